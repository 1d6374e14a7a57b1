"""Every experiment file: it composes, says where it is from, holds the published constants, and runs."""

import functools
import importlib
import json
import re
from dataclasses import asdict

import pytest
import torch
import yaml

from snn.config import compose
from snn.data.sources import Images
from snn.run_folder import RunFolder
from snn.words import CONFIGS

NAMES = sorted(file.stem for file in (CONFIGS / "experiment").glob("*.yaml"))
OWN = {"fashion_mnist_small", "moving_digits"}  # ours, not a published row
LARGE = {name for name in NAMES if re.match("cifar|dvs", name)}

# ../shared notes of the published settings: T, epochs, lr, decay, counts, tau m / s / grad, spikes, batch
PUBLISHED = {
    "mnist_e22": (5, 100, 5e-4, 5e-4, (5, 1), (5, 3, 2.5), 0.5, 50),
    "mnist_l23": (5, 100, 5e-4, 0.05, (5, 1), (5, 3, 2.5), 0.6, 50),
    "fashion_e22": (5, 150, 5e-4, 5e-4, (5, 1), (5, 3, 2.5), 0.5, 50),
    "fashion_l23": (5, 100, 5e-4, 5e-3, (5, 1), (5, 3, 2.5), 0.6, 50),
    "nmnist_e22": (30, 120, 5e-4, 0.2, (15, 2), (8, 4, 3), 2, 50),
    "nmnist_l23": (30, 120, 5e-4, 2e-3, (15, 2), (8, 4, 3), 2, 50),
    "cifar10_vgg_e22": (12, 500, 0.05, 5e-4, (10, 1), (7, 4, 3.5), 1, 50),
    "cifar10_vgg_l23": (12, 500, 5e-3, 5e-4, (10, 1), (7, 4, 3.5), 1, 50),
    "cifar10_resnet_e22": (12, 500, 2e-4, 0.05, (10, 1), (7, 4, 3.5), 1, 50),
    "cifar100_e22": (16, 500, 0.06, 5e-4, (15, 1), (10, 6, 5.5), 1.2, 50),
    "cifar100_l23": (16, 500, 5e-3, 2e-3, (15, 1), (10, 6, 5.5), 1.5, 50),
    "dvs_gesture_l23": (20, 500, 2e-4, 1e-3, (7, 1), (7.5, 4, 3.5), 1, 16),
    "cifar10_dvs_l23": (20, 300, 2e-4, 2e-3, (10, 1), (8, 4.5, 4), 1, 16),
}
VGG = "128C3x2-P2-D0.1-256C3x3-P2-D0.1-512C3x3-P2-D0.1-2048-D0.1-2048-D0.1"
NETWORKS = {
    "mnist": "15C5p0-P2-40C5p0-P2-300",
    "fashion": "32C5-P2-64C5-P2-1024",
    "nmnist": "12C5p1-P2-64C5p0-P2",
    "cifar10_vgg": VGG,
    "cifar100": VGG,
    "dvs_gesture": "128C3-P2-D0.1-256C3x2-P2-D0.1-256C3x2-P2-D0.1-128C3-P2-D0.1-512-D0.1-256-D0.1",
    "cifar10_dvs": "128C3-P2-D0.1-256C3x2-P2-D0.1-256C3-512C3-P2-D0.1-512C3x3-P2-D0.1-1024-D0.1-1024-D0.1",
}


def test_every_published_row_has_its_file():
    assert set(NAMES) == set(PUBLISHED) | OWN


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_constants_are_in_the_file(name):
    config = compose([f"experiment={name}"])
    neuron, grad, loss, optimizer = config.neuron, config.surrogate, config.loss, config.optimizer
    found = (
        *(config.encoding["steps"], config.trainer.epochs, optimizer["lr"], optimizer["weight_decay"]),
        *((loss["desired"], loss["undesired"]), (neuron["tau_m"], neuron["tau_s"], grad["tau_grad"])),
        *(config.calibrate["spikes"], config.trainer.batch_size),
    )
    assert found == PUBLISHED[name]
    early = name.endswith("e22")
    assert loss["_target_"] == f"snn.losses.{'Count' if early else 'CountPlus'}"
    assert grad["grad_scale"] == (0.85 if early else 1)
    assert (config.trainer.clip_norm, config.trainer.clamp_weights) == ((1, None) if early else (None, 4))
    assert config.network["weight_standardization"] is True and config.head["target_rise"] == 0.05
    assert config.neuron["threshold"] == 1 and config.scheduler["_target_"] == "snn.schedules.cosine"
    if name in NETWORKS or name.rsplit("_", 1)[0] in NETWORKS:
        assert config.network["layers"] == NETWORKS[name.rsplit("_", 1)[0]]


