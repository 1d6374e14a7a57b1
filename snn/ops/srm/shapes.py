"""Shapes, memory and checks that the scans of every device share.

Maps are seen as `[T, N, C, H, W]`; in memory they lie channels last, which suits convolutions best.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def pooled(neurons: torch.Size, pool: Sequence[int]) -> tuple[int, int, int, int]:
    """Return the shape of the windows of neurons `[N, C, H, W]`."""
    samples, channels, height, width = neurons
    return samples, channels, height // pool[0], width // pool[1]


def unpooled(windows: torch.Size, pool: Sequence[int]) -> tuple[int, int, int, int]:
    """Return the shape of the neurons of windows `[N, C, h, w]`."""
    samples, channels, height, width = windows
    return samples, channels, height * pool[0], width * pool[1]


def new_maps(like: Tensor, steps: int, shape: tuple[int, int, int, int]) -> Tensor:
    """Return an empty tensor `[T, N, C, H, W]`, channels last, of the dtype and device of `like`."""
    samples, channels, height, width = shape
    row, size = width * channels, height * width * channels
    return like.new_empty_strided((steps, *shape), (samples * size, size, 1, row, channels))


def in_memory(maps: Tensor) -> Tensor:
    """Return `[T, N, C, H, W]` as `[T, N, H * W * C]`; a copy unless it is channels last in memory."""
    return maps.permute(0, 1, 3, 4, 2).flatten(2)


def shown_steps(x: Tensor) -> Tensor:
    """Return the first step of `x` if the others are the same memory (direct encoding), else `x`."""
    return x[:1] if x.stride(0) == 0 else x


def as_images(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `[T, N, C, H, W]` as images `[T * N, C, H, W]`, channels last, as convolutions like them."""
    images = x.flatten(0, 1).to(dtype)
    if images.shape[1] == 1:  # both orders are the same memory; only the strides say which is meant
        return images.contiguous().view(images.shape[0], *images.shape[2:], 1).permute(0, 3, 1, 2)
    return images.contiguous(memory_format=torch.channels_last)


def as_kernels(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `weight` in the order of its axes.

    oneDNN reads a weight wrongly whose layout is channels last but for the stride of a side of length 1.
    """
    return weight.to(dtype).contiguous()


def convolve(x: Tensor, weight: Tensor, conv: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
    """Return the convolution of each step, `[T, N, C_out, H_out, W_out]`, computed in `dtype`.

    Images of one channel that become one column wide are not given channels last: oneDNN reads beyond them.
    """
    stride, padding, dilation, _ = conv
    images, kernels = as_images(x, dtype), as_kernels(weight, dtype)
    count, channels, height, width = images.shape
    reach = dilation[1] * (weight.shape[3] - 1) + 1
    if channels == 1 and (width + 2 * padding[1] - reach) // stride[1] == 0:
        images = images.flatten(1).view(count, 1, height, width)
    current = F.conv2d(images, kernels, None, *conv)
    return current.view(*x.shape[:2], *current.shape[1:])


def require_threshold(threshold: Tensor) -> None:
    """Raise ValueError unless every threshold is finite and > 0; for a CPU: it reads the values."""
    low, high = torch.aminmax(threshold)
    if not 0 < float(low) <= float(high) < math.inf:
        raise invalid_threshold(threshold)


def invalid_threshold(threshold: Tensor) -> ValueError:
    """Return the error that says which rule a threshold breaks."""
    return ValueError(
        f"threshold must be finite and > 0 (a neuron would fire from rest), got {threshold.tolist()}"
    )
