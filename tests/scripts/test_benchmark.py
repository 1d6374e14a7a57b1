"""The benchmark runs end to end, on sizes that take a second."""

import json
import sys
from pathlib import Path

import torch


def test_the_benchmark_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    import benchmark

    monkeypatch.setattr(benchmark, "NETWORKS", {"tiny": ("4C3-P2-8", 1, 8, 3, 4, 4)})
    monkeypatch.setattr(benchmark, "WARMUP", 1)
    monkeypatch.setattr(benchmark, "REPEATS", 3)
    monkeypatch.setattr(benchmark, "STEPS", [1, 2])
    monkeypatch.setattr(benchmark, "BATCHES", [1, 2])
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--json", str(tmp_path / "b.json"), "--skip", "peers"])
    assert benchmark.main() == 0
    report = json.loads((tmp_path / "b.json").read_text())
    assert set(report) == {"machine", "scan", "networks", "steps", "batch"}
    assert report["machine"]["torch"] == torch.__version__.split("+")[0]
    (row,) = report["networks"]
    assert row["step / floor"] > 0 and 0 < row["saved bytes per neuron-step"] < 16
    assert report["scan"]["reference / kernels"] > 1
    assert "step / floor" in capsys.readouterr().out
