"""The scans on a CPU: a block of neurons stays in cache over all steps, and blocks run in parallel.

The tape is a list of events, one per spike, sorted by (block, step, neuron): the neuron's place in its block
and its two slopes. Its memory follows the number of spikes. A block is a run of neurons of one sample, side
by side in memory, made of whole rows of pooling windows.
"""

import functools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from snn.ops.cpu_kernel import Array, cpu_kernel, launch, parallel_kernel
from snn.ops.srm.shapes import in_memory, new_maps, pooled, require_threshold, unpooled

BLOCK = 1024  # neurons, unless a row of windows has more: their traces stay in the nearest caches
CHUNKS = 64  # of blocks, some empty if these are few; a chunk is what one thread scans at a time
MOST_PLACES = 2**16  # that 16 bits tell apart


def scan_forward(
    current: Tensor,
    threshold: Tensor,
    steps: int,
    pool: Sequence[int],
    constants: Sequence[float],
    needs_w: bool,
    needs_t: bool,
    trim: bool,
) -> list[Tensor]:
    """See `snn/ops/srm/scan.py`."""
    require_threshold(threshold)
    above = threshold.numpy()
    neurons = current.shape[1:]
    width, blocks = layout(neurons, pool)
    out = new_maps(current, steps, pooled(neurons, pool))
    begin = _begin(blocks, width * steps)
    stop, count = torch.empty(blocks * steps, dtype=torch.int32), np.empty(CHUNKS, np.int64)
    capacity, kinds = int(begin[-1]), (_place_dtype(width), current.dtype, current.dtype)
    sizes = (capacity, capacity * needs_w, capacity * needs_t)
    if trim:  # scan to where there is room for all, then move the events to memory of their own
        events = [_workspace(*part) for part in zip(range(3), kinds, sizes, strict=True)]
    else:
        events = [torch.zeros(size, dtype=kind) for kind, size in zip(kinds, sizes, strict=True)]
    launch(
        _forward,
        in_memory(current).flatten(1),
        np.tile(above, neurons[2] * neurons[3]),
        _constants(tuple(constants), current.dtype),
        _windows(neurons[1], neurons[3], tuple(pool), width),
        _shares(pool[0] * pool[1], current.dtype),
        begin,
        *(in_memory(out).flatten(1), count, stop, _unsigned(events[0]), *events[1:]),
    )
    if not trim:
        return [out, torch.from_numpy(begin[:-1].copy()), stop, *events]
    base, total = count.cumsum() - count, int(count.sum())
    kept = [part.new_empty(total if len(part) else 0) for part in events]
    launch(_move, begin, base, count, *events, *kept)
    return [out, torch.from_numpy(base), stop, *kept]


_memory = threading.local()


def _workspace(part: int, dtype: torch.dtype, size: int) -> Tensor:
    """Return memory that the thread keeps between calls: mapping new pages takes longer than filling them."""
    kept: dict[Any, Tensor] = vars(_memory)
    memory = kept.get((part, dtype))
    if memory is None or len(memory) < size:
        memory = kept[part, dtype] = torch.empty(size, dtype=dtype)
    return memory[:size]


def scan_backward(
    grad_out: Tensor,
    tape: Sequence[Tensor],
    pool: Sequence[int],
    constants: Sequence[float],
    rows_w: int,
    rows_t: int,
) -> list[Tensor]:
    """See `snn/ops/srm/scan.py`."""
    neurons = unpooled(grad_out.shape[1:], pool)
    width, _ = layout(neurons, pool)
    grad_w, grad_t = (new_maps(grad_out, rows, neurons) for rows in (rows_w, rows_t))
    base, stop, place, slope_w, slope_t = tape
    launch(
        _backward,
        in_memory(grad_out).flatten(1),
        _constants(tuple(constants), grad_out.dtype),
        _windows(neurons[1], neurons[3], tuple(pool), width),
        pool[0] * pool[1],
        neurons[1] * neurons[2] * neurons[3],
        *(base, stop, _unsigned(place), slope_w, slope_t),
        *(in_memory(grad_w).flatten(1), in_memory(grad_t).flatten(1)),
    )
    return [grad_w, grad_t]


