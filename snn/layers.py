"""Modules: weights, buffers, and a call of one op."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snn.neuron import TIME_BASED, Gradient, SRMParams
from snn.ops import gradient_decouple, lb_sign, spike_avg_pool2d, spike_dropout, srm_conv2d, srm_linear

STANDARDIZATION_EPS = 1e-5
START_SCALE = 0.3  # standardized weights start small: their scale has no effect, but they turn faster for it


class SRMLayer(nn.Module):
    """What every SRM layer holds: the weight, its standardization, and one threshold per output channel.

    Weight standardization: `(w - mean) / sqrt(var + 1e-5) * gain + bias` per output channel, with the
    unbiased variance, and a `gain` (from 1) and `bias` (from 0) that are trained.

    `threshold` is a buffer: it shapes the spikes, so it travels with the weights.
    """

    threshold: Tensor
    neurons_per_output = 1  # that one value of the output stands for; more if they are pooled

    def __init__(
        self, shape: tuple[int, ...], neuron: SRMParams, grad: Gradient, weight_standardization: bool
    ) -> None:
        super().__init__()
        fan_in = math.prod(shape[1:])
        if weight_standardization and fan_in < 2:
            raise ValueError(
                f"weight_standardization needs at least 2 weights per output channel, got {fan_in}"
            )
        self.neuron, self.grad = neuron, grad
        self.weight = nn.Parameter(torch.empty(shape))
        bound = fan_in**-0.5 * (START_SCALE if weight_standardization else 1)
        nn.init.uniform_(self.weight, -bound, bound)
        self.register_buffer("threshold", torch.full((shape[0],), float(neuron.threshold)))
        self.weight_standardization = weight_standardization
        if weight_standardization:
            self.gain = nn.Parameter(torch.ones(shape[0]))
            self.bias = nn.Parameter(torch.zeros(shape[0]))

    def effective_weight(self) -> Tensor:
        """Return the weight the synapse uses: standardized, or as it is."""
        weight = self.weight
        if not self.weight_standardization:
            return weight
        # each output channel is a group of its own; group_norm takes the biased variance
        channels, *fan_in = weight.shape
        bessel = 1 - 1 / math.prod(fan_in)
        gain, eps = self.gain * math.sqrt(bessel), STANDARDIZATION_EPS * bessel
        return F.group_norm(weight.unsqueeze(0), channels, gain, self.bias, eps).squeeze(0)


class SRMConv2d(SRMLayer):
    """See :func:`snn.ops.srm_conv2d`; with `pool` its output is averaged over windows already."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        neuron: SRMParams,
        grad: Gradient,
        *,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        groups: int = 1,
        pool: int = 1,
        weight_standardization: bool = False,
    ) -> None:
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(
                f"groups must divide the channels {in_channels} and {out_channels}, got {groups}"
            )
        if pool < 1:
            raise ValueError(f"pool must be at least 1, got {pool}")
        k_h, k_w = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
        super().__init__(
            (out_channels, in_channels // groups, k_h, k_w), neuron, grad, weight_standardization
        )
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        self.pool, self.neurons_per_output = pool, pool**2

    def forward(self, x: Tensor) -> Tensor:
        """`[T, N, C_in, H, W]` to spikes `[T, N, C_out, H_out, W_out]`, or `[..., H_out / k, W_out / k]`."""
        return srm_conv2d(
            x,
            self.effective_weight(),
            self.neuron,
            self.grad,
            threshold=self.threshold,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
            pool=self.pool,
        )


class SRMLinear(SRMLayer):
    """See :func:`snn.ops.srm_linear`; a map `[T, N, C, H, W]` is flattened to `[T, N, C * H * W]` first."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        neuron: SRMParams,
        grad: Gradient,
        *,
        weight_standardization: bool = False,
    ) -> None:
        super().__init__((out_features, in_features), neuron, grad, weight_standardization)

    def forward(self, x: Tensor) -> Tensor:
        """`[T, N, ...]` to spikes `[T, N, F_out]`."""
        return srm_linear(
            x.flatten(2), self.effective_weight(), self.neuron, self.grad, threshold=self.threshold
        )


class SpikeAvgPool2d(nn.Module):
    """See :func:`snn.ops.spike_avg_pool2d`."""

    def __init__(self, kernel_size: int | tuple[int, int], grad: Gradient = TIME_BASED) -> None:
        super().__init__()
        self.kernel_size, self.grad = kernel_size, grad

    def forward(self, x: Tensor) -> Tensor:
        """`[T, N, C, H, W]` to `[T, N, C, H // k_h, W // k_w]`."""
        return spike_avg_pool2d(x, self.kernel_size, self.grad)


class SpikeDropout(nn.Module):
    """See :func:`snn.ops.spike_dropout`; the identity in eval mode."""

    def __init__(self, p: float, grad: Gradient = TIME_BASED) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"p must lie in [0, 1), got {p}")
        self.p, self.grad = p, grad

    def forward(self, x: Tensor) -> Tensor:
        """Any `[T, N, ...]`, to the same shape."""
        return spike_dropout(x, self.p, self.grad) if self.training else x


class GradientDecouple(nn.Module):
    """See :func:`snn.ops.gradient_decouple`."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """Any shape, to the same shape."""
        return gradient_decouple(x, self.scale)


class LBSign(nn.Module):
    """See :func:`snn.ops.lb_sign`."""

    def __init__(self, clip: float = 1.0) -> None:
        super().__init__()
        self.clip = clip

    def forward(self, x: Tensor) -> Tensor:
        """Any shape, to the same shape."""
        return lb_sign(x, self.clip)


class ChannelAffine(nn.Module):
    """Scale each channel, `x * weight (+ bias)`; weight starts at 1, bias at 0.

    The channel axis is the last of 2-D and 3-D input (`[N, F]`, `[T, N, F]`), 1 of 4-D (`[N, C, H, W]`), 2
    of 5-D (`[T, N, C, H, W]`).

    Args:
        num_channels: Channels of the input, >= 1.
        bias: Whether a bias is added.
    """

    def __init__(self, num_channels: int, bias: bool = False) -> None:
        super().__init__()
        if num_channels < 1:
            raise ValueError(f"num_channels must be at least 1, got {num_channels}")
        self.weight = nn.Parameter(torch.ones(num_channels))
        self.bias = nn.Parameter(torch.zeros(num_channels)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Any of the shapes above, to the same shape; ValueError if the channel count is another."""
        axis = {2: 1, 3: 2, 4: 1, 5: 2}.get(x.dim())
        if axis is None:
            raise ValueError(f"x must have 2 to 5 dimensions, got {list(x.shape)}")
        if x.shape[axis] != len(self.weight):
            raise ValueError(f"x must have {len(self.weight)} channels on axis {axis}, got {list(x.shape)}")
        shape = (-1, *(1,) * (x.dim() - axis - 1))
        x = x * self.weight.view(shape)
        return x if self.bias is None else x + self.bias.view(shape)
