"""Sources: small sets in the published layouts, whole, missing and damaged."""

import gzip
import shutil

import numpy as np
import pytest
import torch

from snn.data import download as download_module
from snn.data import files
from snn.data.events import sets
from snn.data.events.framing import to_frames
from snn.data.events.readers import Events
from tests.data.events import writers

STEPS = 3
SETTINGS = {"steps": STEPS, "framing": "count", "cache": None}
SPLIT = {"test_fraction": 0.1, "split_seed": 0}


def columns(events):
    return Events(*np.array(events, np.int64).reshape(-1, 4).T)


def is_expected(images, recordings, sensor, framing="count"):
    """Whether frames and labels are those of the written recordings, in their order."""
    frames = [to_frames(columns(events), sensor, STEPS, framing) for _, events in recordings]
    assert (images.images.dtype, images.labels.dtype, images.unit) == (torch.uint8, torch.int64, 1)
    assert images.labels.tolist() == [label for label, _ in recordings]
    return torch.equal(images.images, torch.from_numpy(np.stack(frames)))


def damage(folder, suffix, content):
    """Replace one file, the last of its kind; return its path."""
    path = sorted(folder.rglob(f"*{suffix}"))[-1]
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("framing", ["count", "time"])
@pytest.mark.parametrize("layout", ["original", "events_np"])
@pytest.mark.parametrize("below", ["NMNIST", "NMNIST/extract", "."])
def test_nmnist(tmp_path, layout, framing, below):
    parts = writers.nmnist(tmp_path / below, layout)
    for images, recordings in zip(
        sets.nmnist(str(tmp_path), False, **{**SETTINGS, "framing": framing}), parts, strict=True
    ):
        assert is_expected(images, recordings, sets.SENSORS["nmnist"], framing)
        assert images.images.shape == (len(recordings), STEPS, 2, 34, 34)
        assert images.names == ()


@pytest.mark.parametrize("layout", ["original", "events_np", "npy"])
@pytest.mark.parametrize("below", ["DVS128Gesture", "DVSGesture", "."])
def test_dvs_gesture(tmp_path, layout, below):
    parts = writers.dvs_gesture(tmp_path / below, layout, repeat=layout != "npy")
    for images, recordings in zip(sets.dvs_gesture(str(tmp_path), False, **SETTINGS), parts, strict=True):
        assert is_expected(images, recordings, sets.SENSORS["dvs_gesture"])
        assert images.images.shape[1:] == (STEPS, 2, 128, 128)


@pytest.mark.parametrize("layout", ["original", "events_np"])
def test_cifar10_dvs(tmp_path, layout):
    recordings = writers.cifar10_dvs(tmp_path / "CIFAR10DVS", layout)
    suffix = {"original": ".aedat", "events_np": ".npz"}[layout]
    train, test = sets.cifar10_dvs(str(tmp_path), False, **SETTINGS, **SPLIT)
    assert torch.bincount(train.labels).tolist() == [9] * 10
    assert torch.bincount(test.labels).tolist() == [1] * 10
    assert len({*train.names, *test.names}) == 100
    for images in (train, test):  # names say which recordings they are
        places = []
        for name in images.names:
            label, stem = name.removesuffix(suffix).split("/")
            places.append(int(stem.split("_")[-1]) * 10 + writers.CLASSES.index(label))
        assert places == sorted(places)
        assert is_expected(images, [recordings[place] for place in places], sets.SENSORS["cifar10_dvs"])


def test_the_split_is_drawn_by_its_seed_alone(tmp_path):
    writers.cifar10_dvs(tmp_path / "CIFAR10DVS")
    writers.cifar10_dvs(tmp_path / "other" / "CIFAR10DVS", "events_np")

    def stems(root, **changes):
        images = sets.cifar10_dvs(str(root), False, **{**SETTINGS, **SPLIT, **changes})[1]
        return [name.rsplit(".", 1)[0] for name in images.names]

    assert stems(tmp_path) == stems(tmp_path / "other") == stems(tmp_path, framing="time")
    assert stems(tmp_path) != stems(tmp_path, split_seed=1)
    assert len(stems(tmp_path, test_fraction=0.3)) == 30


