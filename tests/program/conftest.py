"""Run the whole program in this process, in a folder of its own."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import eval as evaluation
import train

SMALL = (
    "data=synthetic",
    "network.layers=8C3-P2-16",
    "device=cpu",
    "trainer.epochs=2",
    "trainer.batch_size=16",
)


@dataclass
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one error line; a user error has no other, and no traceback."""
        assert self.code != 0
        lines = self.err.strip().splitlines()
        assert lines, "a failed command says why"
        assert lines[-1].startswith("error: ")
        assert sum(line.startswith("error:") for line in lines) == 1
        assert "Traceback" not in self.out + self.err
        return lines[-1]


class Program:
    """The command line, called in `folder`."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys

    def train(self, *words: str) -> Ended:
        return self._ended(train.main, words)

    def small(self, *words: str, run: str = "run") -> Path:
        """Train a small network on synthetic data in the folder `run`, and succeed."""
        ended = self.train(*SMALL, f"hydra.run.dir={run}", *words)
        assert ended.code == 0, ended.err
        return self.folder / run

    def evaluate(self, *words: str) -> Ended:
        return self._ended(evaluation.main, words)

    def _ended(self, main, words: tuple[str, ...]) -> Ended:
        self._capsys.readouterr()
        code = main(list(words))
        return Ended(code, *self._capsys.readouterr())


@pytest.fixture
def program(tmp_path, monkeypatch, capsys) -> Program:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    return Program(tmp_path, capsys)


def rows(run: Path) -> list[dict[str, float]]:
    """The rows of metrics.jsonl without what depends on the clock."""
    kept = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("seconds", "samples_per_second")} for row in kept]


def summary(run: Path) -> dict[str, float]:
    """summary.json."""
    return json.loads((run / "summary.json").read_text())


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, with its bytes."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}
