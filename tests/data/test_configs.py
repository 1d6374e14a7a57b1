from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from snn.data import files, load, sources
from snn.data.loaders import check_settings

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
EVENTS = ["cifar10_dvs", "dvs_gesture", "nmnist", "shd"]  # see events/test_configs.py
NAMES = sorted({path.stem for path in (CONFIGS / "data").glob("[!_]*.yaml")} - {*EVENTS})
NEEDS_PACKAGE = pytest.mark.skipif(
    bool(files.missing(sources.FASHION_MNIST_PACKAGE, "fashion_mnist")),
    reason="Debian's dataset-fashion-mnist is not installed",
)


def compose_data(name, *overrides):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose(overrides=[f"+data={name}", "+encoding=frames", *overrides]).data  # T for events


def test_there_is_a_file_for_each_source():
    images = {"cifar10", "cifar100", "digits", "fashion_mnist", "mnist", "synthetic"}
    assert images | {"moving_digits"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_file_holds_just_the_arguments_of_load(name):
    node = instantiate(compose_data(name), _partial_=True, _convert_="all")
    assert node.func is load
    assert node.keywords["source"].func.__name__ == name
    unchecked = ("source", "root", "download")
    check_settings(**{key: node.keywords[key] for key in node.keywords if key not in unchecked}, batch_size=1)


@pytest.mark.parametrize("name", ["digits", "synthetic", pytest.param("fashion_mnist", marks=NEEDS_PACKAGE)])
def test_facts_are_measured(name, tmp_path, caplog):
    cfg = compose_data(name, f"data.root={tmp_path}")
    loaders = instantiate(cfg, batch_size=100, seed=0, _convert_="all")
    images = loaders.train.data.images / 255
    assert images.mean((0, 2, 3)).tolist() == pytest.approx(list(cfg.mean), abs=6e-4)
    assert images.std((0, 2, 3)).tolist() == pytest.approx(list(cfg.std), abs=6e-4)
    assert not caplog.records  # no class is missing, no file differs


def test_moving_digits_make_a_frame_a_step(caplog):
    cfg = compose_data("moving_digits", "encoding.steps=3")
    loaders = instantiate(cfg, batch_size=4, seed=0, _convert_="all")
    frames, labels, _ = next(loaders.test.batches(0))
    assert frames.shape == (4, 3, 2, 34, 34)
    assert frames.max() > 1  # counts
    assert loaders.train.num_samples + loaders.val.num_samples == 1437
    assert not caplog.records


def test_synthetic_follows_the_facts():
    shape = ("data.channels=3", "data.size=12", "data.num_classes=5")
    cfg = compose_data("synthetic", *shape, "data.mean=[0,0,0]", "data.std=[1,1,1]")
    loaders = instantiate(cfg, batch_size=8, seed=0, _convert_="all")
    images, labels, _ = next(loaders.test.batches(0))
    assert images.shape == (8, 3, 12, 12)
    assert labels.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
