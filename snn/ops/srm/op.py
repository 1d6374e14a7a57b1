"""Public functions of the SRM layers: check, then call the autograd Function."""

from typing import cast

import torch
from torch import Tensor

from snn.neuron import Gradient, SRMParams, SurrogateParams
from snn.ops.srm.function import Pair, SRMConv2dFunc, SRMLinearFunc
from snn.ops.srm.surrogate import surrogate_conv2d, surrogate_linear


def srm_conv2d(
    x: Tensor,
    weight: Tensor,
    neuron: SRMParams,
    grad: Gradient,
    *,
    threshold: Tensor | None = None,
    stride: int | Pair = 1,
    padding: int | Pair = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
    pool: int | Pair = 1,
) -> Tensor:
    """Convolve spikes over space, run one SRM neuron per output position, and average over windows.

    `I[t] = conv2d(x[t], weight)`; `u[t] = sum_s I[s] eps(t-s+1)` over the inputs since the neuron's last
    spike, with `eps` from :func:`snn.neuron.spike_response_kernel`; `spikes[t] = u[t] >= threshold`. A call
    starts from rest.

    The gradient is time-based, not the derivative of the forward: `grad_out[t]` is read as dL/d(time of the
    spike at t), and input and weight receive different signals (equations in `snn/ops/srm/README.md`). From:
    Zhu et al., "Training Spiking Neural Networks with Event-driven Backpropagation", NeurIPS 2022.

    Args:
        x: Spikes or real values, `[T, N, C_in, H, W]`, float32 or float64.
        weight: `[C_out, C_in / groups, k_h, k_w]`, dtype of `x`.
        neuron: Time constants in steps, and the threshold.
        grad: Constants of the gradient; or a :class:`snn.neuron.SurrogateParams`, for ordinary
            backpropagation through time: then `grad_out` is dL/d(height of a spike), and one signal serves
            both ends.
        threshold: One per output channel, `[C_out]`, > 0; overrides `neuron.threshold`. (The range is read
            on the CPU only; on a GPU reading it would stall the device.)
        stride: As in `conv2d`.
        padding: Zeros added on each side, as in `conv2d`.
        dilation: As in `conv2d`.
        groups: As in `conv2d`.
        pool: Window of a :func:`snn.ops.spike_avg_pool2d` of the spikes, a divisor of the map; computed in
            the same pass, which spares the writing of the spikes and of their gradients. 1 for none.

    Returns:
        Spikes (0/1), `[T, N, C_out, H_out, W_out]`, dtype of `x`; or their averages over the windows,
        `[T, N, C_out, H_out / k_h, W_out / k_w]`.

    Raises:
        ValueError: A shape, dtype, device or range breaks a rule above; the message names rule and value.
    """
    _require_float(x, weight)
    if x.dim() != 5:
        raise ValueError(f"x must be of shape [T, N, C, H, W], got {list(x.shape)}")
    if weight.dim() != 4:
        raise ValueError(
            f"weight must be of shape [C_out, C_in / groups, k_h, k_w], got {list(weight.shape)}"
        )
    stride, padding = _pair("stride", stride, 1), _pair("padding", padding, 0)
    dilation, pool = _pair("dilation", dilation, 1), _pair("pool", pool, 1)
    if groups < 1 or weight.shape[0] % groups:
        raise ValueError(f"groups must be at least 1 and divide C_out = {weight.shape[0]}, got {groups}")
    if x.shape[2] != weight.shape[1] * groups:
        raise ValueError(
            f"x must have C_in = {weight.shape[1] * groups} channels (weight, groups), got {x.shape[2]}"
        )
    for side, size, kernel in zip((0, 1), x.shape[3:], weight.shape[2:], strict=True):
        room = size + 2 * padding[side] - dilation[side] * (kernel - 1) - 1
        if room < 0:
            raise ValueError(
                f"the kernel must fit the padded map, got {list(weight.shape[2:])} on {list(x.shape[3:])}"
            )
        if (room // stride[side] + 1) % pool[side]:
            raise ValueError(f"pool must divide the map of side {room // stride[side] + 1}, got {pool}")
    threshold = _require_scan(x, weight, neuron, threshold)
    conv = (stride, padding, dilation, groups)
    if isinstance(grad, SurrogateParams):
        return surrogate_conv2d(x, weight, threshold, neuron, grad, *conv, pool)
    x, weight = _recorded(x, weight)
    spikes = SRMConv2dFunc.apply(x, weight, threshold, neuron, grad, *conv, pool)
    return cast(Tensor, spikes)


def srm_linear(
    x: Tensor, weight: Tensor, neuron: SRMParams, grad: Gradient, *, threshold: Tensor | None = None
) -> Tensor:
    """Connect spikes fully and run one SRM neuron per output.

    :func:`srm_conv2d` with `I[t] = x[t] @ weight.T` as the synapse; the neuron and its gradient are the same.

    Args:
        x: Spikes or real values, `[T, N, F_in]`, float32 or float64.
        weight: `[F_out, F_in]`, dtype of `x`.
        neuron: Time constants in steps, and the threshold.
        grad: As in :func:`srm_conv2d`.
        threshold: One per output neuron, `[F_out]`, > 0; overrides `neuron.threshold`.

    Returns:
        Spikes (0/1), `[T, N, F_out]`, dtype of `x`.

    Raises:
        ValueError: A shape, dtype, device or range breaks a rule above; the message names rule and value.
    """
    _require_float(x, weight)
    if x.dim() != 3:
        raise ValueError(f"x must be of shape [T, N, F], got {list(x.shape)}")
    if weight.dim() != 2:
        raise ValueError(f"weight must be of shape [F_out, F_in], got {list(weight.shape)}")
    if x.shape[2] != weight.shape[1]:
        raise ValueError(f"x must have F_in = {weight.shape[1]} features (weight), got {x.shape[2]}")
    threshold = _require_scan(x, weight, neuron, threshold)
    if isinstance(grad, SurrogateParams):
        return surrogate_linear(x, weight, threshold, neuron, grad)
    x, weight = _recorded(x, weight)
    return cast(Tensor, SRMLinearFunc.apply(x, weight, threshold, neuron, grad))


def _require_float(x: Tensor, weight: Tensor) -> None:
    if x.dtype not in (torch.float32, torch.float64):
        rule = "x must be float32 or float64 (under torch.autocast too: it lowers what is in the layer)"
        raise ValueError(f"{rule}, got {x.dtype}: pass x.float()")
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"x must be on a CPU or a CUDA GPU, got {x.device}")
    if 0 in weight.shape:
        raise ValueError(f"weight must not be empty, got {list(weight.shape)}")
    if weight.dtype != x.dtype:
        raise ValueError(f"weight must have the dtype of x, {x.dtype}, got {weight.dtype}")
    if weight.device != x.device:
        raise ValueError(f"weight must be on the device of x, {x.device}, got {weight.device}")


def _require_scan(x: Tensor, weight: Tensor, neuron: SRMParams, threshold: Tensor | None) -> Tensor:
    """Check what the neurons need; return their thresholds, one per output channel."""
    if x.shape[0] < 1:
        raise ValueError("x must have at least one step (encoding.steps), got T = 0")
    channels = weight.shape[0]
    if threshold is None:
        return torch.full((channels,), neuron.threshold, dtype=x.dtype, device=x.device)
    if threshold.shape != (channels,) or threshold.dtype != x.dtype or threshold.device != x.device:
        got = f"{list(threshold.shape)} {threshold.dtype} on {threshold.device}"
        raise ValueError(
            f"threshold must be [{channels}] {x.dtype} on {x.device}, one per output channel, got {got}"
        )
    return threshold


def _recorded(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return both, detached where autograd records nothing: then nothing is computed for backward."""
    return (x, weight) if torch.is_grad_enabled() else (x.detach(), weight.detach())


def _pair(name: str, value: int | Pair, least: int) -> Pair:
    pair = value if isinstance(value, tuple) else (value, value)
    if len(pair) != 2 or not all(type(side) is int and side >= least for side in pair):
        raise ValueError(f"{name} must be one or two integers of at least {least}, got {value}")
    return pair