def new_tape(
    current: Tensor, steps: int, pool: Sequence[int], needs_w: bool, needs_t: bool, num_events: int | None
) -> list[Tensor]:
    """Return zeros for a tape, with room for `num_events`; None: for as many as there can be.

    A tape holds, `[CHUNKS]`: where the events of each chunk begin; `[blocks * steps]`: the number of events
    of the chunk up to each (block, step); and of each event: its place, and the slopes that are needed.
    """
    width, blocks = layout(current.shape[1:], pool)
    if num_events is None:
        num_events = blocks * width * steps
    return [
        current.new_zeros(CHUNKS, dtype=torch.int64),
        current.new_zeros(blocks * steps, dtype=torch.int32),
        current.new_zeros(num_events, dtype=_place_dtype(width)),
        current.new_zeros(num_events if needs_w else 0),
        current.new_zeros(num_events if needs_t else 0),
    ]


def _place_dtype(width: int) -> torch.dtype:
    """Return what holds the places of a block: 16 bits, or 32 if a row of windows is very large."""
    return torch.int16 if width <= MOST_PLACES else torch.int32


def layout(neurons: Sequence[int], pool: Sequence[int]) -> tuple[int, int]:
    """Return the neurons of a block, and the number of blocks, for neurons `[N, C, H, W]`."""
    samples, channels, height, row = neurons
    size = channels * height * row
    unit = pool[0] * row * channels if pool[0] * pool[1] > 1 else 1
    rows = size // unit
    per_sample = -(-rows // max(1, BLOCK // unit))
    width = -(-rows // per_sample) * unit
    blocks = samples * -(-size // width)
    return width, blocks


@functools.lru_cache(maxsize=256)
def _begin(blocks: int, room: int) -> Array:
    """Return where the events of each chunk begin, and end, if each block has `room` for its own."""
    chunk = np.arange(CHUNKS + 1)
    return chunk * blocks // CHUNKS * room


@functools.lru_cache(maxsize=256)
def _windows(channels: int, row: int, pool: tuple[int, ...], width: int) -> Array:
    """Return the window of each place of a block, counted from the block's first."""
    pixel, channel = np.divmod(np.arange(width), channels)
    y, x = np.divmod(pixel, row)
    window = y // pool[0] * (row // pool[1]) + x // pool[1]
    return (window * channels + channel).astype(np.uint16 if width <= MOST_PLACES else np.uint32)


@functools.lru_cache(maxsize=256)
def _shares(area: int, dtype: torch.dtype) -> Array:
    """Return 1/n for n = 0 ... area, the share of each of n spikes of a window; 1 for n = 0."""
    return np.array([1 / max(1, n) for n in range(area + 1)], _kind(dtype))


@functools.lru_cache(maxsize=256)
def _constants(constants: tuple[float, ...], dtype: torch.dtype) -> tuple[Array, ...]:
    return tuple(_kind(dtype)(value) for value in constants)


def _kind(dtype: torch.dtype) -> Any:
    return np.float32 if dtype == torch.float32 else np.float64


def _unsigned(place: Tensor) -> Array:
    """Return places as unsigned: numba takes a signed index for one that may count from the end."""
    return place.numpy().view(np.uint16 if place.dtype == torch.int16 else np.uint32)


@cpu_kernel
def _slope(rise: Array, cap: Array) -> Array:
    """Return `-1 / rise`, kept within `[-cap, 0]`."""
    zero, one = type(rise)(0), type(rise)(1)
    slope = -one / rise
    slope = slope if slope > -cap else -cap
    return slope if slope < zero else zero


@cpu_kernel
def _find(flags: Array, place: Array) -> Any:
    """Write the places of the ones among `flags`, 0 or 1; return their number.

    Without a branch: each place is written, and stays if its flag is 1; so entries beyond the last are
    overwritten, but no more than there are flags.
    """
    n = np.uintp(0)
    for i in range(len(flags)):
        place[n] = i
        n += np.uintp(flags[i])
    return np.int64(n)


@cpu_kernel
def _forward_blocks(
    current: Array,
    threshold: Array,
    constants: tuple[Array, ...],
    windows: Array,
    shares: Array,
    first: int,
    last: int,
    out: Array,
    stop: Array,
    place: Array,
    slope_w: Array,
    slope_t: Array,
) -> int:
    """Scan the blocks `first ... last - 1` of neurons; return the number of their events."""
    decay_m, decay_s, coef, decay_grad, cap_weight, cap_time = constants
    zero, one = current.dtype.type(0), current.dtype.type(1)
    steps, size, width, area = out.shape[0], len(threshold), len(windows), len(shares) - 1
    per_sample = (size + width - 1) // width
    traces = np.empty((6, width), current.dtype)
    m, s, r, u_last, rise_u, rise_r = traces[0], traces[1], traces[2], traces[3], traces[4], traces[5]
    flags = np.empty(width, np.uint8)
    share, fired_share = np.empty(width, current.dtype), np.ones(width, current.dtype)
    n = 0
    for block in range(first, last):
        offset = block % per_sample * width
        low, neurons = block // per_sample * size + offset, min(width, size - offset)
        above = threshold[offset : offset + neurons]
        traces[:4] = zero
        for t in range(steps):
            incoming = current[t if len(current) > 1 else 0, low : low + neurons]
            for i in range(neurons):
                m_i = (m[i] + incoming[i]) * decay_m
                s_i = (s[i] + incoming[i]) * decay_s
                u_i = coef * (m_i - s_i)
                fires = u_i >= above[i]
                rise_u[i] = u_i - u_last[i]
                m[i] = zero if fires else m_i  # hard reset
                s[i] = zero if fires else s_i
                u_last[i] = zero if fires else u_i
                flags[i] = fires
            if len(slope_t) > 0:
                for i in range(neurons):
                    r_i = (r[i] + incoming[i]) * decay_grad
                    rise_r[i] = r_i
                    r[i] = zero if flags[i] else r_i
            events = _find(flags[:neurons], place[n:])
            fired = place[n : n + events]
            spikes = out[t, low // area : (low + neurons) // area]
            if area == 1:
                for i in range(neurons):
                    spikes[i] = flags[i]
            else:
                for i in range(len(spikes)):
                    spikes[i] = zero
                for k in range(events):
                    spikes[windows[fired[k]]] += one
                for i in range(len(spikes)):  # the spikes of a window share its gradient
                    share[i] = shares[np.uint32(spikes[i])]
                    spikes[i] *= shares[area]
                for k in range(events):
                    fired_share[k] = share[windows[fired[k]]]
            if len(slope_w) > 0:
                slope = slope_w[n : n + events]
                for k in range(events):
                    slope[k] = rise_u[fired[k]]
                for k in range(events):
                    slope[k] = _slope(slope[k], cap_weight) * fired_share[k]
            if len(slope_t) > 0:
                slope = slope_t[n : n + events]
                for k in range(events):
                    slope[k] = rise_r[fired[k]]
                for k in range(events):
                    slope[k] = _slope(slope[k], cap_time) * fired_share[k]
            n += events
            stop[block * steps + t] = n
    return n


@parallel_kernel
def _forward(
    current: Array,
    threshold: Array,
    constants: tuple[Array, ...],
    windows: Array,
    shares: Array,
    begin: Array,
    out: Array,
    count: Array,
    stop: Array,
    place: Array,
    slope_w: Array,
    slope_t: Array,
) -> None:
    blocks = len(stop) // len(out)
    for chunk in prange(CHUNKS):
        count[chunk] = _forward_blocks(
            current,
            threshold,
            constants,
            windows,
            shares,
            chunk * blocks // CHUNKS,
            (chunk + 1) * blocks // CHUNKS,
            out,
            stop,
            place[begin[chunk] :],
            slope_w[begin[chunk] :],
            slope_t[begin[chunk] :],
        )


@cpu_kernel
def _copy(events: Array, to: Array) -> None:
    """Copy; from slices, since no vector code is made of an index that may count from the end."""
    for k in range(len(events)):
        to[k] = events[k]


@parallel_kernel
def _move(
    begin: Array,
    base: Array,
    count: Array,
    place: Array,
    slope_w: Array,
    slope_t: Array,
    to_place: Array,
    to_slope_w: Array,
    to_slope_t: Array,
) -> None:
    """Close the gaps between the chunks' events."""
    for chunk in prange(len(count)):
        here, there, length = begin[chunk], base[chunk], count[chunk]
        _copy(place[here : here + length], to_place[there:])
        if len(slope_w) > 0:
            _copy(slope_w[here : here + length], to_slope_w[there:])
        if len(slope_t) > 0:
            _copy(slope_t[here : here + length], to_slope_t[there:])


@cpu_kernel
def _backward_blocks(
    grad_out: Array,
    constants: tuple[Array, ...],
    windows: Array,
    area: int,
    size: int,
    first: int,
    last: int,
    stop: Array,
    place: Array,
    slope_w: Array,
    slope_t: Array,
    grad_w: Array,
    grad_t: Array,
) -> None:
    """Credit the events of the blocks `first ... last - 1` to the inputs."""
    decay_m, decay_s, coef, decay_grad, _, _ = constants
    zero = grad_out.dtype.type(0)
    steps, width = len(grad_out), len(windows)
    per_sample = (size + width - 1) // width
    carries = np.empty((3, width), grad_out.dtype)
    carry_m, carry_s, carry_t = carries[0], carries[1], carries[2]
    for block in range(first, last):
        offset = block % per_sample * width
        low, neurons = block // per_sample * size + offset, min(width, size - offset)
        carries[:] = zero
        if len(grad_w) < steps:
            grad_w[:, low : low + neurons] = zero
        for t in range(steps - 1, -1, -1):
            here = block * steps + t
            incoming = grad_out[t, low // area : (low + neurons) // area]
            begin, end = stop[here - 1] if here > first * steps else 0, stop[here]
            fired = place[begin:end]
            if len(grad_w) > 0 and len(grad_t) > 0:
                by_w, by_t = slope_w[begin:end], slope_t[begin:end]
                for k in range(len(fired)):
                    i = fired[k]
                    signal = incoming[windows[i]]
                    carry_m[i] = carry_s[i] = signal * by_w[k]
                    carry_t[i] = -(signal * by_t[k])
            elif len(grad_w) > 0:
                by_w = slope_w[begin:end]
                for k in range(len(fired)):
                    i = fired[k]
                    carry_m[i] = carry_s[i] = incoming[windows[i]] * by_w[k]
            elif len(grad_t) > 0:
                by_t = slope_t[begin:end]
                for k in range(len(fired)):
                    i = fired[k]
                    carry_t[i] = -(incoming[windows[i]] * by_t[k])
            if len(grad_w) > 0:
                to_w = grad_w[min(t, len(grad_w) - 1), low : low + neurons]
                if len(grad_w) == steps:
                    for i in range(neurons):
                        carry_m[i] *= decay_m
                        carry_s[i] *= decay_s
                        to_w[i] = coef * (carry_m[i] - carry_s[i])
                else:
                    for i in range(neurons):
                        carry_m[i] *= decay_m
                        carry_s[i] *= decay_s
                        to_w[i] += coef * (carry_m[i] - carry_s[i])
            if len(grad_t) > 0:
                to_t = grad_t[t, low : low + neurons]
                for i in range(neurons):
                    carry_t[i] *= decay_grad
                    to_t[i] = carry_t[i]


@parallel_kernel
def _backward(
    grad_out: Array,
    constants: tuple[Array, ...],
    windows: Array,
    area: int,
    size: int,
    base: Array,
    stop: Array,
    place: Array,
    slope_w: Array,
    slope_t: Array,
    grad_w: Array,
    grad_t: Array,
) -> None:
    blocks = len(stop) // len(grad_out)
    for chunk in prange(CHUNKS):
        _backward_blocks(
            grad_out,
            constants,
            windows,
            area,
            size,
            chunk * blocks // CHUNKS,
            (chunk + 1) * blocks // CHUNKS,
            stop,
            place[base[chunk] :],
            slope_w[base[chunk] :],
            slope_t[base[chunk] :],
            grad_w,
            grad_t,
        )
