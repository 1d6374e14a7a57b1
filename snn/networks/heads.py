"""Heads: from the body's spikes to what a loss reads.

`output` says which: "logits" or "spikes". `teaches` says whether a head shows the loss more than it puts out:
then `teach(body, output, labels)` returns that.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from snn.layers import ChannelAffine, GradientDecouple, LBSign, SRMLinear
from snn.networks.architecture import Linear, require_room
from snn.neuron import TIME_BASED, Gradient, GradParams, SRMParams, require_size
from snn.ops import spike_heights, target_spikes

START_MEAN = 0.15  # of the spiking head's weights, in their standard deviations


class DecoupledHead(nn.Module):
    """Spikes to logits by rate: the body learns in time, the classifier by ordinary backpropagation.

    `count_to_time -> gradient_decouple(decouple_scale) -> mean over T -> channel affine with bias -> LBSign
    -> linear`; without `count_to_time` if the gradient is a surrogate one.

    Args:
        shape: Shape of a sample of the body's output, `(F,)` or `(C, H, W)`.
        num_classes: Number of logits K.
        decouple_scale: Factor (lambda) on the gradient that reaches the body, >= 0.
        sign: Whether LBSign makes the code that the classifier reads binary.
        sign_clip: Largest gradient that LBSign passes, > 0.
        grad: The gradient that the network is trained with.
    """

    output: ClassVar[str] = "logits"
    teaches: ClassVar[bool] = False

    def __init__(
        self,
        shape: tuple[int, ...],
        num_classes: int,
        *,
        decouple_scale: float,
        sign: bool,
        sign_clip: float,
        grad: Gradient = TIME_BASED,
    ) -> None:
        super().__init__()
        if not (math.isfinite(decouple_scale) and decouple_scale >= 0):
            raise ValueError(f"head.decouple_scale must be finite and >= 0, got {decouple_scale}")
        require_size("head.decouple_scale", decouple_scale)
        if not (math.isfinite(sign_clip) and sign_clip > 0):
            raise ValueError(f"head.sign_clip must be finite and > 0, got {sign_clip}")
        require_size("head.sign_clip", sign_clip)
        _require_classes(num_classes, shape)
        self.grad = grad
        self.decouple = GradientDecouple(decouple_scale)
        self.affine = ChannelAffine(shape[0], bias=True)
        self.sign = LBSign(sign_clip) if sign else nn.Identity()
        self.linear = nn.Linear(math.prod(shape), num_classes)

    def forward(self, spikes: Tensor) -> Tensor:
        """Spikes `[T, N, ...]` to logits `[N, K]`."""
        rate = self.decouple(spike_heights(spikes, self.grad)).mean(dim=0)
        logits: Tensor = self.linear(self.sign(self.affine(rate)).flatten(1))
        return logits


class SpikingHead(SRMLinear):
    """An SRM linear layer of K output neurons: spikes `[T, N, ...]` to spikes `[T, N, K]`.

    Its weights start with a mean above 0, so that every output neuron fires for some sample: one that never
    does gets no gradient, and its class is lost.

    Args:
        shape: Shape of a sample of the body's output, `(F,)` or `(C, H, W)`.
        num_classes: Number of output neurons K.
        neuron: Constants of the neuron.
        grad: Constants of its gradient.
        weight_standardization: See :class:`snn.layers.SRMLayer`.
        target_rise: In training a silent neuron of the right class gets a spike at the last step where its
            potential rises by more than this, > 0 (:func:`snn.ops.target_spikes`); None = never. A surrogate
            gradient reaches silent neurons by itself: no spike is set then.
    """

    output: ClassVar[str] = "spikes"

    def __init__(
        self,
        shape: tuple[int, ...],
        num_classes: int,
        *,
        neuron: SRMParams,
        grad: Gradient,
        weight_standardization: bool,
        target_rise: float | None = None,
    ) -> None:
        if target_rise is not None and not (math.isfinite(target_rise) and target_rise > 0):
            raise ValueError(f"head.target_rise must be null or finite and > 0, got {target_rise}")
        require_size("head.target_rise", target_rise or 0)
        _require_classes(num_classes, shape)
        super().__init__(
            math.prod(shape), num_classes, neuron, grad, weight_standardization=weight_standardization
        )
        with torch.no_grad():
            if weight_standardization:
                self.bias.fill_(START_MEAN)
            else:
                self.weight.add_(START_MEAN * self.weight.std(correction=0))
        self.target_rise = target_rise if isinstance(grad, GradParams) else None

    @property
    def teaches(self) -> bool:
        """Whether silent neurons of the right class are given a spike in training."""
        return self.target_rise is not None

    def teach(self, body: Tensor, output: Tensor, labels: Tensor) -> Tensor:
        """Return the output with target spikes.

        Args:
            body: What the head got, `[T, N, ...]`.
            output: What it returned, `[T, N, K]`.
            labels: `[N]`.
        """
        assert isinstance(self.grad, GradParams) and self.target_rise is not None
        weight, neuron = self.effective_weight(), self.neuron
        return output + target_spikes(
            body.flatten(2), weight, neuron, self.grad, output, labels, self.target_rise
        )


def _require_classes(num_classes: int, shape: tuple[int, ...]) -> None:
    key = "head.num_classes (data.num_classes)"
    if num_classes < 1:
        raise ValueError(f"{key} must be at least 1, got {num_classes}")
    try:
        require_room(Linear(num_classes).weights(shape), (num_classes,))
    except ValueError as error:
        raise ValueError(
            f"{key} is {num_classes}, and the head got {'x'.join(map(str, shape))}: {error}"
        ) from error
