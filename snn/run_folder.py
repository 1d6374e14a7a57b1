"""The folder of a run: what is written where.

config.yaml      the resolved config         metrics.jsonl   a row per epoch
overrides.yaml   the words of the command    summary.json    the end of the run
train.log        what the console showed     tb/             the rows, for TensorBoard
last.ckpt        the newest step saved       best.ckpt       the best epoch on validation
previous.ckpt    what last.ckpt was before   error.txt       the traceback, if it failed
starts.jsonl     a row per start: date, command, seed, place, machine, versions, commit
code-N.diff      how the code of start N (from 0) differs from its commit, if it does
split.json       names of the recordings of each split, for a set without an official one
"""

import errno
import fcntl
import json
import logging
import os
import re
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from snn.checkpoint import RESUMABLE
from snn.schema import flat

log = logging.getLogger(__name__)

ORPHAN = re.compile(r"\.[\w-]+\.(ckpt|json|jsonl|yaml|diff|txt)\.\d+")  # of a write that was killed
PLACE = ("commit", "changed", "cpu", "gpu", "threads", "torch", "numba", "triton")  # what moves the last bits


class RunFolder:
    """Writes the files of one run; nothing is written before :meth:`recording` is entered.

    Args:
        path: The folder.
    """

    def __init__(self, path: str | Path) -> None:
        here = Path.cwd()
        self.path = Path(path).relative_to(here) if Path(path).is_relative_to(here) else Path(path)
        self.checkpoints = [self.path / name for name in RESUMABLE]
        self.last, self.previous, self.best = self.checkpoints
        self.summary, self.metrics = self.path / "summary.json", self.path / "metrics.jsonl"
        self.starts = self.path / "starts.jsonl"
        self._writer: SummaryWriter | None = None

    def require_fresh(self) -> None:
        """Raise ValueError if the folder holds another run."""
        if file := self.run_in_it():
            raise ValueError(f"{self.path} holds a run already ({file.name}); resume=PATH continues one")

    def config(self) -> dict[str, Any]:
        """Return the resolved config of the run in the folder.

        Raises:
            ValueError: It cannot be read.
            OSError: There is none.
        """
        path = self.path / "config.yaml"
        try:
            config = yaml.safe_load(path.read_text())
        except (yaml.YAMLError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {' '.join(str(error).split())}") from error
        if not isinstance(config, dict):
            raise ValueError(f"{path} is damaged: it must hold keys and values")
        return config

    def run_in_it(self) -> Path | None:
        """Return a file that tells that the folder holds a run, or None."""
        files = (self.metrics, *self.checkpoints, self.summary)
        return next((file for file in files if file.exists()), None)

    def require_writable(self) -> None:
        """Make the folder if it is not there; raise OSError unless it can be written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".writable.{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise OSError(f"cannot write into the run folder {self.path}: {error.strerror}") from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep the folder, which is there, from a second run at the same time.

        The lock is the kernel's, on the file `.lock`: it ends with the process, however that ends, and no
        child shares it. Where the file system knows no locks there is none.

        Raises:
            ValueError: Another process holds it.
        """
        path = self.path / ".lock"
        with path.open("w") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # not so, if who held it has removed it just now
                free = os.path.samestat(path.stat(), os.fstat(file.fileno()))
            except (BlockingIOError, PermissionError, FileNotFoundError):
                free = False
            except OSError:
                log.info("no lock on %s: its file system has none", self.path)
                free = True
            if not free:
                raise ValueError(f"{self.path} is in use: another process trains in it")
            try:
                yield
            finally:
                path.unlink(missing_ok=True)

    @contextmanager
    def recording(
        self, config: dict[str, Any], start: dict[str, Any], diff: str, epoch: int, step: int
    ) -> Iterator[None]:
        """Open the files, close them at the end, and leave error.txt if the run fails.

        Args:
            config: The resolved config.
            start: What to say of this start: `overrides`, the words of the command line, and where and with
                what it runs.
            diff: How the code differs from its commit.
            epoch: Epochs done: 0 for a fresh run; for a resumed one, later rows of metrics.jsonl are cut.
            step: Optimizer steps done; 0 for a fresh run. Later ones are purged from TensorBoard.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        handler = _LogFile(self.path / "train.log", encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logging.getLogger("snn").addHandler(handler)
        said_of_threads, threading.excepthook = threading.excepthook, _quiet
        try:
            for path in self.path.iterdir():
                if ORPHAN.fullmatch(path.name):
                    path.unlink()
            (self.path / "error.txt").unlink(missing_ok=True)
            if step == 0:
                self._clear()
                write_whole(self.path / "config.yaml", yaml.safe_dump(config, sort_keys=False))
                write_whole(self.path / "overrides.yaml", yaml.safe_dump(start["overrides"]))
            self._note_start({**start, "epoch": epoch, "step": step}, diff)
            self._open_rows(epoch, step)
            if step == 0:
                for summary in hparams(_shown(config), {"val/accuracy": 0.0}):
                    self._file_writer().add_summary(summary)
            yield
        except BaseException:
            self.write_error()
            raise
        finally:
            if self._writer is not None:
                with suppress(OSError):  # a full disk, of which the run has said so
                    self._writer.close()
            threading.excepthook = said_of_threads
            logging.getLogger("snn").removeHandler(handler)
            handler.close()

    def log_row(self, row: dict[str, float]) -> None:
        """Append an epoch's row to metrics.jsonl and, under the same keys, to TensorBoard."""
        append_line(self.metrics, json.dumps(row, allow_nan=False))
        self.log_scalars(row, int(row["step"]))

    def log_scalars(self, values: dict[str, float], step: int) -> None:
        """Write values to TensorBoard and flush, so that a run that dies leaves what it had."""
        assert self._writer is not None
        try:
            for key, value in values.items():
                self._writer.add_scalar(key, value, step)
            self._writer.flush()
        except OSError as error:
            raise OSError(f"cannot write {self.path / 'tb'}: {error.strerror}") from error

    def write_split(self, split: dict[str, list[str]]) -> None:
        """Write split.json: names of the recordings of train, val and test."""
        write_whole(self.path / "split.json", json.dumps(split, indent=2) + "\n")

    def write_summary(self, summary: dict[str, float]) -> None:
        """Write summary.json."""
        write_whole(self.summary, json.dumps(summary, indent=2, allow_nan=False) + "\n")

    def write_error(self) -> None:
        """Write the traceback of the exception being handled to error.txt, if it can be written."""
        with suppress(OSError):
            write_whole(self.path / "error.txt", traceback.format_exc())

    def _clear(self) -> None:
        """Remove the rows of a run that died before its first checkpoint."""
        for file in (self.metrics, *self.path.glob("tb/events.*")):
            file.unlink(missing_ok=True)

    def _note_start(self, start: dict[str, Any], diff: str) -> None:
        """Append to starts.jsonl, and say in the log how the start differs from the first one."""
        before = _read_lines(self.starts)
        append_line(self.starts, json.dumps(start))
        if diff:
            write_whole(self.path / f"code-{len(before)}.diff", diff)
        if before and (moved := [key for key in PLACE if before[0].get(key) != start.get(key)]):
            facts = ", ".join(f"{key} {before[0].get(key)} -> {start.get(key)}" for key in moved)
            log.info("not as at the first start, so the last bits may differ: %s", facts)

    def _open_rows(self, epoch: int, step: int) -> None:
        """Cut metrics.jsonl to the epochs done, and have TensorBoard forget what came after them."""
        rows = [
            row
            for row in _read_lines(self.metrics)
            if all(isinstance(row.get(key), int) for key in ("epoch", "step")) and row["epoch"] <= epoch
        ]
        if lost := set(range(1, epoch + 1)) - {row["epoch"] for row in rows}:
            epochs = ", ".join(map(str, sorted(lost)))
            log.warning("warning: %s is damaged: without the rows of epoch %s", self.metrics, epochs)
        if self.metrics.exists():
            write_whole(self.metrics, "".join(f"{json.dumps(row)}\n" for row in rows))
        last = rows[-1] if rows and rows[-1]["epoch"] == epoch else None
        if last:  # its step included, since the test of a run that died in it stands there too
            purge = int(last["step"])
        else:  # no epoch is done, or its row is lost
            purge = step + 1 if epoch else 1
        self._writer = SummaryWriter(str(self.path / "tb"), purge_step=purge)
        if last:
            self.log_scalars(last, purge)

    def _file_writer(self) -> Any:
        assert self._writer is not None
        return self._writer._get_file_writer()


class _LogFile(logging.FileHandler):
    """A log that stops, without a word, where the disk is full: the run says it, once."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        pass


def _quiet(args: threading.ExceptHookArgs) -> None:
    """Say nothing of a full disk that TensorBoard's thread meets: its next call raises the error again."""
    if not isinstance(args.exc_value, OSError):
        threading.__excepthook__(args)


def write_whole(path: Path, text: str) -> None:
    """Write a file beside `path` and rename it: `path` holds the old text or the new one, never a part.

    Raises:
        OSError: It cannot be written; the message names it.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror}") from error
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def append_line(path: Path, line: str) -> None:
    """Append a line to `path`, or leave it as it was.

    Raises:
        OSError: It cannot be written; the message names it.
    """
    size = path.stat().st_size if path.exists() else None
    try:
        with path.open("ab", buffering=0) as file:
            data = f"{line}\n".encode()
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        with suppress(OSError):
            path.unlink() if size is None else os.truncate(path, size)
        raise OSError(f"cannot write {path}: {error.strerror}") from error


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines; what is none is left out."""
    rows: list[dict[str, Any]] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict):
                    rows.append(row)
    return rows


def _shown(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config as TensorBoard's hparams can hold it: numbers, strings and booleans."""
    return {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in flat(config).items()}
