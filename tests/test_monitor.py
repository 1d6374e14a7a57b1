"""The spike monitor: rates by hand, weighted by samples, and hooks that go away."""

from functools import partial

import pytest
import torch
from torch import nn

from snn.calibrate import Calibration
from snn.layers import SpikeAvgPool2d, SRMConv2d, SRMLinear
from snn.monitor import SpikeMonitor, kept_time_gradient
from snn.networks import DecoupledHead, SpikingHead, SRMNetwork
from snn.neuron import ATan, GradParams, SRMParams

NEURON, GRAD = SRMParams(4.0, 2.0, 1.0), GradParams()


def by_hand():
    """One neuron that fires wherever its input is 2 (u = 1 at once), and one that fires wherever it is 1."""
    net = nn.Sequential(SRMLinear(1, 2, NEURON, GRAD))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[1.0], [2.0]]))
    return net


def make(head):
    torch.manual_seed(0)
    net = SRMNetwork("4C3-P2-10", 1, 6, False, neuron=SRMParams(5.0, 3.0, 0.05), grad=GRAD, head=head)
    return net


def images(batch, seed=0):
    torch.manual_seed(seed)
    return torch.rand(5, batch, 1, 6, 6)


def test_rate_by_hand():
    """T = 3, one sample: 2, 2, 0 fires 2 + 2 of 6 places."""
    net = by_hand()
    with SpikeMonitor(net) as monitor:
        net(torch.tensor([2.0, 2.0, 0.0]).view(3, 1, 1))
    assert monitor.rates() == {"0": 4 / 6}


def test_hazard_20_rates_are_sample_weighted():
    """Nine samples that always fire and one that never does: .9, not the .5 of two batches."""
    net = by_hand()
    with SpikeMonitor(net) as monitor:
        net(torch.full((3, 9, 1), 2.0))
        net(torch.zeros(3, 1, 1))
    assert monitor.rates()["0"] == pytest.approx(0.9)


def test_unequal_batches_equal_one_batch():
    net, x = (
        make(partial(DecoupledHead, num_classes=3, decouple_scale=1.0, sign=True, sign_clip=1.0)),
        images(10),
    )
    with SpikeMonitor(net) as parts:
        for batch in x.split([4, 5, 1], dim=1):
            net(batch)
    with SpikeMonitor(net) as whole:
        net(x)
    assert parts.rates() == pytest.approx(whole.rates()) and all(
        0 < rate < 1 for rate in whole.rates().values()
    )


def test_names_and_values():
    """SRM layers only, without the container's name, as Python floats (hazard 17)."""
    net = make(partial(SpikingHead, num_classes=3, neuron=NEURON, grad=GRAD, weight_standardization=False))
    seen = {}
    for name, module in net.named_modules():
        if isinstance(module, SRMConv2d | SRMLinear):
            module.register_forward_hook(lambda m, i, o, name=name: seen.update({name: o.mean().item()}))
        assert not isinstance(module, SpikeAvgPool2d) or name == "layers.1_P2"
    with SpikeMonitor(net) as monitor:
        net(images(4))
    rates = monitor.rates()
    assert list(rates) == ["0_4C3", "2_10", "head"]
    assert all(type(rate) is float for rate in rates.values())
    expected = [seen["layers.0_4C3"], seen["layers.2_10"], seen["head"]]
    assert list(rates.values()) == pytest.approx(expected)


def test_hazard_19_a_dead_layer_has_rate_zero():
    net = by_hand()
    net[0].threshold.fill_(1000)
    with SpikeMonitor(net) as monitor:
        net(torch.full((3, 2, 1), 2.0))
    assert monitor.rates() == {"0": 0.0}


def test_nothing_seen_gives_nothing():
    with SpikeMonitor(by_hand()) as monitor:
        pass
    assert monitor.rates() == {}


def hooks_of(net):
    return sum(len(module._forward_hooks) for module in net.modules())


def test_hooks_are_removed_on_exit_and_rates_remain():
    net = by_hand()
    monitor = SpikeMonitor(net)
    assert hooks_of(net) == 0
    with monitor:
        assert hooks_of(net) == 1
        net(torch.full((3, 2, 1), 2.0))
    assert hooks_of(net) == 0
    net(torch.zeros(3, 50, 1))
    assert monitor.rates() == {"0": 1.0}


