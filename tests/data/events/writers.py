"""Small event sets, written in the formats and layouts of the published ones.

Written bit by bit from the formats' descriptions, apart from the readers. An event is (t, x, y, p), t in
microseconds.
"""

import random
import struct

import numpy as np

CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()


def some_events(seed, size, count=40, start=0):
    """Return events at whole milliseconds from `start` on, rising in time: every format can hold them."""
    draw = random.Random(seed)
    times = sorted(start + 1000 * draw.randrange(200) for _ in range(count))
    return [(t, draw.randrange(size), draw.randrange(size), draw.randrange(2)) for t in times]


def bin_bytes(events):
    return b"".join(bytes([x, y, p << 7 | t >> 16, t >> 8 & 255, t & 255]) for t, x, y, p in events)


def aedat2_bytes(events, extra=()):
    header = b"#!AER-DAT2.0\r\n# This is a raw AE data file - do not edit\r\n# Timestamps tick is 1 us\r\n"
    words = [((127 - x) << 8 | (127 - y) << 1 | 1 - p, t) for t, x, y, p in events]
    return header + b"".join(struct.pack(">II", *word) for word in [*words, *extra])


def packet(events, kind=1, size=8, capacity=None, overflow=0, valid=1):
    body = b"".join(struct.pack("<II", x << 17 | y << 2 | p << 1 | valid, t) for t, x, y, p in events)
    room = len(events) if capacity is None else capacity
    header = struct.pack("<hhiiiiii", kind, 1, size, 4, overflow, room, len(events), len(events) * valid)
    return header + body + bytes((room - len(events)) * size)


AEDAT3_HEADER = b"#!AER-DAT3.1\r\n#Format: RAW\r\n#Source 1: DVS128\r\n#Start-Time: 2016\r\n#!END-HEADER\r\n"


def aedat3_bytes(events, per_packet=7):
    packets = [packet(events[at : at + per_packet]) for at in range(0, len(events), per_packet)]
    return AEDAT3_HEADER + b"".join(packets)


def write_npz(path, events):
    t, x, y, p = np.array(events, np.int64).reshape(-1, 4).T
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, t=t, x=x.astype(np.uint8), y=y.astype(np.uint8), p=p.astype(np.uint8))


def write_npy(path, events):
    t, x, y, p = np.array(events, np.float64).reshape(-1, 4).T
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, np.stack([x, y, p, t / 1000], 1))


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def nmnist(root, layout="original"):
    """Write 20 + 10 recordings; return the events of both parts in the promised order."""
    parts = []
    for part, numbers in (("Train", (1, 2)), ("Test", (1,))):
        recordings = []
        for number in numbers:
            for digit in range(10):
                events = some_events(f"{part}{number}{digit}", 34)
                name = f"{number * 10 + digit:05d}"
                if layout == "original":
                    write(root / part / str(digit) / f"{name}.bin", bin_bytes(events))
                else:
                    write_npz(root / "events_np" / part.lower() / str(digit) / f"{name}.npz", events)
                recordings.append((digit, events))
        parts.append(recordings)
    return parts


def cifar10_dvs(root, layout="original", count=10):
    """Write `count` recordings of each class; return them in the order that is promised."""
    recordings = []
    for number in range(count):
        for label, name in enumerate(CLASSES):
            events = some_events(f"{name}{number}", 128, 12)
            if layout == "original":
                write(root / name / f"cifar10_{name}_{number}.aedat", aedat2_bytes(events))
            else:
                write_npz(root / "events_np" / name / f"cifar10_{name}_{number}.npz", events)
            recordings.append((label, events))
    return recordings


def dvs_gesture(root, layout="original", repeat=True):
    """Write 2 + 1 trials with a cut per class (two of class 8); return them in the promised order."""
    parts = []
    for part, trials in (("train", ("user01_lab", "user02_led")), ("test", ("user24_led",))):
        recordings = []
        for trial in trials:
            stream, rows, cuts = [], [], []
            for place, label in enumerate([*range(1, 8), 8, 8, 9, 10, 11] if repeat else range(1, 12)):
                start = 1_000_000 * (place + 1)
                events = some_events(f"{trial}{place}", 128, 15, start)
                rows.append(f"{label},{start},{start + 200_000}")
                stream += [(start - 1, 1, 1, 1), *events, (start + 200_000, 2, 2, 0)]  # the bounds of a cut
                cuts.append((label - 1, events))
            for place, (label, events) in enumerate(cuts):
                number = [cut[0] for cut in cuts[:place]].count(label)
                if layout == "events_np":
                    write_npz(root / "events_np" / part / str(label) / f"{trial}_{number}.npz", events)
                elif layout == "npy":
                    write_npy(root / f"ibmGesture{part.title()}" / trial / f"{label}.npy", events)
            if layout == "original":
                table = "class,startTime_usec,endTime_usec\n" + "\n".join(rows) + "\n"
                write(root / "DvsGesture" / f"{trial}.aedat", aedat3_bytes(stream))
                write(root / "DvsGesture" / f"{trial}_labels.csv", table.encode())
            recordings += sorted(cuts, key=lambda cut: cut[0])
        if layout == "original":
            listing = "".join(f"{trial}.aedat\n" for trial in reversed(trials))
            write(root / "DvsGesture" / f"trials_to_{part}.txt", listing.encode())
        parts.append(recordings)
    return parts


def shd(root):
    """Write 6 + 3 recordings; return their labels and (seconds, channels)."""
    import h5py

    draw = random.Random(0)
    parts = []
    root.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", 6), ("test", 3)):
        recordings = []
        for place in range(count):
            spikes = sorted((draw.randrange(2**10) / 2**10, draw.randrange(700)) for _ in range(50))
            recordings.append((19 - place, spikes))
        with h5py.File(root / f"shd_{part}.h5", "w") as file:
            times = file.create_dataset("spikes/times", count, h5py.vlen_dtype(np.float16))
            units = file.create_dataset("spikes/units", count, h5py.vlen_dtype(np.uint16))
            for place, (_, spikes) in enumerate(recordings):
                times[place], units[place] = map(list, zip(*spikes, strict=True))
            file["labels"] = np.array([label for label, _ in recordings], np.uint16)
        parts.append(recordings)
    return parts
