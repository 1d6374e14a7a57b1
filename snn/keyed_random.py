"""Random numbers that are a function of what they are drawn for, not of when or where.

A number depends on `(seed, epoch, stream, sample index, position)` and on nothing else: not on the batch
size, the number of loader workers, the device or the order of the calls. The generator is a counter-based
hash in the manner of splitmix64: a key per sample, a counter per position, a finaliser that mixes each word.
"""

import torch
from torch import Tensor

AUGMENT = 1  # streams: one per purpose, so that two purposes never share a number
ENCODING = 2
ORDER = 3
MOTION = 4

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: a counter times it visits every word once
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_BITS = 24  # a float32 holds 24 bits exactly
_CHUNK = 1 << 18  # words mixed at a time, 2 MB: near the cache, whatever the size of the draw


def keyed_uniform(seed: int, epoch: int, index: Tensor, n: int, stream: int) -> Tensor:
    """Draw `n` uniform numbers for each sample, the same ones whenever and wherever they are drawn.

    Args:
        seed: Seed of the run.
        epoch: Epoch of the draw.
        index: Sample indices, integers `[N]`; equal indices draw equal numbers.
        n: Numbers per sample, >= 0. The first `m` of `n` equal those of a draw of `m`.
        stream: Purpose of the draw, `AUGMENT` or `ENCODING`; purposes are independent of each other.

    Returns:
        float32 `[N, n]` in [0, 1), multiples of 2**-24, on the device of `index`.

    Raises:
        ValueError: `index` is no 1-D integer tensor, or `n` is negative.
    """
    if index.dim() != 1 or index.dtype.is_floating_point:
        raise ValueError(f"index must be a 1-D integer tensor, got {index.dtype}, shape {list(index.shape)}")
    if n < 0:
        raise ValueError(f"n must be >= 0, got {n}")
    key = _signed(stream_key(seed, epoch, stream))
    keys = _mix_((index.long() + 1) * _signed(_STEP) + key)
    counters = torch.arange(1, n + 1, device=index.device).mul_(_signed(_STEP))
    out = torch.empty(len(index), n, dtype=torch.float32, device=index.device)
    rows = max(1, _CHUNK // max(n, 1))
    for top in range(0, len(index), rows):
        words = _mix_(keys[top : top + rows, None] + counters)
        out[top : top + rows] = words.bitwise_right_shift_(64 - _BITS).bitwise_and_((1 << _BITS) - 1)
    return out.mul_(2.0**-_BITS)


def stream_key(seed: int, epoch: int, stream: int) -> int:
    """Return a well-mixed number in [0, 2**64) for a whole epoch; it can seed a `torch.Generator`."""
    word = 0
    for part in (seed, epoch, stream):
        word = ((word ^ part) + _STEP) & _MASK
        for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, 1), strict=True):
            word = ((word ^ (word >> shift)) * multiplier) & _MASK
    return word


def _mix_(words: Tensor) -> Tensor:
    """Mix every 64-bit word in place (the finaliser of splitmix64); a product wraps around, as it should."""
    shifted = torch.empty_like(words)
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, 1), strict=True):
        torch.bitwise_right_shift(words, shift, out=shifted)
        words ^= shifted.bitwise_and_(_MASK >> shift)  # int64 shifts its sign in; the mask takes it out again
        if multiplier != 1:
            words *= _signed(multiplier)
    return words


def _signed(word: int) -> int:
    """Return the int64 that has the bits of an unsigned 64-bit word."""
    return word - (1 << 64) if word >> 63 else word
