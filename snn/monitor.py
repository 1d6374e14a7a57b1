"""What the neurons do while a network runs, and what their gradient keeps, read through forward hooks."""

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from snn.layers import SRMLayer
from snn.neuron import GradParams


def named_srm_layers(network: nn.Module) -> dict[str, SRMLayer]:
    """Return the SRM layers by their place in the network without the container's name: `0_16C3`, `head`."""
    return {
        name.removeprefix("layers."): module
        for name, module in network.named_modules()
        if isinstance(module, SRMLayer)
    }


class SpikeMonitor:
    """Counts the spikes of every SRM layer of `network` while it is entered."""

    def __init__(self, network: nn.Module) -> None:
        self._layers = named_srm_layers(network)
        self._spikes: dict[str, Tensor] = {}
        self._places: dict[str, Tensor] = {}  # not int: to torch.compile another number is another graph
        self._hooks: list[Any] = []

    def __enter__(self) -> "SpikeMonitor":
        self.load({"spikes": dict.fromkeys(self._layers, 0), "places": dict.fromkeys(self._layers, 0)})
        self._hooks = [
            module.register_forward_hook(self._counter(name)) for name, module in self._layers.items()
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def rates(self) -> dict[str, float]:
        """Return spikes per neuron per step of each layer, in [0, 1], over the samples since entering."""
        return {
            name: float(self._spikes[name]) / float(places) for name, places in self._places.items() if places
        }

    def state(self) -> dict[str, Any]:
        """Return what was counted so far, as a checkpoint can hold it."""
        return {"spikes": dict(self._spikes), "places": {name: int(n) for name, n in self._places.items()}}

    def load(self, state: dict[str, Any]) -> None:
        """Go on counting from what :meth:`state` returned; to be called once entered."""
        for name, layer in self._layers.items():
            device = layer.threshold.device
            self._spikes[name] = torch.as_tensor(state["spikes"][name], dtype=torch.float64, device=device)
            self._places[name] = torch.as_tensor(state["places"][name], dtype=torch.int64)

    def spikes(self) -> float:
        """Return the spikes of all layers together since entering."""
        return sum(map(float, self._spikes.values()))

    def _counter(self, name: str) -> Any:
        def count(module: SRMLayer, inputs: tuple[Tensor, ...], spikes: Tensor) -> None:
            # first within each sample and step: that is exact in float32 too, and much faster
            counts = spikes.detach().sum(dim=tuple(range(2, spikes.dim())))
            total = counts.sum(dtype=torch.float64) * module.neurons_per_output
            self._spikes[name] = self._spikes[name] + total
            self._places[name] = self._places[name] + spikes.numel() * module.neurons_per_output

        return count


@torch.compiler.set_stance("force_eager")  # a batch of another size: no graph of its own
def kept_time_gradient(network: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Return the share of its time gradient that each time-based SRM layer hands on to its input.

    By the sum law (snn/ops/srm/README.md) it is 1: all that arrives at a layer's output spikes, times
    `grad_scale`, leaves it at its input spikes. The share is 1 plus the difference of the two sums over the
    sum of all that arrives without its signs, so that sums which cancel do not blow it up.

    The network is run in eval mode, and its mode, its gradients and the random state are left as they were.

    Args:
        network: Its layers, as :func:`named_srm_layers` names them.
        x: An encoded batch, `[T, N, ...]`.
        loss: Of the network's output.

    Returns:
        A number for each layer that got any gradient.
    """
    seen: dict[str, tuple[SRMLayer, Tensor, Tensor]] = {}

    def watch(name: str) -> Any:
        def note(module: SRMLayer, inputs: tuple[Tensor, ...], spikes: Tensor) -> None:
            seen[name] = (module, inputs[0], spikes)

        return note

    layers = {
        name: layer
        for name, layer in named_srm_layers(network).items()
        if isinstance(layer.grad, GradParams) and layer.grad.grad_scale > 0
    }
    if not layers:
        return {}
    hooks = [layer.register_forward_hook(watch(name)) for name, layer in layers.items()]
    training = network.training
    network.eval()
    try:
        with torch.enable_grad():
            value = loss(network(x.detach().requires_grad_()))
            ends = [end for _, *both in seen.values() for end in both]
            grads = torch.autograd.grad(value, ends, allow_unused=True)
    finally:
        network.train(training)
        for hook in hooks:
            hook.remove()
    kept = {}
    for (name, (layer, _, spikes)), sent, received in zip(seen.items(), grads[::2], grads[1::2], strict=True):
        if sent is None or received is None:
            continue
        assert isinstance(layer.grad, GradParams)
        arrived = received.double()[spikes != 0] * layer.grad.grad_scale
        if total := float(arrived.abs().sum()):
            kept[name] = 1 + (float(sent.double().sum()) - float(arrived.sum())) / total
    return kept
