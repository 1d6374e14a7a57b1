import gzip
import hashlib
import pickle
import shutil
import struct
from pathlib import Path

import pytest
import torch
from torchvision import datasets

from snn.data import files, sources

NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
HAS_PACKAGE = not files.missing(sources.FASHION_MNIST_PACKAGE, "fashion_mnist")


def idx(values):
    header = struct.pack(f">I{values.dim()}I", 0x800 + values.dim(), *values.shape)
    return header + bytes(values.flatten().tolist())


def small_set():
    """Return images and labels of a set of 6 + 4 images in MNIST's layout."""
    generator = torch.Generator().manual_seed(0)
    out = {}
    for part, count in (("train", 6), ("t10k", 4)):
        out[f"{part}-images-idx3-ubyte"] = torch.randint(0, 256, (count, 28, 28), generator=generator)
        out[f"{part}-labels-idx1-ubyte"] = torch.arange(count)
    return out


def write_idx(folder, zipped=False):
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in small_set().items():
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(values)))
        else:
            (folder / name).write_bytes(idx(values))


@pytest.fixture
def published(monkeypatch):
    """Let the small set be what was published."""
    for name, values in small_set().items():
        content = idx(values)
        monkeypatch.setitem(files._IDX_SIZES, name, len(content))
        for digests in (files._MNIST, files._FASHION_MNIST):
            monkeypatch.setitem(digests, name, hashlib.sha256(content).hexdigest())


@pytest.fixture(autouse=True)
def no_package(monkeypatch, tmp_path):
    monkeypatch.setattr(sources, "FASHION_MNIST_PACKAGE", tmp_path / "not-installed")


def write_cifar(root, monkeypatch, name):
    """Write 5 x 2 + 2 images (100: 10 + 2) in CIFAR's layout; return the images of both parts as written."""
    cifar = getattr(datasets, files.TORCHVISION_CLASSES[name])
    key = "fine_labels" if name == "cifar100" else "labels"
    folder = root / cifar.base_folder
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)

    def write(file, entry):
        content = pickle.dumps(entry)
        (folder / file).write_bytes(content)
        return [file, hashlib.md5(content, usedforsecurity=False).hexdigest()]

    written = []
    for attribute in ("train_list", "test_list"):
        listed = []
        for number, (file, _) in enumerate(getattr(cifar, attribute)):
            data = torch.randint(0, 256, (2, 3 * 32 * 32), generator=generator, dtype=torch.uint8)
            written.append(data)
            listed.append(write(file, {"data": data.numpy(), key: [number, 9 - number]}))
        monkeypatch.setattr(cifar, attribute, listed)
    meta = write(cifar.meta["filename"], {cifar.meta["key"]: ["a", "b"]})
    monkeypatch.setattr(cifar, "meta", {**cifar.meta, "md5": meta[1]})
    return torch.cat(written[:-1]).view(-1, 3, 32, 32), written[-1].view(-1, 3, 32, 32), folder


def one_line_error(kind, *parts, call):
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message
    return message


# Sources without files


def test_digits_are_scaled_to_bytes():
    train, test = sources.digits("nowhere", False)
    assert train.images.shape == (1437, 1, 8, 8)
    assert test.images.shape == (360, 1, 8, 8)
    values = torch.cat([train.images, test.images]).unique()
    assert values.tolist() == [round(x * 255 / 16) for x in range(17)]
    assert torch.equal(torch.cat([train.labels, test.labels]).unique(), torch.arange(10))


def test_digits_always_have_the_same_test_images():
    torch.manual_seed(1)
    _, first = sources.digits("nowhere", False)
    torch.manual_seed(2)
    _, second = sources.digits("nowhere", False)
    assert torch.equal(first.images, second.images)
    assert first.labels[:12].tolist() == [0, 4, 1, 2, 6, 7, 5, 6, 9, 1, 7, 5]


def test_digits_share_no_image_between_the_parts():
    from sklearn.datasets import load_digits

    train, test = sources.digits("nowhere", False)
    both = torch.cat([torch.cat([part.images.flatten(1), part.labels[:, None]], 1) for part in (train, test)])
    data, target = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    whole = torch.cat([data.mul(255 / 16).round().long(), target[:, None]], 1)
    assert sorted(both.tolist()) == sorted(whole.tolist())


@pytest.mark.parametrize(("channels", "size", "num_classes"), [(1, 8, 4), (3, 5, 7), (2, 1, 1)])
def test_synthetic_has_the_shape_asked_for(channels, size, num_classes):
    parts = sources.synthetic("", False, channels=channels, size=size, num_classes=num_classes)
    for data, count in zip(parts, (64, 32), strict=True):
        assert data.images.shape == (count, channels, size, size)
        assert data.images.dtype == torch.uint8
        counts = data.labels.bincount(minlength=num_classes)
        assert counts.max() - counts.min() <= 1


