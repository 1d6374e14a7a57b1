"""Downloads that leave a whole, verified data set or nothing."""

import contextlib
import http.client
import io
import logging
import os
import shutil
import socket
import tarfile
import tempfile
import threading
import time
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path

from snn.data.files import TORCHVISION_CLASSES, layout, locate, missing, verify

log = logging.getLogger(__name__)

SHD_ADDRESS = "https://zenkelab.org/datasets"
STALL_SECONDS = 20.0  # without a byte, the download is given up
ERRORS = (  # whatever a network, a disk or a damaged archive may raise
    OSError,
    RuntimeError,
    ValueError,
    EOFError,
    http.client.HTTPException,
    tarfile.TarError,
    zlib.error,
)


def download(name: str, root: Path) -> None:
    """Download the missing files of data set `name`; a file that is there stays as it is.

    Raises:
        OSError: It failed; one line names the set, the root and the keys, and nothing partial stays.
    """
    log.info("downloading %s into %s", name, root)
    try:
        with staging(root) as staged:
            fetch = download_shd if name == "shd" else download_by_torchvision
            fetch(name, staged)
            install(name, staged, root)
    except ERRORS as error:
        raise OSError(
            f"could not download {name} into data.root={root} (data.download=true): {one_line(error)}"
        ) from error


@contextlib.contextmanager
def staging(root: Path) -> Iterator[Path]:
    """Open a temporary folder inside `root`, so that a finished file moves into place by a rename.

    It is removed at the end, and so are `root` and its parents where they were made here and stayed empty.
    """
    made = [path for path in (root, *root.parents) if not path.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=".unfinished-", dir=root, ignore_cleanup_errors=True
        ) as staged:
            yield Path(staged)
    finally:
        with contextlib.suppress(OSError):  # the first one that is not empty ends it
            for path in made:
                path.rmdir()


def download_by_torchvision(name: str, staged: Path) -> None:
    """Download a data set into a folder, in torchvision's layout below it.

    Raises:
        OSError: No byte came for `STALL_SECONDS`.
    """
    from torchvision import datasets

    errors: list[BaseException] = []

    def work() -> None:
        try:
            # without its constructor, which would unpickle what came
            reader = object.__new__(getattr(datasets, TORCHVISION_CLASSES[name]))
            reader.root = staged
            reader.download()
        except Exception as error:  # noqa: BLE001  raised below, in the thread that waits
            errors.append(error)

    # A thread, because no timeout covers all of it: name look-ups, each address of each mirror, each retry.
    thread = threading.Thread(target=work, daemon=True)
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(STALL_SECONDS)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # torchvision prints
            thread.start()
            held, since = 0, time.monotonic()
            while thread.is_alive():
                thread.join(0.5)
                size = sum(path.stat().st_size for path in staged.rglob("*") if path.is_file())
                if size != held:
                    held, since = size, time.monotonic()
                elif thread.is_alive() and time.monotonic() - since > STALL_SECONDS:
                    raise OSError(f"nothing came for {STALL_SECONDS:g} s; is there a network?")
    finally:
        socket.setdefaulttimeout(timeout)
    if errors:
        raise errors[0]


def download_shd(name: str, staged: Path) -> None:
    """Download the Heidelberg digits into a folder, laid out below it, as gzipped as they are published."""
    folder, files = layout(name)
    (staged / folder).mkdir(parents=True)
    for file in files:
        address = f"{SHD_ADDRESS}/{file}.gz"
        with (
            urllib.request.urlopen(address, timeout=STALL_SECONDS) as answer,
            (staged / folder / f"{file}.gz").open("wb") as out,
        ):
            shutil.copyfileobj(answer, out)


def install(name: str, staged: Path, root: Path) -> None:
    """Check the files of data set `name` below `staged`, and move those that `root` lacks into place.

    Raises:
        ValueError: A file differs from the published one.
        OSError: A file is missing.
    """
    folder, files = layout(name)
    absent = missing(staged / folder, name)
    if absent:
        raise FileNotFoundError(f"the source lacks {absent[0].name}")
    verify(staged / folder, name)
    target = root / folder
    target.mkdir(parents=True, exist_ok=True)
    for file in files:
        source = locate(staged / folder, file)
        if source is not None and locate(target, file) is None:
            os.replace(source, target / source.name)


def one_line(error: BaseException) -> str:
    """Return an error's message without line breaks, or its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__
