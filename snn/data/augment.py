"""Augmentations of training images, vectorised, each sample with random numbers of its own.

`data.augment` is `none`, or tokens joined by `+`, applied from left to right. A token is a name with its
number, such as `crop4`, or several of these joined by `|`, of which each sample gets one:
`resizedcrop0.7+flip+roll5|rotate30|cutout16`. What a token draws for a sample depends on the seed, the epoch,
the sample and its name alone, never on the other tokens. The T frames of a sample are treated alike.

An augmentation takes images `[N, C, H, W]`, in [0, 1] and not yet normalised, or counts of events; uniform
draws `[N, 5]`, of which the first four are its own; and its number. It returns new images of that shape. To
add one, write the function and enter it at the end of `AUGMENTATIONS`: its place there gives it its draws.
"""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from snn.keyed_random import AUGMENT, keyed_uniform

_NUM_DRAWS = 5  # of each augmentation, used or not; the last one is for the choice that it stands first in
_ASPECT = 4 / 3  # of a random crop's sides, relative to the image's, at most; and the inverse at least


_MOST = 1024  # pixels of a shift or a side


class Augmentation(NamedTuple):
    """A function, how its token reads, and its number: none, or in (0, most], or a whole one from 1 on."""

    apply: Callable[[Tensor, Tensor, float], Tensor]
    example: str
    most: float | None = None
    whole: bool = False


class Step(NamedTuple):
    """An augmentation by name, and its number; 0 if it takes none."""

    name: str
    number: float


Pipeline = tuple[tuple[Step, ...], ...]  # tokens in order; in each, the steps of which a sample gets one


def flip(images: Tensor, draws: Tensor, number: float) -> Tensor:
    """Mirror an image left to right where its first draw is below a half."""
    return torch.where(draws[:, :1, None, None] < 0.5, images.flip(-1), images)


def crop(images: Tensor, draws: Tensor, padding: float) -> Tensor:
    """Shift an image by up to `padding` pixels along each axis; what moves in is 0."""
    rows, columns = _pixels(images)
    down, right = _offsets(draws, padding)
    return _look_up(images, rows + down, columns + right)


def roll(images: Tensor, draws: Tensor, most: float) -> Tensor:
    """Shift an image by up to `most` pixels along each axis; what leaves on one side enters on the other."""
    rows, columns = _pixels(images)
    down, right = _offsets(draws, most)
    return _look_up(images, (rows - down) % images.shape[2], (columns - right) % images.shape[3])


def rotate(images: Tensor, draws: Tensor, degrees: float) -> Tensor:
    """Turn an image about its centre by an angle in [-degrees, degrees], positive ones counter-clockwise.

    Each pixel takes the value of the nearest one; 0 where that lies outside.
    """
    rows, columns = _pixels(images)
    middle_y, middle_x = ((side - 1) / 2 for side in images.shape[2:])
    angle = ((2 * draws[:, 0].double() - 1) * math.radians(degrees))[:, None, None]
    y, x = rows - middle_y, columns - middle_x
    return _look_up(
        images,
        torch.round(angle.sin() * x + angle.cos() * y + middle_y).long(),
        torch.round(angle.cos() * x - angle.sin() * y + middle_x).long(),
    )


