"""One seed, one result: whatever the workers, the folder, or the way the config came in."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from tests.program.conftest import SMALL, rows, summary

pytestmark = pytest.mark.slow  # whole runs, several each

ROOT = Path(__file__).parents[2]
AUGMENT = "data.augment=resizedcrop0.7+flip+roll2|rotate30|cutout3"
RANDOM = ("network.layers=8C3-P2-D0.2-16", AUGMENT, "encoding=poisson")


def test_hazard_22_seed_zero_twice_is_equal_and_seed_one_differs(program):
    once, twice = (program.small(*RANDOM, "seed=0", run=run) for run in ("once", "twice"))
    other = program.small(*RANDOM, "seed=1", run="other")
    assert rows(once) == rows(twice)
    assert rows(once) != rows(other)


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_hazard_24_workers_change_no_number(program, workers):
    alone = program.small(*RANDOM, run="alone")
    helped = program.small(*RANDOM, f"data.num_workers={workers}", run="helped")
    assert rows(alone) == rows(helped)
    assert summary(alone)["test/loss"] == summary(helped)["test/loss"]


def test_hazard_31_the_saved_config_is_resolved_and_repeats_the_metrics(program):
    run = program.small(*RANDOM)
    text = (run / "config.yaml").read_text()
    assert "${" not in text and "???" not in text
    words = ("--config-path", str(run), "--config-name", "config", "hydra.run.dir=again")
    assert program.train(*words).code == 0
    assert rows(program.folder / "again") == rows(run)
    assert yaml.safe_load((program.folder / "again" / "config.yaml").read_text()) == yaml.safe_load(text)


def test_hazard_31_cfg_job_resolve(program):
    ended = program.train("--cfg", "job", "--resolve", "neuron.tau_m=7")
    assert ended.code == 0
    shown = OmegaConf.create(ended.out)
    assert shown.neuron.tau_m == 7 and shown.name == "digits" and shown.encoding.mean == shown.data.mean
    assert not list(program.folder.iterdir())


def test_hazard_31_another_working_directory(tmp_path):
    command = [sys.executable, str(ROOT / "train.py"), *SMALL, "trainer.epochs=1"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    (run,) = (tmp_path / "runs" / "synthetic").iterdir()
    assert (run / "summary.json").exists()


def test_help_needs_no_torch():
    code = "import sys, train; train.main(['--help']); assert 'torch' not in sys.modules"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "optimizer: adam, adamw, sgd" in ended.stdout


def test_a_run_draws_nothing_from_the_test_process(program):
    """Two runs in one process do not share random state."""
    first = program.small(run="first")
    torch.rand(17)
    assert rows(program.small(run="second")) == rows(first)
