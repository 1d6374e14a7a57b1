"""Whatever the program is fed, config, experiment, override or checkpoint: it runs no code of theirs."""

import os
import pickle
import sys

import pytest
import torch

from snn.checkpoint import save_checkpoint
from tests.program.conftest import SMALL, files

HYDRA = "is not to be set; of Hydra's own keys only hydra.run.dir, hydra.sweep.dir, hydra.sweep.subdir are"
SLOW = pytest.mark.slow  # the same, once more from another side
OPENS = "{_target_: zipfile.ZipFile, file: ran, mode: w}"  # makes a file called ran if it is built


def few(cases, count):
    """Mark all but the first `count` slow."""
    return [pytest.param(*case, marks=[SLOW] * (n >= count)) for n, case in enumerate(cases)]


@pytest.fixture(autouse=True)
def ran(program, monkeypatch):
    """Nothing has run when a test is over; a module `evil` that can be imported is the bait."""
    bait = program.folder / "bait"
    bait.mkdir()
    (bait / "evil").mkdir()
    (bait / "evil" / "__init__.py").write_text("open('ran', 'w').close()\nclass Thing:\n    pass\n")
    (bait / "evil" / "experiment").mkdir()
    monkeypatch.syspath_prepend(bait)
    monkeypatch.setattr(os, "system", lambda *_: (program.folder / "ran").touch())
    yield
    sys.modules.pop("evil", None)
    assert not (program.folder / "ran").exists(), "code was run"


def refused(program, *words, main="train"):
    """The error line of a command that changes no file."""
    before = files(program.folder)
    error = getattr(program, main)(*words).error
    assert files(program.folder) == before
    assert {path.name for path in program.folder.iterdir()} <= {"bait", "mine", "run", "evil.ckpt"}
    return error


def experiment(program, text):
    folder = program.folder / "mine" / "experiment"
    folder.mkdir(parents=True)
    (folder / "evil.yaml").write_text(f"# @package _global_\n{text}\n")
    return "--config-dir", "mine", "experiment=evil"


# A config names an object that is not listed


WORDS = [
    ("optimizer._target_=os.system", "optimizer._target_ must name something of torch.optim."),
    ("optimizer._target_=torch.optim.lr_scheduler.LambdaLR", "optimizer._target_ must name"),
    ("loss._target_=evil.Thing", "loss._target_ must name something of snn.losses."),
    ("loss._target_=snn.run_folder.RunFolder", "loss._target_ must name something of snn.losses."),
    ("++loss={_target_:snn.checkpoint.save_checkpoint,path:ran,state:{}}", "loss._target_ must name"),
    ("++network={_target_:snn.data.download.download,name:mnist,root:x}", "network._target_ must name"),
    ("++data={_target_:snn.config.run,task:x,schema:y,argv:[]}", "data._target_ must name"),
    ("data.source={_target_:snn.data.events.cache.load}", "data.source._target_ must name"),
    ("data.source._partial_=false", "data.source._partial_ must be true, got False"),
    ("head._partial_=false", "head._partial_ must be true, got False"),
    ("loss._partial_=true", "loss._partial_ must be false, got True"),
    ("+loss._args_=[1]", "unknown key loss._args_"),
    ("+network.head={_target_:evil.Thing}", "network.head._target_ has no place there"),
    ("+data.source.x=[{_target_:evil.Thing}]", "unknown key data.source.x"),
    ("optimizer.lr=[{a:{_target_:evil.Thing}}]", "optimizer.lr may hold no _target_ at any depth"),
    ("data.mean=[{_target_:evil.Thing}]", "data.mean may hold no _target_ at any depth"),
    ("++trainer={_target_:evil.Thing}", "unknown key trainer._target_"),
    ("+_target_=evil.Thing", "unknown key _target_"),
    ("name=evil.Thing loss._target_=${name}", "loss._target_ must name something of snn.losses."),
    ("loss._target_=${oc.env:EVIL}", "got 'os.system'"),
    ("++loss=${oc.decode:'{_target_: evil.Thing}'}", ""),
]


