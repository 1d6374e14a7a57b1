"""What a `_target_` node may name and hold."""

import functools
import os
from typing import Any

import pytest
import torch

from snn.neuron import SRMParams
from snn.targets import build, check_target, is_kind, locate

SRM = {"_target_": "snn.neuron.SRMParams", "tau_m": 7.0, "tau_s": 4.0, "threshold": 1.0}


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "builtins.eval",
        "subprocess.run",
        "torch.load",
        "torch.optim",
        "torch.optim.Adamm",
        "torch.optim.lr_scheduler.math.cos",
        "torch.optim.Optimizer.__init__",
        "snn",
        "snn.config.os.system",
        "snn.checkpoint.torch.load",
        "snn.neuron.SRMParams.__init__.__globals__",
        "snn.ops.srm.op._require_float",
        "snn.nowhere.at_all",
        "snn.neuron.",
        "snnx.thing",
        "",
        None,
        3,
    ],
)
def test_a_forbidden_target_is_refused_at_any_depth(name, monkeypatch):
    monkeypatch.setattr(os, "system", lambda *_: pytest.fail("code was run"))
    with pytest.raises(ValueError, match="_target_"):
        locate(name)
    with pytest.raises(ValueError, match="_target_"):
        build({"_target_": name})
    with pytest.raises(ValueError, match="_target_"):
        build({"_target_": "snn.networks.DecoupledHead", "_partial_": True, "sign": {"_target_": name}})
    with pytest.raises(ValueError, match="head.sign._target_"):
        check_target("head", {"_target_": "snn.networks.DecoupledHead", "sign": {"_target_": name}})


def test_build_calls_the_target_with_plain_values():
    assert build(SRM) == SRMParams(7.0, 4.0, 1.0)


def test_build_offers_what_the_signature_names():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = build({"_target_": "torch.optim.SGD", "lr": 0.1}, params=[weight], seed=3)
    assert optimizer.param_groups[0]["params"] == [weight]


def test_build_partial_waits():
    waiting = build({**SRM, "_partial_": True})
    assert isinstance(waiting, functools.partial) and waiting().tau_m == 7.0


def test_nested_nodes_are_built_first():
    node = {"_target_": "snn.losses.Count", "_partial_": True, "desired": SRM, "undesired": 1}
    assert build(node).keywords["desired"] == SRMParams(7.0, 4.0, 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tau": 3}, "unknown key neuron.tau; did you mean neuron.tau_"),
        ({"tau_m": "7"}, "neuron.tau_m must be float, got '7'"),
        ({"tau_m": True}, "neuron.tau_m must be float, got True"),
        ({"_partial_": "yes"}, "neuron._partial_ must be false, got 'yes'"),
        ({"_args_": [1]}, "unknown key neuron._args_"),
        ({"_recursive_": False}, "unknown key neuron._recursive_"),
    ],
)
def test_check_names_the_key(change, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        check_target("neuron", {**SRM, **change})


def test_missing_arguments_are_a_value_error():
    with pytest.raises(ValueError, match="snn.losses.Count: missing a required argument: 'undesired'"):
        build({"_target_": "snn.losses.Count", "desired": 1})


@pytest.mark.parametrize(
    ("value", "kind", "fits"),
    [
        (1, float, True),
        (1.0, int, False),
        (True, int, False),
        (True, bool, True),
        (1, bool, False),
        (None, int | None, True),
        ("1", int | None, False),
        ([1, 2.5], list[float], True),
        ([1, "a"], list[float], False),
        ([0.9, 0.99], tuple[float, float], True),
        ([0.9], tuple[float, float], False),
        ({}, dict[str, Any], True),
        (0.1, float | torch.Tensor, True),
        ("x", torch.Tensor, False),
        ("x", Any, True),
    ],
)
def test_is_kind(value, kind, fits):
    assert is_kind(value, kind) == fits


def test_every_optimizer_of_torch_is_allowed():
    for name in ("AdamW", "SGD", "Adafactor"):
        assert locate(f"torch.optim.{name}")
