"""Batches from images, or frames of events, held in memory or mapped into it.

The order of the samples, and what augmentation does to each, depend on the seed and the epoch alone: never on
the number of workers, the batch size, the machine, or what was drawn from the global random generator.
"""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, Dataset

from snn.data.augment import Pipeline, augment_images, parse
from snn.data.sources import Images
from snn.keyed_random import ORDER, stream_key
from snn.signals import ignore_all

log = logging.getLogger(__name__)

MOST_WORKERS = 256  # processes that make batches

Batch = tuple[Tensor, Tensor, Tensor]  # images, labels, index


class Loader:
    """Batches of one split.

    Attributes:
        num_samples: Samples in the split.
        num_batches: Batches in an epoch, a short last one included.
    """

    def __init__(
        self,
        data: Images,
        members: Tensor,
        *,
        size: int,
        batch_size: int,
        num_workers: int,
        seed: int,
        shuffle: bool = False,
        augmentations: Pipeline = (),
    ) -> None:
        """Take those samples of `data` whose indices are in `members`, int64 `[num_samples]`, rising."""
        self.data = data
        self.members = members
        self.size = size
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.shuffle = shuffle
        self.augmentations = augmentations
        self.num_samples = len(members)
        self.num_batches = math.ceil(len(members) / batch_size)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Iterate over one epoch.

        Args:
            epoch: Which epoch; it decides on the order and on the augmentations, where the split has any.
            start: Batches to leave out at the beginning; the others are what they would be without.

        Yields:
            `images`, `labels` int64 `[N]`, and `index` int64 `[N]`, each sample's place in the array of its
            source. `images` are float32 `[N, C, H, W]` in [0, 1], or frames `[N, T, C, H, W]` that count
            events; frames of another size are resized, after augmentation: a new pixel is the mean of those
            that it covers, so a count becomes a mean count.
        """
        order = self.members
        if self.shuffle:
            generator = torch.Generator().manual_seed(stream_key(self.seed, epoch, ORDER))
            order = order[torch.randperm(len(order), generator=generator)]
        dataset = _EpochBatches(self, order, epoch)
        own = torch.Generator()  # without one, a DataLoader draws from the global generator
        yield from DataLoader(
            dataset,
            batch_size=None,
            sampler=range(start, self.num_batches),
            num_workers=self.num_workers,
            generator=own,
            worker_init_fn=ignore_all,
        )

    def first(self, n: int) -> Batch:
        """Return the first `n` samples (all, if there are fewer) in index order, without augmentation."""
        index = self.members[:n].clone()
        return _resized(_to_float(self.data, index), self.size), self.data.labels[index], index


@dataclass(frozen=True)
class Loaders:
    """The three splits of a data set: to learn from, to choose by, to report on."""

    train: Loader
    val: Loader
    test: Loader

    @property
    def split(self) -> dict[str, list[str]] | None:
        """Names of the recordings of each split, or None for a set whose recordings have none."""
        loaders = {"train": self.train, "val": self.val, "test": self.test}
        if not all(loader.data.names for loader in loaders.values()):
            return None
        return {part: [it.data.names[i] for i in it.members.tolist()] for part, it in loaders.items()}


def load(
    source: Callable[..., tuple[Images, Images]],
    root: str,
    download: bool,
    val_fraction: float,
    split_seed: int,
    num_workers: int,
    augment: str,
    limit: int | None,
    channels: int,
    size: int,
    num_classes: int,
    mean: list[float] | None,
    std: list[float] | None,
    *,
    batch_size: int,
    seed: int,
) -> Loaders:
    """Read a data set and split it; what every file of `configs/data` names.

    Args:
        source: `source(root=..., download=...)` returns the training and the test images; `snn.data.sources`.
        root: Folder of data sets; `~` expands.
        download: Fetch the files if they are missing.
        val_fraction: Share of the training images set aside for validation, in (0, 1); at least one image.
        split_seed: Seed of the choice of these; the seed of the run has no say in it.
        num_workers: Processes that make batches, 0 for none.
        augment: Augmentations of training images, see `snn.data.augment`.
        limit: Use the first so many training images only (validation is drawn from them), None for all.
        channels: Channels of an image, checked against the images, as are the next two.
        size: Height and width of an image in pixels; frames of events are resized to it.
        num_classes: Classes; labels lie in [0, num_classes).
        mean: Mean of the training images per channel, for those who normalise; images are in [0, 1]. None,
            with `std`, for frames of events.
        std: Their standard deviation per channel.
        batch_size: Samples in a batch.
        seed: Seed of the training split's order and augmentation.

    Raises:
        ValueError: A setting is illegal, a file is damaged, or the images are not what the settings say.
        OSError: A file is missing (FileNotFoundError), or its download failed.
    """
    check_settings(
        val_fraction=val_fraction,
        split_seed=split_seed,
        num_workers=num_workers,
        augment=augment,
        limit=limit,
        channels=channels,
        size=size,
        num_classes=num_classes,
        mean=mean,
        std=std,
        batch_size=batch_size,
    )
    train, test = source(root=root, download=download)
    for part, data in (("training", train), ("test", test)):
        _check_images(data, part, channels, size, num_classes)
    train = train._replace(
        images=train.images[:limit], labels=train.labels[:limit], names=train.names[:limit]
    )
    train_members, val_members = _split(len(train.labels), val_fraction, split_seed)

    def loader(data: Images, members: Tensor, shuffle: bool, augmentations: Pipeline) -> Loader:
        return Loader(
            data,
            members,
            size=size,
            batch_size=batch_size,
            num_workers=num_workers,
            seed=seed,
            shuffle=shuffle,
            augmentations=augmentations,
        )

    return Loaders(
        train=loader(train, train_members, True, parse(augment)),
        val=loader(train, val_members, False, ()),
        test=loader(test, torch.arange(len(test.labels)), False, ()),
    )


def check_settings(
    *,
    val_fraction: float,
    split_seed: int,
    num_workers: int,
    augment: str,
    limit: int | None,
    channels: int,
    size: int,
    num_classes: int,
    mean: list[float] | None,
    std: list[float] | None,
    batch_size: int,
) -> None:
    """Check what can be checked without data; arguments as for `load`.

    Raises:
        ValueError: A setting is illegal; the message gives the rule, the key and the value.
    """
    if not 0 < val_fraction < 1:
        raise ValueError(f"data.val_fraction must lie in (0, 1), got {val_fraction}")
    if limit is not None and limit < 1:
        raise ValueError(f"data.limit must be null or >= 1, got {limit}")
    for key, value, least in (
        ("data.split_seed", split_seed, 0),
        ("data.num_workers", num_workers, 0),
        ("data.channels", channels, 1),
        ("data.size", size, 1),
        ("data.num_classes", num_classes, 1),
        ("trainer.batch_size", batch_size, 1),
    ):
        if value < least:
            raise ValueError(f"{key} must be >= {least}, got {value}")
    if num_workers > MOST_WORKERS:
        raise ValueError(f"data.num_workers must be at most {MOST_WORKERS}, got {num_workers}")
    if (mean is None) != (std is None):
        raise ValueError(f"data.mean and data.std must be given both or neither, got {mean} and {std}")
    for key, values in (("data.mean", mean or []), ("data.std", std or [])):
        if mean is not None and len(values) != channels:
            raise ValueError(f"{key} must hold data.channels={channels} numbers, one each, got {values}")
        if not all(math.isfinite(value) for value in values):
            raise ValueError(f"{key} must be finite, got {values}")
    if std is not None and min(std) <= 0:
        raise ValueError(f"data.std must be > 0, got {std}")
    steps = [step.name for token in parse(augment) for step in token]
    if "autoaugment" in steps and channels != 3:
        raise ValueError(f"data.augment: autoaugment needs data.channels=3, got {channels}")


class _EpochBatches(Dataset[Batch]):
    """Item `b` is batch `b` of one epoch, made by whichever worker is asked for it."""

    def __init__(self, loader: Loader, order: Tensor, epoch: int) -> None:
        self.loader = loader
        self.order = order
        self.epoch = epoch

    def __len__(self) -> int:
        return self.loader.num_batches

    def __getitem__(self, b: int) -> Batch:
        # A copy: with a view, the whole order would travel from the worker.
        loader = self.loader
        index = self.order[b * loader.batch_size : (b + 1) * loader.batch_size].clone()
        images = _to_float(loader.data, index)
        if loader.augmentations:
            images = augment_images(images, index, loader.augmentations, loader.seed, self.epoch)
        return _resized(images, loader.size), loader.data.labels[index], index


def _to_float(data: Images, index: Tensor) -> Tensor:
    return data.images[index].to(torch.float32).div_(data.unit)


def _resized(images: Tensor, size: int) -> Tensor:
    """Resize frames of another size; images have theirs already."""
    if images.shape[-2:] == (size, size):
        return images
    resized: Tensor = interpolate(images.flatten(1, 2), (size, size), mode="area")
    return resized.view(*images.shape[:3], size, size)


def _split(num_images: int, val_fraction: float, split_seed: int) -> tuple[Tensor, Tensor]:
    """Return the sorted indices of the training and of the validation images."""
    num_val = max(1, round(val_fraction * num_images))
    if num_val >= num_images:
        raise ValueError(f"data.val_fraction={val_fraction} of {num_images} images leaves none to train on")
    order = torch.randperm(num_images, generator=torch.Generator().manual_seed(split_seed))
    return order[num_val:].sort().values, order[:num_val].sort().values


def _check_images(data: Images, part: str, channels: int, size: int, num_classes: int) -> None:
    """Check labels, and of the images the shape alone, against the facts that the config states."""
    images, labels, shape = data.images, data.labels, list(data.images.shape)
    if images.dtype != torch.uint8 or len(shape) not in (4, 5):
        rule = "must be uint8 [M, C, H, W], or [M, T, C, H, W] of events"
        raise ValueError(f"{part} images {rule}, got {images.dtype} of shape {shape}")
    if shape[0] == 0 or list(labels.shape) != shape[:1]:
        raise ValueError(f"{part} images need one label each, got {list(labels.shape)} for {shape[0]} images")
    if len(data.names) not in (0, shape[0]):
        raise ValueError(
            f"{part} images need one name each or none, got {len(data.names)} for {shape[0]} images"
        )
    if shape[-3] != channels:
        raise ValueError(f"data.channels is {channels}, but the {part} images have {shape[-3]}")
    if len(shape) == 4 and shape[-2:] != [size, size]:
        raise ValueError(f"data.size is {size}, but the {part} images have {shape[-2]}x{shape[-1]} pixels")
    lo, hi = int(labels.min()), int(labels.max())
    if lo < 0 or hi >= num_classes:
        raise ValueError(f"data.num_classes is {num_classes}, but the {part} labels run from {lo} to {hi}")
    present = len(torch.bincount(labels).nonzero())
    if present < num_classes:
        log.warning("data.num_classes is %d, but the %s labels hold %d classes", num_classes, part, present)
