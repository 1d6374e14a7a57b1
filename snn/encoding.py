"""Encodings: images in [0, 1] to what the network sees at each step.

An encoding is called as `encode(images, index, epoch)`: images `[N, C, H, W]`, the samples' indices `[N]`,
and the epoch (0 in evaluation); it returns `[T, N, C, H, W]`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from snn.keyed_random import ENCODING, keyed_uniform


@dataclass(frozen=True)
class Direct:
    """Show the normalised image, `(x - mean) / std`, at every step.

    Attributes:
        steps: Number of steps T, >= 1.
        mean: Per channel.
        std: Per channel, > 0.
    """

    steps: int
    mean: list[float]
    std: list[float]

    def __post_init__(self) -> None:
        _require_steps(self.steps)
        if len(self.mean) != len(self.std) or not all(math.isfinite(s) and s > 0 for s in self.std):
            raise ValueError(f"data.mean and data.std must pair up, std > 0, got {self.mean} and {self.std}")

    def __call__(self, images: Tensor, index: Tensor, epoch: int) -> Tensor:
        """See the module; the T steps share memory."""
        mean, std = (images.new_tensor(values)[:, None, None] for values in (self.mean, self.std))
        return ((images - mean) / std).expand(self.steps, *images.shape)


@dataclass(frozen=True)
class Poisson:
    """Spike at each step with the pixel's value as the probability, independently.

    The draws depend on (seed, epoch, sample) alone.

    Attributes:
        steps: Number of steps T, >= 1.
        seed: The run's seed.
    """

    steps: int
    seed: int

    def __post_init__(self) -> None:
        _require_steps(self.steps)

    def __call__(self, images: Tensor, index: Tensor, epoch: int) -> Tensor:
        """See the module."""
        n, shape = images.shape[0], images.shape[1:]
        draws = keyed_uniform(self.seed, epoch, index, self.steps * math.prod(shape), ENCODING)
        return (draws.view(n, self.steps, *shape).transpose(0, 1) < images).to(images.dtype)


@dataclass(frozen=True)
class TTFS:
    """Spike once, the brighter the earlier: at step `round((1 - x)(T - 1))`, and never for x = 0.

    Attributes:
        steps: Number of steps T, >= 1.
    """

    steps: int

    def __post_init__(self) -> None:
        _require_steps(self.steps)

    def __call__(self, images: Tensor, index: Tensor, epoch: int) -> Tensor:
        """See the module."""
        time = torch.round((1 - images) * (self.steps - 1))
        step = torch.arange(self.steps, device=images.device).view(-1, 1, 1, 1, 1)
        return ((time == step) & (images > 0)).to(images.dtype)


def _require_steps(steps: int) -> None:
    if steps < 1:
        raise ValueError(f"encoding.steps must be at least 1, got {steps}")
