"""eval.py repeats a run's accuracy from the checkpoint alone."""

import shlex

import pytest
import torch

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


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("seed=3", "unknown key seed"),
        ("network.layers=5", "unknown key network"),
        ("+trainer.epochs=2", "unknown key trainer"),
        ("data.rot=x", "unknown key data.rot; did you mean data.root?"),
        ("split=tset", "split must be train, val or test, got 'tset'"),
        ("steps=0", "steps must be at least 1, got 0"),
        ("batch_size=1.5", "batch_size must be int or null, got 1.5"),
        ("device=tpu", "device must be auto, cpu, cuda or cuda:N"),
        ("data.num_classes=7", "unknown key data.num_classes"),
        ("checkpoint=nowhere", "there is no checkpoint nowhere"),
        ("-m", "call it without -m"),
    ],
)
def test_hazard_32_a_contradicting_override_fails_loudly(program, word, message):
    program.small()
    before = files(program.folder)
    assert message in program.evaluate("checkpoint=run", word).error
    assert files(program.folder) == before


def test_a_checkpoint_must_be_given(program):
    assert "checkpoint must be given: checkpoint=VALUE" in program.evaluate().error


def test_loading_is_strict(program):
    run = program.small()
    state = torch.load(run / "best.ckpt")
    del state["network"]["layers.0_8C3.threshold"]
    torch.save(state, run / "cut.ckpt")
    assert "layers.0_8C3.threshold" in program.evaluate("checkpoint=run/cut.ckpt").error


def test_a_checkpoint_cannot_name_code(program):
    run = program.small()
    state = torch.load(run / "best.ckpt")
    state["config"]["loss"]["_target_"] = "os.system"
    torch.save(state, run / "evil.ckpt")
    assert "loss._target_ must name" in program.evaluate("checkpoint=run/evil.ckpt").error


def test_any_path_to_a_checkpoint_is_read(program):
    run = program.small(run="'a=1, b é'")
    for path in ("a=1, b é", "a=1, b é/last.ckpt", f"{program.folder}/a=1, b é"):
        assert program.evaluate(f"checkpoint={path}").code == 0
    assert run.parent == program.folder
