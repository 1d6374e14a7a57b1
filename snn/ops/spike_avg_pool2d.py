"""Average pooling that shares a time gradient among the spikes of its window."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from snn.neuron import TIME_BASED, Gradient, GradParams
from snn.ops.compact import compact, restore


def spike_avg_pool2d(x: Tensor, kernel_size: int | tuple[int, int], grad: Gradient = TIME_BASED) -> Tensor:
    """Average over windows that do not overlap; divide the gradient by the window's sum.

    Forward: the mean of each window; a border that no whole window covers is dropped.

    Backward (not the derivative): `grad_x[window] = grad_out / sum(x over the window)` at every position of
    the window, 0 where the sum is 0 and in the border. For 0/1 input the sum is the number of spikes, so the
    spikes of a window share its gradient equally once an SRM layer below reads it at its spikes.

    Args:
        x: `[T, N, C, H, W]`, floating point.
        kernel_size: Window, `k` or `(k_h, k_w)`, each from 1 to the map's size.
        grad: The gradient that the network is trained with; a surrogate one is passed on as the derivative.

    Returns:
        `[T, N, C, H // k_h, W // k_w]`.

    Raises:
        ValueError: `x` is not 5-D floating point with a channel, or a window side lies outside 1 ... the
            map's side.
    """
    pair = kernel_size if isinstance(kernel_size, tuple) else (kernel_size, kernel_size)
    if x.dim() != 5 or not x.is_floating_point() or x.shape[2] < 1:
        rule = "x must be floating point of shape [T, N, C, H, W] with C >= 1"
        raise ValueError(f"{rule}, got {x.dtype} {list(x.shape)}")
    if len(pair) != 2 or not all(type(side) is int and side >= 1 for side in pair):
        raise ValueError(f"kernel_size must be one or two integers of at least 1, got {kernel_size}")
    k_h, k_w = pair
    if k_h > x.shape[3] or k_w > x.shape[4]:
        raise ValueError(
            f"kernel_size must fit the map, got {kernel_size} for a map of {x.shape[3]}x{x.shape[4]}"
        )
    if not isinstance(grad, GradParams):
        return _average(x, k_h, k_w)
    return cast(Tensor, PoolFunc.apply(x, k_h, k_w))


class PoolFunc(Function):
    """Forward the mean of each window, backward `grad / sum` at every position of the window."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k_h: int, k_w: int) -> Tensor:  # noqa: D102
        mean = _average(x, k_h, k_w)
        ctx.kernel_size, ctx.map_size, ctx.shape = (k_h, k_w), x.shape[3:], mean.shape
        ctx.stride = mean.stride()
        ctx.save_for_backward(*compact(mean))
        return mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None, None]:  # noqa: D102
        mean, (k_h, k_w) = restore(ctx.saved_tensors, ctx.shape, ctx.stride), ctx.kernel_size
        height, width = ctx.shape[3:]
        share = torch.where(mean == 0, 0, grad_out / (mean * (k_h * k_w)))
        grad_x = grad_out.new_zeros((*ctx.shape[:3], *ctx.map_size))
        covered = grad_x[..., : height * k_h, : width * k_w]
        covered.unflatten(4, (width, k_w)).unflatten(3, (height, k_h)).copy_(share[:, :, :, :, None, :, None])
        return grad_x, None, None


def _average(x: Tensor, k_h: int, k_w: int) -> Tensor:
    mean: Tensor = F.avg_pool2d(x.flatten(0, 1), (k_h, k_w)).unflatten(0, x.shape[:2])
    return mean
