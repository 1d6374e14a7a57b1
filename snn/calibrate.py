"""Data-driven start: thresholds that give a wanted spike count, and the bias of the decoupled head."""

import logging
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from snn.layers import SRMLayer
from snn.networks.heads import DecoupledHead
from snn.neuron import require_size

log = logging.getLogger(__name__)

LOW, HIGH, PRECISION = 0.01, 100.0, 1.01


@dataclass(frozen=True)
class Calibration:
    """Set thresholds and head bias from one batch, layer by layer, in a single forward pass in eval mode.

    Threshold: a factor in [0.01, 100] of the layer's threshold is bisected (geometrically) until the bracket
    is within 1 %, so that the spikes per neuron over the steps `t >= (2 T) // 3`, times
    `T / (T - (2 T) // 3)`, meet `spikes`.

    Head bias: minus the mean of the rate over all channels and samples.

    Attributes:
        spikes: Wanted spikes per neuron, > 0 (the true count over T comes out lower, the first steps being
            silent); None leaves the thresholds alone.
        batch_size: Training images used, >= 1: the first ones, in index order, unaugmented.
    """

    spikes: float | None
    batch_size: int

    def __post_init__(self) -> None:
        if self.spikes is not None and not (math.isfinite(self.spikes) and self.spikes > 0):
            raise ValueError(f"calibrate.spikes must be null or finite and > 0, got {self.spikes}")
        require_size("calibrate.spikes", self.spikes or 0)
        if self.batch_size < 1:
            raise ValueError(f"calibrate.batch_size must be at least 1, got {self.batch_size}")

    @torch.no_grad()
    def __call__(self, network: nn.Module, x: Tensor) -> None:
        """Calibrate `network` in place on the encoded batch `x`, `[T, N, C, H, W]`."""
        hooks = []
        for name, module in network.named_modules():
            if isinstance(module, SRMLayer) and self.spikes is not None:
                hooks.append(
                    module.register_forward_pre_hook(self._fit_threshold(name.removeprefix("layers.")))
                )
            elif isinstance(module, DecoupledHead):
                hooks.append(module.register_forward_pre_hook(_fit_bias))
        training = network.training
        network.eval()
        try:
            network(x)  # a hook sets its layer before the layer runs, so each layer sees calibrated input
        finally:
            network.train(training)
            for hook in hooks:
                hook.remove()
        if self.spikes is not None:
            log.info("calibrated: thresholds replace neuron.threshold, for %g spikes per neuron", self.spikes)

    def _fit_threshold(self, name: str) -> Any:
        def fit(layer: SRMLayer, inputs: tuple[Tensor]) -> None:
            start = layer.threshold.clone()

            def late_spikes(factor: float) -> float:
                layer.threshold.copy_(start * factor)
                spikes: Tensor = layer.forward(inputs[0])
                steps = spikes.shape[0]
                return float(spikes[2 * steps // 3 :].mean()) * steps

            low, high = LOW, HIGH  # the count falls as the threshold rises
            at_low, at_high = late_spikes(low), late_spikes(high)
            if not at_high <= self.spikes <= at_low:  # type: ignore[operator]
                log.warning(
                    "warning: calibrate.spikes=%g is out of reach in layer %s: %g to %g times the threshold "
                    "give %.3g to %.3g",
                    *(self.spikes, name, LOW, HIGH, at_low, at_high),
                )
            while high > low * PRECISION:
                middle = math.sqrt(low * high)
                if late_spikes(middle) > self.spikes:  # type: ignore[operator]
                    low = middle
                else:
                    high = middle
            layer.threshold.copy_(start * math.sqrt(low * high))

        return fit


def _fit_bias(head: DecoupledHead, inputs: tuple[Tensor]) -> None:
    head.affine.bias.data.fill_(-float(inputs[0].mean()))  # type: ignore[union-attr]
