"""The cache of frames: used, keyed, whole or not there."""

import json
import logging
import multiprocessing
import os
import shutil

import pytest
import torch

from snn.data.events import cache as cache_module
from snn.data.events import layouts, sets
from tests.data.events import writers

SETTINGS = {"steps": 3, "framing": "count", "cache": None}


@pytest.fixture
def root(tmp_path):
    writers.nmnist(tmp_path / "NMNIST")
    return tmp_path


@pytest.fixture
def reads(monkeypatch):
    """Count the files that were read as recordings, and the files that were hashed."""

    class Reads:
        files = 0
        hashed = 0

    def read_file(path, reader, real=layouts.read_file):
        Reads.files += 1
        return real(path, reader)

    def sha256(path, real=cache_module._sha256):
        Reads.hashed += 1
        return real(path)

    monkeypatch.setattr(layouts, "read_file", read_file)
    monkeypatch.setattr(cache_module, "_sha256", sha256)
    return Reads


def load(root, **changes):
    return sets.nmnist(str(root), False, **{**SETTINGS, **changes})


def caches(root):
    return sorted(path.name for path in (root / "event_frames").iterdir() if path.is_dir())


def equal(first, second):
    return all(
        torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels)
        for a, b in zip(first, second, strict=True)
    )


def test_recordings_are_read_once(root, reads, caplog):
    caplog.set_level(logging.INFO)
    first = load(root)
    folder = root / "event_frames" / caches(root)[0]
    assert reads.files == 30
    second = load(root)
    assert reads.files == 30
    assert equal(first, second)
    built, said = [record.getMessage() for record in caplog.records][1:]
    assert built.startswith("frames of nmnist: built from 30 recordings in ")
    assert built.endswith(f" s, in {folder}")
    assert said == f"frames of nmnist: as built before, from {folder}"


def test_frames_are_mapped_and_writing_to_them_changes_no_file(root):
    train = load(root)[0]
    path = root / "event_frames" / caches(root)[0] / "train.u8"
    assert path.stat().st_size == train.images.numel()
    train.images.fill_(7)
    assert load(root)[0].images.max() < 7


@pytest.mark.parametrize("changes", [{"steps": 4}, {"framing": "time"}], ids=str)
def test_another_setting_is_another_cache(root, reads, changes):
    first = load(root)
    other = load(root, **changes)
    assert reads.files == 60
    assert not equal(first, other) if "framing" in changes else other[0].images.shape[1] == 4
    assert equal(load(root), first)
    assert reads.files == 60
    assert len(caches(root)) == 2


def test_another_version_of_the_code_is_another_cache(root, reads, monkeypatch):
    load(root)
    monkeypatch.setattr(cache_module, "VERSION", cache_module.VERSION + 1)
    load(root)
    assert reads.files == 60


def one_byte(path):
    content = bytearray(path.read_bytes())
    content[0] ^= 1  # an x, one pixel aside
    path.write_bytes(content)


