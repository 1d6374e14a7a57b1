"""Nothing goes wrong in silence: dead layers, numbers that are not finite, a test set that decides."""

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch

import snn.data.sources as sources
from snn.data import Loader
from snn.layers import SRMLinear
from snn.losses import CrossEntropy
from snn.neuron import GradParams, SRMParams
from snn.watch import Watch
from tests.program.conftest import SMALL, files, rows, summary


@pytest.mark.parametrize("head", [(), ("head=spiking", "loss=count")], ids=["decoupled", "spiking"])
def test_hazard_19_a_dead_network_is_visible(program, head):
    run = program.folder / "run"
    words = ("data=synthetic", "neuron.threshold=1000", "calibrate.spikes=null", "trainer.epochs=1")
    ended = program.train(*words, *head, "hydra.run.dir=run")
    assert ended.code == 0
    assert "warning: layer 0_16C3" in ended.out and "is silent" in ended.out
    (row,) = rows(run)
    assert row["val/spike_rate/0_16C3"] == 0 == row["train/spike_rate/4_128"]
    assert all(math.isfinite(v) for v in row.values())
    lost = ended.out.count("from them: 4; set head.target_rise=0.05")
    assert lost == (1 if head else 0)
    if head:
        assert row["val/silent_classes"] == 4
        assert row["val/undecided"] == 1 and row["val/accuracy"] == 0, "undecided, not class 0"
        assert summary(run)["test/undecided"] == 1


@pytest.mark.parametrize("words", [(), ("surrogate=atan",), ("head.target_rise=0.05",)], ids=" ".join)
def test_lost_classes_are_said_once_and_only_where_silent_neurons_learn_nothing(program, words):
    dead = ("head=spiking", "loss=count", "neuron.threshold=1000", "calibrate.spikes=null")
    ended = program.train(*SMALL, *dead, *words, "hydra.run.dir=run")
    said = ended.out.count("warning: output neurons that are silent for most samples of their own class")
    assert ended.code == 0 and said == (0 if words else 1)


def test_lost_classes_are_said_again_when_there_are_more(caplog):
    layer = SRMLinear(1, 3, SRMParams(), GradParams())
    loader = SimpleNamespace(
        batch_size=1, first=lambda n: (torch.ones(1, 1, 1), torch.zeros(1), torch.zeros(1))
    )
    cpu = torch.device("cpu")
    watch = Watch(layer, lambda x, i, e: x, lambda output, labels: output.sum(), loader, cpu, taught=False)
    for classes in (1, 1, 3, 0, 2, 0, 4):
        watch({"silent_classes": classes})
    said = [int(re.search(r"from them: (\d)", record.getMessage())[1]) for record in caplog.records]
    assert said == [1, 3, 4]


def poison(monkeypatch, first_bad_call: int) -> None:
    """Make the loss NaN from a call on."""
    calls = []

    def loss(self, logits, labels):
        calls.append(1)
        value = torch.nn.functional.cross_entropy(logits, labels)
        return value * math.nan if len(calls) >= first_bad_call else value

    monkeypatch.setattr(CrossEntropy, "__call__", loss)


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(program, monkeypatch):
    poison(monkeypatch, 8)  # 4 steps, an evaluation and a look at the sum law: the second step of epoch 2
    words = (
        "data=synthetic",
        "network.layers=8",
        "trainer.batch_size=16",
        "trainer.epochs=3",
        "hydra.run.dir=run",
    )
    error = program.train(*words).error
    assert "loss or gradient is not finite at step 6;" in error
    assert "run/last.ckpt is the last good checkpoint" in error
    state = torch.load("run/last.ckpt")
    assert state["epoch"] == 1 and all(t.isfinite().all() for t in state["network"].values())
    assert len(rows(program.folder / "run")) == 1
    assert (program.folder / "run" / "error.txt").exists()


def test_hazard_21_a_loss_that_is_not_finite_in_evaluation_is_never_best(program, monkeypatch):
    poison(monkeypatch, 11)
    words = (
        "data=synthetic",
        "network.layers=8",
        "trainer.batch_size=16",
        "trainer.epochs=3",
        "hydra.run.dir=run",
    )
    assert "not finite in evaluation after step 8" in program.train(*words).error
    assert torch.load("run/best.ckpt")["epoch"] == 1


def test_weights_that_are_not_finite_are_not_saved(program):
    words = ("data=synthetic", "trainer.epochs=2", "optimizer=sgd", "optimizer.lr=1e38", "hydra.run.dir=run")
    assert "not finite" in program.train(*words).error
    assert not (program.folder / "run" / "last.ckpt").exists()


