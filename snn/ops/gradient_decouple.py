"""A tap on the gradient between a body that learns in time and a head that learns by rate."""

import math
from typing import Any, cast

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def gradient_decouple(x: Tensor, scale: float) -> Tensor:
    """Return `x` unchanged; multiply its gradient by `scale`.

    Args:
        x: Any shape.
        scale: Gradient factor (lambda), finite and >= 0; 0 stops the gradient.

    Returns:
        A copy of `x`.

    Raises:
        ValueError: `scale` is negative or not finite.
    """
    if not (math.isfinite(scale) and scale >= 0):
        raise ValueError(f"scale must be finite and >= 0, got {scale}")
    return cast(Tensor, GradientDecoupleFunc.apply(x, scale))


class GradientDecoupleFunc(Function):
    """Forward `x`, backward `grad * scale`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:  # noqa: D102
        ctx.scale = scale
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None]:  # noqa: D102
        return grad_out * ctx.scale, None