def test_the_split_never_changes(tmp_path):
    # Another split is another experiment: a seed would no longer repeat the published numbers.
    writers.cifar10_dvs(tmp_path)
    names = sets.cifar10_dvs(str(tmp_path), False, **SETTINGS, **SPLIT)[1].names
    assert [name.split("/")[1] for name in names[:3]] == [
        "cifar10_ship_0.aedat",
        "cifar10_frog_1.aedat",
        "cifar10_deer_2.aedat",
    ]


@pytest.mark.parametrize("below", ["SHD", "SHD/extract", "."])
@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("framing", ["count", "time"])
def test_shd(tmp_path, below, zipped, framing):
    parts = writers.shd(tmp_path / below)
    if zipped:
        for path in (tmp_path / below).glob("*.h5"):
            path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    loaded = sets.shd(str(tmp_path), False, **{**SETTINGS, "framing": framing})
    for images, recordings in zip(loaded, parts, strict=True):
        events = [
            (label, [(round(seconds * 1e6), 0, 0, unit) for seconds, unit in spikes])
            for label, spikes in recordings
        ]
        assert is_expected(images, events, sets.SENSORS["shd"], framing)
        assert images.images.shape == (len(recordings), STEPS, 700, 1, 1)


ALL = [
    ("nmnist", writers.nmnist, "NMNIST", {}),
    ("dvs_gesture", writers.dvs_gesture, "DVS128Gesture", {}),
    ("cifar10_dvs", writers.cifar10_dvs, "CIFAR10DVS", SPLIT),
    ("shd", writers.shd, "SHD", {}),
]
IDS = [name for name, *_ in ALL]


@pytest.mark.parametrize(("name", "write", "folder", "more"), ALL, ids=IDS)
class TestEachSet:
    def load(self, name, root, more, **changes):
        return getattr(sets, name)(str(root), False, **{**SETTINGS, **more, **changes})

    def test_home_expands_and_the_cache_may_lie_elsewhere(
        self, tmp_path, monkeypatch, name, write, folder, more
    ):
        monkeypatch.setenv("HOME", str(tmp_path))
        write(tmp_path / "data" / folder)
        self.load(name, "~/data", more, cache="~/frames")
        assert [path.name for path in (tmp_path / "data").iterdir()] == [folder]
        assert len([path for path in (tmp_path / "frames").iterdir() if path.is_dir()]) == 1

    def test_a_missing_set_is_one_line_and_nothing_is_made(self, tmp_path, name, write, folder, more):
        with pytest.raises(FileNotFoundError) as caught:
            self.load(name, tmp_path / "data", more)
        message = str(caught.value)
        assert str(tmp_path / "data" / folder) in message
        assert f"data.root={tmp_path / 'data'}" in message
        assert f"`python scripts/fetch_data.py {name} --root {tmp_path / 'data'}`" in message
        assert "\n" not in message
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"steps": 0}, "^encoding.steps must be at least 1, got 0$"),
            ({"framing": "speed"}, "^data.source.framing must be count or time, got 'speed'$"),
        ],
        ids=str,
    )
    def test_a_bad_setting_is_named_before_anything_is_read(
        self, tmp_path, name, write, folder, more, changes, message
    ):
        with pytest.raises(ValueError, match=message):
            self.load(name, tmp_path, more, **changes)

    @pytest.mark.parametrize("content", [b"", b"garbage"], ids=["empty", "garbage"])
    def test_a_damaged_file_is_named_and_nothing_is_kept(self, tmp_path, name, write, folder, more, content):
        write(tmp_path / folder)
        suffix = {"nmnist": ".bin", "shd": ".h5"}.get(name, ".aedat")
        path = damage(tmp_path, suffix, content)
        with pytest.raises(ValueError) as caught:
            self.load(name, tmp_path, more)
        message = str(caught.value)
        assert message.startswith(f"{path} ")
        assert message.endswith(f"(data.root={tmp_path})")
        assert "\n" not in message
        assert [found.name for found in tmp_path.iterdir()] == [folder]


@pytest.mark.parametrize("fraction", [0.0, 1.0, float("nan")])
def test_a_bad_test_fraction_is_named(tmp_path, fraction):
    with pytest.raises(ValueError, match=r"^data.source.test_fraction must lie in \(0, 1\), got "):
        sets.cifar10_dvs(str(tmp_path), False, **SETTINGS, test_fraction=fraction, split_seed=0)


