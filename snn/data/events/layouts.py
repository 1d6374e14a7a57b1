"""Where the recordings of a data set lie: the original releases and the cached layouts of other libraries.

A function here finds a set below the root and returns its folder and its recordings, unread, in one order for
all layouts: split and index of a recording do not depend on the layout that it was read from.
"""

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from snn.data import files
from snn.data.events import readers
from snn.data.events.readers import Events, Reader
from snn.data.events.releases import CIFAR_CLASSES, DIGITS, GESTURES, homes, not_found

_SHD_CLASSES = 20


class Recording(NamedTuple):
    """One sample: the file that holds it, its class, its events."""

    path: Path
    label: int
    events: Events


class Part(NamedTuple):
    """Recordings to be read: `files` are all that they depend on, `read` yields them in order."""

    files: list[Path]
    read: Callable[[], Iterator[Recording]]


class Found(NamedTuple):
    """A data set: the folder that all its files lie in, and its training and its test recordings."""

    folder: Path
    train: Part
    test: Part


class Labelled(NamedTuple):
    """A file that holds one recording, and its class."""

    path: Path
    label: int


def nmnist(root: Path) -> Found:
    """Find N-MNIST: `Train/<digit>/*.bin` and `Test/...`, or `events_np/train/<digit>/*.npz` and so on.

    Raises:
        FileNotFoundError: A part or a digit's folder is missing.
        ValueError: A folder is no digit.
    """
    for folder in _inside(homes("nmnist", root)):
        for base, parts, suffix, reader in (
            (folder, ("Train", "Test"), ".bin", readers.nmnist_bin),
            (folder / "events_np", ("train", "test"), ".npz", readers.nmnist_npz),
        ):
            if any((base / part).is_dir() for part in parts):
                train, test = (_by_label("nmnist", root, base / part, DIGITS, suffix) for part in parts)
                return Found(base, make_part(train, reader), make_part(test, reader))
    raise not_found("nmnist", root)


def cifar10_dvs(root: Path) -> tuple[Path, list[Labelled], Reader]:
    """Find CIFAR10-DVS: `<class>/*.aedat`, or `events_np/<class>/*.npz`, which has no split of its own.

    Returns:
        Its folder, all its recordings, and what reads them.

    Raises:
        FileNotFoundError: A class's folder is missing.
        ValueError: A folder of `events_np` is no class.
    """
    for folder in _inside(homes("cifar10_dvs", root)):
        if any((folder / name).is_dir() for name in CIFAR_CLASSES):
            return folder, _by_label("cifar10_dvs", root, folder, CIFAR_CLASSES, ".aedat"), readers.aedat2
        base = folder / "events_np"
        if base.is_dir():
            return base, _by_label("cifar10_dvs", root, base, CIFAR_CLASSES, ".npz"), readers.npz
    raise not_found("cifar10_dvs", root)


def dvs_gesture(root: Path) -> Found:
    """Find DVS128 Gesture in one of three layouts.

    The original: `DvsGesture/trials_to_train.txt` and `trials_to_test.txt` list recordings `*.aedat`; beside
    each lies `*_labels.csv` with a row `class,startTime_usec,endTime_usec` per gesture: class 1 to 11 becomes
    0 to 10, and a sample is the events with start <= t < end. Cut already: `events_np/train/<0 to 10>/*.npz`
    and `events_np/test/...`, or `ibmGestureTrain/<trial>/<0 to 10>.npy` and `ibmGestureTest/...`.

    Raises:
        FileNotFoundError: A file or folder is missing.
        ValueError: A list, a row or a label is none of these.
    """
    for folder in _inside(homes("dvs_gesture", root)):
        for base in (folder / "DvsGesture", folder):
            if any((base / f"trials_to_{part}.txt").is_file() for part in ("train", "test")):
                return Found(base, *(_trials(root, base, part) for part in ("train", "test")))
        base = folder / "events_np"
        if any((base / part).is_dir() for part in ("train", "test")):
            parts = (
                _by_label("dvs_gesture", root, base / part, GESTURES, ".npz") for part in ("train", "test")
            )
            return Found(base, *(make_part(sorted(part, key=_trial_order), readers.npz) for part in parts))
        if any((folder / f"ibmGesture{part}").is_dir() for part in ("Train", "Test")):
            return Found(
                folder, *(_by_user(root, folder / f"ibmGesture{part}") for part in ("Train", "Test"))
            )
    raise not_found("dvs_gesture", root)


def shd(root: Path) -> Found:
    """Find the Heidelberg digits: `shd_train.h5` and `shd_test.h5`, plain or gzipped.

    Raises:
        FileNotFoundError: A file is missing.
    """
    folder = shd_folder(root)
    for path in files.missing(folder, "shd"):
        for archive in (path.with_name(f"{path.name}.zip"), root / f"{path.name}.zip"):
            if archive.is_file():
                raise FileNotFoundError(
                    f"{path} not found (data.root={root}), but {archive} is there: unpack it into {folder}"
                )
    files.require_all(folder, "shd", root)
    return Found(folder, *(_spoken(files.locate(folder, name)) for name in files.layout("shd").files))


def shd_folder(root: Path) -> Path:
    """Return the folder that holds the most files of the Heidelberg digits."""
    inside = root / files.layout("shd").folder
    folders = [
        folder for place in (inside, root) for folder in (place, place / "extract", place / "events_h5")
    ]
    return min(folders, key=lambda place: len(files.missing(place, "shd")))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put a file's path before what is said about its content."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path} {error}") from error


def read_file(path: Path, reader: Reader) -> Events:
    """Read a file of one recording.

    Raises:
        ValueError: It is empty or damaged; the path is named.
    """
    content = path.read_bytes()
    with naming(path):
        if not content:
            raise ValueError("is empty")
        return reader(content)


