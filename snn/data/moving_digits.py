"""Moving digits: real digits before a simulated event camera, as N-MNIST was recorded from MNIST.

Each image moves along three saccades, the sides of a triangle; a pixel of the camera sends an event whenever
the logarithm of what it sees has changed by a threshold. Frames are the events of equal spans of time.
"""

import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from snn.data.sources import Images, digits
from snn.keyed_random import MOTION, keyed_uniform

SIDE = 34  # pixels of the camera, as in N-MNIST
ZOOM = 2.5  # pixels of the camera per pixel of an image: 8x8 becomes 20x20
LOOKS = 4  # at the intensity, per frame
CONTRAST = 0.3  # change of the logarithm that makes an event
DARK = 0.1  # intensity of the background, in units of a white pixel
_CENTRE = (SIDE - 8 * ZOOM) / 2  # where an image's first pixel lies if it stands in the middle
_START = 2.0  # the path's middle lies up to so many pixels off the camera's, along each axis
_REACH = (4.0, 8.0)  # width and height of the path in pixels, least and most
_CHUNK = 32  # samples recorded at a time: their pixels stay in the cache


def moving_digits(root: str, download: bool, *, steps: int) -> tuple[Images, Images]:
    """Return frames `[M, steps, 2, 34, 34]` of scikit-learn's 1797 digits: counts of OFF and of ON events.

    The split is that of `digits`. How a sample moves depends on its index alone.

    Args:
        root: Unused.
        download: Unused.
        steps: Frames per recording.

    Raises:
        ValueError: `steps` is not positive.
    """
    if steps < 1:
        raise ValueError(f"data.source.steps must be at least 1, got {steps}")
    train, test = digits(root, download)
    index = torch.arange(len(train.labels) + len(test.labels))
    made = []
    for part, members in ((train, index[: len(train.labels)]), (test, index[len(train.labels) :])):
        pairs = zip(part.images.split(_CHUNK), members.split(_CHUNK), strict=True)
        frames = torch.cat([record(images[:, 0] / 255, paths(of), steps) for images, of in pairs])
        made.append(Images(frames, part.labels, unit=1))
    return made[0], made[1]


def paths(index: Tensor) -> Tensor:
    """Return where the saccades of samples begin and end: an isosceles triangle, up or down, and back.

    Args:
        index: Sample indices, int64 `[M]`.

    Returns:
        float32 `[M, 4, 2]`: row and column of the image's first pixel on the camera at the times
        0, 1/3, 2/3 and 1.
    """
    draws = keyed_uniform(0, 0, index, 4, MOTION)
    reach = _REACH[0] + (_REACH[1] - _REACH[0]) * draws[:, :2]
    first = _CENTRE + _START * (2 * draws[:, 2:] - 1) - reach / 2
    corners = torch.tensor([[0.0, 0.0], [1.0, 0.5], [0.0, 1.0], [0.0, 0.0]])
    return first[:, None] + corners * reach[:, None]


def intensities(images: Tensor, path: Tensor, times: Iterable[float]) -> Iterator[Tensor]:
    """Yield what the camera's pixels see, 0 for nothing and 1 for a white pixel, time after time.

    An image lies at `p(t)`, on the straight line between two points of its path, and is magnified by `ZOOM`
    through bilinear interpolation; with `hat(z) = max(0, 1 - |z|)`

        I[y, x](t) = sum_ij hat((y - p_y(t)) / ZOOM - i) hat((x - p_x(t)) / ZOOM - j) image[i, j]

    Args:
        images: float32 `[M, H, W]` in [0, 1].
        path: float32 `[M, 4, 2]`, as `paths` returns it.
        times: In [0, 1].

    Yields:
        float32 `[M, 34, 34]`.
    """
    pixel = torch.arange(SIDE)
    rows, columns = (torch.arange(side) for side in images.shape[1:])
    for time in times:
        leg = min(int(3 * time), 2)
        place = torch.lerp(path[:, leg], path[:, leg + 1], 3 * time - leg)  # [M, 2]
        at = (pixel - place[:, :, None]) / ZOOM  # [M, 2, 34]
        down = (1 - (at[:, 0, :, None] - rows).abs()).clamp_(min=0)  # [M, 34, H]
        across = (1 - (at[:, 1, None, :] - columns[:, None]).abs()).clamp_(min=0)  # [M, W, 34]
        yield down @ images @ across


def events(seen: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the events of each pixel between one look and the next; the first look makes none.

    With `L = log(DARK + I)`, and `R` the value of `L` that the pixel remembers, at first its first one:

        n = trunc((L - R) / CONTRAST)        R = R + n CONTRAST

    Args:
        seen: Intensities, float32, of any shape.

    Yields:
        n, float32 of that shape: above 0 so many ON events, below 0 OFF events.
    """
    remembered = None
    for intensity in seen:
        level = intensity.add(DARK).log_()
        if remembered is None:
            remembered = level
            continue
        count = level.sub_(remembered).div_(CONTRAST).trunc_()
        remembered = torch.add(remembered, count, alpha=CONTRAST)
        yield count


def record(images: Tensor, path: Tensor, steps: int) -> Tensor:
    """Return frames uint8 `[M, steps, 2, 34, 34]`: per span of time the OFF and the ON events of each pixel.

    Args:
        images: float32 `[M, H, W]` in [0, 1].
        path: float32 `[M, 4, 2]`, as `paths` returns it.
        steps: Frames; a frame spans `LOOKS` looks.
    """
    frames = torch.zeros(len(images), steps, 2, SIDE, SIDE)
    times = [look / (steps * LOOKS) for look in range(steps * LOOKS + 1)]
    counts = events(intensities(images, path, times))
    for frame in frames.unbind(1):
        for count in itertools.islice(counts, LOOKS):
            frame[:, 1] += count.clamp(min=0)
            frame[:, 0] -= count.clamp_(max=0)
    return frames.to(torch.uint8)