def test_synthetic_is_fixed_and_learnable():
    train, test = sources.synthetic("", False, channels=1, size=8, num_classes=4)
    again, _ = sources.synthetic("", False, channels=1, size=8, num_classes=4)
    assert torch.equal(train.images, again.images)
    distances = torch.cdist(test.images.flatten(1).float(), train.images.flatten(1).float())
    assert torch.equal(train.labels[distances.argmin(1)], test.labels)
    assert len(train.images.unique(dim=0)) == 64


# MNIST and Fashion-MNIST


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("below", ["MNIST/raw", "."])
def test_mnist_is_read_from_both_places(tmp_path, caplog, published, below, zipped):
    write_idx(tmp_path / below, zipped)
    train, test = sources.mnist(str(tmp_path), False)
    expected = small_set()
    for data, part in ((train, "train"), (test, "t10k")):
        assert data.images.dtype == torch.uint8
        assert torch.equal(data.images.long(), expected[f"{part}-images-idx3-ubyte"][:, None])
        assert torch.equal(data.labels, expected[f"{part}-labels-idx1-ubyte"])
    assert not caplog.records


def test_home_expands(tmp_path, monkeypatch, published):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_idx(tmp_path / "sets/MNIST/raw")
    assert len(sources.mnist("~/sets", False)[0].images) == 6
    one_line_error(FileNotFoundError, tmp_path / "other", call=lambda: sources.mnist("~/other", False))
    one_line_error(FileNotFoundError, tmp_path / "other", call=lambda: sources.cifar10("~/other", False))


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10", "cifar100"])
def test_a_missing_set_names_path_key_and_remedy_and_creates_nothing(tmp_path, name):
    root = tmp_path / "data"
    layout = files.layout(name)
    one_line_error(
        FileNotFoundError,
        root / layout.folder / next(iter(layout.files)),
        "data.root",
        "data.download=true",
        f"python scripts/fetch_data.py {name} --root {root}",
        call=lambda: getattr(sources, name)(str(root), False),
    )
    assert not root.exists()


def test_the_one_missing_file_is_named(tmp_path, published):
    write_idx(tmp_path / "MNIST/raw")
    (tmp_path / "MNIST/raw" / NAMES[3]).unlink()
    path = tmp_path / "MNIST/raw" / NAMES[3]
    one_line_error(FileNotFoundError, f"{path} not found", call=lambda: sources.mnist(str(tmp_path), False))


@pytest.mark.parametrize("name", NAMES)
def test_a_truncated_file_is_named_with_both_sizes(tmp_path, name):
    write_idx(tmp_path)
    path = tmp_path / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    one_line_error(
        ValueError,
        path,
        f"expected {len(whole)} bytes",
        f"got {len(whole) - 3}",
        "data.root",
        call=lambda: sources.mnist(str(tmp_path), False),
    )


@pytest.mark.parametrize("kept", [0, 2, 9], ids=lambda kept: f"{kept}-bytes")
def test_a_file_without_a_whole_header_is_named(tmp_path, kept):
    write_idx(tmp_path)
    path = tmp_path / NAMES[0]
    path.write_bytes(path.read_bytes()[:kept])
    one_line_error(ValueError, path, call=lambda: sources.mnist(str(tmp_path), False))


def test_a_file_that_is_too_long_is_named(tmp_path):
    write_idx(tmp_path)
    path = tmp_path / NAMES[1]
    path.write_bytes(path.read_bytes() + b"\0")
    one_line_error(ValueError, path, "14 bytes", "got 15", call=lambda: sources.mnist(str(tmp_path), False))


def test_a_broken_gzip_file_is_named(tmp_path):
    write_idx(tmp_path, zipped=True)
    path = tmp_path / f"{NAMES[0]}.gz"
    path.write_bytes(path.read_bytes()[:-40])
    one_line_error(ValueError, path, "broken gzip file", call=lambda: sources.mnist(str(tmp_path), False))


def test_an_empty_set_is_named(tmp_path):
    write_idx(tmp_path)
    path = tmp_path / NAMES[0]
    path.write_bytes(idx(torch.zeros(0, 28, 28)))
    one_line_error(ValueError, path, "is empty", call=lambda: sources.mnist(str(tmp_path), False))


def test_swapped_files_are_named(tmp_path):
    write_idx(tmp_path)
    images, labels = tmp_path / NAMES[0], tmp_path / NAMES[1]
    content = images.read_bytes()
    images.write_bytes(labels.read_bytes())
    labels.write_bytes(content)
    one_line_error(
        ValueError,
        f"{images} must start with magic number 2051 of idx images, got 2049 (it holds labels)",
        call=lambda: sources.mnist(str(tmp_path), False),
    )


