"""Tensors that are mostly zero, kept small until backward: a bit per value, and the values that are not 0."""

from collections.abc import Sequence

import numpy as np
import torch
from numba import prange
from torch import Tensor

from snn.ops.cpu_kernel import Array, cpu_kernel, launch, parallel_kernel

DTYPES = (torch.float32, torch.float64)
DENSE = 0.15  # share of non-zero values from which packing is not worth its time
SAMPLE = 512  # values that are looked at before all are counted
CHUNKS = 64  # at most; a chunk is what one thread packs at a time
PIECE = 1024  # values of a chunk that are packed or restored at once, in cache


def compact(x: Tensor) -> list[Tensor]:
    """Return tensors that :func:`restore` turns into `x` again, and that take little memory.

    A tensor with few zeros, one that repeats itself or leaves gaps in memory, and one of another type than
    float32 and float64 is returned as it is; so is any under torch.compile, whose graphs want sizes that do
    not depend on data.
    """
    if torch.compiler.is_compiling() or x.dtype not in DTYPES or x.numel() == 0:
        return [x]
    order = sorted(range(x.dim()), key=x.stride, reverse=True)  # of its axes in memory
    if x.device.type != "cpu":
        return _compact_on_gpu(x, order)
    lying = x.detach().numpy().transpose(order)
    if not lying.flags.c_contiguous:
        return [x]
    flat = lying.reshape(-1)
    sample = flat[:: flat.size // SAMPLE | 1]  # an odd stride meets all channels
    if np.count_nonzero(sample) > DENSE * sample.size:
        return [x]
    size, count = _chunks(flat.size)
    launch(_count, flat, size, count)
    end = count.cumsum()
    if end[-1] > DENSE * flat.size:
        return [x]
    bits, values = np.empty((flat.size + 7) // 8, np.uint8), np.empty(end[-1], flat.dtype)
    launch(_pack, flat, size, end - count, bits, values)
    return [torch.from_numpy(part) for part in (bits, values, end - count)]


def _compact_on_gpu(x: Tensor, order: Sequence[int]) -> list[Tensor]:
    lying = x.detach().permute(*order)
    if not lying.is_contiguous():
        return [x]
    flat = lying.view(-1)
    sample = flat[:: len(flat) // SAMPLE | 1]
    if torch.count_nonzero(sample) > DENSE * len(sample):
        return [x]
    mask = flat != 0
    return [pack_bits(mask), flat[mask]]


def restore(parts: Sequence[Tensor], shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return the tensor of this shape and stride that :func:`compact` made `parts` of."""
    if len(parts) == 1:
        return parts[0]
    bits, values = parts[:2]
    x = torch.empty_strided(shape, stride, dtype=values.dtype, device=values.device)
    flat = x.as_strided((x.numel(),), (1,))
    if values.device.type == "cpu":
        base = parts[2].numpy()
        launch(_restore, bits.numpy(), values.numpy(), base, _chunks(len(flat))[0], flat.numpy())
    else:
        flat.zero_().masked_scatter_(unpack_bits(bits, len(flat)), values)
    return x


def pack_bits(mask: Tensor) -> Tensor:
    """Return `mask`, `[M]` bool, as `[ceil(M / 8)]` uint8; on any device."""
    ones = torch.nn.functional.pad(mask.to(torch.uint8), (0, -len(mask) % 8)).view(-1, 8)
    return (ones << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, length: int) -> Tensor:
    """Return the `[length]` bool that :func:`pack_bits` packed."""
    ones = bits[:, None] >> torch.arange(8, dtype=torch.uint8, device=bits.device) & 1
    return ones.view(-1)[:length].bool()


def _chunks(length: int) -> tuple[int, Array]:
    """Return the length of a chunk, a multiple of 8, and an empty count for each."""
    size = max(PIECE, -(-length // (8 * CHUNKS)) * 8)
    return size, np.empty(-(-length // size), np.int64)


@parallel_kernel
def _count(x: Array, size: int, count: Array) -> None:
    for chunk in prange(len(count)):
        low = chunk * size
        piece = x[low : low + size]
        ones = 0
        for i in range(len(piece)):
            ones += piece[i] != 0
        count[chunk] = ones


@cpu_kernel
def _pack_chunk(x: Array, bits: Array, values: Array) -> None:
    kept, flags = np.empty(PIECE, x.dtype), np.empty(PIECE, np.uint8)
    words = flags.view(np.uint64)
    n = 0
    for low in range(0, len(x), PIECE):
        piece, here = x[low : low + PIECE], bits[low // 8 :]
        flags[len(piece) :] = 0
        for i in range(len(piece)):
            flags[i] = piece[i] != 0
        m = np.uintp(0)
        for i in range(len(piece)):  # no branch: each value is written, and stays if it is not 0
            kept[m] = piece[i]
            m += np.uintp(flags[i])
        to = values[n : n + np.int64(m)]
        for k in range(len(to)):
            to[k] = kept[k]
        n += len(to)
        for byte in range((len(piece) + 7) // 8):
            here[byte] = (words[byte] * np.uint64(0x0102040810204080)) >> np.uint64(56)  # bit j is flag j


@parallel_kernel
def _pack(x: Array, size: int, base: Array, bits: Array, values: Array) -> None:
    for chunk in prange(len(base)):
        low = chunk * size
        _pack_chunk(x[low : low + size], bits[low // 8 :], values[base[chunk] :])


@cpu_kernel
def _restore_chunk(bits: Array, values: Array, x: Array) -> None:
    place = np.empty(PIECE, np.uint16)
    n = 0
    for low in range(0, len(x), PIECE):
        piece, flags = x[low : low + PIECE], bits[low // 8 :]
        m = np.uintp(0)
        for i in range(len(piece)):
            piece[i] = 0
        for i in range(len(piece)):
            place[m] = i
            m += np.uintp((flags[np.uintp(i) >> np.uintp(3)] >> np.uint8(i & 7)) & np.uint8(1))
        kept = values[n : n + np.int64(m)]
        for k in range(len(kept)):
            piece[place[k]] = kept[k]
        n += len(kept)


@parallel_kernel
def _restore(bits: Array, values: Array, base: Array, size: int, x: Array) -> None:
    for chunk in prange(len(base)):
        low = chunk * size
        _restore_chunk(bits[low // 8 :], values[base[chunk] :], x[low : low + size])
