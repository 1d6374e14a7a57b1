"""The main job reaches what it should, on real data (its time stands in the README)."""

import statistics
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
    """Three seeds: of one, another rounding of the same sums moves two or three of the 360 test images."""
    accuracies = []
    for seed in range(3):
        command = [sys.executable, str(ROOT / "train.py"), *words, f"seed={seed}"]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        lines = ended.stdout.splitlines()
        accuracies.append(float(next(line.split()[1] for line in lines if line.startswith("test/accuracy"))))
    assert statistics.mean(accuracies) >= least, accuracies
