"""The bridge from losses that think in spike counts to gradients that think in spike times."""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from snn.neuron import Gradient, GradParams
from snn.ops.compact import compact, restore


def spike_heights(x: Tensor, grad: Gradient) -> Tensor:
    """Return spikes for a rate to be made of: `count_to_time(x)` if `grad` is time-based, else `x`."""
    return count_to_time(x) if isinstance(grad, GradParams) else x


def count_to_time(x: Tensor) -> Tensor:
    """Return `x` unchanged; turn a gradient for spike heights into one for spike times.

    More spiking means earlier spikes, so `dL/dt = -dL/dx * x`: the sign turns, and a position without a
    spike, which has no time, gets none. It stands exactly once between a loss and the spikes; without it, or
    with it twice, training climbs the loss.

    Args:
        x: Spikes (0/1) or pooled spikes (shares), any shape.

    Returns:
        A copy of `x`.
    """
    return cast(Tensor, CountToTimeFunc.apply(x))


class CountToTimeFunc(Function):
    """Forward `x`, backward `-grad * x`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: D102
        ctx.shape, ctx.stride = x.shape, x.stride()
        ctx.save_for_backward(*compact(x))
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> Tensor:  # noqa: D102
        return torch.neg(grad_out * restore(ctx.saved_tensors, ctx.shape, ctx.stride))
