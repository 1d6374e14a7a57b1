"""Calibration: targets met by their definition, warnings by name, and nothing else touched."""

import logging
import math
from functools import partial

import pytest
import torch
from torch import nn

from snn.calibrate import Calibration
from snn.layers import SRMLayer
from snn.networks import DecoupledHead, SpikingHead, SRMNetwork
from snn.neuron import GradParams, SRMParams

NEURON, GRAD = SRMParams(), GradParams()
HEADS = {
    "decoupled": partial(DecoupledHead, num_classes=5, decouple_scale=1.0, sign=True, sign_clip=1.0),
    "spiking": partial(SpikingHead, num_classes=40, neuron=NEURON, grad=GRAD, weight_standardization=True),
}
BOTH = pytest.mark.parametrize("head", HEADS)


def make(head="decoupled", layers="8C3-P2-D0.4-30", standardized=True, neuron=NEURON):
    torch.manual_seed(0)
    return SRMNetwork(layers, 1, 8, standardized, neuron=neuron, grad=GRAD, head=HEADS[head])


def batch(steps=10, n=64, seed=1):
    torch.manual_seed(seed)
    return torch.randn(n, 1, 8, 8).expand(steps, n, 1, 8, 8)


def srm_layers(net):
    return {name: module for name, module in net.named_modules() if isinstance(module, SRMLayer)}


def thresholds(net):
    return {name: module.threshold.clone() for name, module in srm_layers(net).items()}


def spikes_of(net, x):
    """The spikes of every SRM layer, in eval mode, and what the head reads."""
    seen, training, hooks = {}, net.training, []
    for name, module in srm_layers(net).items():
        hooks.append(module.register_forward_hook(lambda m, i, o, name=name: seen.update({name: o.detach()})))
    hooks.append(net.head.register_forward_pre_hook(lambda m, i: seen.update(to_head=i[0].detach())))
    net.eval()(x)
    net.train(training)
    for hook in hooks:
        hook.remove()
    return seen


def late_count(spikes):
    """Spikes per neuron over the steps from (2T)//3 on, scaled up to T."""
    steps = len(spikes)
    first = (2 * steps) // 3
    per_neuron = spikes[first:].sum().item() / spikes[0].numel()
    return per_neuron * steps / (steps - first)


@BOTH
@pytest.mark.parametrize("steps", [10, 7], ids=lambda steps: f"T{steps}")
@pytest.mark.parametrize("target", [0.6, 1.5])
def test_every_layer_meets_the_target(head, steps, target):
    net, x = make(head), batch(steps)
    Calibration(target, 64)(net, x)
    seen = spikes_of(net, x)
    for name in srm_layers(net):
        assert late_count(seen[name]) == pytest.approx(target, rel=0.03), name


def test_plain_weights_meet_the_target_too():
    net, x = make(standardized=False), batch()
    Calibration(0.6, 64)(net, x)
    seen = spikes_of(net, x)
    for name in srm_layers(net):
        assert late_count(seen[name]) == pytest.approx(0.6, rel=0.03), name


def test_thresholds_of_a_layer_move_by_one_factor():
    net, x = make(), batch()
    net.layers[0].threshold.copy_(torch.linspace(0.5, 2, 8))
    Calibration(0.6, 64)(net, x)
    factor = net.layers[0].threshold / torch.linspace(0.5, 2, 8)
    torch.testing.assert_close(factor, factor[:1].expand(8))
    assert 0.01 <= factor[0] <= 100 and factor[0] != 1


def test_the_start_hardly_matters():
    """It replaces neuron.threshold: from 1 or from 4, the bisection ends within its 1 %."""
    ends = []
    for start in (1.0, 4.0):
        net = make(neuron=SRMParams(threshold=start))
        Calibration(0.6, 64)(net, batch())
        ends.append(net.layers[0].threshold)
    torch.testing.assert_close(*ends, rtol=0.011, atol=0)


@BOTH
def test_a_layer_out_of_reach_is_named(head, caplog):
    net, x = make(head), batch()
    name = "30" if head == "decoupled" else "head"
    layer = net.layers[3] if head == "decoupled" else net.head
    with torch.no_grad():
        layer.gain.zero_()  # no current, no spike at any threshold
        layer.bias.zero_()
    with caplog.at_level(logging.WARNING):
        Calibration(0.6, 64)(net, x)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert (
        "calibrate.spikes=0.6 is out of reach in layer " + ("3_30" if name == "30" else "head") in warnings[0]
    )


