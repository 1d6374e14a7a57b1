"""From a gradient per unit of spike height to one for what is there, however high."""

from typing import Any, cast

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from snn.ops.compact import compact, restore


def gradient_by_height(x: Tensor) -> Tensor:
    """Return `x` unchanged; multiply its gradient by `x`.

    A pool hands each place the gradient of a spike of height 1, for an SRM layer that reads it at its spikes.
    It stands between a pool and a sum of branches, which may be 2 high: there are two spikes to move, and
    :func:`snn.ops.spike_add` shares what arrives between them.

    Args:
        x: Spikes, or sums of spikes, floating point, any shape.

    Returns:
        A copy of `x`.

    Raises:
        ValueError: `x` is not floating point.
    """
    if not x.is_floating_point():
        raise ValueError(f"x must be floating point, got {x.dtype}")
    return cast(Tensor, GradientByHeightFunc.apply(x))


class GradientByHeightFunc(Function):
    """Forward `x`, backward `grad * x`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: D102
        ctx.shape, ctx.stride = x.shape, x.stride()
        ctx.save_for_backward(*compact(x))
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> Tensor:  # noqa: D102
        return grad_out * restore(ctx.saved_tensors, ctx.shape, ctx.stride)
