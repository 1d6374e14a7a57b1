"""Losses: (logits or spikes, labels) -> a scalar, the mean over the batch.

`reads` says which of the two a loss takes.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from snn.ops import count_to_time


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy of logits."""

    reads: ClassVar[str] = "logits"

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Logits `[N, K]` and labels `[N]` to a scalar."""
        return F.cross_entropy(logits, labels)


@dataclass(frozen=True)
class Count:
    """Squared distance of the output's spike counts to target counts.

    `mean_n sum_k (count[n, k] - target[n, k])^2 / (2 T)`. More spikes than `desired` of the right class, and
    fewer than `undesired` of another, count as met. The gradient on the time of every spike of class k is
    `-dL/dcount[k]`.

    Attributes:
        desired: Target count of the right class, in spikes over all T steps, >= 0.
        undesired: Target count of the other classes, in [0, desired].
    """

    desired: float
    undesired: float
    reads: ClassVar[str] = "spikes"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.desired) and 0 <= self.undesired <= self.desired):
            raise ValueError(
                f"loss.desired and loss.undesired must be finite with 0 <= undesired <= desired, "
                f"got {self.desired} and {self.undesired}"
            )

    def __call__(self, spikes: Tensor, labels: Tensor) -> Tensor:
        """Spikes `[T, N, K]` and labels `[N]` to a scalar."""
        count = count_to_time(spikes).sum(dim=0)
        right = F.one_hot(labels, count.shape[1]).bool()
        short = (self.desired - count).clamp(min=0)
        over = (count - self.undesired).clamp(min=0)
        return (torch.where(right, short, over) ** 2).sum() / (2 * spikes.shape[0] * spikes.shape[1])
