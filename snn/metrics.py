"""What an output decides, and how often it is right: (logits or spikes, labels) -> numbers."""

import torch
from torch import Tensor

UNDECIDED = -1


def readout(spikes: Tensor) -> Tensor:
    """Return a score per class from output spikes: counts, and earlier spikes break ties.

    `score[k] = sum_t spikes[t, k] * (1.1 - 0.1 * t / T)`

    Args:
        spikes: `[T, N, K]`.

    Returns:
        `[N, K]`; all 0 where no output neuron fired.
    """
    steps = spikes.shape[0]
    value = 1.1 - 0.1 * torch.arange(steps, dtype=spikes.dtype, device=spikes.device) / steps
    return torch.einsum("tnk,t->nk", spikes, value)


def predict(output: Tensor) -> Tensor:
    """Return the class an output decides for.

    Args:
        output: Logits `[N, K]`, or spikes `[T, N, K]`, read out by :func:`readout`.

    Returns:
        `[N]`, int64; `UNDECIDED` (-1) where nothing speaks for any class: no output spike, or every logit
        the same.
    """
    if output.dim() == 3:
        score = readout(output)
        silent = (score == 0).all(dim=1)
    else:
        score = output
        silent = (score == score[:, :1]).all(dim=1) & (score.shape[1] > 1)
    return score.argmax(dim=1).masked_fill(silent, UNDECIDED)