def test_labels_of_another_part_are_noticed(tmp_path):
    write_idx(tmp_path)
    shutil.copy(tmp_path / NAMES[3], tmp_path / NAMES[1])
    one_line_error(
        ValueError,
        f"{tmp_path / NAMES[0]} has 6 images",
        f"{tmp_path / NAMES[1]} has 4 labels",
        call=lambda: sources.mnist(str(tmp_path), False),
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_byte_is_warned_about(tmp_path, caplog, published, name):
    write_idx(tmp_path)
    path = tmp_path / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    sources.mnist(str(tmp_path), False)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert str(path) in record.getMessage()
    assert "sha256" in record.getMessage()


def test_a_subset_is_read_with_a_warning(tmp_path, caplog):
    write_idx(tmp_path)
    assert len(sources.mnist(str(tmp_path), False)[0].images) == 6
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 4


def test_fashion_mnist_falls_back_to_the_package(tmp_path, monkeypatch, published):
    package = tmp_path / "package"
    write_idx(package, zipped=True)
    monkeypatch.setattr(sources, "FASHION_MNIST_PACKAGE", package)
    root = tmp_path / "data"
    assert len(sources.fashion_mnist(str(root), True)[0].images) == 6
    assert not root.exists()


def test_fashion_mnist_in_the_root_comes_first(tmp_path, monkeypatch, published):
    package = tmp_path / "package"
    write_idx(package)
    monkeypatch.setattr(sources, "FASHION_MNIST_PACKAGE", package)
    write_idx(tmp_path / "data/FashionMNIST/raw")
    path = tmp_path / "data/FashionMNIST/raw" / NAMES[2]
    path.unlink()
    # An incomplete set of one's own is an error, not a reason to read another one.
    one_line_error(FileNotFoundError, path, call=lambda: sources.fashion_mnist(str(tmp_path / "data"), False))


@pytest.mark.skipif(not HAS_PACKAGE, reason="Debian's dataset-fashion-mnist is not installed")
def test_the_real_fashion_mnist(tmp_path, monkeypatch, caplog):
    monkeypatch.undo()
    train, test = sources.fashion_mnist(str(tmp_path), False)
    assert (train.images.shape, test.images.shape) == ((60_000, 1, 28, 28), (10_000, 1, 28, 28))
    assert train.labels.bincount().tolist() == [6000] * 10
    assert test.labels[:5].tolist() == [9, 2, 1, 1, 6]
    assert not caplog.records


# CIFAR


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_is_read(tmp_path, monkeypatch, name):
    train_images, test_images, _ = write_cifar(tmp_path, monkeypatch, name)
    train, test = getattr(sources, name)(str(tmp_path), False)
    assert train.images.dtype == torch.uint8
    assert torch.equal(train.images, train_images)
    assert torch.equal(test.images, test_images)
    assert train.labels.dtype == torch.int64
    assert train.labels.tolist() == [label for n in range(len(train_images) // 2) for label in (n, 9 - n)]
    assert test.labels.tolist() == [0, 9]


@pytest.mark.parametrize("file", ["data_batch_3", "test_batch", "batches.meta"])
def test_a_damaged_cifar_file_is_named(tmp_path, monkeypatch, file):
    *_, folder = write_cifar(tmp_path, monkeypatch, "cifar10")
    (folder / file).write_bytes((folder / file).read_bytes()[:-1])
    key = f"data.root={tmp_path}"
    one_line_error(ValueError, folder / file, "md5", key, call=lambda: sources.cifar10(str(tmp_path), True))


def test_a_missing_cifar_file_is_named(tmp_path, monkeypatch):
    *_, folder = write_cifar(tmp_path, monkeypatch, "cifar10")
    path = folder / "data_batch_2"
    path.unlink()
    one_line_error(FileNotFoundError, path, "data.root", call=lambda: sources.cifar10(str(tmp_path), False))


# Published facts


@pytest.mark.parametrize("name", list(files.TORCHVISION_CLASSES))
def test_layouts_are_torchvisions(tmp_path, name):
    folder, listed = files.layout(name)
    assert len(listed) == {"mnist": 4, "fashion_mnist": 4, "cifar10": 7, "cifar100": 3}[name]
    for published in listed.values():
        assert len(published.digest) == {"md5": 32, "sha256": 64}[published.algorithm]
    if "mnist" in name:
        reader = getattr(datasets, files.TORCHVISION_CLASSES[name])
        assert folder == f"{reader.__name__}/raw"
        assert {Path(file).stem for file, _ in reader.resources} == set(listed)
