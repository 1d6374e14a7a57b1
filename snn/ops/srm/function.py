"""Autograd Functions of the SRM layers: they differ in the synapse alone."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from snn.neuron import GradParams, SRMParams
from snn.ops.compact import compact, restore
from snn.ops.srm.scan import scan_backward, scan_forward
from snn.ops.srm.shapes import as_images, as_kernels, convolve, shown_steps

Pair = tuple[int, int]


class SRMConv2dFunc(Function):
    """Convolution, SRM neuron and pool, with the time-based gradient of `snn/ops/srm/README.md`."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        threshold: Tensor,
        neuron: SRMParams,
        grad: GradParams,
        stride: Pair,
        padding: Pair,
        dilation: Pair,
        groups: int,
        pool: Pair,
    ) -> Tensor:
        ctx.conv = (stride, padding, dilation, groups)
        shown, ctx.synapse_dtype = shown_steps(x), _synapse_dtype(x)
        current = convolve(shown, weight, ctx.conv, ctx.synapse_dtype).to(x.dtype)
        return _scan(ctx, shown, weight, current, threshold, x.shape[0], pool, neuron, grad)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        shown, weight, grad_w, grad_t = _signals(ctx, grad_out)
        grad_x = grad_weight = None
        images = as_images(shown, weight.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = _conv2d_backward(grad_w, images, weight, ctx.conv, (False, True, False))[1]
            grad_weight = grad_weight.to(shown.dtype)
        if ctx.needs_input_grad[0]:
            if shown.shape[0] < ctx.steps:
                images = as_images(shown.expand(ctx.steps, *shown.shape[1:]), weight.dtype)
            grad_x = _conv2d_backward(grad_t, images, weight, ctx.conv, (True, False, False))[0]
            grad_x = _time_gradient(ctx, grad_x.view(ctx.steps, *shown.shape[1:]), shown)
        return grad_x, grad_weight, None, None, None, None, None, None, None, None


class SRMLinearFunc(Function):
    """Full connection and SRM neuron, with the time-based gradient of `snn/ops/srm/README.md`."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, x: Tensor, weight: Tensor, threshold: Tensor, neuron: SRMParams, grad: GradParams
    ) -> Tensor:
        shown, dtype = shown_steps(x), _synapse_dtype(x)
        ctx.synapse_dtype = dtype
        current = F.linear(shown.to(dtype), weight.to(dtype)).to(x.dtype)[..., None, None]
        return _scan(ctx, shown, weight, current, threshold, x.shape[0], (1, 1), neuron, grad).flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        shown, weight, grad_w, grad_t = _signals(ctx, grad_out[..., None, None])
        grad_x = grad_weight = None
        with torch.autocast(shown.device.type, enabled=False):  # the forward has decided on the dtype
            if ctx.needs_input_grad[0]:
                grad_x = _time_gradient(ctx, grad_t.flatten(2) @ weight, shown)
            if ctx.needs_input_grad[1]:
                features = shown.flatten(0, 1).to(weight.dtype)
                grad_weight = (grad_w.flatten(2).flatten(0, 1).T @ features).to(shown.dtype)
        return grad_x, grad_weight, None, None, None, None


def _synapse_dtype(x: Tensor) -> torch.dtype:
    """Return what the synapse computes in: the dtype of `x`, or under autocast the lower one for float32."""
    kind = x.device.type
    if x.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def _conv2d_backward(
    signal: Tensor, images: Tensor, weight: Tensor, conv: tuple[Any, ...], wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, ...]:
    """Return the gradients of a convolution's input, weight and bias, as far as `wanted`."""
    stride, padding, dilation, groups = conv
    gradients: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
        signal.flatten(0, 1), images, weight, None, stride, padding, dilation, False, (0, 0), groups, wanted
    )
    return gradients


def _scan(
    ctx: Any,
    shown: Tensor,
    weight: Tensor,
    current: Tensor,
    threshold: Tensor,
    steps: int,
    pool: Pair,
    neuron: SRMParams,
    grad: GradParams,
) -> Tensor:
    """Run the neurons, and save what backward needs."""
    needs_t, needs_w = ctx.needs_input_grad[:2]
    out, tape = scan_forward(current, threshold, steps, pool, neuron, grad, needs_w=needs_w, needs_t=needs_t)
    ctx.steps, ctx.pool, ctx.neuron, ctx.grad = steps, pool, neuron, grad
    ctx.shape, ctx.stride = shown.shape, shown.stride()
    ctx.tape_length = len(tape)
    if needs_w or needs_t:
        ctx.save_for_backward(weight, *tape, *compact(shown))
    return out


def _signals(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the input shown, and in the synapse's dtype the weight and the signals for weight and input.

    An input that is the same at every step meets the sum of the signals for the weight.
    """
    weight, *saved = ctx.saved_tensors
    tape, parts = saved[: ctx.tape_length], saved[ctx.tape_length :]
    shown = restore(parts, ctx.shape, ctx.stride)
    needs_t, needs_w = ctx.needs_input_grad[:2]
    rows_w, rows_t = shown.shape[0] if needs_w else 0, ctx.steps if needs_t else 0
    signals = scan_backward(grad_out, tape, ctx.pool, ctx.neuron, ctx.grad, rows_w=rows_w, rows_t=rows_t)
    grad_w, grad_t = (signal.to(ctx.synapse_dtype) for signal in signals)
    return shown, as_kernels(weight, ctx.synapse_dtype), grad_w, grad_t


def _time_gradient(ctx: Any, grad_x: Tensor, shown: Tensor) -> Tensor:
    """Return the input's gradient: what the synapse carried back, times the input and the scale."""
    return grad_x.to(shown.dtype).mul_(shown).mul_(ctx.grad.grad_scale)
