"""What every network is: layers, one after the other, and a head."""

import math
from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

from snn.layers import SpikeAvgPool2d, SpikeDropout, SRMConv2d, SRMLinear
from snn.networks.architecture import MOST_VALUES, Conv, Linear, Pool, Spec
from snn.neuron import Gradient, SRMParams


class Network(nn.Module):
    """Layers one after the other, closed by a head. It prints as a table.

    Args:
        layers: The layers by name; a layer may hold layers of its own.
        shapes: Output shape of a sample at one step, by the name of each layer that the table shows; one
            within another is named `outer.inner`.
        head: Reads the last layer's output.
    """

    def __init__(
        self, layers: "OrderedDict[str, nn.Module]", shapes: dict[str, tuple[int, ...]], head: nn.Module
    ) -> None:
        super().__init__()
        self.shapes = shapes
        self.layers = nn.Sequential(layers)
        self.head: Any = head

    def forward(self, x: Tensor) -> Tensor:
        """`[T, N, C, H, W]` to the head's output: logits `[N, K]` or spikes `[T, N, K]`."""
        output: Tensor = self.head(self.layers(x))
        return output

    def teach(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the head's output, and what the loss is to see in its place: with target spikes."""
        body = self.layers(x)
        output: Tensor = self.head(body)
        return output, self.head.teach(body, output, labels)

    def __repr__(self) -> str:
        """A table: layer, output shape of a sample at one step, trained parameters."""
        rows = [("layer", "output", "parameters")]
        for name, shape in self.shapes.items():
            count = count_parameters(self.layers.get_submodule(name))
            rows.append((name, "x".join(map(str, shape)), f"{count:,}"))
        rows.append(("head", type(self.head).__name__, f"{count_parameters(self.head):,}"))
        rows.append(("total", "", f"{count_parameters(self):,}"))
        name_width, shape_width, count_width = (max(len(row[i]) for row in rows) for i in range(3))
        return "\n".join(f"{n:<{name_width}}  {s:<{shape_width}}  {c:>{count_width}}" for n, s, c in rows)


def count_parameters(module: nn.Module) -> int:
    """Return the number of trained values in `module`."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def input_shape(in_channels: int, size: int) -> tuple[int, int, int]:
    """Return the shape of a sample of the input; ValueError if there can be none."""
    for key, value in (
        ("network.in_channels (data.channels)", in_channels),
        ("network.size (data.size)", size),
    ):
        if value < 1:
            raise ValueError(f"{key} must be at least 1, got {value}")
    if in_channels * size**2 > MOST_VALUES:
        raise ValueError(
            f"data.channels and data.size must make an input of {MOST_VALUES:,} values at most, "
            f"got {in_channels} and {size}"
        )
    return in_channels, size, size


def misfit(key: str, token: str, place: int, shape: tuple[int, ...], error: ValueError) -> ValueError:
    """Return an error that says which layer does not fit, and what reached it."""
    return ValueError(f"{key}: {token!r} (layer {place}) got {'x'.join(map(str, shape))}: {error}")


def make_layer(
    spec: Spec,
    shape: tuple[int, ...],
    pool: int,
    neuron: SRMParams,
    grad: Gradient,
    weight_standardization: bool,
) -> nn.Module:
    """Return the layer of `spec` for a sample of `shape`; a convolution pools by `pool` in its pass."""
    match spec:
        case Conv():
            return SRMConv2d(
                shape[0],
                spec.channels,
                spec.kernel,
                neuron,
                grad,
                stride=spec.stride,
                padding=spec.padding,
                dilation=spec.dilation,
                groups=spec.groups,
                pool=pool,
                weight_standardization=weight_standardization,
            )
        case Linear():
            features = math.prod(shape)
            return SRMLinear(
                features, spec.neurons, neuron, grad, weight_standardization=weight_standardization
            )
        case Pool():
            return SpikeAvgPool2d(spec.kernel, grad)
        case _:
            return SpikeDropout(spec.p, grad)
