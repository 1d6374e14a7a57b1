"""Event data sets as sources: `source(root=..., download=...)` returns training and test frames.

Frames are uint8 `[M, T, C, H, W]`, counts of events per step, channel and pixel, with `unit` 1: no share of
255. They are mapped from a cache on disk, see `snn.data.events.cache`.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from snn.data import files
from snn.data.download import download as download_set
from snn.data.events import cache as frame_cache
from snn.data.events import layouts
from snn.data.events.framing import FRAMINGS, Sensor
from snn.data.events.layouts import Found, Labelled, Part
from snn.data.sources import Images

SENSORS = {
    "nmnist": Sensor(2, 34, 34),
    "dvs_gesture": Sensor(2, 128, 128),
    "cifar10_dvs": Sensor(2, 128, 128),
    "shd": Sensor(700, 1, 1),
}
_CACHE = "event_frames"  # folder of caches below the root, unless the config names another


def nmnist(
    root: str, download: bool, *, steps: int, framing: str, cache: str | None
) -> tuple[Images, Images]:
    """Return N-MNIST, from a layout that `layouts.nmnist` describes.

    Args:
        root: Folder of data sets; `~` expands.
        download: Plays no part: no program can fetch the set.
        steps: Number of steps T, >= 1.
        framing: `count` (steps hold equally many events) or `time` (steps last equally long).
        cache: Folder of the frames on disk; None for one below the root.

    Raises:
        FileNotFoundError: A file is missing; the message says how to get it.
        ValueError: An argument is illegal, or a file is damaged.
        OSError: The cache cannot be written.
    """
    _check(steps, framing)
    home = Path(root).expanduser()
    return _frames("nmnist", home, layouts.nmnist(home), steps, framing, cache)


def dvs_gesture(
    root: str, download: bool, *, steps: int, framing: str, cache: str | None
) -> tuple[Images, Images]:
    """Return DVS128 Gesture, 11 classes, from a layout that `layouts.dvs_gesture` describes; as `nmnist`."""
    _check(steps, framing)
    home = Path(root).expanduser()
    return _frames("dvs_gesture", home, layouts.dvs_gesture(home), steps, framing, cache)


def cifar10_dvs(
    root: str,
    download: bool,
    *,
    steps: int,
    framing: str,
    cache: str | None,
    test_fraction: float,
    split_seed: int,
) -> tuple[Images, Images]:
    """Return CIFAR10-DVS, from a layout that `layouts.cifar10_dvs` describes; otherwise as `nmnist`.

    It has no official test set: of each class, a share drawn by `split_seed` is set aside. `names` of the
    returned `Images` are the recordings' files.

    Args:
        root: See `nmnist`, as the next four.
        download: Plays no part.
        steps: Number of steps.
        framing: How they are cut.
        cache: Where frames are kept.
        test_fraction: Share of each class's recordings that make the test set, in (0, 1); at least one.
        split_seed: Seed of the choice.
    """
    _check(steps, framing)
    if not 0 < test_fraction < 1:
        raise ValueError(f"data.source.test_fraction must lie in (0, 1), got {test_fraction}")
    home = Path(root).expanduser()
    folder, recordings, reader = layouts.cifar10_dvs(home)
    parts = split(recordings, test_fraction, split_seed)
    found = Found(folder, *(layouts.make_part(part, reader) for part in parts))
    train, test = _frames("cifar10_dvs", home, found, steps, framing, cache)
    return train._replace(names=_names(folder, found.train)), test._replace(names=_names(folder, found.test))


def shd(root: str, download: bool, *, steps: int, framing: str, cache: str | None) -> tuple[Images, Images]:
    """Return the Spiking Heidelberg Digits, 20 classes, each channel a pixel: `[M, T, 700, 1, 1]`.

    From `ROOT/SHD/shd_train.h5` and `shd_test.h5`, or their `.gz`; otherwise as `nmnist`, but:

    Args:
        root: See `nmnist`.
        download: Fetch what is missing.
        steps: Number of steps.
        framing: How they are cut.
        cache: Where frames are kept.

    Raises:
        ImportError: The package h5py is missing.
    """
    _check(steps, framing)
    home = Path(root).expanduser()
    if download and files.missing(layouts.shd_folder(home), "shd"):
        download_set("shd", home)
    return _frames("shd", home, layouts.shd(home), steps, framing, cache)


def split(
    recordings: Sequence[Labelled], test_fraction: float, split_seed: int
) -> tuple[list[Labelled], list[Labelled]]:
    """Split recordings into training and test ones, class by class; both keep their order.

    Raises:
        ValueError: A class has too few recordings for both.
    """
    generator = torch.Generator().manual_seed(split_seed)
    chosen: set[int] = set()
    for label in sorted({label for _, label in recordings}):
        members = [place for place, recording in enumerate(recordings) if recording.label == label]
        count = max(1, round(test_fraction * len(members)))
        if count >= len(members):
            raise ValueError(
                f"data.source.test_fraction={test_fraction} of {len(members)} recordings of class {label} "
                "leaves none to train on"
            )
        order = torch.randperm(len(members), generator=generator)[:count]
        chosen |= {members[place] for place in order.tolist()}
    train = [recording for place, recording in enumerate(recordings) if place not in chosen]
    test = [recording for place, recording in enumerate(recordings) if place in chosen]
    return train, test


def _check(steps: int, framing: str) -> None:
    if steps < 1:
        raise ValueError(f"encoding.steps must be at least 1, got {steps}")
    if framing not in FRAMINGS:
        raise ValueError(f"data.source.framing must be {' or '.join(FRAMINGS)}, got {framing!r}")


def _frames(
    name: str, root: Path, found: Found, steps: int, framing: str, cache: str | None
) -> tuple[Images, Images]:
    folder = root / _CACHE if cache is None else Path(cache).expanduser()
    with files.naming_root(root):
        train, test = frame_cache.load(name, found, SENSORS[name], steps, framing, folder)
    return Images(*train, unit=1), Images(*test, unit=1)


def _names(folder: Path, part: Part) -> tuple[str, ...]:
    return tuple(path.relative_to(folder).as_posix() for path in part.files)