def test_hazard_21_poisoned_test_labels_change_the_test_line_alone(program, monkeypatch):
    clean = program.small("trainer.epochs=3", run="clean")
    real = sources.synthetic

    def poisoned(root, download, *, channels, size, num_classes):
        train, test = real(root, download, channels=channels, size=size, num_classes=num_classes)
        return train, sources.Images(test.images, (test.labels + 1) % num_classes)

    poisoned.__module__ = real.__module__
    monkeypatch.setattr(sources, "synthetic", poisoned)
    dirty = program.small("trainer.epochs=3", run="dirty")
    assert rows(dirty) == rows(clean)
    one, other = summary(clean), summary(dirty)
    changed = {key for key in one if one[key] != other[key]} - {"seconds", "samples_per_second"}
    assert changed and all(key.startswith("test/") for key in changed)


def test_a_failed_save_leaves_the_old_checkpoint(program, monkeypatch):
    run = program.small("trainer.stop_after=1", "trainer.epochs=2")
    before = files(run)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("snn.checkpoint.torch.save", full)
    assert "No space left on device" in program.train("resume=run").error
    after = files(run)
    assert after["last.ckpt"] == before["last.ckpt"] and after["best.ckpt"] == before["best.ckpt"]
    assert not [name for name in after if name.startswith(".")]
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["epoch"] == 1


def test_a_step_that_is_not_finite_is_skipped_counted_and_shown(program, monkeypatch):
    calls = []

    def loss(self, logits, labels):
        calls.append(1)
        value = torch.nn.functional.cross_entropy(logits, labels)
        return value * math.nan if len(calls) in (1, 3) else value

    monkeypatch.setattr(CrossEntropy, "__call__", loss)
    words = ("data=synthetic", "network.layers=8", "trainer.batch_size=16", "trainer.on_nonfinite=skip")
    ended = program.train(*words, "trainer.epochs=2", "hydra.run.dir=run")
    assert ended.code == 0
    assert ended.out.count("warning: loss or gradient is not finite at step ") == 2
    assert "epoch 1/2" in ended.out and "skipped 2 steps" in ended.out
    first, second = rows(program.folder / "run")
    assert (first["train/skipped_steps"], second["train/skipped_steps"]) == (2, 0)
    assert (first["step"], second["step"]) == (4, 8), "the schedule counts them"
    assert all(math.isfinite(value) for row in (first, second) for value in row.values())


@pytest.mark.slow
def test_a_skipped_step_changes_no_weight(program, monkeypatch):
    poison(monkeypatch, 1)
    words = ("data=synthetic", "network.layers=8", "trainer.batch_size=16", "trainer.on_nonfinite=skip")
    error = program.train(*words, "trainer.epochs=2", "hydra.run.dir=run").error
    assert "no step of epoch 1 was finite; nothing was saved; lower optimizer.lr" in error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("neuron.threshold=1e-3", "calibrate.spikes=null"),
            "warning: layer 0_8C3, 2_16 is saturated, at a spike rate of ",
        ),
        (("surrogate.cap_time=0.5",), "of its time gradient, by the sum law 1: raise surrogate.cap_time"),
    ],
    ids=["saturated", "law"],
)
def test_saturation_and_a_broken_sum_law_are_said_once(program, monkeypatch, words, said):
    monkeypatch.setattr("snn.watch.SATURATED", 0.3)  # what a neuron of 8x8 pixels can reach
    ended = program.train(*SMALL, *words, "hydra.run.dir=run")
    assert ended.code == 0 and ended.out.count(said) == 1, ended.out


def test_the_look_at_the_sum_law_takes_no_more_than_a_batch(program, monkeypatch):
    real, asked = Loader.first, []
    monkeypatch.setattr(Loader, "first", lambda loader, n: (asked.append(n), real(loader, n))[1])
    program.small("trainer.batch_size=5", "trainer.epochs=1", "calibrate.batch_size=7")
    assert asked == [1, 7, 5]


SOUND = {
    "decoupled": (),
    "spiking": ("head=spiking", "loss=count"),
    "atan": ("surrogate=atan",),
    "bf16": ("trainer.precision=bf16",),
    "poisson": ("encoding=poisson",),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_run_gives_no_warning(program, name):
    ended = program.train(*SMALL, *SOUND[name], "hydra.run.dir=run")
    assert ended.code == 0 and "warning" not in ended.out
