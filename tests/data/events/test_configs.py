from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from snn.data import load
from snn.data.events import sets
from snn.targets import check_target
from tests.data.events import writers

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
FOLDERS = {"nmnist": "NMNIST", "dvs_gesture": "DVS128Gesture", "cifar10_dvs": "CIFAR10DVS", "shd": "SHD"}
NUM_CLASSES = {"nmnist": 10, "dvs_gesture": 11, "cifar10_dvs": 10, "shd": 20}


def compose_data(name, *overrides):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        words = [f"+data={name}", "+encoding=direct", "encoding.mean=[0]", "encoding.std=[1]", *overrides]
        cfg = compose(overrides=words)
    return OmegaConf.create(OmegaConf.to_container(cfg, resolve=True)).data


@pytest.mark.parametrize("name", FOLDERS)
class TestEachConfig:
    def test_binds_the_source(self, name):
        cfg = compose_data(name, "encoding.steps=7", "data.source.framing=time", "data.split_seed=3")
        assert OmegaConf.to_container(cfg.source) == {
            "_target_": f"snn.data.events.sets.{name}",
            "_partial_": True,
            "steps": 7,
            "framing": "time",
            "cache": None,
            **({"test_fraction": 0.1, "split_seed": 3} if name == "cifar10_dvs" else {}),
        }
        check_target("data.source", OmegaConf.to_container(cfg.source))
        node = instantiate(cfg, _partial_=True, _convert_="all")
        assert node.func is load
        assert node.keywords["source"].func is getattr(sets, name)

    def test_states_the_facts(self, name, tmp_path):
        cfg = compose_data(name)
        sensor = sets.SENSORS[name]
        assert cfg.channels == sensor.channels
        assert cfg.size == min(sensor.height, 48)
        assert (cfg.mean, cfg.std, cfg.num_classes) == (None, None, NUM_CLASSES[name])
        getattr(writers, name)(tmp_path / FOLDERS[name])
        source = instantiate(cfg.source, _convert_="all")
        train, test = source(root=str(tmp_path), download=False)
        assert train.images.shape[1:] == test.images.shape[1:] == (5, *sensor)
        assert max(*train.labels, *test.labels) == cfg.num_classes - 1
