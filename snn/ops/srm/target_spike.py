"""Spikes set by a teacher: one for each labelled output neuron that stayed silent."""

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from snn.neuron import GradParams, SRMParams, spike_response_kernel


def target_spikes(
    x: Tensor,
    weight: Tensor,
    neuron: SRMParams,
    grad: GradParams,
    spikes: Tensor,
    labels: Tensor,
    least_rise: float,
) -> Tensor:
    """Return a spike for every labelled neuron that :func:`snn.ops.srm_linear` left silent.

    A silent neuron has no spike whose time could move, so its class gets no gradient. The spike stands at the
    last step where the neuron's potential rises, `du[t] > least_rise`; without such a step there is none. It
    is set after the scan and resets nothing. Its gradient is that of a spike at its step (equations in
    `snn/ops/srm/README.md`).

    Args:
        x: What the layer got, `[T, N, F]`.
        weight: Its weight, `[K, F]`.
        neuron: Its constants.
        grad: Constants of its gradient.
        spikes: What it returned, `[T, N, K]`.
        labels: The labelled neuron of each sample, `[N]`.
        least_rise: In units of the potential, > 0.

    Returns:
        `[T, N, K]`: 1 at the spikes that are set, else 0. Add them to `spikes`.

    Raises:
        ValueError: `least_rise` is not finite and > 0.
    """
    if not (math.isfinite(least_rise) and least_rise > 0):
        raise ValueError(f"least_rise must be finite and > 0, got {least_rise}")
    return cast(Tensor, TargetSpikeFunc.apply(x, weight, neuron, grad, spikes.detach(), labels, least_rise))


class TargetSpikeFunc(Function):
    """Forward the spikes that are set, backward their time-based gradient."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        neuron: SRMParams,
        grad: GradParams,
        spikes: Tensor,
        labels: Tensor,
        least_rise: float,
    ) -> Tensor:
        steps = len(x)
        current = torch.einsum("tnf,nf->tn", x, weight[labels]).to(x.dtype)  # lower under autocast
        m = s = r = u_last = torch.zeros_like(current[0])
        rises, traces = [], []
        for t in range(steps):
            m = (m + current[t]) * neuron.decay_m
            s = (s + current[t]) * neuron.decay_s
            r = (r + current[t]) * grad.decay_grad
            u = neuron.coef * (m - s)
            rises.append(u - u_last)
            traces.append(r)
            u_last = u
        du, step = torch.stack(rises), torch.arange(steps, device=x.device)[:, None]
        last = torch.where(du > least_rise, step, -1).amax(dim=0)
        silent = spikes.gather(2, labels.expand(steps, -1)[..., None]).sum(dim=(0, 2)) == 0
        is_set = silent & (last >= 0)
        here = (step == last) & is_set
        slope_w = (-1 / du).clamp(-grad.cap_weight, 0) * here
        slope_t = (-1 / torch.stack(traces)).clamp(-grad.cap_time, 0) * here
        ctx.neuron, ctx.grad = neuron, grad
        ctx.save_for_backward(x, weight, labels, last, slope_w.sum(dim=0), slope_t.sum(dim=0))
        return torch.zeros_like(spikes).scatter_(
            2, labels.expand(steps, -1)[..., None], here[..., None].to(x)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        x, weight, labels, last, slope_w, slope_t = ctx.saved_tensors
        steps = len(x)
        rows = torch.arange(len(labels), device=x.device)
        incoming = grad_out[last.clamp(min=0), rows, labels]
        lag = last + 1 - torch.arange(steps, device=x.device)[:, None]  # of step s: t - s + 1
        credited, lag = lag >= 1, lag.clamp(min=1)  # a negative power of a decay overflows
        eps = spike_response_kernel(ctx.neuron, steps).to(x)[lag - 1]
        grad_w = incoming * slope_w * eps * credited
        grad_t = -incoming * slope_t * ctx.grad.decay_grad ** lag.to(x.dtype) * credited
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = grad_t[..., None] * weight[labels] * x * ctx.grad.grad_scale
        if ctx.needs_input_grad[1]:
            with torch.autocast(x.device.type, enabled=False):
                per_sample = torch.einsum("tn,tnf->nf", grad_w, x)
            grad_weight = torch.zeros_like(weight).index_add_(0, labels, per_sample)
        return grad_x, grad_weight, None, None, None, None, None
