"""Autograd Functions of the SRM layers: they differ in the synapse alone."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.grad import conv2d_input, conv2d_weight

from snn.neuron import GradParams, SRMParams
from snn.ops.srm.reference import scan_backward, scan_forward

Pair = tuple[int, int]


class SRMConv2dFunc(Function):
    """Convolution and SRM neuron, with the time-based gradient of `snn/ops/srm/README.md`."""

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
    ) -> Tensor:
        ctx.neuron, ctx.grad = neuron, grad
        ctx.conv = (stride, padding, dilation, groups)
        current = F.conv2d(x.flatten(0, 1), weight, None, *ctx.conv).unflatten(0, x.shape[:2])
        spikes, slope_w, slope_t = scan_forward(current.to(x.dtype), threshold[:, None, None], neuron, grad)
        ctx.save_for_backward(x, weight, spikes, slope_w, slope_t)
        return spikes

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        x, weight, spikes, slope_w, slope_t = ctx.saved_tensors
        signals = scan_backward(grad_out, spikes, slope_w, slope_t, ctx.neuron, ctx.grad)
        grad_w, grad_t = (signal.flatten(0, 1) for signal in signals)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            shape = (grad_t.shape[0], *x.shape[2:])
            grad_x = conv2d_input(shape, weight, grad_t, *ctx.conv).unflatten(0, x.shape[:2])
            grad_x = grad_x * x * ctx.grad.grad_scale
        if ctx.needs_input_grad[1]:
            grad_weight = conv2d_weight(x.flatten(0, 1), weight.shape, grad_w, *ctx.conv)
        return grad_x, grad_weight, None, None, None, None, None, None, None


class SRMLinearFunc(Function):
    """Full connection and SRM neuron, with the time-based gradient of `snn/ops/srm/README.md`."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, x: Tensor, weight: Tensor, threshold: Tensor, neuron: SRMParams, grad: GradParams
    ) -> Tensor:
        ctx.neuron, ctx.grad = neuron, grad
        spikes, slope_w, slope_t = scan_forward(F.linear(x, weight).to(x.dtype), threshold, neuron, grad)
        ctx.save_for_backward(x, weight, spikes, slope_w, slope_t)
        return spikes

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        x, weight, spikes, slope_w, slope_t = ctx.saved_tensors
        grad_w, grad_t = scan_backward(grad_out, spikes, slope_w, slope_t, ctx.neuron, ctx.grad)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = grad_t @ weight * x * ctx.grad.grad_scale
        if ctx.needs_input_grad[1]:
            grad_weight = grad_w.flatten(0, 1).T @ x.flatten(0, 1)
        return grad_x, grad_weight, None, None, None, None
