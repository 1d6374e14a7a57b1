"""What a run leaves behind."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import snn.origin
from snn.data import sources
from snn.losses import CrossEntropy
from snn.run_folder import RunFolder
from tests.program.conftest import SMALL, rows, summary
from tests.program.killing import Zygote

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


def starts(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]


def git_says(commit: str, status: str):
    return lambda *words: {"rev-parse": commit, "status": status}.get(words[0])


def test_a_start_says_with_what_it_was_made(program, monkeypatch):
    monkeypatch.setattr(snn.origin, "_git", git_says("abc\n", " M x\n"))
    monkeypatch.setattr(snn.origin, "code_diff", lambda: "- old\n+ new\n")
    run = program.small("trainer.stop_after=1", "seed=3")
    (start,) = starts(run)
    facts = {"date", "cpu", "cores", "threads", "python", "torch", "numba", "numpy", "hydra-core"}
    assert facts <= set(start)
    assert (start["commit"], start["changed"], start["seed"]) == ("abc", True, 3)
    assert start["overrides"][-1] == "seed=3" and (start["epoch"], start["step"]) == (0, 0)
    assert (run / "code-0.diff").read_text() == "- old\n+ new\n"
    monkeypatch.setattr(snn.origin, "_git", git_says("def\n", ""))
    ended = program.train("resume=run")
    assert "so the last bits may differ: commit abc -> def, changed True -> False" in ended.out
    assert [start["step"] for start in starts(run)] == [0, 4] and (run / "code-1.diff").exists()


def test_a_module_that_comes_from_another_package_ends_no_run():
    """As Triton does where torch is built for ROCm; here yaml, which comes from PyYAML."""
    facts = snn.origin.machine(torch.device("cpu"), "torch", "yaml")
    assert "yaml" not in facts and facts["torch"].startswith(torch.__version__.split("+")[0])


def test_the_diff_of_the_code_holds_what_changed_and_what_is_new(tmp_path, monkeypatch):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x"]
    (tmp_path / "snn").mkdir()
    (tmp_path / "snn" / "a.py").write_text("old\n")
    monkeypatch.setattr(snn.origin, "ROOT", tmp_path)
    cpu = torch.device("cpu")
    assert "commit" not in snn.origin.origin(cpu) and snn.origin.code_diff() == ""
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    os.utime(tmp_path / "snn" / "a.py", (1, 1))  # what makes git refresh its index, if it may
    index = (tmp_path / ".git" / "index").read_bytes()
    assert snn.origin.origin(cpu)["changed"] is False and snn.origin.code_diff() == ""
    assert (tmp_path / ".git" / "index").read_bytes() == index, "read, not written"
    (tmp_path / "snn" / "a.py").write_text("changed\n")
    (tmp_path / "snn" / "b.py").write_text("added\n")
    (tmp_path / "notes.txt").write_text("not code\n")
    diff = snn.origin.code_diff()
    assert (tmp_path / ".git" / "index").read_bytes() == index
    assert "+changed" in diff and "-old" in diff and "+added" in diff and "notes" not in diff
    facts = snn.origin.origin(cpu)
    assert facts["changed"] is True and len(facts["commit"]) == 40


def test_a_lock_whose_file_its_holder_has_just_removed_is_none(tmp_path, monkeypatch):
    """Who comes next would make a file, and a lock, of its own."""
    monkeypatch.setattr("snn.run_folder.fcntl.lockf", lambda *args: (tmp_path / ".lock").unlink())
    with pytest.raises(ValueError, match="is in use"), RunFolder(tmp_path).locked():
        pytest.fail("locked")


@pytest.mark.slow
def test_runs_started_in_the_same_instant_get_folders_of_their_own(tmp_path):
    """Two at a time, ten times."""
    pair = [Zygote(tmp_path), Zygote(tmp_path)]
    for _ in range(10):
        at = time.time() + 0.3
        for zygote in pair:
            zygote.start(*SMALL, "trainer.epochs=1", at=at)
        assert [zygote.wait() for zygote in pair] == [0, 0]
    for zygote in pair:
        zygote.close()
    folders = list((tmp_path / "runs" / "synthetic").iterdir())
    assert len(folders) == 20 and all((folder / "summary.json").exists() for folder in folders)


@pytest.mark.slow
def test_a_deterministic_run_repeats_to_the_bit_and_says_what_it_costs(program):
    words = ("trainer.deterministic=true", "data.augment=crop4+flip", "network.layers=8C3-P2-D0.2-16")
    try:
        first = program.small(*words, run="first")
        second = program.small(*words, run="second")
    finally:
        torch.use_deterministic_algorithms(False)
    assert "on a CPU it costs nothing, on a GPU" in (first / "train.log").read_text()
    assert rows(first) == rows(second)
    one, other = (torch.load(run / "last.ckpt")["network"] for run in (first, second))
    assert all(torch.equal(one[name], other[name]) for name in one)
