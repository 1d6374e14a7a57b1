"""The YAML files: complete, in step with the code, and checked as a whole."""

import dataclasses
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from snn.config import build, build_network, check, update
from snn.config import compose as compose_words
from snn.layers import SpikeDropout, SRMConv2d
from snn.neuron import GradParams, SRMParams
from snn.schema import TrainConfig
from snn.words import CONFIGS


def composed(*words: str) -> TrainConfig:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONFIGS)):
        cfg = compose("train", overrides=list(words), return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    OmegaConf.set_struct(cfg, False)
    del cfg["hydra"]
    return check(cfg, TrainConfig)


EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))
CHOICES = sorted(
    f"{path.parent.name}={path.stem}"
    for path in CONFIGS.glob("*/*.yaml")
    if not path.stem.startswith("_") and path.parent.name != "experiment"
)


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_composes(choice):
    composed(choice)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_and_builds_under_its_own_name(name):
    config = composed(f"experiment={name}")
    assert config.name == name
    build_network(config)
    text = (CONFIGS / "experiment" / f"{name}.yaml").read_text()
    assert f"python train.py experiment={name}" in text, "the header holds the command"


@pytest.mark.parametrize(
    ("name", "facts", "convolutions", "reached"),
    [
        ("vgg", ("data=cifar10",), 8, [(512, 4, 4), (2048,)]),
        ("event8", ("data=synthetic", "data.channels=2", "data.size=48"), 8, [(512, 3, 3), (1024,)]),
        ("event6", ("data=synthetic", "data.channels=2", "data.size=48"), 6, [(128, 3, 3), (256,)]),
        ("resnet", ("data=cifar10",), 1 + 3 * 4 + 3, [(512, 4, 4), (512, 2, 2)]),
    ],
)
def test_networks_of_the_papers(name, facts, convolutions, reached):
    """Built without memory: convolutions, the last map before its pool or layer, and the last shape."""
    with torch.device("meta"):
        network, _ = build_network(composed(f"network={name}", *facts))
    assert sum(isinstance(module, SRMConv2d) for module in network.modules()) == convolutions
    shapes = list(network.shapes.values())
    assert set(reached) <= set(shapes) and shapes[-1] == reached[-1]
    assert {module.p for module in network.modules() if isinstance(module, SpikeDropout)} == {0.1}


@pytest.mark.parametrize("name", ["vgg", "event8", "event6"])
def test_dropout_stands_after_each_pool_and_each_linear_layer(name):
    tokens = composed(f"network={name}").network["layers"].split("-")
    for token, following in zip(tokens, [*tokens[1:], "end"], strict=True):
        assert (following == "D0.1") == (token.startswith("P") or token.isdigit())


def test_a_run_is_named_by_its_data():
    assert composed("data=synthetic").name == "synthetic"


def test_yaml_and_dataclass_defaults_agree():
    config = composed()
    assert build(config.neuron) == SRMParams()
    assert build(config.surrogate) == GradParams()


def test_keys_are_as_documented():
    config = composed("head=spiking", "loss=count", "optimizer=sgd")
    assert {f.name for f in dataclasses.fields(TrainConfig)} >= {"seed", "device", "name", "resume"}
    assert {"tau_m", "tau_s", "threshold"} <= set(config.neuron)
    assert {"tau_grad", "grad_scale", "cap_weight", "cap_time"} <= set(config.surrogate)
    assert {"layers", "weight_standardization"} <= set(config.network)
    assert {"decouple_scale", "sign", "sign_clip"} <= set(composed().head)
    assert {"desired", "undesired"} <= set(config.loss)
    assert {"spikes", "batch_size"} <= set(config.calibrate)
    assert {"lr", "weight_decay", "momentum"} <= set(config.optimizer)
    data = {"root", "download", "val_fraction", "split_seed", "num_workers", "augment", "limit"}
    assert data | {"channels", "size", "num_classes", "mean", "std"} <= set(config.data)
    trainer = ["epochs", "stop_after", "batch_size", "accumulate", "clip_norm", "clamp_weights"]
    trainer += ["norm_weight_decay", "precision", "compile", "test_each_epoch"]
    trainer += ["checkpoint_every_steps", "checkpoint_every_minutes", "on_nonfinite", "deterministic"]
    assert [f.name for f in dataclasses.fields(config.trainer)] == trainer


def test_lists_are_plain_lists():
    assert type(composed().encoding["mean"]) is list  # hazard 29


def test_update_changes_a_copy():
    config = {"a": {"b": 1}, "c": [1, 2]}
    assert update(config, {"a.b": 2}) == {"a": {"b": 2}, "c": [1, 2]}
    assert config["a"]["b"] == 1


@pytest.mark.parametrize("missing", ["loss", "trainer.epochs"])
def test_a_missing_key_is_named(missing):
    plain = dataclasses.asdict(composed())
    node = plain
    *path, last = missing.split(".")
    for key in path:
        node = node[key]
    del node[last]
    with pytest.raises(ValueError, match=f"{missing} is missing"):
        check(plain, TrainConfig)


def test_a_component_without_a_target_is_named():
    with pytest.raises(
        ValueError, match="loss must have a _target_: choose one, for instance loss=ce_plus or loss=count"
    ):
        check({**dataclasses.asdict(composed()), "loss": {}}, TrainConfig)


def test_experiment_header_lists_no_path_of_a_machine():
    for path in Path(CONFIGS).rglob("*.yaml"):
        assert "/home/" not in path.read_text()


def test_a_number_is_text_where_text_is_wanted():
    config = compose_words(["name=5", "data.root=7", "device=0"])
    assert (config.name, config.data["root"], config.device) == ("5", "7", "0")
    with pytest.raises(ValueError, match="name must be str, got True"):
        compose_words(["name=true"])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("neuron=null", r"neuron must name a file of configs/neuron, got None: neuron=srm"),
        ("scheduler=5", "scheduler must name a file .*, got 5: scheduler=constant or scheduler=cosine"),
        ("loss=${seed}", r"loss must name a file .*, got \$\{seed\}: "),
        ("=5", "'=5'"),
        ("seed={", r"cannot read 'seed=\{'"),
        ("seed=${nowhere}", "seed"),
        ("~head.sign", "head.sign is missing"),
        ("~data.source.channels", "data.source.channels is missing"),
        ("~encoding.steps", "encoding.steps is missing"),
    ],
)
def test_a_word_that_cannot_be_is_named(word, message):
    with pytest.raises(ValueError, match=message):
        compose_words(["data=synthetic", word])


@pytest.mark.parametrize("node", ["neuron.threshold", "surrogate.cap_weight", "head.sign_clip"])
@pytest.mark.parametrize("value", ["1e300", "1e-300"])
def test_a_size_that_float32_does_not_hold_is_refused(node, value):
    with pytest.raises(
        ValueError, match=rf"{node.split('.')[1]} must lie within 1e-30 and 1e\+30 in size, got"
    ):
        build_network(compose_words([f"{node}={value}"]))


def test_the_rule_of_torch_names_the_keys():
    config = compose_words(["++optimizer.foreach=true"])
    with pytest.raises(ValueError, match=r"torch.optim.AdamW: .*foreach.* \(of lr=0.002, .*foreach=True\)"):
        build(config.optimizer, params=[torch.nn.Parameter(torch.zeros(2))])
