"""A run that was stopped and resumed is the run that was never stopped, bit for bit."""

import json
import math

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.program.conftest import SMALL, files, rows, summary

pytestmark = pytest.mark.slow  # whole runs, several each

RANDOM = (  # everything that draws: dropout, shuffling, augmentation, poisson
    "network.layers=8C3-P2-D0.2-16",
    "data.augment=crop4+flip",
    "encoding=poisson",
    "trainer.epochs=4",
    "trainer.accumulate=2",
    "optimizer.lr=0.01",
)


def equal(a, b) -> bool:
    """Whether two checkpoint values are the same, tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


@pytest.mark.parametrize(
    "extra", [(), ("optimizer=sgd", "scheduler=constant", "data.num_workers=2")], ids=["adamw", "sgd"]
)
def test_resumed_equals_straight(program, extra):
    straight = program.small(*RANDOM, *extra, run="straight")
    split = program.small(*RANDOM, *extra, "trainer.stop_after=2", run="split")
    assert not (split / "summary.json").exists()
    assert program.train("resume=split").code == 0
    for name in ("last.ckpt", "best.ckpt"):
        one, other = torch.load(straight / name), torch.load(split / name)
        for key in ("network", "optimizer", "scheduler", "rng", "epoch", "step", "best"):
            assert equal(one[key], other[key]), f"{key} of {name}"
    assert rows(straight) == rows(split)
    clock = ("seconds", "samples_per_second")
    assert all(summary(straight)[k] == v for k, v in summary(split).items() if k not in clock)
    assert {path.name for path in program.folder.iterdir()} == {"straight", "split"}


def test_hazard_23_learning_rates_and_steps_of_a_resumed_cosine(program):
    words = ("optimizer=sgd", "optimizer.lr=0.1", "trainer.epochs=10", "network.layers=8")
    run = program.small(*words, "trainer.stop_after=4")
    assert program.train("resume=run").code == 0
    rates = [row["lr"] for row in rows(run)]
    assert rates[4:] == pytest.approx([0.06545, 0.05, 0.03455, 0.02061, 0.00955, 0.00245], abs=5e-6)
    events = EventAccumulator(str(run / "tb"), size_guidance={"scalars": 0}).Reload()
    for tag in ("lr", "val/loss", "train/spike_rate/0_8"):
        steps = [event.step for event in events.Scalars(tag)]
        assert len(steps) == 10 and steps == sorted(set(steps))


def test_resume_cuts_what_came_after_the_checkpoint(program):
    straight = program.small("trainer.epochs=3", run="straight")
    run = program.small("trainer.epochs=3", "trainer.stop_after=2")
    with (run / "metrics.jsonl").open("a") as file:  # a row that was logged before its checkpoint was lost
        file.write(json.dumps({"epoch": 3, "step": 12}) + "\n" + '{"epoch": 4, "st')
    assert program.train("resume=run/last.ckpt").code == 0
    assert rows(run) == rows(straight)


def test_resume_from_best_goes_on_from_there(program):
    straight = program.small("trainer.epochs=3", run="straight")
    run = program.small("trainer.epochs=3", "trainer.stop_after=2")
    assert program.train("resume=run/best.ckpt").code == 0
    assert rows(run) == rows(straight)


def test_resume_stops_again_where_it_is_told(program):
    run = program.small("trainer.epochs=3", "trainer.stop_after=1")
    ended = program.train("resume=run", "trainer.stop_after=2")
    assert ended.code == 0
    assert "stopped after epoch 2 of 3" in ended.out and ended.out.strip().endswith("train.py resume=run")
    assert len(rows(run)) == 2
    assert program.train("resume=run", "trainer.stop_after=1").code == 0  # nothing left to do
    assert len(rows(run)) == 2


def test_a_finished_run_says_so_and_is_left_alone(program):
    run = program.small()
    before = files(run)
    ended = program.train("resume=run")
    assert ended.code == 0 and "finished" in ended.out
    assert files(run) == before
    assert list(program.folder.iterdir()) == [run]


@pytest.mark.parametrize(
    "word", ["seed=1", "trainer.epochs=9", "optimizer=sgd", "hydra.run.dir=elsewhere", "name=x"]
)
def test_resume_refuses_what_would_change_the_run(program, word):
    run = program.small("trainer.stop_after=1")
    before = files(run)
    error = program.train("resume=run", word).error
    assert "only device, data.root, data.num_workers, trainer.stop_after may be given" in error
    assert word.split("=")[0] in error
    assert files(run) == before and list(program.folder.iterdir()) == [run]


def test_resume_takes_what_does_not(program):
    straight = program.small(run="straight")
    run = program.small("trainer.stop_after=1")
    assert program.train("resume=run", "device=cpu", "data.root=elsewhere", "data.num_workers=2").code == 0
    assert rows(run) == rows(straight)


def test_a_damaged_checkpoint_is_named(program):
    run = program.small("trainer.stop_after=1")
    last = run / "last.ckpt"
    last.write_bytes(last.read_bytes()[:1000])
    before = files(run)
    assert "run/last.ckpt is damaged, or no checkpoint" in program.train("resume=run").error
    assert files(run) == before
    torch.save({"weights": torch.zeros(1)}, last)
    assert "run/last.ckpt is no checkpoint of this project" in program.train("resume=run").error


def test_checkpoints_load_plainly(program):
    run = program.small()
    for name in ("last.ckpt", "best.ckpt"):
        state = torch.load(run / name)
        assert state["config"]["network"]["layers"] == "8C3-P2-16"
        assert state["network"]["layers.0_8C3.threshold"].shape == (8,)
        assert {"layers.0_8C3.gain", "layers.0_8C3.bias", "head.affine.bias"} <= set(state["network"])
        assert math.isfinite(state["best"]["accuracy"]) and set(state["versions"]) == {"python", "torch"}


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_checkpoint_is_named(program, share):
    run = program.small("trainer.stop_after=1")
    whole = (run / "last.ckpt").read_bytes()
    (run / "last.ckpt").write_bytes(whole[: int(share * len(whole))])
    assert "run/last.ckpt is damaged, or no checkpoint" in program.train("resume=run").error


def test_a_torn_row_ends_the_rows(program):
    run = program.small("trainer.epochs=3", "trainer.stop_after=2")
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text[:-20])
    assert program.train("resume=run").code == 0
    assert [row["epoch"] for row in rows(run)] == [1, 3]


def test_a_run_that_died_before_its_first_checkpoint_can_start_again(program):
    words = ("optimizer=sgd", "optimizer.lr=1e38", "hydra.run.dir=run")
    assert "nothing was saved" in program.train(*SMALL, *words).error
    assert program.small() == program.folder / "run"


def test_a_missing_best_checkpoint_is_noticed_at_once(program):
    run = program.small("trainer.stop_after=1")
    (run / "best.ckpt").unlink()
    assert "there is no checkpoint run/best.ckpt" in program.train("resume=run").error


def test_a_left_over_summary_is_a_run(program):
    run = program.small()
    for name in ("metrics.jsonl", "last.ckpt", "best.ckpt"):
        (run / name).unlink()
    assert "run holds a run already (summary.json)" in program.train(*SMALL, "hydra.run.dir=run").error
