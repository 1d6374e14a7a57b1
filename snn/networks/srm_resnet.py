"""Residual networks of SRM layers, with a head."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from snn.layers import SpikeAvgPool2d, SpikeDropout, SRMLayer
from snn.networks.architecture import MOST_LAYERS, Conv, Pool, parse, require_room
from snn.networks.network import Network, input_shape, make_layer, misfit
from snn.neuron import Gradient, GradParams, SRMParams
from snn.ops import gradient_by_height, spike_add, spike_avg_pool2d

Shape = tuple[int, ...]
MakeConv = Callable[[Conv, Shape], nn.Module]


@dataclass(frozen=True)
class Residual:
    """Residual block."""

    channels: int
    stride: int
    dropout: float

    def conv(self, kernel: int, stride: int) -> Conv:
        """Return a convolution to the block's channels that keeps the map, but for its stride."""
        return Conv(self.channels, kernel, kernel // 2, stride, dilation=1, groups=1)

    def out_shape(self, shape: Shape) -> Shape:
        """Shape of a sample after this block."""
        return self.conv(3, self.stride).out_shape(shape)

    def weights(self, shape: Shape) -> int:
        """Number of weights, for a sample of `shape`."""
        out_shape = self.out_shape(shape)
        shortcut = 0 if out_shape == shape else self.conv(1, self.stride).weights(shape)
        return self.conv(3, self.stride).weights(shape) + self.conv(3, 1).weights(out_shape) + shortcut


class SRMResNet(Network):
    """A stem, stages of residual blocks and a pool, closed by a head.

    The first block of each stage halves the map. With stem 128C5, channels 128, 256, 512, two blocks a stage,
    dropout 0.1 and pool 2 it is the residual network of Zhu et al., "Training Spiking Neural Networks with
    Event-driven Backpropagation", NeurIPS 2022. Where the dropout stands there we do not know; here it is
    between the two convolutions of every block, which leaves the shortcuts whole.

    Layers are named by place and kind: `0_128C5`, `1_R128s2` (a block of 128 channels, stride 2), `7_P2`;
    those of a block `1_R128s2.conv1`, `1_R128s2.conv2` and `1_R128s2.shortcut`.

    Args:
        stem: The first layer, one SRM convolution as in an architecture string: `128C5`.
        channels: Channels of the blocks, stage by stage, each >= 1.
        blocks: Blocks of a stage, in [1, 999].
        dropout: Probability of dropping a neuron between the convolutions of a block, in [0, 1).
        pool: Window of the pool after the last block, >= 1; 1 for none.
        in_channels: Channels of the input.
        size: Height and width of the input.
        weight_standardization: Whether the SRM layers standardize their weights.
        neuron: Constants of the neuron.
        grad: Constants of its gradient.
        head: Makes the head for the shape of a sample after the last layer, `(C, H, W)`.

    Raises:
        ValueError: A value lies outside its range, or a layer does not fit what reaches it; the message names
            the key, and the layer with the size that reached it.
    """

    def __init__(
        self,
        stem: str,
        channels: list[int],
        blocks: int,
        dropout: float,
        pool: int,
        in_channels: int,
        size: int,
        weight_standardization: bool,
        *,
        neuron: SRMParams,
        grad: Gradient,
        head: Callable[[Shape], nn.Module],
    ) -> None:
        if not channels or min(channels) < 1:
            raise ValueError(f"network.channels must be one or more integers of at least 1, got {channels}")
        if not 1 <= blocks <= MOST_LAYERS:
            raise ValueError(f"network.blocks must lie in [1, {MOST_LAYERS}], got {blocks}")
        if not 0 <= dropout < 1:
            raise ValueError(f"network.dropout must lie in [0, 1), got {dropout}")
        if pool < 1:
            raise ValueError(f"network.pool must be at least 1, got {pool}")
        (_, stem_spec), *more = parse(stem, "network.stem")
        if more or not isinstance(stem_spec, Conv):
            raise ValueError(f"network.stem must be one SRM convolution, like 128C5, got {stem!r}")

        def make_conv(spec: Conv, shape: Shape) -> nn.Module:
            return make_layer(spec, shape, 1, neuron, grad, weight_standardization)

        specs: list[tuple[str, str, Conv | Residual | Pool]] = [("stem", stem, stem_spec)]
        for width in channels:
            specs.append(("channels", f"R{width}s2", Residual(width, 2, dropout)))
            specs += [("channels", f"R{width}", Residual(width, 1, dropout))] * (blocks - 1)
        if pool > 1:
            specs.append(("pool", f"P{pool}", Pool(pool)))
        shape: Shape = input_shape(in_channels, size)
        shapes: dict[str, Shape] = {}
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        weights = 0
        for place, (key, token, spec) in enumerate(specs):
            name = f"{place}_{token}"
            try:
                out_shape = spec.out_shape(shape)
                weights += spec.weights(shape)
                require_room(weights, out_shape)
                match spec:
                    case Conv():
                        layers[name] = make_conv(spec, shape)
                    case Residual():
                        layers[name] = ResidualBlock(spec, shape, make_conv, grad)
                    case Pool():
                        layers[name] = SumPool2d(spec.kernel, grad)
            except ValueError as error:
                raise misfit(f"network.{key}", token, place, shape, error) from error
            parts = layers[name].named_children()
            shown = [f"{name}.{part}" for part, module in parts if isinstance(module, SRMLayer)] or [name]
            shapes |= dict.fromkeys(shown, out_shape)
            shape = out_shape
        super().__init__(layers, shapes, head(shape))


class ResidualBlock(nn.Module):
    """Two SRM convolutions with a dropout between them, joined to their input by `spike_add`.

    Where the shape changes the input goes through an SRM convolution of kernel 1 with the block's stride.

    Args:
        spec: Channels, stride and dropout.
        shape: Shape of a sample of the input, `(C, H, W)`.
        make_conv: Makes the SRM convolution of a specification for the shape that reaches it.
        grad: Constants of their gradient.
    """

    def __init__(self, spec: Residual, shape: Shape, make_conv: MakeConv, grad: Gradient) -> None:
        super().__init__()
        self.grad = grad
        out_shape = spec.out_shape(shape)
        self.conv1 = make_conv(spec.conv(3, spec.stride), shape)
        self.dropout = SpikeDropout(spec.dropout, grad)
        self.conv2 = make_conv(spec.conv(3, 1), out_shape)
        same = out_shape == shape
        self.shortcut = nn.Identity() if same else make_conv(spec.conv(1, spec.stride), shape)

    def forward(self, x: Tensor) -> Tensor:
        """`[T, N, C_in, H, W]` to the sum of the branches, `[T, N, C, H_out, W_out]`."""
        return spike_add(self.conv2(self.dropout(self.conv1(x))), self.shortcut(x), self.grad)


class SumPool2d(SpikeAvgPool2d):
    """Spike average pooling of a sum of branches: a place of two spikes counts twice, backward too."""

    def forward(self, x: Tensor) -> Tensor:
        """`[T, N, C, H, W]` to `[T, N, C, H // k, W // k]`."""
        if isinstance(self.grad, GradParams):
            x = gradient_by_height(x)
        return spike_avg_pool2d(x, self.kernel_size, self.grad)
