"""Augmentations of training images, vectorised, each sample with random numbers of its own.

An augmentation takes images `[N, C, H, W]` and uniform draws `[N, 2]`, and returns new images. To add one,
write the function and enter it at the end of `AUGMENTATIONS`: its place there gives it draws of its own.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from snn.keyed_random import AUGMENT, keyed_uniform

CROP_PADDING = 4  # pixels on each side, as is customary for 28x28 and 32x32 images
_NUM_DRAWS = 2  # of each augmentation, used or not


def flip(images: Tensor, draws: Tensor) -> Tensor:
    """Mirror an image left to right where its first draw is below a half."""
    return torch.where(draws[:, :1, None, None] < 0.5, images.flip(-1), images)


def crop(images: Tensor, draws: Tensor) -> Tensor:
    """Shift an image by up to `CROP_PADDING` pixels along each axis; what moves in is 0."""
    N, C, H, W = images.shape
    last = 2 * CROP_PADDING
    offsets = (draws * (last + 1)).long().clamp_(max=last)  # [N, 2]; the product may round up to last + 1
    rows = offsets[:, :1] + torch.arange(H, device=images.device)  # [N, H]
    columns = offsets[:, 1:] + torch.arange(W, device=images.device)  # [N, W]
    places = (rows[:, :, None] * (W + last) + columns[:, None, :]).view(N, 1, H * W).expand(N, C, H * W)
    return pad(images, (CROP_PADDING,) * 4).flatten(2).gather(2, places).view(N, C, H, W)


AUGMENTATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"flip": flip, "crop": crop}


def parse(augment: str) -> tuple[str, ...]:
    """Split `none`, `flip`, `crop+flip` ... into names of augmentations, in the order in which they apply.

    Raises:
        ValueError: A name is unknown or stands twice.
    """
    if augment == "none":
        return ()
    names = tuple(augment.split("+"))
    for name in names:
        if name not in AUGMENTATIONS:
            legal = ", ".join(AUGMENTATIONS)
            raise ValueError(f"data.augment must be none, or names of {legal} joined by +, got {augment!r}")
    if len(set(names)) < len(names):
        raise ValueError(f"data.augment must name each augmentation once, got {augment!r}")
    return names


def augment_images(images: Tensor, index: Tensor, names: tuple[str, ...], seed: int, epoch: int) -> Tensor:
    """Apply augmentations to a batch; what happens to a sample depends on `(seed, epoch, index)` alone.

    Args:
        images: `[N, C, H, W]`.
        index: Sample indices, int64 `[N]`.
        names: Names of augmentations, as `parse` returns them.
        seed: Seed of the run.
        epoch: Epoch of the batch.
    """
    draws = keyed_uniform(seed, epoch, index, _NUM_DRAWS * len(AUGMENTATIONS), AUGMENT)
    for name in names:
        place = _NUM_DRAWS * list(AUGMENTATIONS).index(name)
        images = AUGMENTATIONS[name](images, draws[:, place : place + _NUM_DRAWS])
    return images
