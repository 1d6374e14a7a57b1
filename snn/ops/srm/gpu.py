"""The scans on a CUDA GPU, in Triton: a program scans a block of neurons over all steps, in registers.

The tape holds where the spikes are, a byte per neuron and step, and the slopes of all, 0 where no spike is.
Trimmed, it is a bit per neuron and step, and the slopes of the spikes.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from snn.ops.compact import pack_bits, unpack_bits
from snn.ops.srm.shapes import in_memory, new_maps, unpooled

BLOCK = 256  # neurons of a program


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
    incoming = in_memory(current).contiguous()
    fired, *slopes = tape = new_tape(current, steps, needs_w, needs_t, None)
    length = incoming[0].numel()
    with _device_of(current):
        _forward[(triton.cdiv(length, BLOCK),)](
            incoming,
            threshold.contiguous(),
            fired,
            *slopes,
            length,
            len(threshold),
            steps,
            0 if len(incoming) == 1 else length,
            *constants,
            needs_w,
            needs_t,
            BLOCK,
            enable_fp_fusion=False,  # rounds as the reference does
        )
    out = new_maps(current, steps, unpooled(neurons, (1, 1)))
    in_memory(out).view(-1).copy_(fired)
    if pool[0] * pool[1] > 1:
        out = F.avg_pool2d(out.flatten(0, 1), tuple(pool)).unflatten(0, out.shape[:2])
    if trim:
        mask = fired.bool()
        tape = [pack_bits(mask), *(slope[mask] if len(slope) else slope for slope in slopes)]
    return [out, *tape]


def scan_backward(
    grad_out: Tensor,
    tape: Sequence[Tensor],
    pool: Sequence[int],
    constants: Sequence[float],
    rows_w: int,
    rows_t: int,
) -> list[Tensor]:
    """See `snn/ops/srm/scan.py`."""
    steps, neurons = len(grad_out), unpooled(grad_out.shape[1:], pool)
    grad_w, grad_t = (new_maps(grad_out, rows, neurons) for rows in (rows_w, rows_t))
    fired, *slopes = tape
    length = neurons[0] * neurons[1] * neurons[2] * neurons[3]
    if fired.dtype == torch.uint8:  # trimmed
        mask = unpack_bits(fired, steps * length)
        fired = mask.to(torch.int8)
        slopes = [
            slope.new_zeros(len(mask)).masked_scatter_(mask, slope) if len(slope) else slope
            for slope in slopes
        ]
    if pool[0] * pool[1] > 1:  # the spikes of a window share its gradient
        spikes = new_maps(grad_out, steps, neurons)
        in_memory(spikes).view(-1).copy_(fired)
        window = F.avg_pool2d(spikes.flatten(0, 1), tuple(pool), divisor_override=1).view_as(grad_out)
        grad_out = grad_out / window.clamp(min=1)
    with _device_of(grad_out):
        _backward[(triton.cdiv(length, BLOCK),)](
            in_memory(grad_out).contiguous(),
            fired,
            *slopes,
            grad_w,
            grad_t,
            length,
            length * (steps - 1),
            steps,
            *neurons[1:],
            *pool,
            *constants[:4],
            rows_w,
            rows_t,
            BLOCK,
            enable_fp_fusion=False,
        )
    return [grad_w, grad_t]


def new_tape(
    current: Tensor, steps: int, needs_w: bool, needs_t: bool, num_events: int | None
) -> list[Tensor]:
    """Return an empty tape: trimmed to `num_events`, or, if that is None, not trimmed."""
    length = current[0].numel() * steps
    if num_events is None:
        where, slopes = current.new_empty(length, dtype=torch.int8), length
    else:
        where, slopes = current.new_empty(-(-length // 8), dtype=torch.uint8), num_events
    return [where, current.new_empty(slopes if needs_w else 0), current.new_empty(slopes if needs_t else 0)]


def _device_of(x: Tensor) -> Any:
    """Launch on the GPU that `x` lies on, which need not be the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()  # Triton's interpreter


