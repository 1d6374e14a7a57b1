"""The network that an architecture string describes, with a head."""

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from snn.layers import SpikeAvgPool2d, SpikeDropout, SRMConv2d, SRMLinear
from snn.networks.architecture import Conv, Linear, Pool, Spec, parse
from snn.neuron import Gradient, SRMParams


class SRMNetwork(nn.Module):
    """A chain of SRM layers, pools and dropout, closed by a head. It prints as a table.

    Args:
        layers: Architecture string (`snn/networks/architecture.py`), without the head: `16C3-P2-32C3-P2-128`;
            a lone number is a single linear layer.
        in_channels: Channels of the input.
        size: Height and width of the input.
        weight_standardization: Whether the SRM layers standardize their weights.
        neuron: Constants of the neuron.
        grad: Constants of its gradient.
        head: Makes the head for the shape of a sample after the last layer, `(F,)` or `(C, H, W)`.

    Raises:
        ValueError: A token cannot be read, or a layer does not fit what reaches it; the message names the
            token.
    """

    def __init__(
        self,
        layers: str | int,
        in_channels: int,
        size: int,
        weight_standardization: bool,
        *,
        neuron: SRMParams,
        grad: Gradient,
        head: Callable[[tuple[int, ...]], nn.Module],
    ) -> None:
        super().__init__()
        shape: tuple[int, ...] = (in_channels, size, size)
        self.shapes: dict[str, tuple[int, ...]] = {}
        modules: OrderedDict[str, nn.Module] = OrderedDict()
        module: nn.Module
        specs, pool = parse(str(layers)), 1
        for place, (token, spec) in enumerate(specs):
            try:
                out_shape = spec.out_shape(shape)
                if pool > 1:  # the convolution before this pool does it
                    module, pool = nn.Identity(), 1
                else:
                    pool = _pool_of(spec, out_shape, specs[place + 1 :])
                    module = _make_layer(spec, shape, pool, neuron, grad, weight_standardization)
            except ValueError as error:
                size_text = "x".join(map(str, shape))
                raise ValueError(
                    f"network.layers: {token!r} (layer {place}) got {size_text}: {error}"
                ) from error
            name = f"{place}_{token.replace('.', '_')}"  # a module's name holds no dot
            modules[name], self.shapes[name], shape = module, out_shape, out_shape
        self.layers = nn.Sequential(modules)
        self.head: Any = head(shape)

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
        for name, module in self.layers.named_children():
            rows.append((name, "x".join(map(str, self.shapes[name])), f"{count_parameters(module):,}"))
        rows.append(("head", type(self.head).__name__, f"{count_parameters(self.head):,}"))
        rows.append(("total", "", f"{count_parameters(self):,}"))
        name_width, shape_width, count_width = (max(len(row[i]) for row in rows) for i in range(3))
        return "\n".join(f"{n:<{name_width}}  {s:<{shape_width}}  {c:>{count_width}}" for n, s, c in rows)


def count_parameters(module: nn.Module) -> int:
    """Return the number of trained values in `module`."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def _pool_of(spec: Spec, out_shape: tuple[int, ...], following: list[tuple[str, Spec]]) -> int:
    """Return the window of the pool that a convolution does in the same pass: of the next layer, or 1."""
    after = following[0][1] if following else None
    if (
        isinstance(spec, Conv)
        and isinstance(after, Pool)
        and all(n % after.kernel == 0 for n in out_shape[1:])
    ):
        return after.kernel
    return 1


def _make_layer(
    spec: Spec,
    shape: tuple[int, ...],
    pool: int,
    neuron: SRMParams,
    grad: Gradient,
    weight_standardization: bool,
) -> nn.Module:
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
