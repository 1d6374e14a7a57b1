"""The scans of the surrogate gradient on a CPU: a block of neurons stays in cache over all steps."""

from collections.abc import Sequence

import numpy as np
import torch
from numba import prange
from torch import Tensor

from snn.neuron import SRMParams
from snn.ops.cpu_kernel import Array, launch, parallel_kernel
from snn.ops.srm.shapes import in_memory, new_maps, require_threshold

BLOCK = 1024  # neurons: their traces fit the first-level cache


def potential_forward(current: Tensor, threshold: Tensor, steps: int, taus: Sequence[float]) -> list[Tensor]:
    """See `snn/ops/srm/surrogate.py`."""
    require_threshold(threshold)
    spikes, potential = (new_maps(current, steps, tuple(current.shape[1:])) for _ in range(2))  # type: ignore[arg-type]
    above = threshold.repeat(current.shape[3] * current.shape[4])
    launch(
        _forward,
        in_memory(current).numpy(),
        above.numpy(),
        _constants(taus, current),
        in_memory(spikes).numpy(),
        in_memory(potential).numpy(),
    )
    return [spikes, potential]


def potential_backward(grad_u: Tensor, spikes: Tensor, taus: Sequence[float]) -> Tensor:
    """See `snn/ops/srm/surrogate.py`."""
    grad_current = new_maps(spikes, len(spikes), tuple(spikes.shape[1:]))  # type: ignore[arg-type]
    arrays = [in_memory(maps).numpy() for maps in (grad_u, spikes, grad_current)]
    launch(_backward, *arrays, _constants(taus, spikes))
    return grad_current


def _constants(taus: Sequence[float], like: Tensor) -> tuple[Array, ...]:
    neuron, kind = SRMParams(*taus), np.float32 if like.dtype == torch.float32 else np.float64
    return kind(neuron.decay_m), kind(neuron.decay_s), kind(neuron.coef)


@parallel_kernel
def _forward(
    current: Array, threshold: Array, constants: tuple[Array, ...], spikes: Array, potential: Array
) -> None:
    decay_m, decay_s, coef = constants
    zero, one = current.dtype.type(0), current.dtype.type(1)
    steps, samples, size = spikes.shape
    blocks = (size + BLOCK - 1) // BLOCK
    for place in prange(samples * blocks):
        n, low = place // blocks, place % blocks * BLOCK
        high = min(low + BLOCK, size)
        above = threshold[low:high]
        m, s = np.zeros(high - low, current.dtype), np.zeros(high - low, current.dtype)
        for t in range(steps):
            incoming = current[t if len(current) > 1 else 0, n, low:high]
            fires, u = spikes[t, n, low:high], potential[t, n, low:high]
            for i in range(high - low):
                m_i = (m[i] + incoming[i]) * decay_m
                s_i = (s[i] + incoming[i]) * decay_s
                u_i = coef * (m_i - s_i)
                u[i] = u_i
                fired = u_i >= above[i]
                fires[i] = one if fired else zero
                m[i], s[i] = (zero, zero) if fired else (m_i, s_i)


@parallel_kernel
def _backward(grad_u: Array, spikes: Array, grad_current: Array, constants: tuple[Array, ...]) -> None:
    decay_m, decay_s, coef = constants
    zero = grad_u.dtype.type(0)
    steps, samples, size = spikes.shape
    blocks = (size + BLOCK - 1) // BLOCK
    for place in prange(samples * blocks):
        n, low = place // blocks, place % blocks * BLOCK
        high = min(low + BLOCK, size)
        carry_m, carry_s = np.zeros(high - low, grad_u.dtype), np.zeros(high - low, grad_u.dtype)
        for t in range(steps - 1, -1, -1):
            incoming, fired = grad_u[t, n, low:high], spikes[t, n, low:high]
            out = grad_current[t, n, low:high]
            for i in range(high - low):
                kept_m, kept_s = (carry_m[i], carry_s[i]) if fired[i] == zero else (zero, zero)
                carry_m[i] = (kept_m + incoming[i]) * decay_m
                carry_s[i] = (kept_s + incoming[i]) * decay_s
                out[i] = coef * (carry_m[i] - carry_s[i])
