"""Learning rates over a run: (optimizer, total_steps) -> LambdaLR, stepped once per optimizer step."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def cosine(optimizer: Optimizer, total_steps: int) -> LambdaLR:
    """Fall from the base rate to 0 on half a cosine: `lr * (1 + cos(pi * step / total_steps)) / 2`."""
    return LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / total_steps)) / 2)


def constant(optimizer: Optimizer, total_steps: int) -> LambdaLR:
    """Keep the base rate."""
    return LambdaLR(optimizer, lambda step: 1.0)