def one_byte_in_secret(path):
    before = path.stat()
    one_byte(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def swap_labels(path):
    other = path.parents[1] / "9" / "00019.bin"
    mine, its = path.read_bytes(), other.read_bytes()
    path.write_bytes(its)
    other.write_bytes(mine)


CHANGES = [one_byte, one_byte_in_secret, swap_labels, os.remove]


@pytest.mark.parametrize("change", CHANGES, ids=["byte", "byte and clock", "swap", "gone"])
@pytest.mark.parametrize("settled", [True, False])
def test_a_change_of_any_file_is_seen(root, reads, monkeypatch, change, settled):
    if settled:
        monkeypatch.setattr(cache_module, "SETTLED_NS", -1)
    first = load(root)
    change(root / "NMNIST" / "Train" / "3" / "00013.bin")
    changed = load(root)
    assert reads.files == 30 + len(changed[0].labels) + 10
    assert not torch.equal(first[0].images[:19], changed[0].images[:19])
    assert len(caches(root)) == 2


def test_a_test_recording_is_no_training_recording(root, reads):
    load(root)
    shutil.move(root / "NMNIST" / "Test" / "0" / "00010.bin", root / "NMNIST" / "Train" / "0" / "00030.bin")
    shutil.copy(root / "NMNIST" / "Train" / "0" / "00020.bin", root / "NMNIST" / "Test" / "0" / "00010.bin")
    train, test = load(root)
    assert (len(train.labels), len(test.labels)) == (21, 10)


def test_files_that_stay_are_hashed_once(root, reads, monkeypatch):
    load(root)
    load(root)
    assert reads.hashed == 60  # written just now: their clock may not have ticked
    monkeypatch.setattr(cache_module, "SETTLED_NS", -1)
    load(root)
    load(root)
    assert reads.hashed == 90
    os.utime(root / "NMNIST" / "Train" / "3" / "00013.bin")
    load(root, steps=4)
    assert reads.hashed == 91


def test_an_index_of_another_folder_or_a_broken_one_is_not_believed(root, reads, monkeypatch):
    monkeypatch.setattr(cache_module, "SETTLED_NS", -1)
    load(root)
    index = root / "event_frames" / "nmnist.json"
    for content in ("garbage", "{}", "[]", json.dumps({"folder": "/elsewhere", "files": {}})):
        index.write_text(content)
        before = reads.hashed
        load(root)
        assert reads.hashed == before + 30


def test_a_set_that_moved_keeps_its_frames(root, reads):
    frames = str(root / "frames")
    load(root, cache=frames)
    (root / "NMNIST").rename(root / "N-MNIST")
    load(root, cache=frames)
    assert reads.files == 30


@pytest.mark.parametrize("at", [0, 17, 29])
def test_a_build_that_fails_leaves_nothing(root, monkeypatch, at):
    path = sorted((root / "NMNIST").rglob("*.bin"))[at]
    path.write_bytes(b"1234")
    with pytest.raises(
        ValueError, match=f"^{path} must hold 5 bytes per event, got 4 bytes .data.root={root}."
    ):
        load(root)
    assert [found.name for found in root.iterdir()] == ["NMNIST"]


def test_a_build_that_is_interrupted_leaves_nothing(root, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cache_module, "to_frames", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load(root)
    assert [found.name for found in root.iterdir()] == ["NMNIST"]


def test_a_failing_build_keeps_the_other_caches(root):
    load(root)
    before = sorted(path.name for path in (root / "event_frames").iterdir())
    (root / "NMNIST" / "Test" / "0" / "00010.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="00010.bin is empty"):
        load(root)
    assert sorted(path.name for path in (root / "event_frames").iterdir()) == before


def test_a_file_that_changes_while_it_is_read_is_named(root, monkeypatch):
    path = root / "NMNIST" / "Train" / "3" / "00013.bin"

    def to_frames(*args, real=cache_module.to_frames):
        os.utime(path, ns=(1, 1))
        return real(*args)

    monkeypatch.setattr(cache_module, "to_frames", to_frames)
    with pytest.raises(ValueError, match=f"^{path} changed while it was read .data.root"):
        load(root)
    assert [found.name for found in root.iterdir()] == ["NMNIST"]


def test_a_cache_folder_that_cannot_be_made_is_one_line(root):
    (root / "file").write_text("")
    with pytest.raises(
        OSError, match=f"could not make frames of nmnist in {root}/file/x .data.source.cache"
    ) as caught:
        load(root, cache=str(root / "file" / "x"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spoil", ["train.u8", "test.u8", "labels.json"])
@pytest.mark.parametrize("how", ["cut", "gone"])
def test_a_damaged_cache_is_named(root, spoil, how):
    load(root)
    path = root / "event_frames" / caches(root)[0] / spoil
    if how == "cut":
        os.truncate(path, path.stat().st_size - 1)
    else:
        path.unlink()
    with pytest.raises(ValueError, match=f".u8 is damaged, delete {path.parent}: "):
        load(root)


def test_no_gesture_at_all_is_named(tmp_path):
    writers.dvs_gesture(tmp_path)
    path = tmp_path / "DvsGesture" / "user24_led_labels.csv"
    path.write_text("class,startTime_usec,endTime_usec\n")
    with pytest.raises(ValueError, match="trials_to_test.txt leads to no test recording .data.root="):
        sets.dvs_gesture(str(tmp_path), False, **SETTINGS)


def build_at_once(root, barrier, results):
    """Load in a process of its own, so that all build before the first is done."""
    real = cache_module._move

    def move(made, folder):
        barrier.wait(20)
        real(made, folder)

    cache_module._move = move
    results.put(int(load(root)[0].images.sum()))


def test_processes_that_build_at_once_share_one_cache(root):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    processes = [context.Process(target=build_at_once, args=(root, barrier, results)) for _ in range(3)]
    for process in processes:
        process.start()
    sums = [results.get(timeout=30) for _ in processes]
    for process in processes:
        process.join(30)
    assert sums == [20 * 40] * 3
    assert len(caches(root)) == 1
    assert not [path for path in (root / "event_frames").iterdir() if path.name.startswith(".")]
