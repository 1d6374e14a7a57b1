"""A sweep is its runs, each as it would be alone."""

import shlex

import pytest

from tests.program.conftest import SMALL, files, rows

pytestmark = pytest.mark.slow  # whole runs, several each


def jobs(program) -> dict[str, object]:
    (sweep,) = (program.folder / "runs" / "synthetic").iterdir()
    assert sweep.name.endswith("-sweep")
    return {path.name: path for path in sweep.iterdir() if path.is_dir()}


def test_hazard_30_each_job_equals_the_same_run_alone(program):
    words = ("seed=0,1", "optimizer=sgd", "surrogate.grad_scale=0.85,1")
    assert program.train(*SMALL, "-m", *words).code == 0
    made = jobs(program)
    assert sorted(made) == [
        "0_seed=0,surrogate.grad_scale=0.85",
        "1_seed=0,surrogate.grad_scale=1",
        "2_seed=1,surrogate.grad_scale=0.85",
        "3_seed=1,surrogate.grad_scale=1",
    ]
    results = []
    for name, folder in made.items():
        alone = program.small("optimizer=sgd", *name.split("_", 1)[1].split(","), run=f"alone{name[0]}")
        assert rows(folder) == rows(alone)
        results.append(str(rows(folder)))
    assert len(set(results)) == 4, "under SGD the scale acts"


def test_the_command_that_a_job_prints_pastes(program):
    ended = program.train(*SMALL, "-m", "seed=0", "surrogate.grad_scale=0.85,1")
    commands = [shlex.split(line) for line in ended.out.splitlines() if line.startswith("python ")]
    assert len(commands) == 2
    for command in commands:
        assert program.evaluate(*command[2:]).code == 0


def test_hazard_30_a_job_that_fails_leaves_the_others_whole(program):
    ended = program.train(*SMALL, "-m", "surrogate.tau_grad=2.5,1,3")
    assert "tau_grad must be finite and > 1 step, got 1" in ended.error
    good, bad, other = (folder for _, folder in sorted(jobs(program).items()))
    assert rows(good) and rows(other)
    assert [file.name for file in bad.iterdir()] == ["error.txt"]
    assert "Traceback" in (bad / "error.txt").read_text()
    assert not (good / "error.txt").exists() and (good / "summary.json").exists()


def test_a_glob_sweeps_over_the_choices(program):
    assert program.train(*SMALL, "-m", "optimizer=glob(*,exclude=sgd)").code == 0
    assert sorted(jobs(program)) == ["0_optimizer=adam", "1_optimizer=adamw"]


@pytest.mark.slow
def test_a_long_or_slashed_override_makes_a_plain_folder(program):
    layers = "-".join(["4"] * 200)
    assert program.train(*SMALL, "-m", f"network.layers={layers},4", "data.root=../../x,b").code == 0
    assert len(jobs(program)) == 4


def test_a_job_refused_the_folder_of_a_run_leaves_it_alone(program):
    words = ("-m", *SMALL, "trainer.epochs=1", "seed=0,1", "hydra.sweep.dir=sweep")
    assert program.train(*words).code == 0
    first = program.folder / "sweep" / "0_seed=0"
    before = files(first)
    ended = program.train(*words)
    assert ended.code == 1 and "holds a run already" in ended.out
    assert files(first) == before
