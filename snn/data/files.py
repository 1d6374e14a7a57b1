"""Files of data sets: what a set consists of, where it lies, how a file is read and checked."""

import contextlib
import gzip
import hashlib
import io
import math
import pickle
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

_IDX_MAGIC = {"labels": 0x801, "images": 0x803}  # unsigned bytes, of 1 and of 3 dimensions


class Published(NamedTuple):
    """What was published of a file's unpacked content: `digest` by `algorithm`, `size` in bytes or None."""

    algorithm: str
    digest: str
    size: int | None


class Layout(NamedTuple):
    """Files of a data set, laid out as by torchvision: `folder` below the root, `files` in it by name."""

    folder: str
    files: dict[str, Published]


_FASHION_MNIST = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
_MNIST = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
_SHD = {
    "shd_train.h5": "8e9877c85f29a28dd353ea6a54402667",
    "shd_test.h5": "207ad1295a0ab611e22d1734989c254e",
}
_IDX_SIZES = {
    "train-images-idx3-ubyte": 16 + 60_000 * 28 * 28,
    "train-labels-idx1-ubyte": 8 + 60_000,
    "t10k-images-idx3-ubyte": 16 + 10_000 * 28 * 28,
    "t10k-labels-idx1-ubyte": 8 + 10_000,
}
TORCHVISION_CLASSES = {
    "fashion_mnist": "FashionMNIST",
    "mnist": "MNIST",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
}


def layout(name: str) -> Layout:
    """Return the files of a data set, `fashion_mnist`, `mnist`, `cifar10`, `cifar100` or `shd`."""
    if name in ("fashion_mnist", "mnist"):
        digests = _MNIST if name == "mnist" else _FASHION_MNIST
        files = {file: Published("sha256", digest, _IDX_SIZES[file]) for file, digest in digests.items()}
        return Layout(f"{TORCHVISION_CLASSES[name]}/raw", files)
    if name == "shd":
        return Layout("SHD", {file: Published("md5", digest, None) for file, digest in _SHD.items()})
    from torchvision import datasets

    cifar = getattr(datasets, TORCHVISION_CLASSES[name])
    listed = [*cifar.train_list, *cifar.test_list, (cifar.meta["filename"], cifar.meta["md5"])]
    return Layout(cifar.base_folder, {file: Published("md5", digest, None) for file, digest in listed})


def locate(folder: Path, file: str) -> Path | None:
    """Return the path of a file in a folder, plain or gzipped (`.gz`), or None if there is neither."""
    for path in (folder / file, folder / f"{file}.gz"):
        if path.is_file():
            return path
    return None


def missing(folder: Path, name: str) -> list[Path]:
    """Return the paths of those files of data set `name` that a folder lacks."""
    return [folder / file for file in layout(name).files if locate(folder, file) is None]


def require_all(folder: Path, name: str, root: Path) -> None:
    """Raise FileNotFoundError, with the path and the remedy, if a folder lacks a file of data set `name`."""
    for path in missing(folder, name):
        raise FileNotFoundError(
            f"{path} not found (data.root={root}); "
            f"get it with data.download=true or `python scripts/fetch_data.py {name} --root {root}`"
        )


@contextlib.contextmanager
def naming_root(root: Path) -> Iterator[None]:
    """Add the config key to what is said about a damaged file."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error} (data.root={root})") from error


def read_bytes(path: Path) -> bytes:
    """Return a file's content, unpacked if its name ends in `.gz`.

    Raises:
        ValueError: The gzip stream is broken.
    """
    content = path.read_bytes()
    if path.suffix != ".gz":
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is a broken gzip file: {error}") from error


def difference(content: bytes, published: Published) -> str | None:
    """Return how a file's content differs from the published one, in words, or None if it does not."""
    if published.size is not None and len(content) != published.size:
        return f"holds {len(content)} bytes, but {published.size} were published"
    digest = hashlib.new(published.algorithm, content, usedforsecurity=False).hexdigest()
    return difference_of_digest(published.algorithm, digest, published.digest)


def difference_of_digest(algorithm: str, digest: str, published: str) -> str | None:
    """Return how a digest differs from the published one, in words, or None if it does not."""
    return None if digest == published else f"has {algorithm} {digest}, but {published} was published"


def verify(folder: Path, name: str) -> None:
    """Check every file of data set `name` that lies in a folder against what was published.

    Raises:
        ValueError: A file is broken or differs; the message names it.
    """
    for file, published in layout(name).files.items():
        path = locate(folder, file)
        if path is None:
            continue
        content = read_bytes(path)
        if published.algorithm == "sha256":
            parse_idx(content, path)
        found = difference(content, published)
        if found:
            raise ValueError(f"{path} {found}")


def parse_idx(content: bytes, path: Path) -> Tensor:
    """Read an idx file of images or labels; the file's name says which of the two it must hold.

    Args:
        content: The unpacked file.
        path: Where it came from.

    Returns:
        uint8 `[M, H, W]` for images, `[M]` for labels.

    Raises:
        ValueError: It holds something else, or more or fewer bytes than its header says; `path` is named.
    """
    kind = "images" if "-images-" in path.name else "labels"
    expected = _IDX_MAGIC[kind]
    magic = int.from_bytes(content[:4], "big")
    if magic != expected:
        other = next((f" (it holds {held})" for held, value in _IDX_MAGIC.items() if value == magic), "")
        raise ValueError(f"{path} must start with magic number {expected} of idx {kind}, got {magic}{other}")
    num_dims = magic & 0xFF
    start = 4 + 4 * num_dims
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    size = start + math.prod(shape)
    if len(content) != size:
        raise ValueError(f"{path} is damaged: expected {size} bytes by its header, got {len(content)}")
    if size == start:
        raise ValueError(f"{path} is empty: its header gives the shape {shape}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).reshape(shape)


class _State:
    """Stands for numpy's array or type in a pickle, and keeps what that was made from."""

    def __init__(self, *arguments: object) -> None:
        self.values: tuple[object, ...] = arguments

    def __setstate__(self, state: tuple[object, ...]) -> None:
        self.values = state


class _PlainUnpickler(pickle.Unpickler):
    """Reads containers, numbers and text; of classes, numpy's array and type alone, and those as `_State`."""

    def find_class(self, module: str, name: str) -> type[_State]:
        if (module.replace("._core", ".core"), name) not in (
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
        ):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return _State


def parse_cifar(content: bytes, path: Path) -> tuple[Tensor, Tensor]:
    """Read a file of CIFAR, a pickle; nothing that it names is ever imported or called.

    Args:
        content: The file.
        path: Where it came from.

    Returns:
        Images uint8 `[M, 3, 32, 32]` and labels int64 `[M]`, the fine ones of CIFAR-100.

    Raises:
        ValueError: It holds something else; `path` is named.
    """
    try:
        entry = _PlainUnpickler(io.BytesIO(content), encoding="bytes").load()
        held = {key.decode() if isinstance(key, bytes) else key: value for key, value in entry.items()}
        labels = held["labels"] if "labels" in held else held["fine_labels"]
        raw = held["data"].values[4]
        images = torch.frombuffer(bytearray(raw), dtype=torch.uint8).reshape(len(labels), 3, 32, 32)
        return images, torch.tensor(labels, dtype=torch.int64)
    except Exception as error:  # noqa: BLE001  a damaged pickle fails in many ways; the cause is told
        said = " ".join(str(error).split())
        raise ValueError(f"{path} is damaged, or no file of CIFAR: {said or type(error).__name__}") from error
