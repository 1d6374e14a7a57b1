"""Each format, byte by byte."""

import io
import struct
import sys

import numpy as np
import pytest

from snn.data.events import readers
from tests.data.events import writers

SOME = writers.some_events(0, 34)


def rows(events):
    return list(zip(*(column.tolist() for column in events), strict=True))


def archive(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def array(values):
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def test_nmnist_by_hand():
    # x = 3, y = 33; 0x81 is ON and 1 << 16 us; 0x0203 us more. Then OFF at 5 us.
    content = bytes([3, 33, 0x81, 0x02, 0x03, 0, 1, 0, 0, 5])
    assert rows(readers.nmnist_bin(content)) == [(65536 + 515, 3, 33, 1), (5, 0, 1, 0)]


def test_nmnist_markers_shift_what_follows():
    events = [(7, 1, 2, 0), (0, 9, 240, 1), (3, 4, 5, 1), (0, 0, 240, 0), (1, 6, 7, 0)]
    expected = [(7, 1, 2, 0), (8195, 4, 5, 1), (16385, 6, 7, 0)]
    assert rows(readers.nmnist_bin(writers.bin_bytes(events))) == expected
    t, x, y, p = np.array(events).T
    assert (
        rows(readers.nmnist_npz(archive(t=t.astype(np.uint32), x=x, y=y.astype(np.uint8), p=p))) == expected
    )


def test_aedat2_by_hand():
    # the address 0b0_0000010_0000011_0: ON (a 0), bits 1 to 7 are 3, bits 8 to 14 are 2
    header = b"#!AER-DAT2.0\r\n# anything\r\n"
    body = struct.pack(">IIII", 0b0_0000010_0000011_0, 70000, 0b1, 70001)
    assert rows(readers.aedat2(header + body)) == [(70000, 125, 124, 1), (70001, 127, 127, 0)]
    assert rows(readers.aedat2(header)) == []


def test_aedat2_leaves_special_events_out():
    content = writers.aedat2_bytes(SOME, extra=[(1 << 15, 5), (1 << 31, 6)])
    assert rows(readers.aedat2(content)) == SOME


def test_aedat3_by_hand():
    # x = 5, y = 9, ON, valid, 17 us after one overflow of 2^31 us; the packet has room for 2 events
    word = 5 << 17 | 9 << 2 | 1 << 1 | 1
    header = struct.pack("<hhiiiiii", 1, 1, 8, 4, 1, 2, 1, 1)
    content = writers.AEDAT3_HEADER + header + struct.pack("<II", word, 17) + bytes(8)
    assert rows(readers.aedat3(content)) == [(2**31 + 17, 5, 9, 1)]
    assert rows(readers.aedat3(writers.AEDAT3_HEADER)) == []


def test_aedat3_skips_invalid_events_and_other_packets():
    content = b"".join(
        [
            writers.AEDAT3_HEADER,
            writers.packet([(1, 1, 1, 1)], valid=0),
            writers.packet([], kind=0, size=12, capacity=3),
            writers.packet(SOME[:3], capacity=5),
            writers.packet(SOME[3:]),
        ]
    )
    assert rows(readers.aedat3(content)) == SOME


@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.float32])
def test_npy_holds_milliseconds(dtype):
    assert rows(readers.npy(array(np.array([[3, 4, 1, 12], [5, 6, 0, 13]], dtype)))) == [
        (12000, 3, 4, 1),
        (13000, 5, 6, 0),
    ]


@pytest.mark.parametrize(
    ("reader", "content"),
    [
        (readers.nmnist_bin, writers.bin_bytes(SOME)),
        (readers.aedat2, writers.aedat2_bytes(SOME)),
        (readers.aedat3, writers.aedat3_bytes(SOME)),
        (readers.npy, array(np.array([(x, y, p, t / 1000) for t, x, y, p in SOME]))),
        (readers.npz, archive(**dict(zip("txyp", np.array(SOME).T, strict=True)))),
    ],
    ids=["bin", "aedat2", "aedat3", "npy", "npz"],
)
def test_a_round_trip_keeps_all(reader, content):
    events = reader(content)
    assert rows(events) == SOME
    assert all(column.dtype == np.int64 for column in events)


ODD = writers.aedat3_bytes(SOME)
RANDOM = np.random.default_rng(0).integers(0, 256, 4000, np.uint8).tobytes()


