"""The neuron under a surrogate gradient: the same spikes, and backpropagation through time.

Two scans as torch.library ops: kernels on a CPU, the reference on a GPU.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from snn.neuron import SRMParams, SurrogateParams
from snn.ops.spike_avg_pool2d import spike_avg_pool2d
from snn.ops.srm import potential_cpu, reference
from snn.ops.srm.shapes import convolve, new_maps, shown_steps

Pair = tuple[int, int]


def surrogate_conv2d(
    x: Tensor,
    weight: Tensor,
    threshold: Tensor,
    neuron: SRMParams,
    grad: SurrogateParams,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    pool: Pair,
) -> Tensor:
    """Compute what `SRMConv2dFunc` does, by operations that autograd knows, and a neuron of its own."""
    current = convolve(_shown(x), weight, (stride, padding, dilation, groups), x.dtype).to(x.dtype)
    spikes = _neurons(current, threshold, len(x), neuron, grad)
    return spikes if pool == (1, 1) else spike_avg_pool2d(spikes, pool, grad)


def surrogate_linear(
    x: Tensor, weight: Tensor, threshold: Tensor, neuron: SRMParams, grad: SurrogateParams
) -> Tensor:
    """Compute what `SRMLinearFunc` does, in the same way."""
    current = F.linear(_shown(x), weight)[..., None, None]
    return _neurons(current.to(x.dtype), threshold, len(x), neuron, grad).flatten(2)


def _shown(x: Tensor) -> Tensor:
    """Return one step for all if they are the same memory, unless each is to get a gradient of its own."""
    return x if x.requires_grad else shown_steps(x)


def _neurons(
    current: Tensor, threshold: Tensor, steps: int, neuron: SRMParams, grad: SurrogateParams
) -> Tensor:
    return cast(Tensor, SurrogateFunc.apply(current, threshold, steps, neuron, grad))


class SurrogateFunc(Function):
    """Forward the scan, backward the surrogate derivative and the scan back in time."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, current: Tensor, threshold: Tensor, steps: int, neuron: SRMParams, grad: SurrogateParams
    ) -> Tensor:
        taus = [neuron.tau_m, neuron.tau_s]
        spikes, potential = torch.ops.snn.potential_forward(current, threshold, steps, taus)
        if ctx.needs_input_grad[0]:
            ctx.taus, ctx.rows = taus, len(current)
            scale = threshold[:, None, None]
            ctx.save_for_backward(spikes, grad.slope(potential / scale - 1) / scale)
        return cast(Tensor, spikes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        spikes, slope = ctx.saved_tensors
        grad_current = torch.ops.snn.potential_backward(grad_out * slope, spikes, ctx.taus)
        if ctx.rows < len(spikes):
            grad_current = grad_current.sum(dim=0, keepdim=True)
        return grad_current, None, None, None, None


def _cuda_forward(current: Tensor, threshold: Tensor, steps: int, taus: Sequence[float]) -> list[Tensor]:
    every = current.expand(steps, *current.shape[1:])
    return list(reference.potential_forward(every, threshold[:, None, None], SRMParams(*taus)))


def _cuda_backward(grad_u: Tensor, spikes: Tensor, taus: Sequence[float]) -> Tensor:
    return reference.potential_backward(grad_u, spikes, SRMParams(*taus))


def _fake_forward(current: Tensor, threshold: Tensor, steps: int, taus: Sequence[float]) -> list[Tensor]:
    return [new_maps(current, steps, tuple(current.shape[1:])) for _ in range(2)]  # type: ignore[arg-type]


def _fake_backward(grad_u: Tensor, spikes: Tensor, taus: Sequence[float]) -> Tensor:
    return new_maps(spikes, len(spikes), tuple(spikes.shape[1:]))  # type: ignore[arg-type]


_library = torch.library.Library("snn", "FRAGMENT")
_library.define("potential_forward(Tensor current, Tensor threshold, SymInt steps, float[] taus) -> Tensor[]")
_library.define("potential_backward(Tensor grad_u, Tensor spikes, float[] taus) -> Tensor")
for _name, _cpu, _cuda, _fake in (
    ("potential_forward", potential_cpu.potential_forward, _cuda_forward, _fake_forward),
    ("potential_backward", potential_cpu.potential_backward, _cuda_backward, _fake_backward),
):
    _library.impl(_name, _cpu, "CPU")
    _library.impl(_name, _cuda, "CUDA")
    torch.library.register_fake(f"snn::{_name}", _fake, lib=_library)