def resizedcrop(images: Tensor, draws: Tensor, least: float) -> Tensor:
    """Cut out a box and magnify it to the image's size; a pixel takes the value of the nearest one.

    With the box's share `s` of the area uniform in [least, 1], and its aspect `r` (relative to the image's)
    log-uniform in [3/4, 4/3], or in [s, 1/s] where that is narrower, so that the box fits:

        height = H sqrt(s / r)        width = W sqrt(s r)        rounded, at least 1

    Its place is uniform among those in the image.
    """
    share = least + (1 - least) * draws[:, 0].double()
    widest = (-share.log()).clamp(max=math.log(_ASPECT))
    root = (widest * (draws[:, 1] - 0.5)).exp()  # of the aspect
    places = []
    for axis, ratio in ((0, 1 / root), (1, root)):
        side = images.shape[2 + axis]
        length = (side * share.sqrt() * ratio).round().long().clamp(1, side)[:, None]
        first = _whole(draws[:, 2 + axis : 3 + axis], side - length + 1)
        places.append(first + (2 * torch.arange(side, device=images.device) + 1) * length // (2 * side))
    return _look_up(images, places[0][:, :, None], places[1][:, None, :])


def cutout(images: Tensor, draws: Tensor, side: float) -> Tensor:
    """Set a square of `side` pixels to 0; its centre is any pixel, so that it may stick out of the image."""
    covered = []
    for axis, pixels in enumerate(_pixels(images)):
        first = _whole(draws[:, axis, None, None], images.shape[2 + axis]) - int(side) // 2
        covered.append((pixels >= first) & (pixels < first + int(side)))
    return images * ~(covered[0] & covered[1])[:, None]


def autoaugment(images: Tensor, draws: Tensor, number: float) -> Tensor:
    """Apply the policy that AutoAugment found for CIFAR-10 (torchvision's), to one image after another.

    Raises:
        ValueError: The images have not 3 channels.
    """
    from torchvision.transforms import AutoAugmentPolicy, v2

    if images.shape[1] != 3:
        raise ValueError(f"data.augment: autoaugment takes images of 3 channels, got {images.shape[1]}")
    policy = v2.AutoAugment(AutoAugmentPolicy.CIFAR10)
    pixels = images.mul(255).round_().to(torch.uint8)
    out = torch.empty_like(images)
    seeds = draws[:, :2].double() @ torch.tensor([2.0**48, 2.0**24], dtype=torch.float64)  # 24 bits each
    state = torch.get_rng_state()  # torchvision draws from the global generator alone
    try:
        for n, seed in enumerate(seeds.long().tolist()):
            torch.default_generator.manual_seed(seed)
            out[n] = policy(pixels[n])
    finally:
        torch.set_rng_state(state)
    return out.div_(255)


AUGMENTATIONS = {
    "flip": Augmentation(flip, "flip"),
    "crop": Augmentation(crop, "crop4", _MOST, whole=True),
    "cutout": Augmentation(cutout, "cutout10", _MOST, whole=True),
    "resizedcrop": Augmentation(resizedcrop, "resizedcrop0.6", 1),
    "rotate": Augmentation(rotate, "rotate30", 180),
    "roll": Augmentation(roll, "roll5", _MOST, whole=True),
    "autoaugment": Augmentation(autoaugment, "autoaugment"),
}


def parse(augment: str) -> Pipeline:
    """Read `none`, `crop4+flip`, `flip+roll5|rotate30` ...

    Raises:
        ValueError: A token is not of the grammar, a number is out of range, or a name stands twice.
    """
    if augment == "none":
        return ()
    tokens = tuple(tuple(_parse_step(word, augment) for word in t.split("|")) for t in augment.split("+"))
    names = [step.name for token in tokens for step in token]
    if len(set(names)) < len(names):
        raise ValueError(f"data.augment must name each augmentation once, got {augment!r}")
    return tokens


def _parse_step(word: str, augment: str) -> Step:
    match = re.fullmatch(r"([a-z]+)([0-9]+(?:\.[0-9]+)?)?", word)
    if match is None or match[1] not in AUGMENTATIONS:
        legal = ", ".join(known.example for known in AUGMENTATIONS.values())
        raise ValueError(
            f"data.augment must be none, or some of {legal} joined by + (by |: one of them), "
            f"got {word!r} in {augment!r}"
        )
    name, text = match.groups()
    _, example, most, whole = AUGMENTATIONS[name]
    if most is None:
        if text is not None:
            raise ValueError(f"data.augment: {name} takes no number, got {word!r}")
        return Step(name, 0)
    if text is None:
        raise ValueError(f"data.augment: {name} needs a number, as in {example}, got {word!r}")
    if not 0 < float(text) <= most or (whole and not text.isdigit()):
        kind = "a whole number >= 1" if whole else f"a number in (0, {most:g}]"
        raise ValueError(f"data.augment: {name} takes {kind}, got {word!r}")
    return Step(name, float(text))


def augment_images(images: Tensor, index: Tensor, pipeline: Pipeline, seed: int, epoch: int) -> Tensor:
    """Apply augmentations to a batch; what happens to a sample depends on `(seed, epoch, index)` alone.

    Args:
        images: `[N, C, H, W]`, or frames `[N, T, C, H, W]`; the T frames of a sample are treated alike.
        index: Sample indices, int64 `[N]`.
        pipeline: What `parse` returns.
        seed: Seed of the run.
        epoch: Epoch of the batch.
    """
    draws = keyed_uniform(seed, epoch, index, _NUM_DRAWS * len(AUGMENTATIONS), AUGMENT)
    own = dict(zip(AUGMENTATIONS, draws.split(_NUM_DRAWS, dim=1), strict=True))
    out = images.flatten(1, -3)  # frames become channels
    for token in pipeline:
        choice = _whole(own[token[0].name][:, -1], len(token))
        given = out
        for place, (name, number) in enumerate(token):
            members = (choice == place).nonzero().flatten()
            if len(members) == len(out):
                out = AUGMENTATIONS[name].apply(given, own[name], number)
            elif len(members) > 0:
                out = out.clone() if out is given else out
                out[members] = AUGMENTATIONS[name].apply(given[members], own[name][members], number)
    return out.view(images.shape)


def _whole(draws: Tensor, count: int | Tensor) -> Tensor:
    """Turn draws into whole numbers in [0, count)."""
    return (draws * count).long().clamp(max=count - 1)  # the product may round up to count


def _offsets(draws: Tensor, most: float) -> list[Tensor]:
    """Return two whole numbers in [-most, most] per sample, each `[N, 1, 1]`."""
    return [_whole(draws[:, axis, None, None], 2 * int(most) + 1) - int(most) for axis in (0, 1)]


def _pixels(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of an image's rows `[H, 1]` and of its columns `[W]`."""
    H, W = images.shape[2:]
    return torch.arange(H, device=images.device)[:, None], torch.arange(W, device=images.device)


def _look_up(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return images whose pixel (h, w) is the one at `(rows, columns)[n, h, w]`, or 0 where there is none."""
    N, C, H, W = images.shape
    inside = (rows >= 0) & (rows < H) & (columns >= 0) & (columns < W)
    places = (rows.clamp(0, H - 1) * W + columns.clamp(0, W - 1)).reshape(N, 1, H * W)
    found = images.flatten(2).gather(2, places.expand(N, C, H * W)).view(N, C, H, W)
    return found.mul_(inside[:, None])
