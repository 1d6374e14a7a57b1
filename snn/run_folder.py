"""The folder of a run: what is written where.

config.yaml      the resolved config         metrics.jsonl   a row per epoch
overrides.yaml   the words of the command    summary.json    the end of the run
train.log        what the console showed     tb/             the rows, for TensorBoard
last.ckpt        the newest epoch            best.ckpt       the best one on validation
error.txt        the traceback, if it failed
split.json       names of the recordings of each split, for a set without an official one
"""

import json
import logging
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams


class RunFolder:
    """Writes the files of one run; nothing is written before :meth:`recording` is entered.

    Args:
        path: The folder.
    """

    def __init__(self, path: str | Path) -> None:
        here = Path.cwd()
        self.path = Path(path).relative_to(here) if Path(path).is_relative_to(here) else Path(path)
        self.last, self.best = self.path / "last.ckpt", self.path / "best.ckpt"
        self.summary, self.metrics = self.path / "summary.json", self.path / "metrics.jsonl"
        self._writer: SummaryWriter | None = None

    def require_fresh(self) -> None:
        """Raise ValueError if the folder holds another run."""
        for file in (self.metrics, self.last, self.best, self.summary):
            if file.exists():
                raise ValueError(f"{self.path} holds a run already ({file.name}); resume=PATH continues one")

    @contextmanager
    def recording(
        self, config: dict[str, Any], overrides: list[str], epoch: int, step: int
    ) -> Iterator[None]:
        """Open the files, close them at the end, and leave error.txt if the run fails.

        Args:
            config: The resolved config.
            overrides: Words of the command line.
            epoch: Epochs done: 0 for a fresh run; for a resumed one, later rows of metrics.jsonl are cut.
            step: Optimizer steps done; later ones are purged from TensorBoard.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(self.path / "train.log", encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logging.getLogger("snn").addHandler(handler)
        try:
            (self.path / "error.txt").unlink(missing_ok=True)
            if epoch == 0:
                _write(self.path / "config.yaml", yaml.safe_dump(config, sort_keys=False))
                _write(self.path / "overrides.yaml", yaml.safe_dump(overrides))
            if self.metrics.exists():
                _write(self.metrics, "".join(f"{row}\n" for row in _rows(self.metrics, epoch)))
            self._writer = SummaryWriter(str(self.path / "tb"), purge_step=step + 1 if step else None)
            if epoch == 0:
                for summary in hparams(_flat(config), {"val/accuracy": 0.0}):
                    self._writer._get_file_writer().add_summary(summary)
            yield
        except BaseException:
            self.write_error()
            raise
        finally:
            if self._writer is not None:
                self._writer.close()
            logging.getLogger("snn").removeHandler(handler)
            handler.close()

    def log_row(self, row: dict[str, float]) -> None:
        """Append an epoch's row to metrics.jsonl and, under the same keys, to TensorBoard."""
        with self.metrics.open("a") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
        self.log_scalars(row, int(row["step"]))

    def log_scalars(self, values: dict[str, float], step: int) -> None:
        """Write values to TensorBoard and flush, so that a run that dies leaves what it had."""
        assert self._writer is not None
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def write_split(self, split: dict[str, list[str]]) -> None:
        """Write split.json: names of the recordings of train, val and test."""
        _write(self.path / "split.json", json.dumps(split, indent=2) + "\n")

    def write_summary(self, summary: dict[str, float]) -> None:
        """Write summary.json."""
        _write(self.summary, json.dumps(summary, indent=2, allow_nan=False) + "\n")

    def write_error(self) -> None:
        """Write the traceback of the exception being handled to error.txt."""
        (self.path / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")


def _rows(path: Path, epoch: int) -> list[str]:
    """Return the rows of metrics.jsonl up to an epoch; a torn row ends them."""
    rows = []
    for row in path.read_text(errors="replace").splitlines():
        try:
            if json.loads(row)["epoch"] > epoch:
                break
        except (ValueError, KeyError, TypeError):
            break
        rows.append(row)
    return rows


def _write(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten a config to what TensorBoard's hparams can hold: numbers, strings and booleans."""
    if not isinstance(node, dict):
        return {prefix: node if isinstance(node, bool | int | float | str) else str(node)}
    return {
        k: v for key, value in node.items() for k, v in _flat(value, f"{prefix}.{key}".lstrip(".")).items()
    }
