"""The bytes of a recording to its events, one function per format.

A reader raises ValueError for bytes that are not what the format says; who knows the file's name adds it.
"""

import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_NMNIST_OVERFLOW = 240  # this y marks that the clock wrapped, not a pixel
_NMNIST_WRAP = 2**13  # microseconds
_AEDAT2 = b"#!AER-DAT2"
_AEDAT3 = b"#!AER-DAT3.1"
_AEDAT3_END = b"#!END-HEADER\r\n"
_PACKET = struct.Struct("<2h6i")  # type, source, size, time's offset, overflow, capacity, number, valid
_POLARITY_EVENT = (1, 8)  # type of its packets, bytes of an event
_DVS128_SPECIAL = 1 << 31 | 1 << 15  # set in an address that is no pixel
_DVS128_LAST = 127


class Events(NamedTuple):
    """Events of a recording, int64 `[n]` each, in the order of its file.

    Attributes:
        t: Time in microseconds.
        x: Column of the pixel, from the left.
        y: Row of the pixel, from the top.
        p: Polarity, 0 OFF (darker) or 1 ON (brighter); of sound, the channel.
    """

    t: Array
    x: Array
    y: Array
    p: Array


Reader = Callable[[bytes], Events]


def nmnist_bin(content: bytes) -> Events:
    """Read a recording of N-MNIST: 5 bytes an event.

    These are x, y, then one bit of polarity and 23 bits of time, big-endian. An event with y = 240 is a
    marker: it, and every event after it, is 2^13 us later than written.
    """
    if len(content) % 5:
        raise ValueError(f"must hold 5 bytes per event, got {len(content)} bytes")
    rows = np.frombuffer(content, np.uint8).reshape(-1, 5).astype(np.int64)
    t = (rows[:, 2] & 0x7F) << 16 | rows[:, 3] << 8 | rows[:, 4]
    return _without_markers(Events(t, rows[:, 0], rows[:, 1], rows[:, 2] >> 7))


def nmnist_npz(content: bytes) -> Events:
    """Read a cached recording of N-MNIST; markers were kept there as if they were events."""
    return _without_markers(npz(content))


def _without_markers(events: Events) -> Events:
    marker = events.y == _NMNIST_OVERFLOW
    if not marker.any():
        return events
    late = events._replace(t=events.t + _NMNIST_WRAP * np.cumsum(marker))
    return Events(*(column[~marker] for column in late))


def aedat2(content: bytes) -> Events:
    """Read AEDAT 2.0 of a DVS128 camera: header lines that start with #, then 8 bytes an event.

    These are a 32-bit address and a 32-bit time in microseconds, big-endian. Of the address, bit 0 is 0 for
    ON and 1 for OFF, bits 1 to 7 and 8 to 14 count pixels from the lower right corner of a camera that stood
    on its side: `y = 127 - bits 1 to 7`, `x = 127 - bits 8 to 14`. Bit 15 or 31 marks what is no pixel's
    event; such are left out.
    """
    _require_start(content, _AEDAT2, "AEDAT 2.0")
    start = 0
    while content[start : start + 1] == b"#":
        start = content.find(b"\n", start) + 1
        if start == 0:
            raise ValueError("has an AEDAT header without an end")
    if (len(content) - start) % 8:
        raise ValueError(
            f"must hold 8 bytes per event after its header, got {len(content) - start}: is it truncated?"
        )
    address, t = np.frombuffer(content, ">u4", offset=start).reshape(-1, 2).astype(np.int64).T
    pixel = address & _DVS128_SPECIAL == 0
    address, t = address[pixel], t[pixel]
    if (address >> 16).any():
        raise ValueError("holds addresses that a DVS128 does not have: is it another camera's, or damaged?")
    x, y = _DVS128_LAST - (address >> 8 & 0x7F), _DVS128_LAST - (address >> 1 & 0x7F)
    return Events(t, x, y, 1 - (address & 1))


