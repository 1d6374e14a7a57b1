"""The scans on a CPU: a block of neurons stays in cache over all steps, and blocks run in parallel.

The tape is a list of events, one per spike, sorted by (block, step, neuron): the neuron's place in its block
and its two slopes. Its memory follows the number of spikes. A block is a run of neurons of one sample, side
by side in memory, made of whole rows of pooling windows.
"""

import functools
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import prange
from torch import Tensor

from snn.ops.cpu_kernel import Array, cpu_kernel, launch, parallel_kernel
from snn.ops.keep import keep
from snn.ops.srm.shapes import invalid_threshold, new_maps, pooled, unpooled

BLOCK = 1024  # neurons, unless a row of windows has more: their traces stay in the nearest caches
CHUNKS = 64  # of blocks, some empty if these are few; a chunk is what one thread scans at a time
MOST_PLACES = 2**16  # that 16 bits tell apart


class _Plan(NamedTuple):
    """What the kernels know of a layer before it runs."""

    width: int  # neurons of a block
    blocks: int
    begin: Array  # where the events of each chunk begin, and end, if there is room for every one
    windows: Array  # of each place of a block: its window, counted from the block's first
    constants: tuple[Array, ...]
    summed: Array  # eps(1) + ... + eps(k) for k = 0 ... T


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
    neurons = current.shape[1:]
    plan = _plan(tuple(neurons), steps, tuple(pool), tuple(constants), current.dtype)
    out = new_maps(current, steps, pooled(neurons, pool))
    valid, *tape = launch(
        _forward,
        _in_memory(current),
        threshold.numpy(),
        plan.constants,
        plan.windows,
        pool[0] * pool[1],
        neurons[1] * neurons[2] * neurons[3],
        plan.begin,
        _in_memory(out),
        np.empty(plan.blocks * steps, np.int32),
        *(_workspace if trim else _room)(plan, needs_w, needs_t),
        trim,
    )
    if not valid:
        raise invalid_threshold(threshold)
    base, stop, place, *slopes = tape
    signed = place.view(f"i{place.itemsize}")  # torch does little with unsigned numbers
    return [out, *(torch.from_numpy(part) for part in (base, stop, signed, *slopes))]


