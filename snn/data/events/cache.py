"""Frames kept on disk, so that recordings are read once.

A cache's name holds a key of all that its frames depend on: the data set, each file's path, size, content and
part, steps, framing and `VERSION`. It is built beside its place and moved there whole. Hashing gigabytes at
each start would take minutes, so an index remembers the hash of every file that did not change.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from snn.data.download import one_line, staging
from snn.data.events.framing import Sensor, to_frames
from snn.data.events.layouts import Found, Part, naming

log = logging.getLogger(__name__)

VERSION = 1  # raise it whenever readers or framing give other frames for the same files
SETTLED_NS = 2_000_000_000  # a file changed later than this before now may change again unseen by its clock
_PARTS = ("train", "test")
_LABELS = "labels.json"

Stamp = list[int]  # size, time of the last change of content, and of any change, in ns


def load(
    name: str, found: Found, sensor: Sensor, steps: int, framing: str, cache: Path
) -> list[tuple[Tensor, Tensor]]:
    """Return the frames of a data set, from the cache or else through it.

    Args:
        name: Of the data set.
        found: Its recordings.
        sensor: What can fire.
        steps: Number of steps T.
        framing: `count` or `time`.
        cache: Folder of caches.

    Returns:
        For the training and the test recordings: frames, uint8 `[M, T, C, H, W]`, mapped from disk (what is
        written to them stays in memory), and labels, int64 `[M]`.

    Raises:
        ValueError: A recording, or the cache itself, is damaged, or a file changed while it was read.
        OSError: The cache cannot be written.
    """
    parts = dict(zip(_PARTS, (found.train, found.test), strict=True))
    places = {
        path: str(path).removeprefix(f"{found.folder}/") for part in parts.values() for path in part.files
    }
    index = cache / f"{name}.json"
    before = stamps(places)
    remembered = _read_index(index, found.folder)
    hashes = {}
    for path, place in places.items():
        known = remembered.get(place)
        hashes[path] = known[1] if known and known[0] == before[path] else _sha256(path)
    content = {
        part: [(places[path], before[path][0], hashes[path]) for path in recordings.files]
        for part, recordings in parts.items()
    }
    key = hashlib.sha256(json.dumps([name, VERSION, steps, framing, content]).encode()).hexdigest()
    folder = cache / f"{name}-T{steps}-{framing}-{key[:16]}"
    if folder.is_dir():
        log.info("frames of %s: as built before, from %s", name, folder)
    else:
        _build(name, parts, sensor, steps, framing, folder, before)
    opened = [_open(folder, part, (steps, *sensor)) for part in _PARTS]
    now = time.time_ns()
    settled = {
        place: (before[path], hashes[path])
        for path, place in places.items()
        if now - max(before[path][1:]) > SETTLED_NS
    }
    if settled != remembered:
        _write_index(index, found.folder, settled)
    return opened


def stamps(paths: Iterable[Path]) -> dict[Path, Stamp]:
    """Return what tells cheaply whether a file has changed."""
    return {path: [(at := path.stat()).st_size, at.st_mtime_ns, at.st_ctime_ns] for path in paths}


def _build(
    name: str,
    parts: dict[str, Part],
    sensor: Sensor,
    steps: int,
    framing: str,
    folder: Path,
    before: dict[Path, Stamp],
) -> None:
    log.info("frames of %s: reading %d files, once, into %s", name, len(before), folder)
    start = time.monotonic()
    try:
        with staging(folder.parent) as staged:
            made = staged / "frames"
            made.mkdir()
            labels: dict[str, list[int]] = {part: [] for part in parts}
            num_empty = 0
            for part, recordings in parts.items():
                with (made / f"{part}.u8").open("wb") as out:
                    for path, label, events in recordings.read():
                        with naming(path):
                            out.write(to_frames(events, sensor, steps, framing).data)
                        labels[part].append(label)
                        num_empty += len(events.t) == 0
                if not labels[part]:
                    raise ValueError(f"{recordings.files[0]} leads to no {part} recording")
            (made / _LABELS).write_text(json.dumps(labels))
            for path, stamp in stamps(before).items():
                if stamp != before[path]:
                    raise ValueError(f"{path} changed while it was read")
            _move(made, folder)
    except OSError as error:
        raise OSError(
            f"could not make frames of {name} in {folder.parent} (data.source.cache): {one_line(error)}"
        ) from error
    num, seconds = sum(map(len, labels.values())), time.monotonic() - start
    log.info("frames of %s: built from %d recordings in %.1f s, in %s", name, num, seconds, folder)
    if num_empty:
        log.warning("%d of %d recordings of %s hold no event", num_empty, num, name)


def _move(made: Path, folder: Path) -> None:
    """Move a whole cache into place, unless another process was faster: its frames are the same."""
    try:
        os.rename(made, folder)
    except OSError:
        if not folder.is_dir():
            raise


def _open(folder: Path, part: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    path = folder / f"{part}.u8"
    try:
        labels = torch.tensor(json.loads((folder / _LABELS).read_text())[part])
        if path.stat().st_size != len(labels) * math.prod(shape):
            raise ValueError(f"got {path.stat().st_size} bytes for {len(labels)} recordings")
        frames = np.memmap(path, np.uint8, mode="c", shape=(len(labels), *shape))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path} is damaged, delete {folder}: {error}") from error
    return torch.from_numpy(frames), labels


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_index(index: Path, folder: Path) -> dict[str, tuple[Stamp, str]]:
    """Return the remembered stamps and hashes of the files of a folder; none, if the index is of another."""
    try:
        held = json.loads(index.read_text())
        if held["folder"] == str(folder.resolve()):
            return {place: (stamp, digest) for place, (stamp, digest) in held["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return {}


def _write_index(index: Path, folder: Path, hashes: dict[str, tuple[Stamp, str]]) -> None:
    """Remember hashes; a cache that may not be written to is used without."""
    with contextlib.suppress(OSError), staging(index.parent) as staged:
        made = staged / index.name
        made.write_text(json.dumps({"folder": str(folder.resolve()), "files": hashes}))
        os.replace(made, index)
