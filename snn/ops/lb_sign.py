"""A binary code with a gradient that passes."""

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def lb_sign(x: Tensor, clip: float = 1.0) -> Tensor:
    """Return the sign of `x`; clamp the gradient's value to `[-clip, clip]`.

    Forward `sign(x)` with `sign(0) = 0`. Backward `clamp(grad, -clip, clip)`: a straight-through estimate
    that bounds the gradient, whatever |x| is.

    Args:
        x: Any shape.
        clip: Largest gradient passed, finite and > 0.

    Returns:
        -1, 0 or 1, of the shape of `x`.

    Raises:
        ValueError: `clip` is not a finite number > 0.
    """
    if not (math.isfinite(clip) and clip > 0):
        raise ValueError(f"clip must be finite and > 0, got {clip}")
    return cast(Tensor, LBSignFunc.apply(x, clip))


class LBSignFunc(Function):
    """Forward `sign(x)`, backward `clamp(grad, -clip, clip)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clip: float) -> Tensor:  # noqa: D102
        ctx.clip = clip
        return torch.sign(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None]:  # noqa: D102
        return grad_out.clamp(-ctx.clip, ctx.clip), None
