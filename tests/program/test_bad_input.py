"""A mistake ends the command with one line, before any work, and leaves nothing behind."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.program.conftest import SMALL, files

ROOT = Path(__file__).parents[2]


@pytest.fixture
def no_data(monkeypatch):
    """Loading data is a failure of the test."""

    def refuse(*args, **kwargs):
        raise AssertionError("data were loaded")

    monkeypatch.setattr("sklearn.datasets.load_digits", refuse)


BAD = [
    # misspelt keys, wherever they stand
    ("trainer.epohs=3", "unknown key trainer.epohs; did you mean trainer.epochs?"),
    ("+trainer.epohs=3", "unknown key trainer.epohs; did you mean trainer.epochs?"),
    ("optimizer.lrr=3", "unknown key optimizer.lrr; did you mean optimizer.lr?"),
    ("+optimizer.lrr=3", "unknown key optimizer.lrr; did you mean optimizer.lr?"),
    ("optimzer=sgd", "unknown key optimzer; did you mean optimizer?"),
    ("sed=1", "unknown key sed; did you mean seed?"),
    ("+data.source.rot=x", "unknown key data.source.rot; did you mean data.source.root?"),
    ("++neuron.tau=3", "unknown key neuron.tau; did you mean neuron.tau_"),
    ("encoding=ttfs encoding.mean=[1]", "unknown key encoding.mean"),
    # choices
    ("optimizer=adm", "optimizer=adm is no choice; did you mean optimizer=adam?"),
    ("data=digit", "did you mean data=digits?"),
    ("experiment=fashion_mnist", "did you mean experiment=fashion_mnist_small?"),
    # values of the wrong kind
    ("optimizer.lr=abc", "optimizer.lr must be float"),
    ("optimizer.lr=", "optimizer.lr must be float"),
    ("optimizer.lr=true", "optimizer.lr must be float"),
    ("trainer.epochs=1.5", "trainer.epochs must be int, got 1.5"),
    ("trainer.epochs=null", "trainer.epochs must be int, got None"),
    ("seed=abc", "seed must be int, got 'abc'"),
    ("head.sign=maybe", "head.sign must be bool"),
    ("data.mean=0.3", "data.mean must be list[float]"),
    ("seed=0,1", "Ambiguous value for argument 'seed=0,1'"),
    # values out of range
    ("optimizer.lr=-1", "torch.optim.AdamW: Invalid learning rate: -1"),
    ("encoding.steps=0", "encoding.steps must be at least 1, got 0"),
    ("trainer.epochs=0", "trainer.epochs must be at least 1, got 0"),
    ("trainer.batch_size=0", "trainer.batch_size must be at least 1, got 0"),
    ("trainer.accumulate=0", "trainer.accumulate must be at least 1, got 0"),
    ("trainer.stop_after=0", "trainer.stop_after must be at least 1, got 0"),
    ("trainer.clip_norm=0", "trainer.clip_norm must be null or finite and > 0, got 0"),
    ("trainer.norm_weight_decay=-1", "trainer.norm_weight_decay must be null or finite and >= 0, got -1"),
    ("seed=-1", "seed must lie in [0, 2^63), got -1"),
    ("neuron.tau_m=1", "tau_m must be finite and > 1 step, got 1"),
    ("neuron.tau_m=nan", "tau_m must be finite and > 1 step, got nan"),
    ("neuron.tau_m=3 neuron.tau_s=3", "tau_m and tau_s must differ, but got 3 for both"),
    ("neuron.threshold=0", "threshold must be finite and > 0"),
    ("surrogate.tau_grad=1", "tau_grad must be finite and > 1 step, got 1"),
    ("surrogate.cap_weight=0", "cap_weight must be finite and > 0, got 0"),
    ("surrogate.grad_scale=-1", "grad_scale must be finite and >= 0, got -1"),
    ("head.decouple_scale=-1", "head.decouple_scale must be finite and >= 0, got -1"),
    ("head.sign_clip=0", "head.sign_clip must be finite and > 0, got 0"),
    ("head=spiking loss=count loss.desired=-1", "loss.desired and loss.undesired must be finite"),
    ("calibrate.spikes=-1", "calibrate.spikes must be null or finite and > 0, got -1"),
    ("calibrate.batch_size=0", "calibrate.batch_size must be at least 1, got 0"),
    ("data.val_fraction=2", "data.val_fraction must lie in (0, 1), got 2"),
    ("data.limit=0", "data.limit must be null or >= 1, got 0"),
    ("data.num_workers=-1", "data.num_workers must be >= 0, got -1"),
    ("data.augment=flop", "data.augment must be none, or some of flip, crop4, "),
    ("data.augment=flip+crop", "data.augment: crop needs a number, as in crop4, got 'crop'"),
    ("data.augment=crop4|rotate200", "data.augment: rotate takes a number in (0, 180], got 'rotate200'"),
    ("data.std=[0]", "data.std must pair up, std > 0"),
    ("name=a/b", "name must be made of letters, digits"),
    # networks
    ("network.layers=16C3-Q2", "token 2 of '16C3-Q2'"),
    ("network.layers=16C3-P2-P9", "'P9' (layer 2) got 16x4x4: nothing of the map is left"),
    ("network=resnet network.channels=128", "network.channels must be list[int], got 128"),
    ("network=resnet network.channels=[4,0]", "network.channels must be one or more integers of at least 1"),
    ("network=resnet network.stem=P2", "network.stem must be one SRM convolution, like 128C5, got 'P2'"),
    ("network=resnet", "network.pool: 'P2' (layer 7) got 512x1x1: nothing of the map is left"),
    ("network=resnet network.layers=16C3", "unknown key network.layers"),
    ("head=spiking", "the head gives spikes, but the loss CrossEntropy reads logits: try loss=count"),
    ("loss=count", "the head gives logits, but the loss Count reads spikes: try loss=cross_entropy"),
    # targets
    (
        "optimizer._target_=os.system",
        "optimizer._target_ must name something of torch.optim., got 'os.system'",
    ),
    ("optimizer._target_=torch.optim.Adamm", "optimizer._target_ names nothing that exists"),
    # command line
    ("--frob", "unrecognized arguments: --frob"),
    ("trainer.epochs", "missing EQUAL"),
    ("resume=nowhere", "there is no checkpoint nowhere"),
    ("device=tpu", "device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=[words for words, _ in BAD])
def test_hazards_13_29_bad_input_is_one_line_before_data_are_loaded(program, no_data, words, message):
    assert message in program.train(*words.split()).error
    assert not list(program.folder.iterdir())


def test_hazard_27_cuda_without_a_gpu(program, no_data, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert "device=cuda: there is no such CUDA GPU here (0 found)" in program.train("device=cuda").error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer: {epohs: 3}", "unknown key trainer.epohs; did you mean trainer.epochs?"),
        ("optimizer: {lrr: 3}", "unknown key optimizer.lrr; did you mean optimizer.lr?"),
        ("trainr: {epochs: 3}", "unknown key trainr; did you mean trainer?"),
        ("optimizer: {lr: fast}", "optimizer.lr must be float"),
    ],
)
def test_hazard_29_a_mistake_in_an_experiment_file(program, no_data, tmp_path, text, message):
    (tmp_path / "extra" / "experiment").mkdir(parents=True)
    (tmp_path / "extra" / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}\n")
    assert message in program.train("--config-dir", "extra", "experiment=mine").error


def test_the_traceback_is_shown_on_request(program, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    ended = program.train("encoding.steps=0")
    assert ended.code != 0
    assert "Traceback" in ended.err
    assert ended.err.strip().splitlines()[-1] == "error: encoding.steps must be at least 1, got 0"


def test_hazard_28_missing_data_names_path_and_key_and_leaves_no_folder(program):
    error = program.train("data=mnist", "data.root=nowhere").error
    assert "nowhere/MNIST/raw/train-images-idx3-ubyte not found (data.root=nowhere)" in error
    assert not list(program.folder.iterdir())


def test_a_fresh_run_refuses_the_folder_of_another(program):
    run = program.small()
    before = files(run)
    error = program.train("data=synthetic", "hydra.run.dir=run", "trainer.epochs=1").error
    assert "run holds a run already" in error
    assert files(run) == before


def test_wrong_facts_are_named(program):
    assert "data.num_classes" in program.train("data.num_classes=5", "trainer.epochs=1").error
    assert "data.size" in program.train("data.size=9", "trainer.epochs=1").error
    assert not list(program.folder.iterdir())


def test_an_encoding_that_does_not_fit_the_data_is_named(program):
    error = program.train("data=synthetic", "encoding=frames").error
    assert "encoding=frames takes frames of events" in error
    assert not list(program.folder.iterdir())


def test_events_need_an_encoding_of_events(program):
    assert "which are null: try encoding=frames" in program.train("data=moving_digits").error
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
