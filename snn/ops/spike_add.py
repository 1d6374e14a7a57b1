"""The add that joins branches: it shares a time gradient by what each branch gave."""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from snn.neuron import TIME_BASED, Gradient, GradParams
from snn.ops.compact import compact, restore


def spike_add(a: Tensor, b: Tensor, grad: Gradient = TIME_BASED) -> Tensor:
    """Add the spikes of two branches; share the gradient of a place by each branch's part of the sum.

    Backward (not the derivative): `grad_a = grad_out * a / (a + b)` and `grad_b = grad_out * b / (a + b)`, 0
    where the sum is 0. An SRM layer, a head and another `spike_add` hand back a gradient that is already
    times the height `a + b`; so the two shares add up to it, and the sum law holds through a join. What hands
    back a gradient per unit of height, as a pool does, needs :func:`snn.ops.gradient_by_height` before it.

    Spikes, pooled spikes and sums of them are never negative. Values that are would not be shared sensibly:
    a share could lie outside [0, 1].

    Args:
        a: Spikes or pooled spikes, floating point, any shape.
        b: The same of the other branch: shape, dtype and device of `a`.
        grad: The gradient that the network is trained with; a surrogate one is passed on as the derivative.

    Returns:
        `a + b`.

    Raises:
        ValueError: `a` is not floating point, or `b` differs from it in shape, dtype or device.
    """
    if not a.is_floating_point():
        raise ValueError(f"a must be floating point, got {a.dtype}")
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        rule = "b must have the shape, dtype and device of a"
        raise ValueError(f"{rule}, {_words(a)}, got {_words(b)}")
    if not isinstance(grad, GradParams):
        return a + b
    return cast(Tensor, SpikeAddFunc.apply(a, b))


class SpikeAddFunc(Function):
    """Forward `a + b`, backward `grad * a / (a + b)` and `grad * b / (a + b)`."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:  # noqa: D102
        ctx.shape, ctx.strides = a.shape, (a.stride(), b.stride())
        if any(ctx.needs_input_grad):
            parts = compact(a)
            ctx.length = len(parts)
            ctx.save_for_backward(*parts, *compact(b))
        return a + b

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, Tensor | None]:  # noqa: D102
        saved, (stride_a, stride_b) = ctx.saved_tensors, ctx.strides
        a = restore(saved[: ctx.length], ctx.shape, stride_a)
        b = restore(saved[ctx.length :], ctx.shape, stride_b)
        total = a + b
        grad_a, grad_b = (
            torch.where(total == 0, 0, grad_out * (part / total)) if needed else None
            for part, needed in zip((a, b), ctx.needs_input_grad, strict=True)
        )
        return grad_a, grad_b


def _words(x: Tensor) -> str:
    return f"{list(x.shape)} {x.dtype} on {x.device}"
