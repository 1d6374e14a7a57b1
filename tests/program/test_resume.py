"""A run that was stopped and resumed is the run that was never stopped, bit for bit."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from snn.checkpoint import load_checkpoint, save_checkpoint
from snn.schema import RESUME_KEYS
from tests.program.conftest import SMALL, files, rows, summary

ROOT = Path(__file__).parents[2]
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
    assert f"only {', '.join(RESUME_KEYS)} may be given" in error
    assert word.split("=")[0] in error
    assert files(run) == before and list(program.folder.iterdir()) == [run]


def test_resume_takes_what_does_not(program):
    straight = program.small(run="straight")
    run = program.small("trainer.stop_after=1")
    assert program.train("resume=run", "device=cpu", "data.root=elsewhere", "data.num_workers=2").code == 0
    assert rows(run) == rows(straight)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(program):
    straight = program.small("trainer.epochs=4", run="straight")
    run = program.small("trainer.epochs=4", "trainer.stop_after=3")
    last = run / "last.ckpt"
    last.write_bytes(last.read_bytes()[:1000])
    ended = program.train("resume=run")
    assert ended.code == 0 and "warning: run/last.ckpt is damaged, or no checkpoint" in ended.out
    assert re.search(r"going on from run/(previous|best).ckpt, step (8|12)\n", ended.out)
    assert rows(run) == rows(straight)
    assert equal(torch.load(straight / "last.ckpt")["network"], torch.load(last)["network"])


def test_a_damaged_one_never_takes_the_place_of_the_one_before(program):
    run = program.small("trainer.epochs=4", "trainer.stop_after=3")
    before = (run / "previous.ckpt").read_bytes()
    (run / "last.ckpt").write_bytes(b"half")
    (run / "best.ckpt").write_bytes((run / "previous.ckpt").read_bytes())  # no newer one
    assert program.train("resume=run", "trainer.stop_after=3").code == 0
    assert torch.load(run / "last.ckpt")["epoch"] == 3
    assert (run / "previous.ckpt").read_bytes() == before


def test_when_all_are_damaged_nothing_is_touched(program):
    run = program.small("trainer.stop_after=1")
    (run / "last.ckpt").write_bytes((run / "last.ckpt").read_bytes()[:1000])
    (run / "best.ckpt").write_bytes(b"")
    before = files(run)
    for words in (("resume=run",), (*SMALL, "resume=auto", "hydra.run.dir=run", "trainer.stop_after=1")):
        error = program.train(*words).error
        assert "run/last.ckpt is damaged" in error and "run/best.ckpt is damaged" in error
        assert files(run) == before


def test_what_is_whole_but_no_checkpoint_is_named(program):
    run = program.small("trainer.stop_after=1")
    torch.save({"weights": torch.zeros(1)}, run / "other.ckpt")
    assert "run/other.ckpt is damaged, or no checkpoint" in program.train("resume=run/other.ckpt").error


def test_checkpoints_load_plainly(program):
    run = program.small()
    for name in ("last.ckpt", "best.ckpt"):
        state = torch.load(run / name)
        assert state["config"]["network"]["layers"] == "8C3-P2-16"
        assert state["network"]["layers.0_8C3.threshold"].shape == (8,)
        assert {"layers.0_8C3.gain", "layers.0_8C3.bias", "head.affine.bias"} <= set(state["network"])
        assert math.isfinite(state["best"]["accuracy"]) and set(state["versions"]) == {"python", "torch"}


def test_a_damaged_row_is_named_and_takes_no_other_with_it(program):
    run = program.small("trainer.epochs=4", "trainer.stop_after=3")
    first, second, third = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text(f'{first[:-20]}\n{second}\n{{"epoch": "3"}}\n{third}\n[]')
    ended = program.train("resume=run")
    assert "run/metrics.jsonl is damaged: without the rows of epoch 1\n" in ended.out
    assert [row["epoch"] for row in rows(run)] == [2, 3, 4]


def test_tensorboard_keeps_its_steps_where_the_rows_are_lost(program):
    run = program.small("trainer.epochs=3", "trainer.stop_after=2")
    (run / "metrics.jsonl").unlink()
    ended = program.train("resume=run")
    assert "without the rows of epoch 1, 2\n" in ended.out
    events = EventAccumulator(str(run / "tb"), size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in events.Scalars("val/loss")] == [4, 8, 12]


def test_a_first_row_that_was_logged_before_its_checkpoint_stands_once_in_tensorboard(program, monkeypatch):
    words = (*SMALL, "trainer.checkpoint_every_steps=4", "resume=auto", "hydra.run.dir=run")
    with monkeypatch.context() as context:
        context.setattr("snn.watch.Watch.__call__", fail)
        assert "as if killed" in program.train(*words).error
    state = torch.load("run/last.ckpt")
    assert (state["epoch"], state["step"]) == (0, 4) and len(rows(program.folder / "run")) == 1
    assert program.train(*words).code == 0
    events = EventAccumulator("run/tb", size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in events.Scalars("val/loss")] == [4, 8]


def fail(*_) -> None:
    raise OSError("as if killed")


CHANGES = {
    "epoch": lambda s: s.update(epoch=-1),
    "epoch past the end": lambda s: s.update(epoch=9),
    "epoch of another type": lambda s: s.update(epoch=1.0),
    "step": lambda s: s.update(step=0),
    "best": lambda s: s.update(best={}),
    "best epoch": lambda s: s["best"].update(epoch=0.0),
    "best accuracy": lambda s: s["best"].update(accuracy=math.nan),
    "seconds": lambda s: s["seconds"].pop("total"),
    "rng": lambda s: s["rng"].update(cpu=torch.zeros(3)),
    "scheduler": lambda s: s["scheduler"].update(last_epoch=1),
    "batches": lambda s: s["progress"]["epoch"].update(batches=4),
    "skipped": lambda s: s["progress"]["epoch"].pop("skipped"),
    "sums": lambda s: s["progress"]["epoch"]["tally"].update(sums=torch.zeros(5)),
    "monitor": lambda s: s["progress"].update(monitor=None),
    "moments too small": lambda s: s["optimizer"]["state"][0].update(exp_avg=torch.zeros(1)),
    "moments of another type": lambda s: s["optimizer"]["state"][0].update(exp_avg="x"),
    "moments missing": lambda s: s["optimizer"]["state"][0].pop("exp_avg"),
    "a parameter too many": lambda s: s["optimizer"]["state"].update({99: {}}),
    "groups": lambda s: s["optimizer"].update(param_groups=[]),
    "learning rate": lambda s: s["optimizer"]["param_groups"][0].update(lr=math.nan),
    "weight decay": lambda s: s["optimizer"]["param_groups"][0].update(weight_decay=0.5),
}


def test_a_checkpoint_that_no_run_of_its_config_saved_is_refused_before_anything_is_written(
    program, monkeypatch
):
    with monkeypatch.context() as context:
        context.setattr("snn.trainer.Trainer._evaluate", fail)
        program.train(*SMALL, "trainer.checkpoint_every_steps=3", "hydra.run.dir=run")
    last = program.folder / "run" / "last.ckpt"
    whole = last.read_bytes()
    for name, change in CHANGES.items():
        last.write_bytes(whole)
        state = load_checkpoint(last)
        change(state)
        save_checkpoint(last, state)
        before = files(last.parent)
        error = program.train("resume=run").error
        assert error.startswith("error: the checkpoint"), (name, error)
        assert files(last.parent) == before, name
    last.write_bytes(whole)
    assert program.train("resume=run").code == 0


def test_a_best_checkpoint_of_another_run_is_refused_at_once(program):
    program.small("seed=1", run="other")
    run = program.small("trainer.stop_after=1")
    (run / "best.ckpt").write_bytes(Path("other/best.ckpt").read_bytes())
    error = program.train("resume=run").error
    assert "run/best.ckpt holds a run with other settings: seed is 1 there, 0 here" in error


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
    for name in ("metrics.jsonl", "last.ckpt", "previous.ckpt", "best.ckpt"):
        (run / name).unlink()
    assert "run holds a run already (summary.json)" in program.train(*SMALL, "hydra.run.dir=run").error


def test_auto_starts_goes_on_and_lets_a_finished_run_be(program):
    straight = program.small("trainer.epochs=3", run="straight")
    words = (*SMALL, "trainer.epochs=3", "resume=auto", "hydra.run.dir=run")
    assert program.train(*words, "trainer.stop_after=1").code == 0  # one command, again and again
    assert program.train(*words, "trainer.stop_after=2", "data.num_workers=1").code == 0
    assert program.train(*words).code == 0
    run = program.folder / "run"
    assert rows(run) == rows(straight)
    before = files(run)
    ended = program.train(*words)
    assert ended.code == 0 and "run is finished: nothing to resume" in ended.out and files(run) == before
    for path in run.glob("*.ckpt"):
        path.unlink()
    ended = program.train(*words)
    assert ended.code == 0 and "run is finished: nothing to resume" in ended.out, "its config is at hand"
    assert yaml.safe_load((run / "config.yaml").read_text())["resume"] is None
    starts = [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]
    assert [(start["epoch"], start["step"]) for start in starts] == [(0, 0), (1, 4), (2, 8)]


def test_auto_refuses_a_run_of_other_settings(program):
    run = program.small("trainer.stop_after=1")
    before = files(run)
    error = program.train(*SMALL, "optimizer.lr=0.5", "resume=auto", "hydra.run.dir=run").error
    assert "run holds a run with other settings: optimizer.lr is 0.002 there, 0.5 here" in error
    assert files(run) == before


def test_auto_needs_a_folder(program):
    assert "resume=auto needs the folder of the run: hydra.run.dir=PATH" in program.train("resume=auto").error
    error = program.train("-m", "resume=auto", "seed=0,1").error
    assert "resume=auto needs the folder of the run: hydra.sweep.dir=PATH" in error
    assert not list(program.folder.iterdir())


def test_auto_goes_on_with_the_jobs_of_a_sweep(program):
    words = ("-m", *SMALL, "seed=0,1", "resume=auto", "hydra.sweep.dir=sweep")
    assert program.train(*words, "trainer.stop_after=1").code == 0
    assert program.train(*words).code == 0
    for number in (0, 1):
        assert len(rows(program.folder / "sweep" / f"{number}_seed={number}")) == 2


def test_auto_starts_afresh_where_a_run_died_before_its_first_checkpoint(program):
    straight = program.small(run="straight")
    run = program.folder / "run"
    (run / "tb").mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"epoch": 1, "step": 4}\n')
    (run / ".last.ckpt.123").write_bytes(b"half")
    (run / ".notes.2024").write_text("mine")
    program.small("resume=auto")
    assert rows(run) == rows(straight) and [path.name for path in run.glob(".*")] == [".notes.2024"]


def test_a_folder_holds_one_run_at_a_time(program):
    run = program.small("trainer.stop_after=1")
    before = files(run)
    code = "from snn.run_folder import RunFolder\nwith RunFolder('run').locked(): print(flush=True); input()"
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": {"PYTHONPATH": str(ROOT)}}
    with subprocess.Popen([sys.executable, "-c", code], **piped) as other:
        other.stdout.readline()
        for words in (("resume=run",), (*SMALL, "resume=auto", "hydra.run.dir=run")):
            assert "run is in use: another process trains in it" in program.train(*words).error
        other.communicate(b"\n")
    assert files(run) == before
    assert program.train("resume=run").code == 0