def read_labelled(recordings: Sequence[Labelled], reader: Reader) -> Iterator[Recording]:
    """Read files of one recording each, in order."""
    for path, label in recordings:
        yield Recording(path, label, read_file(path, reader))


def make_part(recordings: Sequence[Labelled], reader: Reader) -> Part:
    """Return files of one recording each as a part."""
    return Part([path for path, _ in recordings], functools.partial(read_labelled, recordings, reader))


def _inside(folders: list[Path]) -> list[Path]:
    """Return each folder, and `extract` in it, where some libraries unpack archives."""
    return [place for folder in folders for place in (folder, folder / "extract")]


def _number(path: Path) -> int:
    """Return the number at the end of a file's stem, or 0."""
    found = re.search(r"\d+$", path.stem)
    return int(found.group()) if found else 0


def _by_label(name: str, root: Path, folder: Path, labels: tuple[str, ...], suffix: str) -> list[Labelled]:
    """List `<folder>/<label>/*<suffix>`, where a label is one of `labels` or its place among them.

    The order goes by the number that ends a file's name, then by class, so that the first few recordings hold
    all classes.
    """
    if not folder.is_dir():
        raise not_found(name, root, folder)
    legal = {str(place): place for place in range(len(labels))} | {
        text: place for place, text in enumerate(labels)
    }
    places: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.name in legal:
            places[legal[path.name]] = path
        elif any(path.glob(f"*{suffix}")):
            raise ValueError(
                f"{path} must be named after a class, one of {', '.join(labels)} (data.root={root})"
            )
    found = []
    for label, text in enumerate(labels):
        if label not in places:
            raise not_found(name, root, folder / text)
        paths = list(places[label].glob(f"*{suffix}"))
        if not paths:
            raise not_found(name, root, places[label] / f"*{suffix}")
        found += [Labelled(path, label) for path in paths]
    return sorted(found, key=lambda item: (_number(item.path), item.label, item.path.name))


def _trial_order(item: Labelled) -> tuple[str, int, int]:
    """Order cuts `<trial>_<number>.npz` as the original gives them: by trial, class, number in the class."""
    return item.path.stem.rpartition("_")[0], item.label, _number(item.path)


def _by_user(root: Path, folder: Path) -> Part:
    """List `<folder>/<trial>/<class>.npy`."""
    if not folder.is_dir():
        raise not_found("dvs_gesture", root, folder)
    found = []
    for path in folder.glob("*/*.npy"):
        if path.stem not in GESTURES:
            raise ValueError(
                f"{path} must be named after a class, 0 to {len(GESTURES) - 1} (data.root={root})"
            )
        found.append(Labelled(path, int(path.stem)))
    if not found:
        raise not_found("dvs_gesture", root, folder / "*/*.npy")
    return make_part(sorted(found, key=lambda item: (item.path.parent.name, item.label)), readers.npy)


def _trials(root: Path, folder: Path, part: str) -> Part:
    """List the recordings that `trials_to_<part>.txt` names, and their tables of labels."""
    listing = folder / f"trials_to_{part}.txt"
    if not listing.is_file():
        raise not_found("dvs_gesture", root, listing)
    names = sorted(line.strip() for line in listing.read_text(errors="replace").splitlines() if line.strip())
    if not names:
        raise ValueError(f"{listing} names no recording (data.root={root})")
    pairs = [(folder / name, folder / f"{Path(name).stem}_labels.csv") for name in names]
    for path in (path for pair in pairs for path in pair):
        if not path.is_file():
            raise not_found("dvs_gesture", root, path)
    return Part([listing, *(path for pair in pairs for path in pair)], functools.partial(_cut_trials, pairs))


def _cut_trials(pairs: list[tuple[Path, Path]]) -> Iterator[Recording]:
    for path, table in pairs:
        with naming(table):
            gestures = _gestures(table.read_text(errors="replace"))
        t, x, y, p = read_file(path, readers.aedat3)
        for label, start, end in gestures:
            cut = (start <= t) & (t < end)
            yield Recording(path, label, Events(t[cut], x[cut], y[cut], p[cut]))


def _gestures(text: str) -> list[tuple[int, int, int]]:
    """Read a table of labels: (class from 0, start, end) in microseconds, sorted by class, else as it is."""
    header, *lines = text.splitlines() or [""]
    if not header.startswith("class"):
        raise ValueError(f"must start with class,startTime_usec,endTime_usec, got {header!r}")
    rows = []
    for number, line in enumerate(lines, 2):
        if not line.strip():
            continue
        try:
            label, start, end = (int(value) for value in line.split(","))
        except ValueError as error:
            raise ValueError(f"must hold three whole numbers in line {number}, got {line!r}") from error
        if not 1 <= label <= len(GESTURES) or start >= end:
            raise ValueError(f"must hold a class from 1 to 11 and start < end in line {number}, got {line!r}")
        rows.append((label - 1, start, end))
    return sorted(rows, key=lambda row: row[0])


def _spoken(path: Path | None) -> Part:
    assert path is not None  # require_all saw it
    return Part([path], functools.partial(_read_spoken, path))


def _read_spoken(path: Path) -> Iterator[Recording]:
    content = files.read_bytes(path)
    with naming(path):
        if not content:
            raise ValueError("is empty")
        for row, (label, events) in enumerate(readers.shd_hdf5(content)):
            if not 0 <= label < _SHD_CLASSES:
                raise ValueError(f"must hold labels in [0, {_SHD_CLASSES}), got {label} of recording {row}")
            yield Recording(path, label, events)
