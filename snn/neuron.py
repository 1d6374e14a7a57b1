"""Parameters of the SRM neuron and of its gradient, time-based or surrogate, and the neuron's kernel."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 1e30  # in size, and its inverse the smallest but 0: what float32 holds, with room for products


def require_size(name: str, value: float) -> None:
    """Raise ValueError unless `value` is 0 or of a size that float32 can compute with."""
    if value != 0 and not 1 / LARGEST <= abs(value) <= LARGEST:
        raise ValueError(f"{name} must lie within {1 / LARGEST:g} and {LARGEST:g} in size, got {value}")


def require_time_constant(name: str, tau: float) -> None:
    """Raise ValueError unless `tau` (steps) is finite and > 1: at 1 and below nothing is left of a trace."""
    if not (math.isfinite(tau) and tau > 1):
        raise ValueError(f"{name} must be finite and > 1 step, got {tau}")
    require_size(name, tau)


@dataclass(frozen=True)
class SRMParams:
    """Physics of the spike response model (SRM) neuron; these constants shape the spikes.

    Attributes:
        tau_m: Membrane time constant in steps, > 1.
        tau_s: Synaptic time constant in steps, > 1 and different from `tau_m`.
        threshold: Firing threshold, > 0; a layer may override it per output channel.

    Raises:
        ValueError: A constant lies outside its range.
    """

    tau_m: float = 5.0
    tau_s: float = 3.0
    threshold: float = 1.0

    def __post_init__(self) -> None:
        require_time_constant("tau_m", self.tau_m)
        require_time_constant("tau_s", self.tau_s)
        if self.tau_m == self.tau_s:
            raise ValueError(f"tau_m and tau_s must differ, but got {self.tau_m} for both")
        if not (math.isfinite(self.threshold) and self.threshold > 0):
            raise ValueError(
                f"threshold must be finite and > 0 (a neuron would fire from rest), got {self.threshold}"
            )
        require_size("threshold", self.threshold)

    @property
    def decay_m(self) -> float:
        """Decay of the membrane trace per step, `1 - 1/tau_m`."""
        return 1 - 1 / self.tau_m

    @property
    def decay_s(self) -> float:
        """Decay of the synaptic trace per step, `1 - 1/tau_s`."""
        return 1 - 1 / self.tau_s

    @property
    def coef(self) -> float:
        """Scale of the kernel, `tau_m / (tau_m - tau_s)`."""
        return self.tau_m / (self.tau_m - self.tau_s)


@dataclass(frozen=True)
class GradParams:
    """Constants of the time-based gradient; they shape the backward pass and no spike.

    Attributes:
        tau_grad: Time constant of the rise trace in steps, > 1.
        grad_scale: Factor on the gradient that a layer hands to its input, >= 0.
        cap_weight: Largest |dt/du| on the path to the weight, > 0.
        cap_time: Largest |dt/dr| on the path to the input's spike times, > 0.

    Raises:
        ValueError: A constant lies outside its range.
    """

    tau_grad: float = 2.5
    grad_scale: float = 0.85
    cap_weight: float = 4.0
    cap_time: float = 123456789.0

    def __post_init__(self) -> None:
        require_time_constant("tau_grad", self.tau_grad)
        if not (math.isfinite(self.grad_scale) and self.grad_scale >= 0):
            raise ValueError(f"grad_scale must be finite and >= 0, got {self.grad_scale}")
        require_size("grad_scale", self.grad_scale)
        for name in ("cap_weight", "cap_time"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be finite and > 0, got {value}")
            require_size(name, value)

    @property
    def decay_grad(self) -> float:
        """Decay of the rise trace per step, `1 - 1/tau_grad`."""
        return 1 - 1 / self.tau_grad


@dataclass(frozen=True)
class SurrogateParams(ABC):
    """A surrogate derivative: what backpropagation through time takes for that of the spike.

    `dspike/du = slope(v) / threshold` at `v = u / threshold - 1`, the distance from the threshold in
    thresholds. Every slope encloses the area 1, as the step that it stands for.

    Attributes:
        width: Scale of the slope, in thresholds, > 0.

    Raises:
        ValueError: `width` lies outside its range.
    """

    width: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.width) and self.width > 0):
            raise ValueError(f"surrogate.width must be finite and > 0, got {self.width}")
        require_size("surrogate.width", self.width)

    @abstractmethod
    def slope(self, v: Tensor) -> Tensor:
        """Return the slope at each distance `v`, any shape."""


class ATan(SurrogateParams):
    """`slope(v) = 1 / (width (1 + (pi v / width)^2))`, the derivative of an arcus tangent."""

    def slope(self, v: Tensor) -> Tensor:  # noqa: D102
        return 1 / (self.width * (1 + (v * (math.pi / self.width)) ** 2))


class Sigmoid(SurrogateParams):
    """`slope(v) = s (1 - s) / width` with `s = sigmoid(v / width)`."""

    def slope(self, v: Tensor) -> Tensor:  # noqa: D102
        s = torch.sigmoid(v / self.width)
        return s * (1 - s) / self.width


class Rectangle(SurrogateParams):
    """`slope(v) = 1 / width` where `|v| < width / 2`, else 0."""

    def slope(self, v: Tensor) -> Tensor:  # noqa: D102
        return (v.abs() < self.width / 2).to(v.dtype) / self.width


Gradient = GradParams | SurrogateParams  # an op picks its backward by which of the two it is given
TIME_BASED = GradParams()


def spike_response_kernel(neuron: SRMParams, steps: int) -> Tensor:
    """Return the potential that one unit of current leaves `k` steps on, for `k = 1 ... steps`.

    `eps(k) = tau_m / (tau_m - tau_s) * ((1 - 1/tau_m)^k - (1 - 1/tau_s)^k)`

    Args:
        neuron: The neuron's constants.
        steps: Number of lags, >= 1.

    Returns:
        `[steps]`, float64; entry 0 is lag 1: the step in which the current arrives.

    Raises:
        ValueError: `steps` is below 1.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    lag = torch.arange(1, steps + 1, dtype=torch.float64)
    return neuron.coef * (neuron.decay_m**lag - neuron.decay_s**lag)
