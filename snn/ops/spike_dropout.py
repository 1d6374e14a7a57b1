"""Dropout for spikes: it removes spikes, and leaves the times of the others alone."""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from snn.neuron import TIME_BASED, Gradient, GradParams


def spike_dropout(x: Tensor, p: float, grad: Gradient = TIME_BASED) -> Tensor:
    """Drop each neuron with probability `p` for all steps; scale what is kept by `1 / (1 - p)`.

    Backward only masks: a kept spike is `1 / (1 - p)` high, but its *time* is what it was, so the time
    gradient passes unscaled (this keeps the sum law).

    Args:
        x: `[T, N, ...]`, floating point.
        p: Probability of dropping, in [0, 1).
        grad: The gradient that the network is trained with; a surrogate one is passed on as the derivative.

    Returns:
        The shape of `x`; one mask, drawn from torch's global generator, serves all `T` steps.

    Raises:
        ValueError: `p` lies outside [0, 1), or `x` is not floating point of two dimensions or more.
    """
    if not 0 <= p < 1:
        raise ValueError(f"p must lie in [0, 1), got {p}")
    if x.dim() < 2 or not x.is_floating_point():
        raise ValueError(f"x must be floating point of shape [T, N, ...], got {x.dtype} {list(x.shape)}")
    keep = torch.rand(x.shape[1:], device=x.device) >= p
    if not isinstance(grad, GradParams):
        return x * (keep * (1 / (1 - p))).to(x.dtype)
    return cast(Tensor, SpikeDropoutFunc.apply(x, keep, 1 / (1 - p)))


class SpikeDropoutFunc(Function):
    """Forward `x * keep * height`, backward `grad * keep`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, height: float) -> Tensor:  # noqa: D102
        ctx.save_for_backward(keep)
        return x * (keep * height).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None, None]:  # noqa: D102
        (keep,) = ctx.saved_tensors
        return grad_out * keep, None, None
