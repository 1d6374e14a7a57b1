"""Encodings: images in [0, 1], or frames of events, to what the network sees at each step.

An encoding is called as `encode(images, index, epoch)`: images `[N, C, H, W]` (`Frames`: frames
`[N, T, C, H, W]`), the samples' indices `[N]`, and the epoch (0 in evaluation and calibration); it returns
`[T, N, C, H, W]`, and raises ValueError for the other kind.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from snn.keyed_random import ENCODING, keyed_uniform
from snn.neuron import require_size

MOST_STEPS = 100_000  # no memory holds what a network does in more


@dataclass(frozen=True)
class Direct:
    """Show the normalised image, `(x - mean) / std`, at every step.

    Attributes:
        steps: Number of steps T, >= 1.
        mean: Per channel.
        std: Per channel, > 0.
    """

    steps: int
    mean: list[float] | None
    std: list[float] | None

    def __post_init__(self) -> None:
        _require_steps(self.steps)
        if self.mean is None or self.std is None:
            raise ValueError(
                "encoding=direct normalises by data.mean and data.std, which are null: try encoding=frames"
            )
        if len(self.mean) != len(self.std) or not all(math.isfinite(s) and s > 0 for s in self.std):
            raise ValueError(f"data.mean and data.std must pair up, std > 0, got {self.mean} and {self.std}")
        for key, values in (("data.mean", self.mean), ("data.std", self.std)):
            for value in values:
                require_size(key, value)

    def __call__(self, images: Tensor, index: Tensor, epoch: int) -> Tensor:
        """See the module; the T steps share memory."""
        _require_images(images, "direct")
        assert self.mean is not None and self.std is not None
        mean = _per_channel(tuple(self.mean), images.dtype, images.device)
        std = _per_channel(tuple(self.std), images.dtype, images.device)
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
        _require_images(images, "poisson")
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
        _require_images(images, "ttfs")
        time = torch.round((1 - images) * (self.steps - 1))
        step = torch.arange(self.steps, device=images.device).view(-1, 1, 1, 1, 1)
        return ((time == step) & (images > 0)).to(images.dtype)


@dataclass(frozen=True)
class Frames:
    """Show one frame of events at each step: `[N, T, C, H, W]` to `[T, N, C, H, W]`.

    Attributes:
        steps: Number of steps T, >= 1; the frames must have as many.
        cap: Larger values are cut to it, > 0: 1 makes counts events or none; None keeps the counts.
        drawn: In training (epoch >= 1) each sample shows so many of its T frames, in [1, T], drawn anew in
            each epoch and kept in their order; by (seed, epoch, sample) alone. None shows all.
        seed: The run's seed.
    """

    steps: int
    cap: float | None
    drawn: int | None
    seed: int

    def __post_init__(self) -> None:
        _require_steps(self.steps)
        if self.cap is not None and not (math.isfinite(self.cap) and self.cap > 0):
            raise ValueError(f"encoding.cap must be null or finite and > 0, got {self.cap}")
        require_size("encoding.cap", self.cap or 0)
        if self.drawn is not None and not 1 <= self.drawn <= self.steps:
            raise ValueError(f"encoding.drawn must be null or in [1, {self.steps}], got {self.drawn}")

    def __call__(self, frames: Tensor, index: Tensor, epoch: int) -> Tensor:
        """See the module."""
        if frames.dim() != 5:
            raise ValueError(
                f"encoding=frames takes frames of events [N, T, C, H, W], got images of shape "
                f"{list(frames.shape)}: try encoding=direct, poisson or ttfs"
            )
        if frames.shape[1] != self.steps:
            raise ValueError(f"encoding.steps is {self.steps}, but the data have {frames.shape[1]} frames")
        if self.drawn is not None and epoch >= 1:
            draws = keyed_uniform(self.seed, epoch, index, self.steps, ENCODING)
            chosen = draws.argsort(dim=1, stable=True)[:, : self.drawn].sort(1).values  # [N, drawn]
            frames = frames[torch.arange(len(frames), device=frames.device)[:, None], chosen]
        if self.cap is not None:
            frames = frames.clamp(max=self.cap)
        return frames.transpose(0, 1)


@functools.lru_cache(maxsize=16)
def _per_channel(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `[C, 1, 1]`, made once: on a GPU it would hold up every batch."""
    return torch.tensor(values, dtype=dtype, device=device)[:, None, None]


def _require_images(images: Tensor, name: str) -> None:
    if images.dim() != 4:
        raise ValueError(
            f"encoding={name} takes images [N, C, H, W], got frames of events of shape "
            f"{list(images.shape)}: try encoding=frames"
        )


def _require_steps(steps: int) -> None:
    if steps < 1:
        raise ValueError(f"encoding.steps must be at least 1, got {steps}")
    if steps > MOST_STEPS:
        raise ValueError(f"encoding.steps must be at most {MOST_STEPS}, got {steps}")