@pytest.mark.parametrize(("word", "message"), few(WORDS, 6))
def test_a_word_names_no_other_object(program, monkeypatch, word, message):
    monkeypatch.setenv("EVIL", "os.system")
    assert message in refused(program, *SMALL, *word.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loss: {_target_: evil.Thing}", "loss._target_ must name"),
        ("data: {source: {_target_: os.system}}", "data.source._target_ must name"),
        ("loss: !!python/object/apply:os.system ['touch ran']", "could not determine a constructor"),
        ("loss: !!python/name:evil.Thing", "could not determine a constructor"),
        ("name: !!python/module:evil", "could not determine a constructor"),
    ],
)
def test_an_experiment_file_names_no_other_object(program, text, message):
    assert message in refused(program, *experiment(program, text))


# Hydra's own node

LOGGING = "{version: 1, handlers: {a: {(): zipfile.ZipFile, file: ran, mode: w}}, root: {handlers: [a]}}"
SETS_HYDRA = {
    "callbacks": f"callbacks: {{a: {OPENS}}}",
    "job_logging": f"job_logging: {LOGGING}",
    "hydra_logging": f"hydra_logging: {LOGGING}",
    "formatter": "job_logging: {formatters: {a: {class: evil.Thing}}}",
    "launcher": "launcher: {_target_: evil.Thing}",
    "sweeper": "sweeper: {_target_: evil.Thing}",
    "sweeper-params": "sweeper: {params: {seed: '1,2'}}",
    "env_set": "job: {env_set: {LD_PRELOAD: evil.so}}",
    "env_copy": "job: {env_copy: [HOME]}",
    "chdir": "job: {chdir: true}",
    "mode": "mode: MULTIRUN",
    "overrides": "overrides: {task: [seed=3]}",
    "searchpath": "searchpath: ['pkg://evil']",
    "verbose": "verbose: true",
}


OFTEN = ("callbacks", "job_logging", "env_set", "searchpath")
EACH = pytest.mark.parametrize(
    "text", [pytest.param(SETS_HYDRA[key], id=key, marks=[SLOW] * (key not in OFTEN)) for key in SETS_HYDRA]
)


def fed_back(program, text):
    (program.folder / "mine").mkdir()
    (program.folder / "mine" / "evil.yaml").write_text(f"hydra: {{{text}}}\nseed: 1\n")
    return "--config-path", "mine", "--config-name", "evil"


@EACH
def test_a_fed_back_config_sets_no_key_of_hydra(program, text):
    assert HYDRA in refused(program, *fed_back(program, text))


@EACH
def test_an_experiment_sets_no_key_of_hydra(program, text):
    error = refused(program, *experiment(program, f"hydra: {{{text}}}"))
    assert HYDRA in error or "Overriding hydra.searchpath" in error


@SLOW
@pytest.mark.parametrize("extra", [("-m", "seed=0,1"), ("--help",), ("--hydra-help",), ("--cfg", "job")])
@pytest.mark.parametrize("key", ["callbacks", "job_logging", "hydra_logging", "overrides"])
def test_no_way_of_asking_runs_it(program, key, extra):
    words = fed_back(program, SETS_HYDRA[key])
    assert HYDRA in refused(program, *words, *extra)
    assert HYDRA in refused(program, "--config-dir", *words[1:], *extra)


HYDRA_WORDS = [
    f"+hydra.callbacks.a={OPENS}",
    "+hydra.job_logging.handlers.a={class: zipfile.ZipFile, file: ran, mode: w}",
    "+hydra.hydra_logging.formatters.a={class: evil.Thing}",
    "hydra.launcher._target_=evil.Thing",
    "hydra.sweeper._target_=evil.Thing",
    "+hydra.sweeper.params={seed:'1,2'}",
    "hydra/launcher=basic",
    "hydra/job_logging=disabled",
    "+hydra/callbacks=a",
    "hydra.searchpath=[pkg://evil]",
    "hydra.job.env_set={LD_PRELOAD:x}",
    "hydra.mode=MULTIRUN",
    "~hydra.job_logging",
    "hydra.job.chdir=true",
    "hydra.verbose=true",
    "+optimizer@hydra.callbacks.a=adamw",
    "+hydra={callbacks:{a:1}}",
]


