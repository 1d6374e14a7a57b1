"""What an SRM layer must give, in float64, and how far rounding may move it.

Two layers that sum a current in another order differ in its last digit. Where a potential then lies within
that of its threshold, either answer is right: such a neuron is set apart (`unsure`) and its gradient not
compared. So is one whose slope, `-1 / du` or `-1 / r`, hangs on digits that rounding took.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight

from snn.neuron import GradParams
from snn.ops.srm import reference

SURE = 1e-2  # relative error of a slope from which it is not compared


@dataclass
class Conv:
    """A convolution's arguments; a linear layer is one of kernel 1 on one pixel."""

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        current = F.conv2d(x.flatten(0, 1).contiguous(), weight.contiguous(), None, *self._args())
        return current.unflatten(0, x.shape[:2])

    def to_input(self, signal: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        shape, signal = x.flatten(0, 1).shape, signal.flatten(0, 1).contiguous()
        return conv2d_input(shape, weight.contiguous(), signal, *self._args()).view(x.shape)

    def to_weight(self, signal: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        x, signal = x.flatten(0, 1).contiguous(), signal.flatten(0, 1).contiguous()
        return conv2d_weight(x, weight.shape, signal, *self._args())

    def _args(self):
        return self.stride, self.padding, self.dilation, self.groups


@dataclass
class Expected:
    """Spikes `[T, N, C, H, W]`, the neurons `[N, C, H, W]` that rounding decides, and the way back."""

    spikes: Tensor
    unsure: Tensor
    signals: object  # gradient of the spikes -> (signal, its error) for the weight, the same for the input


def scan(
    current: Tensor, error: Tensor | None, threshold: Tensor, neuron, grad, dtype: torch.dtype
) -> Expected:
    """Run the reference on a `current` that a layer of `dtype` may see with this `error`.

    None: the current is exact in `dtype`. The reference runs in it too then, and nothing is unsure.
    """
    exact = error is None
    eps, tiny = 2 * torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    seen = current.to(dtype) if exact else current
    above = threshold.to(seen.dtype)[:, None, None]
    if isinstance(grad, GradParams):
        spikes, *slopes = (part.double() for part in reference.scan_forward(seen, above, neuron, grad))
    else:
        spikes, potential = reference.potential_forward(seen, above, neuron)
        slopes = [(grad.slope(potential / above - 1) / above).double()]
        spikes = spikes.double()
    unsure, errors = torch.zeros_like(spikes[0], dtype=torch.bool), [torch.zeros_like(spikes) for _ in slopes]
    if not exact:
        unsure, errors = _blur(current, error, spikes, threshold.double()[:, None, None], neuron, grad, eps)
        for slope, slope_error in zip(slopes, errors, strict=True):
            unsure |= (slope_error > SURE * slope.abs() + tiny).any(0)

    def signals(grad_out):
        return _back(grad_out, spikes, slopes, errors, neuron, grad, eps, tiny)

    return Expected(spikes, unsure, signals)


def _blur(current, error, spikes, threshold, neuron, grad, eps):
    """Neurons whose spikes rounding decides, and the error of each slope."""
    time_based = isinstance(grad, GradParams)
    decays = [neuron.decay_m, neuron.decay_s, grad.decay_grad if time_based else 0.0]
    coef = abs(neuron.coef)
    value, size, wrong = ([torch.zeros_like(current[0]) for _ in decays] for _ in range(3))
    u_last = wrong_last = torch.zeros_like(current[0])
    unsure = torch.zeros_like(spikes[0], dtype=torch.bool)
    errors = [torch.zeros_like(spikes) for _ in range(2 if time_based else 1)]
    for t, fired in enumerate(spikes != 0):
        for i, decay in enumerate(decays):
            value[i] = (value[i] + current[t]) * decay
            size[i] = (size[i] + current[t].abs()) * decay
            wrong[i] = (wrong[i] + error[t]) * decay + 2 * eps * size[i]
        u = neuron.coef * (value[0] - value[1])
        wrong_u = coef * (wrong[0] + wrong[1] + 2 * eps * (size[0] + size[1]))
        unsure |= (u - threshold).abs() <= wrong_u
        if time_based:
            du, wrong_du = u - u_last, wrong_u + wrong_last + eps * (u.abs() + u_last.abs())
            errors[0][t] = _slope_error(du, wrong_du, grad.cap_weight, eps) * fired
            errors[1][t] = _slope_error(value[2], wrong[2], grad.cap_time, eps) * fired
        else:
            v, wrong_v = u / threshold - 1, wrong_u / threshold + 2 * eps * (1 + u.abs() / threshold)
            errors[0][t] = _surrogate_error(v, wrong_v, grad, eps) / threshold
        for parts in (value, size, wrong):
            parts[:] = [part.masked_fill(fired, 0) for part in parts]
        u_last, wrong_last = u.masked_fill(fired, 0), wrong_u.masked_fill(fired, 0)
    return unsure, errors


def _slope_error(rise, wrong, cap, eps):
    def slope(at):
        return torch.where(at > 0, -1 / at, torch.where(at < 0, 0.0, -cap)).clamp(-cap, 0)

    low, high = rise - wrong, rise + wrong
    spread = torch.where((low <= 0) & (high >= 0), cap, (slope(low) - slope(high)).abs())
    return spread + 2 * eps * slope(rise).abs()


def _surrogate_error(v, wrong, grad, eps):
    """Of a slope that falls on either side of 0; `1 - s` of a sigmoid near 1 has digits of its own."""
    slope = grad.slope(v)
    ends = torch.stack([grad.slope(v - wrong), grad.slope(v + wrong)])
    peak = grad.slope(torch.zeros_like(v))
    highest = torch.where(v.abs() <= wrong, peak, torch.maximum(ends.amax(0), slope))
    return highest - ends.amin(0) + 4 * eps * slope + eps * peak


def _back(grad_out, spikes, slopes, slope_errors, neuron, grad, eps, tiny):
    """(Signal for the weight, its error), (that for the input, its error)."""
    time_based = isinstance(grad, GradParams)
    decays = [neuron.decay_m, neuron.decay_s, *([grad.decay_grad] if time_based else [])]
    if time_based:
        exact = reference.scan_backward(grad_out, spikes, *slopes, neuron, grad)
    else:
        exact = [reference.potential_backward(grad_out * slopes[0], spikes, neuron)]
    sizes = [(grad_out * slope).abs() for slope in slopes]
    errors = [
        grad_out.abs() * error + 4 * eps * size + tiny
        for error, size in zip(slope_errors, sizes, strict=True)
    ]
    size, wrong = ([torch.zeros_like(spikes[0]) for _ in decays] for _ in range(2))
    signal_errors = [torch.zeros_like(spikes) for _ in slopes]
    for t in reversed(range(len(spikes))):
        fired = spikes[t] != 0
        starts = fired if time_based else torch.ones_like(fired)
        for i, decay in enumerate(decays):
            path = i // 2
            size[i] = (size[i] * ~fired + sizes[path][t] * starts) * decay
            wrong[i] = (wrong[i] * ~fired + errors[path][t] * starts) * decay + 2 * eps * size[i] + tiny
        signal_errors[0][t] = abs(neuron.coef) * (wrong[0] + wrong[1] + 2 * eps * (size[0] + size[1]))
        if time_based:
            signal_errors[1][t] = wrong[2]
    return (exact[0], signal_errors[0]), (exact[-1], signal_errors[-1])