def test_constants_of_single_rows():
    assert compose(["experiment=mnist_l23"]).trainer.norm_weight_decay == 1e-3
    resnet = compose(["experiment=cifar10_resnet_e22"]).network
    assert (resnet["stem"], resnet["channels"], resnet["blocks"]) == ("128C5", [128, 256, 512], 2)
    assert (resnet["dropout"], resnet["pool"]) == (0.1, 2)
    gesture = compose(["experiment=dvs_gesture_l23"])
    assert (gesture.encoding["drawn"], gesture.data["size"]) == (14, 48)
    assert gesture.data["augment"] == "resizedcrop0.6+rotate30"
    dvs = compose(["experiment=cifar10_dvs_l23"]).data
    assert dvs["augment"] == "resizedcrop0.7+flip+roll5|rotate30|cutout16"
    assert (dvs["source"]["test_fraction"], dvs["size"]) == (0.1, 48)
    weak, strong = (compose([f"experiment=cifar10_vgg_{p}"]).data["augment"] for p in ("e22", "l23"))
    assert (weak, strong) == ("crop4+flip+cutout10", "crop4+flip+autoaugment")


@pytest.mark.parametrize("name", NAMES)
def test_the_header_says_where_it_is_from(name):
    text = (CONFIGS / "experiment" / f"{name}.yaml").read_text()
    assert f"ommand: python train.py experiment={name}" in re.sub(" +", " ", text)
    assert "Measured:" in text and (name in OWN or ("# Paper: " in text and "# Published: " in text))


def synthetic(original, shape, num_classes, unit):
    """Stands in for a set's source: two samples to train on, one for validation, and one to test."""

    @functools.wraps(original)
    def source(*args, **kwargs):
        generator = torch.Generator().manual_seed(0)

        def draw(count):
            high = 256 if unit == 255 else 3
            values = torch.randint(high, (count, *shape), generator=generator, dtype=torch.uint8)
            return Images(values, torch.arange(count) % num_classes, unit)

        return draw(3), draw(1)

    return source


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LARGE else ()) for name in NAMES]
)
def test_it_runs_for_two_steps(name, monkeypatch, tmp_path):
    from train import train

    words = ["trainer.epochs=1", "trainer.batch_size=1", "calibrate.batch_size=1", "device=cpu"]
    config = compose([f"experiment={name}", *words])
    data, steps = config.data, config.encoding["steps"]
    frames = config.encoding["_target_"] == "snn.encoding.Frames"
    sensor = 128 if "dvs" in name else data["size"]
    shape = (data["channels"], sensor, sensor)
    module, function = data["source"]["_target_"].rsplit(".", 1)
    module = importlib.import_module(module)
    original = getattr(module, function)
    fake = synthetic(
        original, (steps, *shape) if frames else shape, data["num_classes"], 1 if frames else 255
    )
    monkeypatch.setattr(module, function, fake)
    folder = RunFolder(tmp_path / "run")
    train(config, None, folder, [])
    assert folder.summary.exists() and json.loads(folder.metrics.read_text())["step"] == 2


def test_another_choice_of_a_group_is_as_its_file_says():
    config = compose(["experiment=fashion_l23", "surrogate=atan", "head=decoupled", "loss=cross_entropy"])
    assert config.surrogate == {"_target_": "snn.neuron.ATan", "width": 1.0}
    assert set(config.loss) == {"_target_"} and "target_rise" not in config.head
    assert compose(["experiment=fashion_l23", "network=vgg"]).network["layers"] == VGG
    words = ["loss=count_plus", "loss.desired=4", "optimizer=sgd", "optimizer.lr=0.3", "data=fashion_mnist"]
    config = compose(["experiment=mnist_e22", *words])
    assert (config.loss["desired"], config.loss["undesired"]) == (4, 1)
    assert (config.optimizer["lr"], config.optimizer["momentum"]) == (0.3, 0.9)
    assert config.data["mean"] == [0.286] and config.data["val_fraction"] == 0.1
    assert config.calibrate["spikes"] == 0.5 and config.trainer.clip_norm == 1  # the others are untouched
    assert compose(["experiment=moving_digits", "surrogate=sigmoid"]).surrogate["width"] == 1
    same = compose(["experiment=mnist_e22", "loss=count", "optimizer=adamw"])
    assert same == compose(["experiment=mnist_e22"])
    for word in ("surrogate.tau_grad=3", "surrogate.tau_grap=3"):
        with pytest.raises(ValueError, match=f"unknown key {word.split('=')[0]}"):
            compose(["experiment=fashion_l23", "surrogate=atan", word])


def test_cfg_job_shows_what_would_run(capsys):
    from train import main

    assert main(["experiment=fashion_l23", "surrogate=atan", "--cfg", "job", "--resolve"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown == asdict(compose(["experiment=fashion_l23", "surrogate=atan"])) | {"name": shown["name"]}
