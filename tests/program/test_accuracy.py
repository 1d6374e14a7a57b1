"""The main job reaches what it should, on real data (its time stands in the README)."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "least"), [((), 0.97), (("head=spiking", "loss=count"), 0.95)], ids=["decoupled", "spiking"]
)
def test_digits(tmp_path, words, least):
    command = [sys.executable, str(ROOT / "train.py"), *words]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    accuracy = next(line.split()[1] for line in ended.stdout.splitlines() if line.startswith("test/accuracy"))
    assert float(accuracy) >= least
