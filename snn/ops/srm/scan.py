"""The neuron's two scans as torch.library ops, each with the kernel of the tensor's device.

They compute what `reference.py` does, and two things more: the spikes may be averaged over pooling windows in
the same pass, and what backward needs is a *tape*, which the backward of the same device reads.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from snn.neuron import GradParams, SRMParams
from snn.ops.srm import cpu
from snn.ops.srm.shapes import new_maps, pooled, unpooled


def scan_forward(
    current: Tensor,
    threshold: Tensor,
    steps: int,
    pool: tuple[int, int],
    neuron: SRMParams,
    grad: GradParams,
    *,
    needs_w: bool,
    needs_t: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Run the neurons from rest over all steps.

    Args:
        current: Input current, `[T, N, C, H, W]`, or `[1, N, C, H, W]` if it is the same at every step;
            float32 or float64, on a CPU or a CUDA GPU.
        threshold: Firing threshold, `[C]`.
        steps: T.
        pool: Window `(k_h, k_w)` that the spikes are averaged over, a divisor of the map; (1, 1) for none.
        neuron: The neuron's constants.
        grad: The gradient's constants.
        needs_w: Whether `scan_backward` will be asked for the signal for the weight.
        needs_t: Whether it will be asked for the signal for the input's spike times.

    Returns:
        The spikes, averaged over the windows, `[T, N, C, H / k_h, W / k_w]`; and the tape for
        :func:`scan_backward`. A tape's size follows the number of spikes, except under torch.compile, whose
        graphs want sizes that do not depend on data.
    """
    arguments = (current, threshold, steps, pool, _constants(neuron, grad), needs_w, needs_t)
    if torch.compiler.is_compiling():
        out, *tape = torch.ops.snn.scan_forward(*arguments, False)
    else:
        out, *tape = _FORWARD[current.device.type](*arguments, True)
    return out, tape


def scan_backward(
    grad_out: Tensor,
    tape: Sequence[Tensor],
    pool: tuple[int, int],
    neuron: SRMParams,
    grad: GradParams,
    *,
    rows_w: int,
    rows_t: int,
) -> tuple[Tensor, Tensor]:
    """Credit the time gradient of every spike to the inputs that caused it.

    The spikes of a pooling window share its gradient equally.

    Args:
        grad_out: Gradient of what `scan_forward` returned, `[T, N, C, H / k_h, W / k_w]`.
        tape: As `scan_forward` returned it.
        pool: As in `scan_forward`.
        neuron: The neuron's constants.
        grad: The gradient's constants.
        rows_w: Of the signal for the weight: T = each step, 1 = the sum over the steps, 0 = none.
        rows_t: Of the signal for the input's spike times: T or 0.

    Returns:
        `grad_w`, `[rows_w, N, C, H, W]`, and `grad_t`, `[rows_t, N, C, H, W]`.
    """
    arguments = (grad_out, list(tape), pool, _constants(neuron, grad), rows_w, rows_t)
    if torch.compiler.is_compiling():
        grad_w, grad_t = torch.ops.snn.scan_backward(*arguments)
    else:
        grad_w, grad_t = _BACKWARD[grad_out.device.type](*arguments)
    return grad_w, grad_t


def _constants(neuron: SRMParams, grad: GradParams) -> list[float]:
    decays = [neuron.decay_m, neuron.decay_s, neuron.coef, grad.decay_grad]
    return [*decays, grad.cap_weight, grad.cap_time]


def _cuda_forward(*arguments: object) -> list[Tensor]:
    from snn.ops.srm import gpu  # Triton is not everywhere

    return gpu.scan_forward(*arguments)  # type: ignore[arg-type]


def _cuda_backward(*arguments: object) -> list[Tensor]:
    from snn.ops.srm import gpu

    return gpu.scan_backward(*arguments)  # type: ignore[arg-type]


# outside of compiled graphs they are called by themselves: by torch's dispatcher a call takes 50 us more
_FORWARD: dict[str, Callable[..., list[Tensor]]] = {"cpu": cpu.scan_forward, "cuda": _cuda_forward}
_BACKWARD: dict[str, Callable[..., list[Tensor]]] = {"cpu": cpu.scan_backward, "cuda": _cuda_backward}


def _fake_forward(
    current: Tensor,
    threshold: Tensor,
    steps: int,
    pool: Sequence[int],
    constants: Sequence[float],
    needs_w: bool,
    needs_t: bool,
    trim: bool,
) -> list[Tensor]:
    """Return the shapes alone."""
    neurons = current.shape[1:]
    out = new_maps(current, steps, pooled(neurons, pool))
    events: Any = torch.library.get_ctx().new_dynamic_size() if trim else None
    if current.device.type == "cpu":
        return [out, *cpu.new_tape(current, steps, pool, needs_w, needs_t, events)]
    from snn.ops.srm import gpu

    return [out, *gpu.new_tape(current, steps, needs_w, needs_t, events)]


def _fake_backward(
    grad_out: Tensor,
    tape: Sequence[Tensor],
    pool: Sequence[int],
    constants: Sequence[float],
    rows_w: int,
    rows_t: int,
) -> list[Tensor]:
    """Return the shapes alone."""
    neurons = unpooled(grad_out.shape[1:], pool)
    return [new_maps(grad_out, rows, neurons) for rows in (rows_w, rows_t)]


# defined by hand: torch.library.custom_op costs a small layer as much time as its scan
# a change of the sizes below needs new names: torch keeps compiled graphs on disk, and knows the ops by these
_library = torch.library.Library("snn", "FRAGMENT")
_library.define(
    "scan_forward(Tensor current, Tensor threshold, SymInt steps, int[2] pool, float[] constants, "
    "bool needs_w, bool needs_t, bool trim) -> Tensor[]"
)
_library.define(
    "scan_backward(Tensor grad_out, Tensor[] tape, int[2] pool, float[] constants, "
    "SymInt rows_w, SymInt rows_t) -> Tensor[]"
)
for _name, _kernels, _fake in (
    ("scan_forward", _FORWARD, _fake_forward),
    ("scan_backward", _BACKWARD, _fake_backward),
):
    for _device, _kernel in _kernels.items():
        _library.impl(_name, _kernel, _device.upper())
    torch.library.register_fake(f"snn::{_name}", _fake, lib=_library)