def test_a_class_with_too_few_recordings_is_named(tmp_path):
    writers.cifar10_dvs(tmp_path, count=1)
    with pytest.raises(ValueError, match="test_fraction=0.1 of 1 recordings of class 0 leaves none to train"):
        sets.cifar10_dvs(str(tmp_path), False, **SETTINGS, **SPLIT)


@pytest.mark.parametrize(
    ("name", "folder", "gone", "archive"),
    [
        ("nmnist", "NMNIST", "Train", "Train.zip"),
        ("nmnist", ".", "Test", "Test.zip"),
        ("cifar10_dvs", "CIFAR10DVS", "deer", "deer.zip"),
        ("shd", "SHD", "shd_test.h5", "shd_test.h5.zip"),
    ],
)
def test_what_is_not_unpacked_is_named(tmp_path, name, folder, gone, archive):
    more = SPLIT if name == "cifar10_dvs" else {}
    getattr(writers, name)(tmp_path / folder)
    path = tmp_path / folder / gone
    path.unlink() if path.is_file() else shutil.rmtree(path)
    others = {"Train.zip", "Test.zip", "deer.zip", "cat.zip"} - {archive}
    for other in others:
        (tmp_path / other).write_bytes(b"packed")  # of what is there already
    with pytest.raises(FileNotFoundError, match=f"^{path} not found .*; get .*{name} --root"):
        getattr(sets, name)(str(tmp_path), False, **SETTINGS, **more)
    (tmp_path / archive).write_bytes(b"packed")
    with pytest.raises(
        FileNotFoundError,
        match=f"^{path} not found .*, but {tmp_path / archive} is there: unpack it into {path.parent}$",
    ):
        getattr(sets, name)(str(tmp_path), False, **SETTINGS, **more)


@pytest.mark.parametrize("place", [".", "DVS128Gesture", "DVS128Gesture/download"])
@pytest.mark.parametrize("archive", ["DvsGesture.tar.gz", "ibmGestureTrain.tar.gz"])
def test_a_packed_gesture_set_is_named(tmp_path, place, archive):
    writers.write(tmp_path / place / archive, b"packed")
    with pytest.raises(FileNotFoundError, match=f"but .*{archive} is there: unpack it into .*DVS128Gesture$"):
        sets.dvs_gesture(str(tmp_path), False, **SETTINGS)


def test_unlisted_labels_are_refused(tmp_path):
    writers.nmnist(tmp_path)
    (tmp_path / "Train" / "notes").mkdir()  # nothing to read, nothing to refuse
    sets.nmnist(str(tmp_path), False, **SETTINGS)
    shutil.copytree(tmp_path / "Train" / "3", tmp_path / "Train" / "10")
    with pytest.raises(
        ValueError, match=f"^{tmp_path / 'Train' / '10'} must be named after a class, one of 0, 1,"
    ):
        sets.nmnist(str(tmp_path), False, **SETTINGS)


def test_cached_folders_may_be_named_by_number(tmp_path):
    writers.cifar10_dvs(tmp_path, "events_np")
    named = sets.cifar10_dvs(str(tmp_path), False, **SETTINGS, **SPLIT)
    for label, name in enumerate(writers.CLASSES):
        (tmp_path / "events_np" / name).rename(tmp_path / "events_np" / str(label))
    numbered = sets.cifar10_dvs(str(tmp_path), False, **SETTINGS, **SPLIT)
    for one, other in zip(named, numbered, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("class,", "", "user02_led_labels.csv must start with class,startTime_usec,endTime_usec, got 'start"),
        ("\n11,", "\n12,", "must hold a class from 1 to 11 and start < end in line 13, got '12,"),
        ("\n1,", "\n0,", "must hold a class from 1 to 11 and start < end in line 2, got '0,"),
        ("\n1,1000000,", "\n1,9000000,", "and start < end in line 2, got '1,9000000"),
        ("\n1,1000000,", "\n1,", "must hold three whole numbers in line 2, got '1,1200000'"),
    ],
    ids=str,
)
def test_a_bad_table_of_labels_is_named(tmp_path, old, new, message):
    writers.dvs_gesture(tmp_path)
    path = tmp_path / "DvsGesture" / "user02_led_labels.csv"
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=f"{message}.*data.root={tmp_path}"):
        sets.dvs_gesture(str(tmp_path), False, **SETTINGS)


