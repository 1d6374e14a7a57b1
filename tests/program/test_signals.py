"""SIGTERM and SIGINT end a run in good order, SIGUSR1 has it save, and nothing is lost by either."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from snn.run_folder import RunFolder
from tests.program.conftest import SMALL, rows
from tests.program.killing import Zygote
from tests.program.test_kill import BASE, contents
from tests.program.test_resume import equal

pytestmark = pytest.mark.slow

WORDS = (*BASE, "trainer.checkpoint_every_steps=null", "trainer.epochs=12")


@pytest.fixture
def zygote(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started = Zygote(tmp_path)
    yield started
    started.close()


def wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.005)


def output() -> str:
    return Path("output.txt").read_text()


@pytest.mark.parametrize(("number", "code", "workers"), [(signal.SIGTERM, 143, 0), (signal.SIGINT, 130, 2)])
def test_a_signal_ends_a_run_that_can_go_on(tmp_path, zygote, number, code, workers):
    words = (*WORDS, f"data.num_workers={workers}")
    pid = zygote.start(*words, "hydra.run.dir=run")
    wait_for(tmp_path / "run" / "best.ckpt")
    time.sleep(0.05)
    os.kill(pid, number)
    start = time.monotonic()
    assert zygote.wait() == code and time.monotonic() - start < 20
    run, state = tmp_path / "run", torch.load("run/last.ckpt")
    assert f"{number.name}: stopped at step {state['step']}" in output()
    assert output().strip().endswith("train.py resume=run") and "error" not in output()
    assert not (run / "error.txt").exists() and "stopped at step" in (run / "train.log").read_text()
    assert len(rows(run)) == state["epoch"]
    zygote.start("resume=run")
    assert zygote.wait() == 0
    zygote.start(*words, "hydra.run.dir=straight")
    assert zygote.wait() == 0
    straight, stopped = contents(tmp_path / "straight"), contents(run)
    for part in straight:
        assert equal(straight[part], stopped[part]), part


def test_a_signal_within_an_epoch_keeps_its_steps(tmp_path, zygote):
    pid = zygote.start(*WORDS, "trainer.batch_size=1", "hydra.run.dir=run")
    wait_for(tmp_path / "run" / "last.ckpt")
    time.sleep(0.05)
    os.kill(pid, signal.SIGTERM)
    assert zygote.wait() == 143
    state = torch.load("run/last.ckpt")
    assert f"SIGTERM: stopped at step {state['step']}" in output()
    steps = 0 if state["progress"] is None else state["progress"]["epoch"]["steps"]
    assert steps % 58 == state["step"] % 58


def test_sigusr1_saves_and_goes_on(tmp_path, zygote):
    pid = zygote.start(*WORDS, "hydra.run.dir=run")
    wait_for(tmp_path / "run" / "last.ckpt")
    os.kill(pid, signal.SIGUSR1)
    assert zygote.wait() == 0
    assert "SIGUSR1: run/last.ckpt holds step " in output()
    assert len(rows(tmp_path / "run")) == 12


def test_a_signal_before_the_training_ends_at_once_and_leaves_nothing(tmp_path, zygote):
    pid = zygote.start(*WORDS)
    time.sleep(0.05)
    os.kill(pid, signal.SIGTERM)
    assert zygote.wait() in (143, -signal.SIGTERM)  # the latter before our first line
    assert not (tmp_path / "runs").exists()


def test_a_signal_at_the_very_end_of_a_run_ends_the_sweep_too(program, monkeypatch):
    real = RunFolder.write_summary

    def ended(self, summary):
        real(self, summary)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(RunFolder, "write_summary", ended)
    words = ("-m", *SMALL, "seed=0,1", "hydra.sweep.dir=sweep")
    assert program.train(*words).code == 143
    assert [path.parent.name for path in Path("sweep").glob("*/summary.json")] == ["0_seed=0"]
    assert not Path("sweep/1_seed=1").exists()


def test_a_signal_ends_a_whole_sweep(tmp_path, zygote):
    pid = zygote.start("-m", *WORDS, "seed=0,1", "hydra.sweep.dir=sweep")
    first = tmp_path / "sweep" / "0_seed=0"
    wait_for(first / "last.ckpt")
    os.kill(pid, signal.SIGTERM)
    assert zygote.wait() == 143
    assert not (first / "summary.json").exists() and not (tmp_path / "sweep" / "1_seed=1").exists()