def scan_backward(
    grad_out: Tensor,
    tape: Sequence[Tensor],
    pool: Sequence[int],
    constants: Sequence[float],
    rows_w: int,
    rows_t: int,
) -> list[Tensor]:
    """See `snn/ops/srm/scan.py`."""
    neurons, steps = unpooled(grad_out.shape[1:], pool), grad_out.shape[0]
    plan = _plan(neurons, steps, tuple(pool), tuple(constants), grad_out.dtype)
    grad_w, grad_t = new_maps(grad_out, rows_w, neurons), new_maps(grad_out, rows_t, neurons)
    base, stop, place, *slopes = [part.numpy() for part in tape]
    channels_first = grad_out.is_contiguous()  # a gradient of a flattened map
    incoming = grad_out.numpy().reshape(steps, -1) if channels_first else _in_memory(grad_out)
    launch(
        _backward,
        incoming,
        plan.constants,
        plan.summed,
        plan.width,
        _positions(neurons, tuple(pool), channels_first),
        pool[0] * pool[1],
        base,
        stop,
        place.view(f"u{place.itemsize}"),
        *slopes,
        _in_memory(grad_w),
        _in_memory(grad_t),
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
        current.new_zeros(num_events, dtype=torch.int16 if width <= MOST_PLACES else torch.int32),
        current.new_zeros(num_events if needs_w else 0),
        current.new_zeros(num_events if needs_t else 0),
    ]


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
def _plan(
    neurons: tuple[int, ...],
    steps: int,
    pool: tuple[int, ...],
    constants: tuple[float, ...],
    dtype: torch.dtype,
) -> _Plan:
    width, blocks = layout(neurons, pool)
    _, channels, _, row = neurons
    pixel, channel = np.divmod(np.arange(width), channels)
    y, x = np.divmod(pixel, row)
    window = (y // pool[0] * (row // pool[1]) + x // pool[1]) * channels + channel
    kind: Any = np.float32 if dtype == torch.float32 else np.float64
    decay_m, decay_s, coef = constants[:3]
    lag = np.arange(steps + 1)
    return _Plan(
        width,
        blocks,
        np.arange(CHUNKS + 1) * blocks // CHUNKS * width * steps,
        window.astype(np.uint16 if width <= MOST_PLACES else np.uint32),
        tuple(kind(value) for value in constants),
        np.cumsum((lag > 0) * coef * (decay_m**lag - decay_s**lag)).astype(kind),
    )


@functools.lru_cache(maxsize=256)
def _positions(neurons: tuple[int, ...], pool: tuple[int, ...], channels_first: bool) -> Array:
    """Return where the window of each neuron of a sample lies among the sample's windows."""
    _, channels, height, row = neurons
    y, x, channel = np.indices((height, row, channels))
    window, rows, columns = (y // pool[0], x // pool[1]), height // pool[0], row // pool[1]
    order = (channel, *window) if channels_first else (*window, channel)
    shape = (channels, rows, columns) if channels_first else (rows, columns, channels)
    positions = np.ravel_multi_index(order, shape).reshape(-1)
    return positions.astype(np.uint16 if positions.size <= MOST_PLACES else np.uint32)


def _in_memory(maps: Tensor) -> Array:
    """Return `[T, N, C, H, W]` as `[T, N * H * W * C]`; a copy unless it is channels last in memory."""
    array = maps.numpy().transpose(0, 1, 3, 4, 2)
    if not array.flags.c_contiguous:
        array = maps.permute(0, 1, 3, 4, 2).contiguous().numpy()
    steps, samples, height, width, channels = array.shape
    return array.reshape(steps, samples * height * width * channels)


def _room(plan: _Plan, needs_w: bool, needs_t: bool) -> list[Array]:
    """Return room for a place and the slopes that are needed, of every neuron at every step."""
    most, kind = plan.begin[-1], plan.summed.dtype
    return [
        np.empty(most, plan.windows.dtype),
        np.empty(most * needs_w, kind),
        np.empty(most * needs_t, kind),
    ]


_kept = threading.local()


def _workspace(plan: _Plan, needs_w: bool, needs_t: bool) -> list[Array]:
    """Return what `_room` does, in memory that the thread keeps: mapping new pages takes its time."""
    most, kind, places = int(plan.begin[-1]), plan.summed.dtype, plan.windows.dtype
    sizes = [most * needs_w * kind.itemsize, most * needs_t * kind.itemsize, most * places.itemsize]
    memory = getattr(_kept, "memory", None)
    if memory is None or len(memory) < sum(sizes):
        memory = _kept.memory = np.empty(sum(sizes), np.uint8)
    slope_w, memory = memory[: sizes[0]], memory[sizes[0] :]
    slope_t, memory = memory[: sizes[1]], memory[sizes[1] :]
    return [memory[: sizes[2]].view(places), slope_w.view(kind), slope_t.view(kind)]


@cpu_kernel
def _slope(rise: Array, cap: Array) -> Array:
    """Return `-1 / rise`, kept within `[-cap, 0]`."""
    zero, one = type(rise)(0), type(rise)(1)
    slope = -one / rise
    slope = slope if slope > -cap else -cap
    return slope if slope < zero else zero


@cpu_kernel
def _forward_blocks(
    current: Array,
    threshold: Array,
    constants: tuple[Array, ...],
    windows: Array,
    area: int,
    size: int,
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
    zero, one, part = current.dtype.type(0), current.dtype.type(1), current.dtype.type(1 / area)
    steps, width, channels = len(out), len(windows), len(threshold)
    per_sample = (size + width - 1) // width
    above, channel = np.empty(width, current.dtype), -1
    traces = np.empty((5, width), current.dtype)
    m, s, r, rise_u, rise_r = traces[0], traces[1], traces[2], traces[3], traces[4]
    flags, numbers = np.empty(width, np.uint8), np.arange(width).astype(place.dtype)
    share, fired_share = np.empty(width, current.dtype), np.ones(width, current.dtype)
    n = 0
    for block in range(first, last):
        offset = block % per_sample * width
        low, neurons = block // per_sample * size + offset, min(width, size - offset)
        if offset % channels != channel:  # of the block's first neuron
            channel = c = offset % channels
            for i in range(width):
                above[i] = threshold[c]
                c = c + 1 if c + 1 < channels else 0
        traces[:3] = zero
        for t in range(steps):
            incoming = current[t if len(current) > 1 else 0, low : low + neurons]
            for i in range(neurons):
                u_last = coef * (m[i] - s[i])
                m_i = (m[i] + incoming[i]) * decay_m
                s_i = (s[i] + incoming[i]) * decay_s
                u_i = coef * (m_i - s_i)
                fires = u_i >= above[i]
                rise_u[i] = u_i - u_last
                m[i] = zero if fires else m_i  # hard reset
                s[i] = zero if fires else s_i
                flags[i] = fires
            if len(slope_t) > 0:
                for i in range(neurons):
                    r_i = (r[i] + incoming[i]) * decay_grad
                    rise_r[i] = r_i
                    r[i] = zero if flags[i] else r_i
            events = keep(flags[:neurons], numbers, place[n:])
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
                    share[i] = one / max(one, spikes[i])
                    spikes[i] *= part
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


@cpu_kernel
def _copy(events: Array, to: Array) -> None:
    """Copy; from slices, since no vector code is made of an index that may count from the end."""
    for k in range(len(events)):
        to[k] = events[k]


@parallel_kernel
def _forward(
    current: Array,
    threshold: Array,
    constants: tuple[Array, ...],
    windows: Array,
    area: int,
    size: int,
    begin: Array,
    out: Array,
    stop: Array,
    place: Array,
    slope_w: Array,
    slope_t: Array,
    trim: bool,
) -> tuple[Any, ...]:
    """Scan to where there is room for all; to `trim`, move the events to memory of their own, without gaps.

    Returns whether every threshold is finite and > 0, and the tape.
    """
    valid = True
    for i in range(len(threshold)):
        valid &= 0 < threshold[i] < np.inf
    blocks = len(stop) // len(out)
    count = np.empty(CHUNKS, np.int64)
    for chunk in prange(CHUNKS):
        count[chunk] = _forward_blocks(
            current,
            threshold,
            constants,
            windows,
            area,
            size,
            chunk * blocks // CHUNKS,
            (chunk + 1) * blocks // CHUNKS,
            out,
            stop,
            place[begin[chunk] :],
            slope_w[begin[chunk] :],
            slope_t[begin[chunk] :],
        )
    base, total = begin[:CHUNKS].copy(), 0
    if not trim:
        return valid, base, stop, place, slope_w, slope_t
    for chunk in range(CHUNKS):
        base[chunk] = total
        total += count[chunk]
    to_place = np.empty(total, place.dtype)
    to_slope_w = np.empty(total if len(slope_w) > 0 else 0, slope_w.dtype)
    to_slope_t = np.empty(total if len(slope_t) > 0 else 0, slope_t.dtype)
    for chunk in prange(CHUNKS):
        here, there, length = begin[chunk], base[chunk], count[chunk]
        _copy(place[here : here + length], to_place[there:])
        if len(slope_w) > 0:
            _copy(slope_w[here : here + length], to_slope_w[there:])
        if len(slope_t) > 0:
            _copy(slope_t[here : here + length], to_slope_t[there:])
    return valid, base, stop, to_place, to_slope_w, to_slope_t


@cpu_kernel
def _sum_blocks(
    grad_out: Array,
    summed: Array,
    width: int,
    positions: Array,
    area: int,
    first: int,
    last: int,
    stop: Array,
    place: Array,
    slope_w: Array,
    grad_w: Array,
) -> None:
    """Credit the events of the blocks `first ... last - 1` to the sum over the steps of the inputs.

    An event that comes k steps after the one before it is credited eps(1) + ... + eps(k).
    """
    steps, size = len(grad_out), len(positions)
    per_sample = (size + width - 1) // width
    begin = 0
    rested = np.empty(width, np.uint32)  # the step at which the neuron was last reset
    for block in range(first, last):
        offset = block % per_sample * width
        start, neurons = block // per_sample * size, min(width, size - offset)
        low, position = start + offset, positions[offset : offset + neurons]
        to_w = grad_w[low : low + neurons]
        to_w[:] = grad_w.dtype.type(0)
        rested[:] = np.uint32(0)
        for t in range(steps):
            incoming = grad_out[t, start // area : (start + size) // area]
            end = stop[block * steps + t]
            fired, slope = place[begin:end], slope_w[begin:end]
            for k in range(len(fired)):
                i = fired[k]
                to_w[i] += incoming[position[i]] * slope[k] * summed[np.uint32(t + 1) - rested[i]]
                rested[i] = t + 1
            begin = end


@cpu_kernel
def _backward_blocks(
    grad_out: Array,
    constants: tuple[Array, ...],
    width: int,
    positions: Array,
    area: int,
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
    steps, size = len(grad_out), len(positions)
    per_sample = (size + width - 1) // width
    carries = np.empty((3, width), grad_out.dtype)
    carry_m, carry_s, carry_t = carries[0], carries[1], carries[2]
    for block in range(first, last):
        offset = block % per_sample * width
        start, neurons = block // per_sample * size, min(width, size - offset)
        low, position = start + offset, positions[offset : offset + neurons]
        carries[:] = zero
        for t in range(steps - 1, -1, -1):
            here = block * steps + t
            incoming = grad_out[t, start // area : (start + size) // area]
            begin, end = stop[here - 1] if here > first * steps else 0, stop[here]
            fired = place[begin:end]
            if len(grad_w) > 0 and len(grad_t) > 0:
                by_w, by_t = slope_w[begin:end], slope_t[begin:end]
                for k in range(len(fired)):
                    i = fired[k]
                    signal = incoming[position[i]]
                    carry_m[i] = carry_s[i] = signal * by_w[k]
                    carry_t[i] = -(signal * by_t[k])
            elif len(grad_w) > 0:
                by_w = slope_w[begin:end]
                for k in range(len(fired)):
                    i = fired[k]
                    carry_m[i] = carry_s[i] = incoming[position[i]] * by_w[k]
            elif len(grad_t) > 0:
                by_t = slope_t[begin:end]
                for k in range(len(fired)):
                    i = fired[k]
                    carry_t[i] = -(incoming[position[i]] * by_t[k])
            if len(grad_w) > 0:
                to_w = grad_w[t, low : low + neurons]
                for i in range(neurons):
                    carry_m[i] *= decay_m
                    carry_s[i] *= decay_s
                    to_w[i] = coef * (carry_m[i] - carry_s[i])
            if len(grad_t) > 0:
                to_t = grad_t[t, low : low + neurons]
                for i in range(neurons):
                    carry_t[i] *= decay_grad
                    to_t[i] = carry_t[i]


@parallel_kernel
def _backward(
    grad_out: Array,
    constants: tuple[Array, ...],
    summed: Array,
    width: int,
    positions: Array,
    area: int,
    base: Array,
    stop: Array,
    place: Array,
    slope_w: Array,
    slope_t: Array,
    grad_w: Array,
    grad_t: Array,
) -> None:
    steps = len(grad_out)
    blocks = len(stop) // steps
    each_w = grad_w if len(grad_w) == steps else grad_w[:0]
    for chunk in prange(CHUNKS):
        first, last = chunk * blocks // CHUNKS, (chunk + 1) * blocks // CHUNKS
        events = place[base[chunk] :]
        by_w, by_t = slope_w[base[chunk] :], slope_t[base[chunk] :]
        if 0 < len(grad_w) < steps:
            _sum_blocks(grad_out, summed, width, positions, area, first, last, stop, events, by_w, grad_w[0])
        if len(each_w) > 0 or len(grad_t) > 0:
            _backward_blocks(
                grad_out,
                constants,
                width,
                positions,
                area,
                first,
                last,
                stop,
                events,
                by_w,
                by_t,
                each_w,
                grad_t,
            )