def aedat3(content: bytes) -> Events:
    """Read AEDAT 3.1: header lines up to `#!END-HEADER`, then packets, all little-endian.

    A packet is 28 bytes of its own header and room for `capacity` events, of which `number` are used. Kept
    are the valid events of polarity packets: 32 bits (bit 0 valid, bit 1 polarity, bits 2 to 16 y, bits 17 to
    31 x) and 31 bits of time in microseconds, above which the packet counts overflows.
    """
    _require_start(content, _AEDAT3, "AEDAT 3.1")
    at = content.find(_AEDAT3_END)
    if at < 0:
        raise ValueError("has an AEDAT 3.1 header without its end, the line #!END-HEADER")
    at += len(_AEDAT3_END)
    data, times = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    while at < len(content):
        if at + _PACKET.size > len(content):
            raise ValueError(f"is truncated inside the packet header at byte {at}")
        kind, _, size, _, overflow, capacity, number, _ = _PACKET.unpack_from(content, at)
        polarity = (kind, size) == _POLARITY_EVENT
        if size < 1 or not 0 <= number <= capacity or overflow < 0 or (kind == 1 and not polarity):
            raise ValueError(f"is damaged: the packet at byte {at} has an impossible header")
        start = at + _PACKET.size
        at = start + capacity * size
        if at > len(content):
            raise ValueError(
                f"is truncated: its last packet should end at byte {at}, got {len(content)} bytes"
            )
        if polarity:
            events = np.frombuffer(content, "<u4", 2 * number, start).reshape(-1, 2).astype(np.int64)
            data.append(events[:, 0])
            times.append(events[:, 1] | overflow << 31)
    word, t = np.concatenate(data), np.concatenate(times)
    valid = word & 1 == 1
    word, t = word[valid], t[valid]
    return Events(t, word >> 17, word >> 2 & 0x7FFF, word >> 1 & 1)


def npy(content: bytes) -> Events:
    """Read an array `[n, 4]`: x, y, polarity, and time in milliseconds."""
    with _numpy_errors("a .npy file"):
        rows = np.load(io.BytesIO(content), allow_pickle=False)
    if rows.ndim != 2 or rows.shape[1] != 4 or rows.dtype.kind not in "iuf":
        raise ValueError(f"must hold numbers [n, 4], got {rows.dtype} {list(rows.shape)}")
    x, y, p, milliseconds = rows.T
    return Events(_whole(milliseconds.astype(np.float64) * 1000), _whole(x), _whole(y), _whole(p))


def npz(content: bytes) -> Events:
    """Read an archive of the arrays `t` (microseconds), `x`, `y` and `p`, each `[n]`."""
    with _numpy_errors("a .npz file"):
        archive = np.load(io.BytesIO(content), allow_pickle=False)
        columns = [archive[name] for name in Events._fields]
    if any(column.shape != columns[0].shape or column.ndim != 1 for column in columns):
        shapes = ", ".join(str(list(column.shape)) for column in columns)
        raise ValueError(f"must hold t, x, y and p of one length, got shapes {shapes}")
    return Events(*map(_whole, columns))


def shd_hdf5(content: bytes) -> Iterator[tuple[int, Events]]:
    """Read a file of the Heidelberg digits: yield each recording's label and events.

    `spikes/times` holds seconds, `spikes/units` the channel that fired, one row per recording, and `labels`
    one number each. All events have x = y = 0.

    Raises:
        ImportError: The package h5py is missing.
    """
    try:
        import h5py
    except ImportError as error:
        raise ImportError('reading HDF5 needs the package h5py: pip install -e ".[events]"') from error
    try:
        file = h5py.File(io.BytesIO(content), "r")
        times, units, labels = (file[key] for key in ("spikes/times", "spikes/units", "labels"))
        if not len(times) == len(units) == len(labels):
            raise ValueError(f"holds {len(labels)} labels for {len(times)} times and {len(units)} units")
        for row, label in enumerate(labels[:].tolist()):
            t, p = _whole(times[row].astype(np.float64) * 1e6), _whole(units[row])
            if len(t) != len(p):
                raise ValueError(f"holds {len(t)} times, but {len(p)} units of recording {row}")
            yield int(label), Events(t, np.zeros_like(t), np.zeros_like(t), p)
    except (OSError, KeyError) as error:
        raise ValueError(f"is no HDF5 file with spikes/times, spikes/units and labels: {error}") from error


def _require_start(content: bytes, start: bytes, name: str) -> None:
    if not content.startswith(start):
        raise ValueError(f"must start with {start.decode()} of {name}, got {content[:12]!r}")


_MOST = 1e12  # microseconds: eleven days; times beyond it would overflow when they are framed


def _whole(values: Array) -> Array:
    """Return values rounded to int64."""
    if values.dtype.kind not in "biuf":
        raise ValueError(f"holds {values.dtype} in place of numbers")
    if not np.isfinite(values).all() or (abs(values.astype(float)) > _MOST).any():
        raise ValueError(f"holds a value that is not finite, or beyond {_MOST:.0e}")
    return np.rint(values).astype(np.int64) if values.dtype.kind == "f" else values.astype(np.int64)


@contextmanager
def _numpy_errors(what: str) -> Iterator[None]:
    """Say in one way what NumPy says in many."""
    try:
        yield
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"cannot be read as {what}: {error}") from error