def test_more_spikes_than_steps_are_out_of_reach(caplog):
    Calibration(11.0, 64)(make(), batch())
    assert [r.levelno for r in caplog.records].count(logging.WARNING) == 2


def test_in_reach_there_is_one_line_and_no_warning(caplog):
    with caplog.at_level(logging.INFO):
        Calibration(0.6, 64)(make(), batch())
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert "thresholds replace neuron.threshold" in caplog.text and "0.6" in caplog.text


# the head's bias


@pytest.mark.parametrize("spikes", [0.6, None], ids=["calibrated", "thresholds left"])
@pytest.mark.parametrize("layers", ["8C3-P2-D0.4-30", "8C3-P2"], ids=["features", "map"])
def test_head_bias_is_minus_the_mean_rate(spikes, layers):
    net, x = make(layers=layers), batch()
    Calibration(spikes, 64)(net, x)
    mean = spikes_of(net, x)["to_head"].double().mean().item()
    assert 0 < mean < 1
    torch.testing.assert_close(net.head.affine.bias.detach(), torch.full_like(net.head.affine.bias, -mean))
    assert net.head.affine.bias.requires_grad and torch.equal(
        net.head.affine.weight, torch.ones_like(net.head.affine.weight)
    )


def test_a_silent_channel_then_reads_minus_one():
    net, x = make(), batch()
    net.layers[3].threshold[0] = 5000.0
    Calibration(None, 64)(net, x)
    codes = []
    net.head.sign.register_forward_hook(lambda module, inputs, output: codes.append(output))
    net.eval()(x)
    assert (codes[0][:, 0] == -1).all() and {-1.0, 1.0} == set(codes[0].unique().tolist())


# what it leaves alone


@BOTH
def test_none_leaves_the_thresholds(head, caplog):
    net = make(head)
    before = thresholds(net)
    Calibration(None, 64)(net, batch())
    assert all(torch.equal(before[name], now) for name, now in thresholds(net).items())
    assert not caplog.records


@BOTH
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_hazard_18_training_mode_is_restored(head, training):
    net = make(head).train(training)
    Calibration(0.6, 64)(net, batch())
    assert all(module.training == training for module in net.modules())


def test_hazard_18_training_mode_and_hooks_are_restored_after_an_error():
    net = make().train()
    with pytest.raises(ValueError, match="features|channels"):
        Calibration(0.6, 64)(net, torch.zeros(4, 2, 3, 8, 8))
    assert net.training and not any(module._forward_pre_hooks for module in net.modules())


def test_hazard_18_dropout_is_off():
    """The same thresholds and bias as without dropout, and not one random number drawn."""
    with_dropout, without = make(), make(layers="8C3-P2-30")
    state = torch.get_rng_state()
    x = batch()
    drawn = torch.get_rng_state()
    Calibration(0.6, 64)(with_dropout, x)
    assert torch.equal(torch.get_rng_state(), drawn) and not torch.equal(state, drawn)
    Calibration(0.6, 64)(without, x)
    pairs = zip(with_dropout.state_dict().values(), without.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@BOTH
def test_only_thresholds_and_bias_change(head):
    net, x = make(head), batch()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    x_before = x.clone()
    Calibration(0.6, 64)(net, x)
    for name, value in net.state_dict().items():
        changes = name.endswith("threshold") or name == "head.affine.bias"
        assert torch.equal(value, before[name]) != changes, name
    assert torch.equal(x, x_before)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in net.modules())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_the_net_trains_afterwards():
    net = make()
    Calibration(0.6, 64)(net, batch())
    nn.functional.cross_entropy(net(batch()), torch.arange(64) % 5).backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_rule_of_spikes(value):
    with pytest.raises(ValueError, match=f"calibrate.spikes must be null or finite and > 0, got {value}"):
        Calibration(value, 64)


@pytest.mark.parametrize("value", [0, -3])
def test_rule_of_batch_size(value):
    with pytest.raises(ValueError, match=f"calibrate.batch_size must be at least 1, got {value}"):
        Calibration(0.6, value)
