"""What was published of the event sets that no program can fetch, and how to say that it is missing."""

import hashlib
from pathlib import Path
from typing import NamedTuple

from snn.data.files import difference_of_digest


class Release(NamedTuple):
    """A published data set.

    Attributes:
        folders: Names of its folder below the root; the first is the one that messages suggest.
        page: Where the archives are offered.
        archives: The archives of the original release, and their md5.
        first: A path in the unpacked set, below its folder; what a message misses.
        others: Archives of other distributions that can be read, and their md5.
        counts: Possible numbers of training and test recordings of a whole set.
    """

    folders: tuple[str, ...]
    page: str
    archives: dict[str, str]
    first: str
    others: dict[str, str]
    counts: tuple[tuple[int, int], ...]


DIGITS = tuple(str(digit) for digit in range(10))
GESTURES = tuple(str(label) for label in range(11))
CIFAR_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
_CIFAR10_DVS_MD5 = (
    "0afd5c4bf9ae06af762a77b180354fdd",
    "8438dfeba3bc970c94962d995b1b9bdd",
    "a9c207c91c55b9dc2002dc21c684d785",
    "52c63c677c2b15fa5146a8daf4d56687",
    "b6bf21f6c04d21ba4e23fc3e36c8a4a3",
    "f379ebdf6703d16e0a690782e62639c3",
    "cad6ed91214b1c7388a5f6ee56d08803",
    "e7cbbf77bec584ffbf913f00e682782a",
    "41c7bd7d6b251be82557c6cce9a7d5c9",
    "89f3922fd147d9aeff89e76a2b0b70a7",
)

RELEASES = {
    "nmnist": Release(
        folders=("NMNIST", "N-MNIST"),
        page="https://www.garrickorchard.com/datasets/n-mnist",
        archives={
            "Train.zip": "20959b8e626244a1b502305a9e6e2031",
            "Test.zip": "69ca8762b2fe404d9b9bad1103e97832",
        },
        first="Train",
        others={},
        counts=((60_000, 10_000),),
    ),
    "dvs_gesture": Release(
        folders=("DVS128Gesture", "DVSGesture"),
        page="https://research.ibm.com/interactive/dvsgesture/",
        archives={"DvsGesture.tar.gz": "8a5c71fb11e24e5ca5b11866ca6c00a1"},
        first="DvsGesture/trials_to_train.txt",
        others={
            "ibmGestureTrain.tar.gz": "3a8f0d4120a166bac7591f77409cb105",
            "ibmGestureTest.tar.gz": "56070e45dadaa85fff82e0fbfbc06de5",
        },
        counts=((1176, 288), (1077, 264)),  # of the original, of the one with one file per label
    ),
    "cifar10_dvs": Release(
        folders=("CIFAR10DVS", "CIFAR10-DVS"),
        page="https://figshare.com/articles/dataset/CIFAR10-DVS_New/4724671",
        archives={f"{name}.zip": md5 for name, md5 in zip(CIFAR_CLASSES, _CIFAR10_DVS_MD5, strict=True)},
        first="airplane",
        others={},
        counts=((9000, 1000),),
    ),
}


def homes(name: str, root: Path) -> list[Path]:
    """Return the folders that may hold a data set: those below the root by its names, then the root."""
    return [*(root / folder for folder in RELEASES[name].folders), root]


def not_found(name: str, root: Path, path: Path | None = None) -> FileNotFoundError:
    """Return the error for a missing path, None if all of the set is: what is missing, and how to get it."""
    release = RELEASES[name]
    place, wanted = root / release.folders[0], list(release.archives)
    if path is None:
        path = place / release.first
    elif path.parent.name != "events_np":  # which no archive holds
        named = [archive for archive in wanted if archive.split(".")[0] == path.name]
        if named:
            place, wanted = path.parent, named
    for archive in found_archives(name, root):
        if archive.name in wanted or archive.name in release.others:
            return FileNotFoundError(
                f"{path} not found (data.root={root}), but {archive} is there: unpack it into {place}"
            )
    return FileNotFoundError(
        f"{path} not found (data.root={root}); get {', '.join(wanted)} from {release.page}, "
        f"unpack into {place}, then `python scripts/fetch_data.py {name} --root {root}` checks what is there"
    )


def found_archives(name: str, root: Path) -> list[Path]:
    """Return the archives of a data set that lie in its folders, or in `download` inside one."""
    release = RELEASES[name]
    places = [place for home in homes(name, root) for place in (home, home / "download")]
    return [
        place / archive
        for archive in {**release.archives, **release.others}
        for place in places
        if (place / archive).is_file()
    ]


def verify_archives(name: str, root: Path) -> None:
    """Check the archives of a data set that are there against what was published.

    Raises:
        ValueError: One differs; the message names it.
    """
    published = {**RELEASES[name].archives, **RELEASES[name].others}
    for archive in found_archives(name, root):
        with archive.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        found = difference_of_digest("md5", digest, published[archive.name])
        if found:
            raise ValueError(f"{archive} {found}")
