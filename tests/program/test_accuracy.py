"""The main job reaches what it should, on real data, in the time it should."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "least"), [((), 0.97), (("head=spiking", "loss=count"), 0.95)], ids=["decoupled", "spiking"]
)
def test_digits(tmp_path, words, least):
    start = time.perf_counter()
    command = [sys.executable, str(ROOT / "train.py"), *words]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    accuracy = next(line.split()[1] for line in ended.stdout.splitlines() if line.startswith("test/accuracy"))
    assert float(accuracy) >= least
    assert time.perf_counter() - start < 120