@pytest.mark.parametrize("word", few([(word,) for word in HYDRA_WORDS], 3))
def test_a_word_sets_no_key_of_hydra(program, word):
    assert HYDRA in refused(program, *SMALL, word)


@SLOW
def test_a_sweep_cannot_hide_it_in_one_job_or_in_what_all_share(program):
    words = experiment(program, f"hydra: {{callbacks: {{a: {OPENS}}}}}")
    assert HYDRA in refused(program, *SMALL, "-m", *words[:2], "experiment=fashion_mnist_small,evil")
    (program.folder / "mine" / "experiment" / "calm.yaml").write_text(
        "# @package _global_\nhydra: {callbacks: null}\n"
    )
    (program.folder / "mine" / "base.yaml").write_text(f"hydra: {{callbacks: {{a: {OPENS}}}}}\nseed: 0\n")
    words = ("--config-path", "mine", "--config-name", "base", "-m", "+experiment=calm,calm")
    assert HYDRA in refused(program, *words)


@SLOW
def test_the_folder_of_a_run_is_a_user_s_to_choose(program):
    words = experiment(program, "hydra: {run: {dir: here}}\ntrainer: {epochs: 1}")
    assert program.train(*SMALL, *words, "trainer.epochs=1").code == 0
    assert (program.folder / "here" / "summary.json").exists()
    words = ("hydra.sweep.dir=all", "hydra.sweep.subdir=job${hydra.job.num}", "-m", "seed=0,1")
    assert program.train(*SMALL, "trainer.epochs=1", *words).code == 0
    assert (program.folder / "all" / "job1" / "summary.json").exists()


def test_a_pickled_rerun_is_refused(program):
    (program.folder / "mine").mkdir()
    evil = program.folder / "mine" / "config.pickle"
    evil.write_bytes(pickle.dumps(Evil()))
    for flag in ("--experimental-rerun", "--experimental-re"):
        assert "--experimental-rerun runs what a pickle says" in refused(program, flag, "mine/config.pickle")


# A checkpoint


class Evil:
    def __reduce__(self):
        return open, ("ran", "w")


CHECKPOINTS = [
    ("config.loss._target_", "os.system", "loss._target_ must name"),
    ("config.loss._target_", "snn.trainer.Trainer", "loss._target_ must name"),
    ("config.loss._target_", "${name}", "loss._target_ must name"),
    ("config.loss._target_", "${oc.env:EVIL}", "got 'os.system'"),
    ("config.data.source._target_", "snn.data.download.download", "data.source._target_ must name"),
    ("config.encoding.mean", [{"_target_": "evil.Thing"}], "encoding.mean may hold no _target_"),
    ("config.optimizer.lr", {"a": {"_target_": "evil.Thing"}}, "optimizer.lr may hold no _target_"),
    ("config.hydra", {"callbacks": {"a": {"_target_": "evil.Thing"}}}, "unknown key hydra"),
    ("config", "a: 1", ""),
    ("config", ["a"], ""),
    ("config", None, ""),
    ("network", None, ""),
    ("config", Evil(), "is no checkpoint of this project"),
    ("optimizer.state", [Evil()], "is no checkpoint of this project"),
    ("rng", {"cpu": Evil()}, "is no checkpoint of this project"),
]


@pytest.mark.parametrize(("path", "value", "message"), few(CHECKPOINTS, 1))
def test_a_checkpoint_runs_nothing(program, monkeypatch, small_run, path, value, message):
    monkeypatch.setenv("EVIL", "os.system")
    state = torch.load(small_run / "last.ckpt")
    node, keys = state, path.split(".")
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    for name in ("last.ckpt", "best.ckpt"):
        save_checkpoint(small_run / name, state)  # whole, as far as its checksum tells
    assert message in refused(program, "checkpoint=run", main="evaluate")
    assert message in refused(program, "resume=run")


@pytest.fixture
def small_run(program):
    return program.small("trainer.stop_after=1")