def test_hooks_are_removed_when_the_body_raises():
    net = by_hand()
    with pytest.raises(ValueError, match="F_in"), SpikeMonitor(net):
        net(torch.zeros(3, 2, 7))
    assert hooks_of(net) == 0


def test_entering_again_starts_again():
    net = by_hand()
    monitor = SpikeMonitor(net)
    with monitor:
        net(torch.full((3, 2, 1), 2.0))
    with monitor:
        net(torch.zeros(3, 2, 1))
    assert monitor.rates() == {"0": 0.0}


def test_watching_changes_nothing():
    net, x = (
        make(partial(DecoupledHead, num_classes=3, decouple_scale=1.0, sign=True, sign_clip=1.0)),
        images(4),
    )
    expected = net(x)
    expected.sum().backward()
    gradient = net.layers[0].weight.grad.clone()
    net.zero_grad()
    with SpikeMonitor(net):
        output = net(x)
        output.sum().backward()
    assert torch.equal(output, expected) and torch.equal(net.layers[0].weight.grad, gradient)


@pytest.mark.parametrize("pool", [2, 3])
def test_rates_of_pooled_layers_are_those_of_their_neurons(pool):
    torch.manual_seed(0)
    layer = SRMConv2d(2, 4, 3, NEURON, GRAD, padding=1, pool=pool)
    x = (torch.rand(5, 3, 2, 12, 12) < 0.5).float() * 3
    rates = []
    for window in (pool, 1):
        layer.pool, layer.neurons_per_output = window, window**2
        with SpikeMonitor(nn.Sequential(layer)) as monitor:
            layer(x)
        rates.append(monitor.rates()["0"])
    assert rates[0] == pytest.approx(rates[1], rel=1e-6) and 0 < rates[1] < 1


SOUND = {
    "decoupled": partial(DecoupledHead, num_classes=3, decouple_scale=0.5, sign=False, sign_clip=1.0),
    "spiking": partial(SpikingHead, num_classes=3, neuron=NEURON, grad=GRAD, weight_standardization=False),
}


def test_a_monitor_goes_on_from_its_state():
    net, whole, part = make(SOUND["decoupled"]), None, None
    with SpikeMonitor(net) as monitor:
        net(images(3))
        part = monitor.state()
        net(images(2, seed=1))
        whole = monitor.rates()
    with SpikeMonitor(net) as monitor:
        monitor.load(part)
        net(images(2, seed=1))
        assert monitor.rates() == whole


# the sum law


def loss(output):
    return output.mean(0).square().sum()


@pytest.mark.parametrize("head", SOUND)
def test_a_sound_network_keeps_its_time_gradient_and_is_left_as_it_was(head):
    net, x = make(SOUND[head]), images(4)
    if head == "spiking":
        nn.init.constant_(net.head.weight, 0.5)  # so that it fires
    Calibration(1.0, 4)(net, x)
    state, mode = torch.get_rng_state(), net.training
    kept = kept_time_gradient(net, x, loss)
    assert set(kept) >= {"0_4C3", "2_10"} and kept == pytest.approx(dict.fromkeys(kept, 1.0), abs=1e-5)
    assert net.training is mode and torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in net.parameters())
    assert not any(module._forward_hooks for module in net.modules())


def test_a_capped_layer_is_seen_to_lose_by_how_much():
    """One spike with r = 3 * (1 - 1/2.5) = 1.8: capped at .1, 1/1.8 becomes .1, and 18 % are left."""
    net = nn.Sequential(SRMLinear(1, 1, NEURON, GradParams(cap_time=0.1)))
    nn.init.constant_(net[0].weight, 3.0)
    kept = kept_time_gradient(net, torch.tensor([1.0, 0.0]).view(2, 1, 1), lambda spikes: spikes.sum())
    assert kept == {"0": pytest.approx(0.18, rel=1e-5)}


def test_a_surrogate_has_no_time_gradient_to_keep():
    net = nn.Sequential(SRMLinear(1, 1, NEURON, ATan(2.0)))
    assert kept_time_gradient(net, torch.ones(2, 1, 1), lambda spikes: spikes.sum()) == {}
