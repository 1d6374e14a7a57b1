"""The neuron's scans, written as the formulas of README.md read: the definition of truth for every kernel."""

import torch
from torch import Tensor

from snn.neuron import GradParams, SRMParams


def scan_forward(
    current: Tensor, threshold: Tensor, neuron: SRMParams, grad: GradParams
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the neurons from rest over all steps.

    Args:
        current: Input current `I`, `[T, N, ...]`.
        threshold: Firing threshold, broadcastable to one step of `current`.
        neuron: The neuron's constants.
        grad: The gradient's constants.

    Returns:
        `spikes` (0/1), `slope_w = clamp(-1/du, -cap_weight, 0)` and `slope_t = clamp(-1/r, -cap_time, 0)`,
        all of the shape of `current`; the slopes are 0 where there is no spike.
    """
    spikes, slope_w, slope_t = (
        torch.empty_like(current, memory_format=torch.contiguous_format) for _ in range(3)
    )
    m = s = r = u_last = torch.zeros_like(current[0])
    for t in range(current.shape[0]):
        m = (m + current[t]) * neuron.decay_m
        s = (s + current[t]) * neuron.decay_s
        r = (r + current[t]) * grad.decay_grad
        u = neuron.coef * (m - s)
        du = u - u_last
        fires = u >= threshold
        spikes[t] = fires
        slope_w[t] = torch.where(fires, (-1 / du).clamp(-grad.cap_weight, 0), 0)
        slope_t[t] = torch.where(fires, (-1 / r).clamp(-grad.cap_time, 0), 0)
        m, s, r, u_last = (trace.masked_fill(fires, 0) for trace in (m, s, r, u))  # hard reset
    return spikes, slope_w, slope_t


def scan_backward(
    grad_out: Tensor, spikes: Tensor, slope_w: Tensor, slope_t: Tensor, neuron: SRMParams, grad: GradParams
) -> tuple[Tensor, Tensor]:
    """Credit the time gradient of every spike to the inputs that caused it.

    The input at step `s` belongs to the next spike at `t >= s`. Walking back in time, three carries hold
    that spike's `a * decay_m^(t-s+1)`, `a * decay_s^(t-s+1)` and `-b * decay_grad^(t-s+1)`; a spike replaces
    all three.

    Args:
        grad_out: `dL/dt` of the output spikes, `[T, N, ...]`; read only at spikes.
        spikes: As `scan_forward` returned it.
        slope_w: As `scan_forward` returned it.
        slope_t: As `scan_forward` returned it.
        neuron: The neuron's constants.
        grad: The gradient's constants.

    Returns:
        `grad_w` (signal for the weight) and `grad_t` (signal for the input's spike times), of the shape of
        `spikes`.
    """
    grad_w, grad_t = torch.empty_like(spikes), torch.empty_like(spikes)
    carry_m = carry_s = carry_t = torch.zeros_like(spikes[0])
    for t in reversed(range(spikes.shape[0])):
        fired = spikes[t] != 0
        a = grad_out[t] * slope_w[t]
        b = grad_out[t] * slope_t[t]
        carry_m = torch.where(fired, a, carry_m) * neuron.decay_m
        carry_s = torch.where(fired, a, carry_s) * neuron.decay_s
        carry_t = torch.where(fired, -b, carry_t) * grad.decay_grad
        grad_w[t] = neuron.coef * (carry_m - carry_s)
        grad_t[t] = carry_t
    return grad_w, grad_t


def potential_forward(current: Tensor, threshold: Tensor, neuron: SRMParams) -> tuple[Tensor, Tensor]:
    """Run the neurons from rest over all steps, and keep the potentials.

    Args:
        current: Input current `I`, `[T, N, ...]`.
        threshold: Firing threshold, broadcastable to one step of `current`.
        neuron: The neuron's constants.

    Returns:
        `spikes` (0/1), those of :func:`scan_forward`, and the potential `u` before its reset, of that shape.
    """
    spikes, potential = (torch.empty_like(current, memory_format=torch.contiguous_format) for _ in range(2))
    m = s = torch.zeros_like(current[0])
    for t in range(current.shape[0]):
        m = (m + current[t]) * neuron.decay_m
        s = (s + current[t]) * neuron.decay_s
        potential[t] = neuron.coef * (m - s)
        fires = potential[t] >= threshold
        spikes[t] = fires
        m, s = m.masked_fill(fires, 0), s.masked_fill(fires, 0)  # hard reset
    return spikes, potential


def potential_backward(grad_u: Tensor, spikes: Tensor, neuron: SRMParams) -> Tensor:
    """Carry gradients of the potentials back to the currents.

    The traces are the derivative's only memory, and a reset ends it: `dL/du[t]` reaches the currents since
    the spike before `t`. A reset itself passes no gradient.

    Args:
        grad_u: `dL/du`, `[T, N, ...]`.
        spikes: As `potential_forward` returned them.
        neuron: The neuron's constants.

    Returns:
        `dL/dI`, of the shape of `spikes`.
    """
    grad_current = torch.empty_like(spikes)
    carry_m = carry_s = torch.zeros_like(spikes[0])
    for t in reversed(range(spikes.shape[0])):
        kept = spikes[t] == 0
        carry_m = (carry_m * kept + grad_u[t]) * neuron.decay_m
        carry_s = (carry_s * kept + grad_u[t]) * neuron.decay_s
        grad_current[t] = neuron.coef * (carry_m - carry_s)
    return grad_current
