"""What the neurons do while a network runs, read through forward hooks."""

from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from snn.layers import SRMLayer


class SpikeMonitor:
    """Counts the spikes of every SRM layer of `network` while it is entered.

    A layer is named by its place in the network without the container's name: `0_16C3`, `head`.
    """

    def __init__(self, network: nn.Module) -> None:
        self._layers = {
            name.removeprefix("layers."): module
            for name, module in network.named_modules()
            if isinstance(module, SRMLayer)
        }
        self._spikes: dict[str, Tensor] = {}
        self._places: dict[str, int] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> "SpikeMonitor":
        self._spikes, self._places = {}, dict.fromkeys(self._layers, 0)
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
        return {name: float(self._spikes[name]) / places for name, places in self._places.items() if places}

    def spikes(self) -> float:
        """Return the spikes of all layers together since entering."""
        return sum(map(float, self._spikes.values()))

    def _counter(self, name: str) -> Any:
        def count(module: SRMLayer, inputs: tuple[Tensor, ...], spikes: Tensor) -> None:
            # first within each sample and step: that is exact in float32 too, and much faster
            counts = spikes.detach().sum(dim=tuple(range(2, spikes.dim())))
            total = counts.sum(dtype=torch.float64) * module.neurons_per_output
            self._spikes[name] = self._spikes.get(name, torch.zeros_like(total)) + total
            self._places[name] += spikes.numel() * module.neurons_per_output

        return count
