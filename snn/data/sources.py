"""Where images come from: `source(root=..., download=...)` returns the training and the test images of a set.

An image's place in its array is the sample's `index` from here on.
"""

import logging
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from snn.data import files
from snn.data.download import download as download_set

log = logging.getLogger(__name__)

FASHION_MNIST_PACKAGE = Path("/usr/share/datasets/fashion-mnist")  # of Debian's dataset-fashion-mnist
_NUM_DIGITS_TEST = 360  # of 1797, a fifth
_NUM_SYNTHETIC = (64, 32)  # train, test
_SYNTHETIC_NOISE = 0.15


class Images(NamedTuple):
    """One split of a data set.

    Attributes:
        images: Images uint8 `[M, C, H, W]`, or frames of events uint8 `[M, T, C, H, W]`; may be a memory map.
        labels: int64 `[M]`.
        unit: The value of a pixel that stands for 1.0: 255 for images, 1 for counts of events.
        names: Names of the recordings, one each, of a set without an official split; else empty.
    """

    images: Tensor
    labels: Tensor
    unit: int = 255
    names: tuple[str, ...] = ()


def digits(root: str, download: bool) -> tuple[Images, Images]:
    """Return scikit-learn's 1797 handwritten digits of 8x8 pixels; `root` and `download` play no part."""
    from sklearn.datasets import load_digits

    data, target = load_digits(return_X_y=True)
    images = torch.from_numpy(data).mul(255 / 16).round_().to(torch.uint8).reshape(-1, 1, 8, 8)
    labels = torch.from_numpy(target).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order[:_NUM_DIGITS_TEST].sort().values, order[_NUM_DIGITS_TEST:].sort().values
    return Images(images[train], labels[train]), Images(images[test], labels[test])


def synthetic(
    root: str, download: bool, *, channels: int, size: int, num_classes: int
) -> tuple[Images, Images]:
    """Return 64 and 32 images made on the spot: a random image per class, plus noise.

    Args:
        root: Unused.
        download: Unused.
        channels: Channels of an image.
        size: Height and width of an image.
        num_classes: Classes; the labels go round, so they are balanced.
    """
    generator = torch.Generator().manual_seed(0)
    prototypes = torch.rand(num_classes, channels, size, size, generator=generator)

    def draw(count: int) -> Images:
        labels = torch.arange(count) % num_classes
        noise = torch.rand(count, channels, size, size, generator=generator) * 2 - 1
        images = (prototypes[labels] + _SYNTHETIC_NOISE * noise).clamp_(0, 1)
        return Images(images.mul_(255).round_().to(torch.uint8), labels)

    train, test = (draw(count) for count in _NUM_SYNTHETIC)
    return train, test


def fashion_mnist(root: str, download: bool) -> tuple[Images, Images]:
    """Return Fashion-MNIST, from `ROOT/FashionMNIST/raw`, `ROOT` or else the installed Debian package.

    Args:
        root: Folder of data sets; `~` expands.
        download: Fetch what is missing.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is damaged.
        OSError: The download failed.
    """
    return _read_idx_set("fashion_mnist", root, download, FASHION_MNIST_PACKAGE)


def mnist(root: str, download: bool) -> tuple[Images, Images]:
    """Return MNIST, from `ROOT/MNIST/raw` or `ROOT`; arguments and errors as for `fashion_mnist`."""
    return _read_idx_set("mnist", root, download, None)


def cifar10(root: str, download: bool) -> tuple[Images, Images]:
    """Return CIFAR-10, from `ROOT/cifar-10-batches-py`; arguments and errors as for `fashion_mnist`."""
    return _read_cifar("cifar10", root, download)


def cifar100(root: str, download: bool) -> tuple[Images, Images]:
    """Return CIFAR-100 with its 100 fine labels, from `ROOT/cifar-100-python`; otherwise as `cifar10`."""
    return _read_cifar("cifar100", root, download)


def _read_idx_set(name: str, root: str, download: bool, package: Path | None) -> tuple[Images, Images]:
    home = Path(root).expanduser()
    folder = _idx_folder(name, home, package)
    if download and files.missing(folder, name):
        download_set(name, home)
        folder = _idx_folder(name, home, package)
    files.require_all(folder, name, home)
    with files.naming_root(home):
        return _read_idx_part(folder, "train", name), _read_idx_part(folder, "t10k", name)


def _idx_folder(name: str, root: Path, package: Path | None) -> Path:
    """Return the folder that holds the most files of a set; the package only if the root holds none."""
    layout = files.layout(name)
    inside = root / layout.folder
    folder = min((inside, root), key=lambda path: len(files.missing(path, name)))
    if package is not None and len(files.missing(folder, name)) == len(layout.files) and package.is_dir():
        return package
    return folder


def _read_idx_part(folder: Path, part: str, name: str) -> Images:
    images, image_path = _read_idx_file(folder, f"{part}-images-idx3-ubyte", name)
    labels, label_path = _read_idx_file(folder, f"{part}-labels-idx1-ubyte", name)
    if len(images) != len(labels):
        raise ValueError(f"{image_path} has {len(images)} images, but {label_path} has {len(labels)} labels")
    return Images(images[:, None], labels.long())


def _read_idx_file(folder: Path, file: str, name: str) -> tuple[Tensor, Path]:
    path = files.locate(folder, file) or folder / file
    content = files.read_bytes(path)
    values = files.parse_idx(content, path)
    published = files.layout(name).files
    found = files.difference(content, published[file])
    if found:
        for other, facts in published.items():
            if files.difference(content, facts) is None:
                raise ValueError(f"{path} holds what was published as {other}: are files swapped?")
        log.warning("%s %s: a subset, or a damaged file?", path, found)
    return values, path


def _read_cifar(name: str, root: str, download: bool) -> tuple[Images, Images]:
    home = Path(root).expanduser()
    below, listed = files.layout(name)
    folder = home / below
    if download and files.missing(folder, name):
        download_set(name, home)
    files.require_all(folder, name, home)
    with files.naming_root(home):
        files.verify(folder, name)
        train = [file for file in listed if file.startswith(("data_batch_", "train"))]
        return _read_cifar_part(folder, train), _read_cifar_part(folder, ["test_batch", "test"])


def _read_cifar_part(folder: Path, names: list[str]) -> Images:
    paths = [path for name in names if (path := files.locate(folder, name)) is not None]
    parts = [files.parse_cifar(files.read_bytes(path), path) for path in paths]
    images, labels = zip(*parts, strict=True)
    return Images(torch.cat(images), torch.cat(labels))
