"""Layers and classes that learn nothing, and a gradient that gets lost, are said; training goes on."""

import logging

import torch
from torch import nn

from snn.data import Loader
from snn.evaluation import RATE, Encode, Loss
from snn.monitor import kept_time_gradient, named_srm_layers
from snn.neuron import GradParams

log = logging.getLogger(__name__)

SATURATED = 0.9  # spikes per neuron per step, of 1
SAMPLES, TOLERANCE = 16, 0.01  # at most, of the look at the sum law
SILENT_SAYS = "silent, at a spike rate of %s: lower neuron.threshold or set calibrate.spikes"
SATURATED_SAYS = "saturated, at a spike rate of %s: raise neuron.threshold or set calibrate.spikes"
LAW_SAYS = (
    "handing on %s of its time gradient, by the sum law 1: raise surrogate.cap_time, or set "
    "trainer.precision=fp32"
)
LOST_SAYS = (
    "warning: output neurons that are silent for most samples of their own class, and learn nothing from "
    "them: %d; set head.target_rise=0.05, or lower optimizer.lr"
)


class Watch:
    """Warns of layers that are dead, saturated, or lose time gradient, and of classes that are lost.

    It does so again only when the layers are others, or the classes more.

    Args:
        network: Whose layers.
        encode: `(images, index, epoch)` to `[T, N, ...]`.
        loss_fn: `(output, labels)` to a scalar.
        loader: Its first samples show what becomes of the time gradient.
        device: Where the network runs.
        taught: Whether silent output neurons are given target spikes in training.
    """

    def __init__(
        self,
        network: nn.Module,
        encode: Encode,
        loss_fn: Loss,
        loader: Loader,
        device: torch.device,
        *,
        taught: bool,
    ) -> None:
        self.network, self.encode, self.loss_fn = network, encode, loss_fn
        self.loader, self.device = loader, device
        self._warned: dict[str, list[str]] = {}
        time_based = any(isinstance(layer.grad, GradParams) for layer in named_srm_layers(network).values())
        self._silent_learn = taught or not time_based  # any other gradient reaches a silent neuron
        self._lost = 0

    def __call__(self, evaluation: dict[str, float]) -> None:
        """Look at the spike rates of an evaluation, and at the sum law."""
        rates = {key.removeprefix(RATE): v for key, v in evaluation.items() if key.startswith(RATE)}
        batch = self.loader.first(min(SAMPLES, self.loader.batch_size))  # a step has room for it
        images, labels, index = (part.to(self.device) for part in batch)
        x = self.encode(images, index, 0)
        kept = kept_time_gradient(self.network, x, lambda output: self.loss_fn(output, labels))
        if not self._silent_learn:
            self._say_lost(int(evaluation.get("silent_classes", 0)))
        self._say(SILENT_SAYS, {name: rate for name, rate in rates.items() if rate == 0})
        self._say(SATURATED_SAYS, {name: rate for name, rate in rates.items() if rate > SATURATED})
        self._say(LAW_SAYS, {n: share for n, share in kept.items() if not abs(share - 1) <= TOLERANCE})

    def _say(self, what: str, layers: dict[str, float]) -> None:
        if layers and list(layers) != self._warned.get(what):
            figures = ", ".join(f"{figure:.3g}" for figure in layers.values())
            log.warning(f"warning: layer %s is {what}", ", ".join(layers), figures)
        self._warned[what] = list(layers)

    def _say_lost(self, classes: int) -> None:
        if classes > self._lost:
            log.warning(LOST_SAYS, classes)
            self._lost = classes