@pytest.mark.parametrize("gone", ["user02_led.aedat", "user24_led_labels.csv", "trials_to_test.txt"])
def test_a_listed_file_that_is_missing_is_named(tmp_path, gone):
    writers.dvs_gesture(tmp_path)
    (tmp_path / "DvsGesture" / gone).unlink()
    with pytest.raises(FileNotFoundError, match=f"^{tmp_path / 'DvsGesture' / gone} not found"):
        sets.dvs_gesture(str(tmp_path), False, **SETTINGS)


def test_an_unlisted_gesture_file_is_refused(tmp_path):
    writers.dvs_gesture(tmp_path, "npy", repeat=False)
    path = tmp_path / "ibmGestureTest" / "user24_led" / "11.npy"
    shutil.copy(path.with_name("10.npy"), path)
    with pytest.raises(ValueError, match=f"^{path} must be named after a class, 0 to 10"):
        sets.dvs_gesture(str(tmp_path), False, **SETTINGS)


def test_a_cut_without_events_is_empty_and_warned_of(tmp_path, caplog):
    parts = writers.dvs_gesture(tmp_path)
    path = tmp_path / "DvsGesture" / "user24_led_labels.csv"
    path.write_text(path.read_text() + "11,90000000,91000000\n")
    images = sets.dvs_gesture(str(tmp_path), False, **SETTINGS)[1]
    assert is_expected(images, [*parts[1], (10, [])], sets.SENSORS["dvs_gesture"])
    assert [record.getMessage() for record in caplog.records] == [
        "1 of 37 recordings of dvs_gesture hold no event"
    ]


def test_events_outside_name_the_file(tmp_path):
    writers.nmnist(tmp_path)
    path = damage(tmp_path / "Train", ".bin", writers.bin_bytes([(0, 34, 0, 0)]))
    with pytest.raises(ValueError, match=f"^{path} has an event whose x is 34, but it must lie in .0, 34."):
        sets.nmnist(str(tmp_path), False, **SETTINGS)


def test_a_bad_label_of_shd_names_the_file(tmp_path):
    import h5py

    writers.shd(tmp_path)
    with h5py.File(tmp_path / "shd_test.h5", "a") as file:
        file["labels"][1] = 20
    with pytest.raises(
        ValueError, match=f"^{tmp_path}/shd_test.h5 must hold labels in .0, 20., got 20 of recording 1"
    ):
        sets.shd(str(tmp_path), False, **SETTINGS)


@pytest.fixture
def zenkelab(tmp_path, monkeypatch):
    """Serve a small SHD as a folder, and publish it."""
    import hashlib

    served = tmp_path / "served"
    writers.shd(served)
    for path in served.glob("*.h5"):
        content = path.read_bytes()
        monkeypatch.setitem(files._SHD, path.name, hashlib.md5(content).hexdigest())
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(content))
    monkeypatch.setattr(download_module, "SHD_ADDRESS", served.as_uri())
    return served


def test_shd_is_downloaded_whole(tmp_path, zenkelab):
    root = tmp_path / "data"
    train, test = sets.shd(str(root), True, **SETTINGS)
    assert (len(train.labels), len(test.labels)) == (6, 3)
    assert sorted(path.name for path in (root / "SHD").iterdir()) == ["shd_test.h5.gz", "shd_train.h5.gz"]
    shutil.rmtree(zenkelab)
    sets.shd(str(root), True, **SETTINGS)  # what is there is not downloaded


def test_a_bad_download_of_shd_leaves_nothing(tmp_path, zenkelab):
    (zenkelab / "shd_test.h5.gz").write_bytes(gzip.compress(b"another"))
    with pytest.raises(
        OSError, match="could not download shd into data.root=.*shd_test.h5.gz has md5"
    ) as caught:
        sets.shd(str(tmp_path / "data"), True, **SETTINGS)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "data").exists()
