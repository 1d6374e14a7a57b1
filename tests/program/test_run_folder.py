"""What a run leaves behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from snn.data import sources
from snn.losses import CrossEntropy
from tests.program.conftest import SMALL, rows, summary

ROOT = Path(__file__).parents[2]


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(run / "tb"), size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_files_rows_and_summary(program):
    run = program.small()
    names = {
        "config.yaml",
        "overrides.yaml",
        "metrics.jsonl",
        "summary.json",
        "train.log",
        "tb",
        "last.ckpt",
        "best.ckpt",
        "previous.ckpt",
        "starts.jsonl",
    }
    names |= {path.name for path in run.glob("code-0.diff")}  # if the code differs from its commit
    assert {path.name for path in run.iterdir()} == names
    assert yaml.safe_load((run / "overrides.yaml").read_text())[:2] == list(SMALL[:2])
    raw = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    both = ("loss", "accuracy", "undecided", "spike_rate/0_8C3", "spike_rate/2_16")
    keys = {f"{split}/{key}" for split in ("train", "val") for key in both}
    keys |= {
        "val/spikes_per_image",
        "epoch",
        "step",
        "train/grad_norm",
        "lr",
        "samples_per_second",
        "seconds",
    }
    assert [set(row) for row in raw] == [keys, keys]
    assert [(row["epoch"], row["step"]) for row in raw] == [(1, 4), (2, 8)]
    assert all(
        0 <= v <= 1
        for row in raw
        for k, v in row.items()
        if "accuracy" in k or "rate/" in k or "undecided" in k
    )
    assert {"test/accuracy", "test/loss", "val/accuracy", "best_epoch", "epochs", "seconds"} <= set(
        summary(run)
    )
    assert {"samples_per_second", "parameters"} <= set(summary(run))
    best = max(raw, key=lambda row: row["val/accuracy"])
    assert (
        summary(run)["best_epoch"] == best["epoch"] and summary(run)["val/accuracy"] == best["val/accuracy"]
    )
    log = (run / "train.log").read_text()
    assert "epoch 2/2" in log and "test/accuracy" in log and "0_8C3  8x8x8" in log


def test_the_split_of_a_set_without_an_official_one_is_kept(program, monkeypatch):
    real = sources.synthetic

    def named(root, download, *, channels, size, num_classes):
        train, test = real(root, download, channels=channels, size=size, num_classes=num_classes)
        return (
            train._replace(names=tuple(f"a{i}" for i in range(64))),
            test._replace(names=tuple(f"b{i}" for i in range(32))),
        )

    named.__module__ = real.__module__
    monkeypatch.setattr(sources, "synthetic", named)
    split = json.loads((program.small("trainer.epochs=1") / "split.json").read_text())
    assert [len(split[part]) for part in ("train", "val", "test")] == [58, 6, 32]
    assert split["test"] == [f"b{i}" for i in range(32)]
    assert {*split["train"], *split["val"]} == {f"a{i}" for i in range(64)}


def test_tensorboard_holds_the_rows_and_one_entry_of_hparams(program):
    run = program.small("data.mean=[0.4]")  # hazard 25: a list in the config
    shown = scalars(run)
    for key in rows(run)[0]:
        assert [v for _, v in shown[key]] == pytest.approx([row[key] for row in rows(run)])
        assert [step for step, _ in shown[key]] == [4, 8]
    assert [path.is_dir() for path in (run / "tb").iterdir()] == [False], "one run, no folders of series"
    events = EventAccumulator(str(run / "tb")).Reload()
    assert "_hparams_/session_start_info" in events.summary_metadata


def test_hazard_25_a_run_that_raises_keeps_its_epochs_and_says_why(program, monkeypatch):
    calls = []

    def fail_late(self, logits, labels):
        calls.append(1)
        if len(calls) > 8:  # 4 steps, an evaluation and a look at the sum law: in the second epoch
            raise RuntimeError("the disk is on fire")
        return torch.nn.functional.cross_entropy(logits, labels)

    monkeypatch.setattr(CrossEntropy, "__call__", fail_late)
    ended = program.train(*SMALL, "hydra.run.dir=run")
    assert ended.error == "error: RuntimeError: the disk is on fire"
    run = program.folder / "run"
    assert "fail_late" in (run / "error.txt").read_text()
    assert len(rows(run)) == 1 and len(scalars(run)["val/loss"]) == 1
    monkeypatch.undo()
    monkeypatch.chdir(program.folder)
    assert program.train("resume=run").code == 0
    assert not (run / "error.txt").exists() and len(rows(run)) == 2


def test_a_run_gets_a_folder_of_its_own_below_its_name(program):
    for _ in range(2):
        assert program.train(*SMALL, "trainer.epochs=1", "seed=5").code == 0
    first, second = sorted((program.folder / "runs" / "synthetic").iterdir())
    for run in (first, second):
        assert run.name.endswith(f"-s5-{os.getpid()}") and len(run.name.split("-s5")[0].split("-")[-1]) == 6
    assert program.train(*SMALL, "trainer.epochs=1", "name=mine").code == 0
    assert (program.folder / "runs" / "mine").is_dir()


def test_hazard_26_piped_output_has_a_line_per_epoch_and_no_carriage_return(tmp_path):
    command = f"{sys.executable} {ROOT / 'train.py'} {' '.join(SMALL)} 2>&1 | cat"
    ended = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True)
    assert b"\r" not in ended.stdout
    lines = ended.stdout.decode().splitlines()
    assert [line.split()[1] for line in lines if line.startswith("epoch ")] == ["1/2", "2/2"]


def test_a_terminal_gets_a_bar(program, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    ended = program.train(*SMALL)
    assert "\r" in ended.err and ended.code == 0
