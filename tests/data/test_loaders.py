import functools
import multiprocessing
import pickle

import numpy as np
import pytest
import torch

from snn.data import Images, Loader, load
from snn.data import augment as augment_module
from snn.data.loaders import check_settings
from snn.data.sources import digits, synthetic

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores

FACTS = {"channels": 1, "size": 8, "num_classes": 4, "mean": [0.5], "std": [0.3]}
SETTINGS = {
    "root": "unused",
    "download": False,
    "val_fraction": 0.1,
    "split_seed": 0,
    "num_workers": 0,
    "augment": "none",
    "limit": None,
    **FACTS,
    "batch_size": 10,
    "seed": 0,
}
SYNTHETIC = functools.partial(synthetic, channels=1, size=8, num_classes=4)


def load_with(source=SYNTHETIC, **changes):
    return load(source, **{**SETTINGS, **changes})


def epoch_of(loader, epoch):
    """Return a whole epoch as three tensors."""
    return tuple(torch.cat(part) for part in zip(*loader.batches(epoch), strict=True))


def by_sample(loader, epoch):
    """Return a whole epoch sorted by the samples' index."""
    images, labels, index = epoch_of(loader, epoch)
    order = index.argsort()
    return images[order], labels[order], index[order]


def all_equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.fixture
def start_method(request):
    """Start workers by the method that the test names, `fork` if it names none."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(getattr(request, "param", "fork"), force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


def probe(images, draws, number):
    """Show the first drawn number as the image."""
    return draws[:, :1, None, None].expand_as(images)


def test_random_augmentation_differs_by_sample_and_epoch_with_workers(monkeypatch, start_method):
    # hazard 24: 8 equal samples, 2 workers, 2 epochs
    known = augment_module.Augmentation(probe, "probe")
    monkeypatch.setitem(augment_module.AUGMENTATIONS, "probe", known)
    data = Images(torch.full((8, 1, 8, 8), 9, dtype=torch.uint8), torch.zeros(8, dtype=torch.long))

    def drawn(num_workers):
        loader = Loader(
            data,
            torch.arange(8),
            size=8,
            batch_size=3,
            num_workers=num_workers,
            seed=0,
            shuffle=True,
            augmentations=augment_module.parse("probe"),
        )
        return torch.cat([by_sample(loader, epoch)[0].flatten(1)[:, 0] for epoch in (0, 1)])

    parameters = drawn(2)
    assert len(parameters.unique()) == 16
    assert not torch.equal(parameters[:8], parameters[8:])
    assert torch.equal(parameters, drawn(0))


@pytest.mark.parametrize(
    "start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)], indirect=True
)
def test_worker_processes_change_nothing(start_method):
    alone, helped = (load_with(augment="crop4+flip", num_workers=workers).train for workers in (0, 2))
    assert all_equal(epoch_of(alone, 1), epoch_of(helped, 1))


def test_four_workers_change_nothing(start_method):
    alone, helped = (load_with(augment="crop4+flip", num_workers=workers) for workers in (0, 4))
    for part in ("train", "val", "test"):
        first, second = getattr(alone, part), getattr(helped, part)
        assert [len(batch[2]) for batch in second.batches(0)] == [len(batch[2]) for batch in first.batches(0)]
        assert all_equal(epoch_of(first, 0), epoch_of(second, 0))


@pytest.mark.parametrize("batch_size", [1, 7, 58, 1000])
def test_batch_size_changes_nothing_per_sample(batch_size):
    other = load_with(augment="crop4+flip", batch_size=batch_size)
    assert all_equal(epoch_of(other.train, 3), epoch_of(load_with(augment="crop4+flip").train, 3))


def test_batches_have_the_promised_shapes_and_values():
    loaders = load_with()
    raw = SYNTHETIC("", False)[0]
    batches = list(loaders.train.batches(0))
    assert [len(index) for _, _, index in batches] == [10, 10, 10, 10, 10, 8]
    assert loaders.train.num_batches == 6
    assert loaders.train.num_samples == 58
    for images, labels, index in batches:
        assert (images.dtype, labels.dtype, index.dtype) == (torch.float32, torch.int64, torch.int64)
        assert torch.equal(images, raw.images[index] / 255)
        assert torch.equal(labels, raw.labels[index])
    assert images.shape == (8, 1, 8, 8)


def test_only_training_is_shuffled_and_augmented():
    loaders = load_with(augment="crop4+flip")
    sources = dict(zip(("val", "test"), SYNTHETIC("", False), strict=True))
    for part, data in sources.items():
        images, _, index = epoch_of(getattr(loaders, part), 1)
        assert torch.equal(index, index.sort().values)
        assert torch.equal(images, data.images[index] / 255)
    assert torch.equal(epoch_of(loaders.test, 0)[2], torch.arange(32))
    train_index = epoch_of(loaders.train, 1)[2]
    assert not torch.equal(train_index, train_index.sort().values)


def test_order_depends_on_seed_and_epoch():
    loader = load_with().train
    assert torch.equal(epoch_of(loader, 2)[2], epoch_of(load_with().train, 2)[2])
    assert not torch.equal(epoch_of(loader, 2)[2], epoch_of(loader, 3)[2])
    assert not torch.equal(epoch_of(loader, 2)[2], epoch_of(load_with(seed=1).train, 2)[2])


def test_order_never_changes():
    # Another order is another run: a seed would no longer repeat the published numbers.
    assert epoch_of(load_with().train, 0)[2][:8].tolist() == [52, 35, 56, 42, 13, 24, 23, 12]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_leaves_the_global_generator_alone(num_workers, start_method):
    before = torch.get_rng_state()
    loaders = load_with(augment="crop4+flip", num_workers=num_workers)
    for loader in (loaders.train, loaders.val, loaders.test):
        epoch_of(loader, 0)
        loader.first(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loader_survives_an_abandoned_epoch(start_method):
    loader = load_with(num_workers=2).train
    whole = epoch_of(loader, 0)
    next(loader.batches(0))
    one, other = loader.batches(0), loader.batches(0)
    assert all_equal(next(one), next(other))
    assert all_equal(epoch_of(loader, 0), whole)


def test_loaders_can_be_pickled():
    loader = load_with(augment="flip").train
    assert all_equal(epoch_of(pickle.loads(pickle.dumps(loader)), 0), epoch_of(loader, 0))


def test_first_takes_index_order_without_augmentation():
    loader = load_with(augment="crop4+flip").train
    images, _, index = loader.first(20)
    assert torch.equal(index, loader.members[:20])
    assert torch.equal(images, SYNTHETIC("", False)[0].images[index] / 255)
    images.zero_()
    index.zero_()
    _, labels, index = loader.first(20)
    assert torch.equal(index, epoch_of(loader, 0)[2].sort().values[:20])
    assert torch.equal(labels, loader.data.labels[index])
    assert loader.first(20)[0].max() > 0


def test_first_gives_all_there_are():
    assert len(load_with().val.first(100)[1]) == 6


def test_validation_is_drawn_from_training_by_its_own_seed():
    loaders = load_with()
    val, train = epoch_of(loaders.val, 0)[2], epoch_of(loaders.train, 0)[2]
    assert len(val) == 6
    assert torch.equal(torch.cat([val, train]).sort().values, torch.arange(64))
    assert torch.equal(epoch_of(load_with(seed=9).val, 0)[2], val)
    assert not torch.equal(epoch_of(load_with(split_seed=9).val, 0)[2], val)


@pytest.mark.parametrize(("val_fraction", "expected"), [(0.001, 1), (0.25, 16), (0.98, 63)])
def test_validation_has_its_share(val_fraction, expected):
    loaders = load_with(val_fraction=val_fraction)
    assert (loaders.val.num_samples, loaders.train.num_samples) == (expected, 64 - expected)


def test_limit_takes_the_first_training_images_and_the_whole_test():
    loaders = load_with(limit=20)
    assert (loaders.train.num_samples, loaders.val.num_samples, loaders.test.num_samples) == (18, 2, 32)
    used = torch.cat([epoch_of(loaders.train, 0)[2], epoch_of(loaders.val, 0)[2]])
    assert torch.equal(used.sort().values, torch.arange(20))
    assert load_with(limit=1000).train.num_samples == 58


@pytest.mark.parametrize("changes", [{"limit": 1}, {"limit": 4, "val_fraction": 0.9}], ids=str)
def test_something_must_be_left_to_train_on(changes):
    with pytest.raises(ValueError, match=r"data.val_fraction=0..* of . images leaves none to train on"):
        load_with(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"val_fraction": 2.0}, r"data.val_fraction must lie in \(0, 1\), got 2.0"),
        ({"val_fraction": 0.0}, r"data.val_fraction must lie in \(0, 1\), got 0.0"),
        ({"val_fraction": float("nan")}, r"data.val_fraction must lie in \(0, 1\), got nan"),
        ({"split_seed": -1}, "data.split_seed must be >= 0, got -1"),
        ({"num_workers": -1}, "data.num_workers must be >= 0, got -1"),
        ({"augment": "spin"}, "data.augment must be none, or some of flip, crop4, .* got 'spin' in 'spin'"),
        ({"augment": "crop"}, "data.augment: crop needs a number, as in crop4, got 'crop'"),
        ({"augment": "flip|autoaugment"}, "data.augment: autoaugment needs data.channels=3, got 1"),
        ({"limit": 0}, "data.limit must be null or >= 1, got 0"),
        ({"channels": 0}, "data.channels must be >= 1, got 0"),
        ({"size": 0}, "data.size must be >= 1, got 0"),
        ({"num_classes": 0}, "data.num_classes must be >= 1, got 0"),
        ({"mean": [0.1, 0.2]}, r"data.mean must hold data.channels=1 numbers, one each, got \[0.1, 0.2\]"),
        ({"std": []}, r"data.std must hold data.channels=1 numbers, one each, got \[\]"),
        ({"std": None}, r"data.mean and data.std must be given both or neither, got \[0.5\] and None"),
        ({"mean": [float("inf")]}, r"data.mean must be finite, got \[inf\]"),
        ({"std": [0.0]}, r"data.std must be > 0, got \[0.0\]"),
        ({"batch_size": 0}, "trainer.batch_size must be >= 1, got 0"),
    ],
    ids=str,
)
def test_a_bad_setting_is_named_before_anything_is_read(changes, message):
    def never(root, download):
        pytest.fail("data were read")

    with pytest.raises(ValueError, match=f"^{message}$"):
        load_with(never, **changes)


def test_settings_can_be_checked_alone():
    settings = {key: value for key, value in SETTINGS.items() if key not in ("root", "download", "seed")}
    check_settings(**settings)
    with pytest.raises(ValueError, match="data.size"):
        check_settings(**{**settings, "size": -3})


def some_data(**changes):
    images = torch.zeros(8, 1, 8, 8, dtype=torch.uint8)
    good = {"images": images, "labels": torch.arange(8) % 4}
    return Images(**{**good, **changes})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"labels": torch.arange(8)}, "data.num_classes is 4, but the {} labels run from 0 to 7"),
        ({"labels": torch.arange(8) % 4 - 1}, "data.num_classes is 4, but the {} labels run from -1 to 2"),
        ({"images": torch.zeros(8, 3, 8, 8).byte()}, "data.channels is 1, but the {} images have 3"),
        ({"images": torch.zeros(8, 1, 8, 9).byte()}, "data.size is 8, but the {} images have 8x9 pixels"),
        (
            {"images": torch.zeros(8, 1, 8, 8)},
            r"{} images must be uint8 \[M, C, H, W\], .* got torch.float32",
        ),
        ({"images": torch.zeros(8, 8, 8).byte()}, r"{} images must be .* of shape \[8, 8, 8\]"),
        ({"images": torch.zeros(8, 5, 2, 8, 8).byte()}, "data.channels is 1, but the {} images have 2"),
        ({"names": ("a", "b")}, "{} images need one name each or none, got 2 for 8 images"),
        ({"labels": torch.arange(4)}, r"{} images need one label each, got \[4\] for 8 images"),
        (
            {"images": torch.zeros(0, 1, 8, 8).byte(), "labels": torch.arange(0)},
            r"{} images need one label each, got \[0\] for 0 images",
        ),
    ],
    ids=["above", "below", "channels", "size", "dtype", "dims", "frames", "names", "count", "empty"],
)
@pytest.mark.parametrize("part", ["training", "test"])
def test_images_must_be_what_the_config_says(part, bad, message):
    pair = (some_data(**bad), some_data()) if part == "training" else (some_data(), some_data(**bad))
    with pytest.raises(ValueError, match=message.format(part)):
        load_with(lambda root, download: pair)


def test_the_last_label_alone_is_noticed():
    labels = torch.arange(8) % 4
    labels[-1] = 4
    with pytest.raises(ValueError, match="labels run from 0 to 4"):
        load_with(lambda root, download: (some_data(), some_data(labels=labels)))


def test_a_class_without_images_is_warned_about(caplog):
    load_with(lambda root, download: (some_data(), some_data(labels=torch.arange(8) % 3)))
    assert [record.getMessage() for record in caplog.records] == [
        "data.num_classes is 4, but the test labels hold 3 classes"
    ]


def test_source_is_asked_once_for_the_root_and_download():
    asked = []

    def source(root, download):
        asked.append((root, download))
        return some_data(), some_data()

    load_with(source, root="~/sets", download=True)
    assert asked == [("~/sets", True)]


def test_digits_load():
    loaders = load_with(digits, num_classes=10, mean=[0.3], std=[0.4])
    assert (loaders.train.num_samples, loaders.val.num_samples, loaders.test.num_samples) == (1293, 144, 360)


# frames of events

EVENTS = {"channels": 2, "size": 6, "num_classes": 3, "mean": None, "std": None}


def some_frames(M=12, T=4, side=6, names=()):
    frames = torch.randint(0, 9, (M, T, 2, side, side), generator=torch.Generator().manual_seed(M)).byte()
    return Images(frames, torch.arange(M) % 3, unit=1, names=names)


def load_frames(source=lambda root, download: (some_frames(12), some_frames(6)), **changes):
    return load_with(source, **{**EVENTS, **changes})


def test_frames_keep_their_counts():
    loader = load_frames(batch_size=5).test
    for images, labels, index in loader.batches(0):
        assert images.dtype == torch.float32
        assert torch.equal(images, some_frames(6).images[index].float())
        assert torch.equal(labels, index % 3)
    assert images.shape == (1, 4, 2, 6, 6)


@pytest.mark.parametrize("unit", [1, 7, 255])
def test_the_unit_stands_for_one(unit):
    data = some_data(images=torch.full((8, 1, 8, 8), unit).byte(), unit=unit)
    loaders = load_with(lambda root, download: (data, data))
    for images in (loaders.train.first(9)[0], epoch_of(loaders.val, 0)[0]):
        assert torch.equal(images, torch.ones_like(images))


def test_frames_of_another_size_are_resized_to_means():
    frames = torch.arange(16, dtype=torch.uint8).view(1, 1, 1, 4, 4).repeat(6, 3, 2, 1, 1)
    frames[:, 1] *= 2
    data = Images(frames, torch.arange(6) % 3, unit=1)
    loader = load_frames(lambda root, download: (data, data), size=2).test
    (batch, _, _), (first, _, _) = next(loader.batches(0)), loader.first(6)
    assert torch.equal(first, batch)
    for t, times in ((0, 1), (1, 2), (2, 1)):
        assert batch[3, t, 1].tolist() == [[2.5 * times, 4.5 * times], [10.5 * times, 12.5 * times]]
    assert load_frames(lambda root, download: (data, data), size=3).test.first(1)[0][0, 0, 0, 0, 0] == 2.5


def test_frames_resized_do_not_depend_on_batch_and_workers(start_method):
    choices = {"size": 4, "augment": "resizedcrop0.6+roll2|rotate30"}
    runs = [by_sample(load_frames(batch_size=n, **choices).train, 1) for n in (1, 4, 100)]
    runs.append(by_sample(load_frames(num_workers=2, **choices).train, 1))
    assert all(all_equal(runs[0], run) for run in runs[1:])


def test_frames_are_augmented_before_they_are_resized():
    """A pixel cut out of 4x4 leaves 3/4 of one of 2x2."""
    data = Images(torch.full((6, 3, 2, 4, 4), 4).byte(), torch.arange(6) % 3, unit=1)
    images, _, _ = epoch_of(
        load_frames(lambda root, download: (data, data), size=2, augment="cutout1").train, 1
    )
    for sample in images:
        assert sample.flatten(2).sort(2).values.tolist() == [[[3, 4, 4, 4]] * 2] * 3


def test_a_memory_map_is_read_where_needed_alone(tmp_path):
    """The file claims 8 GB of which nothing is stored: a copy or a scan would be noticed."""
    shape = (30_000, 8, 2, 128, 128)
    mapped = np.memmap(tmp_path / "frames", np.uint8, "w+", shape=shape)
    mapped[11] = 3
    data = Images(torch.from_numpy(mapped), torch.arange(shape[0]) % 3, unit=1)
    loaders = load_frames(lambda root, download: (data, some_frames(6)), limit=13, size=6)
    assert loaders.train.data.images.data_ptr() == data.images.data_ptr()
    assert loaders.train.data.unit == 1
    images, _, index = by_sample(loaders.train, 0)
    assert images.shape == (12, 8, 2, 6, 6) and images[index == 11].unique().tolist() == [3]


def test_a_set_with_an_official_split_has_no_names_to_tell():
    assert load_with().split is None


@pytest.mark.parametrize("limit", [None, 8])
def test_the_split_tells_who_is_where(limit):
    train, test = some_frames(12, names=tuple("abcdefghijkl")), some_frames(6, names=tuple("uvwxyz"))
    loaders = load_frames(lambda root, download: (train, test), val_fraction=0.25, limit=limit)
    split = loaders.split
    assert list(split) == ["train", "val", "test"]
    assert split["test"] == list("uvwxyz")
    assert split["val"] == ["abcdefghijkl"[i] for i in epoch_of(loaders.val, 0)[2].tolist()]
    assert sorted(split["train"] + split["val"]) == list("abcdefghijkl")[:limit]
    assert len(split["val"]) == (3 if limit is None else 2)
