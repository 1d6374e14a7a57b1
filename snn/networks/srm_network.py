"""The network that an architecture string describes, with a head."""

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable

from torch import nn

from snn.networks.architecture import Conv, Dropout, Pool, Spec, parse, require_room
from snn.networks.network import Network, input_shape, make_layer, misfit
from snn.neuron import Gradient, GradParams, SRMParams

log = logging.getLogger(__name__)


class SRMNetwork(Network):
    """A chain of SRM layers, pools and dropout, closed by a head.

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
        shape: tuple[int, ...] = input_shape(in_channels, size)
        shapes: dict[str, tuple[int, ...]] = {}
        modules: OrderedDict[str, nn.Module] = OrderedDict()
        module: nn.Module
        specs, pool, weights = parse(str(layers)), 1, 0
        for place, (token, spec) in enumerate(specs):
            try:
                out_shape = spec.out_shape(shape)
                weights += spec.weights(shape)
                require_room(weights, out_shape)
                if pool > 1:  # the convolution before this pool does it
                    module, pool = nn.Identity(), 1
                else:
                    pool = _pool_of(spec, out_shape, specs[place + 1 :])
                    module = make_layer(spec, shape, pool, neuron, grad, weight_standardization)
            except ValueError as error:
                raise misfit("network.layers", token, place, shape, error) from error
            name = f"{place}_{token.replace('.', '_')}"  # a module's name holds no dot
            modules[name], shapes[name], shape = module, out_shape, out_shape
        if isinstance(grad, GradParams):
            _warn_of_pools_in_a_row(specs, list(shapes))
        super().__init__(modules, shapes, head(shape))


def _warn_of_pools_in_a_row(specs: list[tuple[str, Spec]], names: list[str]) -> None:
    """Say where the sum law breaks: a pool's backward counts on spikes, and a pool gives their averages."""
    every = zip(specs, names, strict=True)
    named = [(spec, name) for (_, spec), name in every if not isinstance(spec, Dropout)]
    for (one, _), (two, name) in itertools.pairwise(named):
        if isinstance(one, Pool) and isinstance(two, Pool):
            log.warning(
                "warning: layer %s reads a pool, so that the time gradient grows up to %d times (by the "
                "sum law: 1): give network.layers one P%d instead",
                *(name, one.kernel**2, one.kernel * two.kernel),
            )


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