@pytest.mark.parametrize(
    ("reader", "content", "message"),
    [
        (readers.nmnist_bin, writers.bin_bytes(SOME)[:-1], "must hold 5 bytes per event, got 199 bytes"),
        (readers.aedat2, b"garbage", "must start with #!AER-DAT2 of AEDAT 2.0, got b'garbage'"),
        (readers.aedat2, ODD, "must start with #!AER-DAT2 of AEDAT 2.0, got b'#!AER-DAT3.1'"),
        (readers.aedat2, b"#!AER-DAT2.0\r\n# and no", "has an AEDAT header without an end"),
        (readers.aedat2, writers.aedat2_bytes(SOME)[:-3], "8 bytes per event after its header, got 317"),
        (readers.aedat2, b"#!AER-DAT2.0\r\n" + RANDOM, "addresses that a DVS128 does not have"),
        (readers.aedat3, b"#!AER-DAT3.0\r\n", "must start with #!AER-DAT3.1 of AEDAT 3.1"),
        (readers.aedat3, ODD.replace(b"#!END-HEADER", b"#"), "header without its end, the line #!END-HEADER"),
        (readers.aedat3, ODD[:-1], r"is truncated: its last packet should end at byte \d+, got \d+ bytes"),
        (readers.aedat3, ODD + b"1234", r"is truncated inside the packet header at byte \d+"),
        (readers.aedat3, writers.AEDAT3_HEADER + RANDOM, r"is (damaged|truncated)"),
        (readers.aedat3, writers.AEDAT3_HEADER + bytes(28), r"is damaged: the packet at byte \d+ has an imp"),
        (readers.aedat3, writers.AEDAT3_HEADER + writers.packet([], size=16), "is damaged: the packet"),
        (readers.npy, b"garbage", "cannot be read as a .npy file: "),
        (readers.npy, array(np.zeros((2, 4)))[:-1], "cannot be read as a .npy file: "),
        (readers.npy, array(np.zeros((4, 2))), r"must hold numbers \[n, 4\], got float64 \[4, 2\]"),
        (readers.npy, array(np.full((1, 4), np.nan)), "holds a value that is not finite"),
        (readers.npz, b"garbage", "cannot be read as a .npz file: "),
        (readers.npz, archive(t=[1], x=[1], y=[1]), "cannot be read as a .npz file: .*p"),
        (readers.npz, archive(t=[1], x=[1], y=[1, 2], p=[1]), r"t, x, y and p of one length, .*\[1\], \[2\]"),
    ],
)
def test_what_is_not_the_format_is_refused(reader, content, message):
    with pytest.raises(ValueError, match=message):
        reader(content)


@pytest.mark.parametrize("cut", range(1, 1200, 97))
def test_a_truncated_archive_is_refused(cut):
    content = archive(**dict(zip("txyp", np.array(SOME).T, strict=True)))
    with pytest.raises(ValueError, match="cannot be read as a .npz file"):
        readers.npz(content[:-cut])


def test_objects_are_never_unpickled():
    with pytest.raises(ValueError, match="cannot be read as a .npy file"):
        readers.npy(array(np.array([[print, 1, 1, 1]], object)))


def test_hdf5_by_hand(tmp_path):
    parts = writers.shd(tmp_path)
    read = list(readers.shd_hdf5((tmp_path / "shd_test.h5").read_bytes()))
    assert [label for label, _ in read] == [19, 18, 17]
    for (_, events), (_, spikes) in zip(read, parts[1], strict=True):
        assert rows(events) == [(round(seconds * 1e6), 0, 0, unit) for seconds, unit in spikes]


def test_hdf5_that_is_none_is_refused(tmp_path):
    import h5py

    writers.shd(tmp_path)
    content = (tmp_path / "shd_test.h5").read_bytes()
    for bad in (b"garbage", content[: len(content) // 2]):
        with pytest.raises(ValueError, match="is no HDF5 file with spikes/times, spikes/units and labels"):
            list(readers.shd_hdf5(bad))
    with h5py.File(tmp_path / "shd_test.h5", "a") as file:
        del file["labels"]
        file["labels"] = [1, 2]
    with pytest.raises(ValueError, match="holds 2 labels for 3 times and 3 units"):
        list(readers.shd_hdf5((tmp_path / "shd_test.h5").read_bytes()))


def test_without_h5py_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match=r'^reading HDF5 needs .* h5py: pip install -e "\.\[events\]"$'):
        list(readers.shd_hdf5(b""))
