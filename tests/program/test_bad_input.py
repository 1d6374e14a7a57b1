"""A mistake ends the command with one line, before any work, and leaves nothing behind."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.program.conftest import SMALL

ROOT = Path(__file__).parents[2]


def test_the_traceback_is_shown_on_request(program, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    ended = program.train("encoding.steps=0")
    assert ended.code != 0
    assert "Traceback" in ended.err
    assert ended.err.strip().splitlines()[-1] == "error: encoding.steps must be at least 1, got 0"


def test_ctrl_c_while_it_is_still_importing_is_one_line(program, monkeypatch):
    def interrupted(*words, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("omegaconf.OmegaConf.register_new_resolver", interrupted)
    ended = program.train()
    assert (ended.code, ended.error) == (130, "error: interrupted")


def test_wrong_facts_are_named(program):
    assert "data.num_classes" in program.train("data.num_classes=5", "trainer.epochs=1").error
    assert "data.size" in program.train("data.size=9", "trainer.epochs=1").error
    assert not list(program.folder.iterdir())


def test_hazard_27_passes_with_future_warnings_as_errors_and_no_gpu(tmp_path):
    words = ["data=synthetic", "trainer.epochs=1", "network.layers=16"]
    command = [sys.executable, "-W", "error::FutureWarning", str(ROOT / "train.py"), *words]
    ended = subprocess.run(
        command, cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr


def test_hazard_28_a_tilde_expands(program, monkeypatch):
    monkeypatch.setenv("HOME", str(program.folder / "home"))
    assert f"{program.folder}/home/x/MNIST/raw" in program.train("data=mnist", "data.root=~/x").error


def test_a_value_with_other_than_ascii_is_read(program):
    assert "there is no checkpoint é/x" in program.train("resume=é/x").error


@pytest.mark.slow
def test_a_closed_pipe_ends_no_run(tmp_path):
    command = f"{sys.executable} {ROOT / 'train.py'} {' '.join(SMALL)} hydra.run.dir=run | head -1"
    ended = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert "Traceback" not in ended.stderr
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("resume", ["null", "auto"])
@pytest.mark.parametrize("where", ["hydra.run.dir=mine", "hydra.run.dir=deep/mine", "hydra.run.dir=."])
def test_a_run_that_is_refused_leaves_no_folder(program, where, resume):
    before = Path.cwd()
    words = ("data=mnist", "data.root=nowhere", f"resume={resume}", where)
    assert "not found" in program.train(*words).error
    assert Path.cwd() == before and not list(before.iterdir())
