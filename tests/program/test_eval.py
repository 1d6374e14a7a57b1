"""eval.py repeats a run's accuracy from the checkpoint alone."""

import shlex

import pytest

from tests.program.conftest import SMALL, files, summary


@pytest.mark.parametrize(
    "extra",
    [
        (),
        ("head=spiking", "loss=count"),
        ("encoding=poisson",),
        ("network.weight_standardization=false", "calibrate.spikes=null"),
        (
            *("data=moving_digits", "data.limit=60", "data.augment=roll2", "network.layers=P2-4C3-P4"),
            *("encoding=frames", "encoding.steps=3", "encoding.drawn=2", "encoding.cap=1"),
        ),
    ],
    ids=["decoupled", "spiking", "poisson", "plain-weights", "events"],
)
def test_hazard_32_best_checkpoint_repeats_the_summary(program, extra):
    run = program.small(*extra)
    before = files(program.folder)
    for split in ("test", "val"):
        ended = program.evaluate("checkpoint=run/best.ckpt", f"split={split}")
        assert ended.code == 0, ended.err
        assert ended.out.splitlines()[-1] == f"{split}/accuracy {summary(run)[f'{split}/accuracy']:.4f}"
    assert f"test/loss {summary(run)['test/loss']:.4f}" in program.evaluate("checkpoint=run").out
    assert files(program.folder) == before, "eval writes nothing"


def test_the_last_line_of_training_is_the_command_to_evaluate(program):
    ended = program.train(*SMALL, "name=with-a-name")
    command = ended.out.strip().splitlines()[-1]
    assert command.startswith("python ") and "eval.py checkpoint=runs/with-a-name/" in command
    again = program.evaluate(*shlex.split(command)[2:])
    accuracy = next(line.split()[1] for line in ended.out.splitlines() if line.startswith("test/accuracy"))
    assert again.out.strip().endswith(f"test/accuracy {accuracy}")


def test_eval_takes_steps_batch_size_workers_and_data_keys(program):
    program.small("data.val_fraction=0.25")
    plain = program.evaluate("checkpoint=run", "split=val").out.splitlines()[-1]
    words = ("batch_size=5", "data.num_workers=2", "data.root=x")
    assert program.evaluate("checkpoint=run", "split=val", *words).out.splitlines()[-1] == plain
    more_steps = program.evaluate("checkpoint=run", "steps=9")
    assert more_steps.code == 0 and more_steps.out != program.evaluate("checkpoint=run").out
    assert program.evaluate("checkpoint=run", "split=train", "data.limit=20").code == 0


def test_any_path_to_a_checkpoint_is_read(program):
    run = program.small(run="'a=1, b é'")
    for path in ("a=1, b é", "a=1, b é/last.ckpt", f"{program.folder}/a=1, b é"):
        assert program.evaluate(f"checkpoint={path}").code == 0
    assert run.parent == program.folder