@triton.jit
def _slope(rise, cap: tl.constexpr):
    """Return `-1 / rise`, kept within `[-cap, 0]`."""
    zero = tl.zeros_like(rise)
    return tl.minimum(tl.maximum(-1.0 / rise, zero - cap), zero)  # a lone constant would be float32


@triton.jit
def _forward(
    current,
    threshold,
    fired,
    slope_w,
    slope_t,
    length,
    channels,
    steps,
    step_stride,
    decay_m: tl.constexpr,
    decay_s: tl.constexpr,
    coef: tl.constexpr,
    decay_grad: tl.constexpr,
    cap_weight: tl.constexpr,
    cap_time: tl.constexpr,
    needs_w: tl.constexpr,
    needs_t: tl.constexpr,
    BLOCK: tl.constexpr,
):
    neuron = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = neuron < length
    source = neuron.to(tl.int64)
    here = neuron.to(tl.int64)
    above = tl.load(threshold + neuron % channels, mask=inside, other=1.0)
    m = tl.zeros_like(above)
    s = tl.zeros_like(above)
    r = tl.zeros_like(above)
    u_last = tl.zeros_like(above)
    zero = tl.zeros_like(above)
    for _ in range(steps):
        incoming = tl.load(current + source, mask=inside, other=0.0)
        m = (m + incoming) * decay_m
        s = (s + incoming) * decay_s
        u = coef * (m - s)
        fires = u >= above
        tl.store(fired + here, fires.to(tl.int8), mask=inside)
        if needs_w:
            tl.store(slope_w + here, tl.where(fires, _slope(u - u_last, cap_weight), zero), mask=inside)
        if needs_t:
            r = (r + incoming) * decay_grad
            tl.store(slope_t + here, tl.where(fires, _slope(r, cap_time), zero), mask=inside)
            r = tl.where(fires, zero, r)
        m = tl.where(fires, zero, m)  # hard reset
        s = tl.where(fires, zero, s)
        u_last = tl.where(fires, zero, u)
        source += step_stride
        here += length


@triton.jit
def _backward(
    grad_out,
    fired,
    slope_w,
    slope_t,
    grad_w,
    grad_t,
    length,
    last_step,
    steps,
    channels,
    height,
    width,
    pool_h,
    pool_w,
    decay_m: tl.constexpr,
    decay_s: tl.constexpr,
    coef: tl.constexpr,
    decay_grad: tl.constexpr,
    rows_w,
    rows_t,
    BLOCK: tl.constexpr,
):
    neuron = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = neuron < length
    # the window of a neuron [N, H, W, C] in maps [N, H / pool_h, W / pool_w, C]
    channel = neuron % channels
    x = neuron // channels % width
    y = neuron // channels // width % height
    sample = neuron // channels // width // height
    window = (
        (sample * (height // pool_h) + y // pool_h) * (width // pool_w) + x // pool_w
    ) * channels + channel
    windows = length // (pool_h * pool_w)
    here = neuron.to(tl.int64) + last_step
    there = window.to(tl.int64) + last_step // (pool_h * pool_w)
    zero = tl.zeros([BLOCK], dtype=grad_out.dtype.element_ty)
    carry_m = zero
    carry_s = zero
    carry_t = zero
    total = zero
    for _ in range(steps):
        fires = tl.load(fired + here, mask=inside, other=0) != 0
        g = tl.load(grad_out + there, mask=inside & fires, other=0.0)
        if rows_w > 0:
            a = g * tl.load(slope_w + here, mask=inside & fires, other=0.0)
            carry_m = tl.where(fires, a, carry_m) * decay_m
            carry_s = tl.where(fires, a, carry_s) * decay_s
            signal = coef * (carry_m - carry_s)
            if rows_w == steps:
                tl.store(grad_w + here, signal, mask=inside)
            else:
                total += signal
        if rows_t > 0:
            b = g * tl.load(slope_t + here, mask=inside & fires, other=0.0)
            carry_t = tl.where(fires, -b, carry_t) * decay_grad
            tl.store(grad_t + here, carry_t, mask=inside)
        here -= length
        there -= windows
    if rows_w > 0:
        if rows_w < steps:
            tl.store(grad_w + neuron, total, mask=inside)
