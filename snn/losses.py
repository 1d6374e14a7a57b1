"""Losses: (logits or spikes, labels) -> a scalar, the mean over the batch.

`reads` says which of the two a loss takes. A loss of spikes is built for the gradient that the network is
trained with, `grad`. With the time-based one (:class:`snn.neuron.GradParams`) it hands dL/d(time) to every
spike; with a surrogate one it has its value's ordinary derivative. The symbols: `s[t, k]` are the spikes,
`n[k] = sum_t s[t, k]` their counts, `y` is the right class.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from snn.neuron import TIME_BASED, Gradient, GradParams, require_size, require_time_constant
from snn.ops import spike_heights

SILENT = -20.0  # logit of a neuron without a spike in `CEPlus`


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy of logits."""

    reads: ClassVar[str] = "logits"

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Logits `[N, K]` and labels `[N]` to a scalar."""
        return F.cross_entropy(logits, labels)


@dataclass(frozen=True)
class _SpikeTargets:
    """Losses with a number of spikes that each class should have.

    Attributes:
        desired: Target count of the right class, in spikes over all T steps, >= 0.
        undesired: Target count of the other classes, in [0, desired].
        grad: The gradient that the network is trained with.
    """

    desired: float
    undesired: float
    grad: Gradient = field(default=TIME_BASED, kw_only=True)
    reads: ClassVar[str] = "spikes"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.desired) and 0 <= self.undesired <= self.desired):
            raise ValueError(
                f"loss.desired and loss.undesired must be finite with 0 <= undesired <= desired, "
                f"got {self.desired} and {self.undesired}"
            )
        require_size("loss.desired", self.desired)


@dataclass(frozen=True)
class Count(_SpikeTargets):
    """Squared distance of the output's spike counts to target counts.

    `mean_n sum_k (n[k] - target[k])^2 / (2 T)`. More spikes than `desired` of the right class, and fewer than
    `undesired` of another, count as met. The gradient on the time of every spike of class k is `-dL/dn[k]`.
    From: Zhu et al., "Training Spiking Neural Networks with Event-driven Backpropagation", NeurIPS 2022.
    """

    def __call__(self, spikes: Tensor, labels: Tensor) -> Tensor:
        """Spikes `[T, N, K]` and labels `[N]` to a scalar."""
        return self._distance(spike_heights(spikes, self.grad).sum(dim=0), labels, len(spikes))

    def _distance(self, count: Tensor, labels: Tensor, steps: int) -> Tensor:
        short = (self.desired - count).clamp(min=0)
        over = (count - self.undesired).clamp(min=0)
        return (torch.where(_right(count, labels), short, over) ** 2).sum() / (2 * steps * len(labels))


@dataclass(frozen=True)
class CountPlus(Count):
    """Enhanced counting: the value of :class:`Count`, with a gradient that the spikes of a neuron share.

    The gradient on the time of every spike of class k is `-dL/dn[k] / n[k]`; that of the right class is
    scaled by `max(ratio / 10, 1)`, `ratio` = all spikes of wrong classes in the batch over all of right ones.
    Both shape spike times: with a surrogate gradient the derivative is that of :class:`Count`.
    From: Zhu et al., "Exploring Loss Functions for Time-based Training Strategy in Spiking Neural Networks",
    NeurIPS 2023.
    """

    def __call__(self, spikes: Tensor, labels: Tensor) -> Tensor:
        """Spikes `[T, N, K]` and labels `[N]` to a scalar."""
        count = spike_heights(spikes, self.grad).sum(dim=0)
        if isinstance(self.grad, GradParams):
            right, n = _right(count, labels), count.detach()
            ratio = n[~right].sum() / n[right].sum().clamp(min=1)
            boost = torch.where(right, (ratio / 10).clamp(min=1), 1)
            count = _scale_gradient(count, boost / n.clamp(min=1))
        return self._distance(count, labels, len(spikes))


@dataclass(frozen=True)
class CEPlus:
    """Cross-entropy of spike counts, with a gradient that the spikes of a neuron share.

    Logit `2 n[k] / T`, or -20 of a silent neuron. The gradient on the time of every spike of class k is
    `-dL/dn[k] / n[k]`; a sample whose right class is silent gives none. With a surrogate gradient: the
    derivative. From: Zhu et al., NeurIPS 2023 (see :class:`CountPlus`).

    Attributes:
        grad: The gradient that the network is trained with.
    """

    grad: Gradient = TIME_BASED
    reads: ClassVar[str] = "spikes"

    def __call__(self, spikes: Tensor, labels: Tensor) -> Tensor:
        """Spikes `[T, N, K]` and labels `[N]` to a scalar."""
        count = spike_heights(spikes, self.grad).sum(dim=0)
        n = count.detach()
        if isinstance(self.grad, GradParams):
            heard = n.gather(1, labels[:, None]) > 0
            count = _scale_gradient(count, heard / n.clamp(min=1))
        return F.cross_entropy(torch.where(n > 0, 2 * count / len(spikes), SILENT), labels)


@dataclass(frozen=True)
class Kernel(_SpikeTargets):
    """Van Rossum distance: squared distance of filtered spike trains to filtered target trains.

    `mean_n sum_k sum_t (f[t, k] - g[t, k])^2 / 2`, where `f[t] = f[t-1] (1 - 1/tau_s) + s[t]`, and `g` is the
    same of the target train: n spikes (`desired` or `undesired`, rounded, and T at most), the i-th (from 1)
    at step `ceil(i T / n) - 1`. The gradient on the time of a spike at t is `-dL/ds[t]`.

    Attributes:
        tau_s: Time constant of the filter in steps, > 1.
    """

    tau_s: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require_time_constant("loss.tau_s", self.tau_s)

    def __call__(self, spikes: Tensor, labels: Tensor) -> Tensor:
        """Spikes `[T, N, K]` and labels `[N]` to a scalar."""
        times = _target_times(self, spikes, labels)
        target = torch.zeros(len(spikes) + 1, *spikes.shape[1:], dtype=spikes.dtype, device=spikes.device)
        target.scatter_(0, times, 1.0)  # the missing ones at T, which is cut off
        gap = spike_heights(spikes, self.grad) - target[:-1]
        filtered, loss = torch.zeros_like(gap[0]), gap.new_zeros(())
        for step in gap:
            filtered = filtered * (1 - 1 / self.tau_s) + step
            loss = loss + (filtered**2).sum()
        return loss / (2 * len(labels))


@dataclass(frozen=True)
class TET:
    """Cross-entropy of the output at every step, averaged over the steps; the logits are the spikes.

    From: Deng et al., "Temporal Efficient Training of Spiking Neural Network via Gradient Re-weighting",
    ICLR 2022, where the logits are currents.

    Attributes:
        grad: The gradient that the network is trained with.
    """

    grad: Gradient = TIME_BASED
    reads: ClassVar[str] = "spikes"

    def __call__(self, spikes: Tensor, labels: Tensor) -> Tensor:
        """Spikes `[T, N, K]` and labels `[N]` to a scalar."""
        logits = spike_heights(spikes, self.grad).flatten(0, 1)
        return F.cross_entropy(logits, labels.repeat(len(spikes)))


@dataclass(frozen=True)
class TTFS:
    """Cross-entropy of first-spike times: the earlier, the larger the score.

    Logit `-t[k]`, the step of the first spike of class k, or `-T` without one. The gradient is on the time of
    the first spike.

    Attributes:
        grad: The gradient that the network is trained with; a time-based one.
    """

    grad: Gradient = TIME_BASED
    reads: ClassVar[str] = "spikes"
    moves_times: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_time_based(type(self), type(self.grad))

    def __call__(self, spikes: Tensor, labels: Tensor) -> Tensor:
        """Spikes `[T, N, K]` and labels `[N]` to a scalar."""
        first = (spikes.cumsum(dim=0) == 1) & (spikes != 0)
        missing = len(spikes) * ~first.any(dim=0)
        return F.cross_entropy(-((_times(spikes) * first).sum(dim=0) + missing), labels)


@dataclass(frozen=True)
class Timing(_SpikeTargets):
    """Each spike's time against the target train's spike of the same rank.

    `mean_n sum_k sum_i (t[i, k] - target[i, k])^2 / (2 T^2)`, with the times of the i-th spikes and of the
    i-th target spikes (see :class:`Kernel`); where one train has fewer, its time is T: never. The gradient is
    on the times themselves.
    """

    moves_times: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_time_based(type(self), type(self.grad))

    def __call__(self, spikes: Tensor, labels: Tensor) -> Tensor:
        """Spikes `[T, N, K]` and labels `[N]` to a scalar."""
        steps, target = len(spikes), _target_times(self, spikes, labels)
        count = spikes.detach().sum(dim=0)
        rank = (spikes.detach().cumsum(dim=0) - 1).clamp(min=0).long()
        met = (_times(spikes) - target.gather(0, rank)) ** 2 * (spikes != 0)
        place = torch.arange(steps, device=spikes.device)[:, None, None]
        missed = (steps - target) ** 2 * (place >= count)
        return (met + missed).sum() / (2 * steps**2 * len(labels))


def _right(count: Tensor, labels: Tensor) -> Tensor:
    return F.one_hot(labels, count.shape[1]).bool()


def _scale_gradient(x: Tensor, scale: Tensor) -> Tensor:
    """Return `x`, whose gradient is multiplied by `scale`."""
    return x.detach() + (x - x.detach()) * scale


def _times(spikes: Tensor) -> Tensor:
    """Return the step of every place, `[T, N, K]`; the gradient on it is on the time of the spike there."""
    step = torch.arange(len(spikes), dtype=spikes.dtype, device=spikes.device)[:, None, None]
    return step + (spikes - spikes.detach())


def _target_times(targets: _SpikeTargets, spikes: Tensor, labels: Tensor) -> Tensor:
    """Return the times of each neuron's target spikes by rank, int64 `[T, N, K]`; T for those it has not."""
    steps = len(spikes)
    desired, undesired = (min(round(n), steps) for n in (targets.desired, targets.undesired))
    count = torch.where(_right(spikes[0], labels), desired, undesired)
    rank = torch.arange(1, steps + 1, device=spikes.device)[:, None, None]
    time = -(-rank * steps // count.clamp(min=1)) - 1
    return torch.where(rank <= count, time, steps)


def require_time_based(loss: type, grad: type) -> None:
    """Raise ValueError if a loss that moves spike times is to be used with a gradient of another kind."""
    if getattr(loss, "moves_times", False) and not issubclass(grad, GradParams):
        name = loss.__name__.lower()
        raise ValueError(f"loss={name} moves spike times: it needs surrogate=time, got {grad.__name__}")
