"""Residual networks: names, shapes, the sum law from head to input, and what works on their layers."""

import copy
import functools
import pickle
import re
from functools import partial

import pytest
import torch
from torch import nn

from snn.calibrate import Calibration
from snn.device import compile_network, set_precision
from snn.layers import SRMLayer
from snn.losses import Count, CrossEntropy
from snn.monitor import SpikeMonitor
from snn.networks import DecoupledHead, SpikingHead, SRMResNet
from snn.neuron import GradParams, SRMParams

NEURON, GRAD = SRMParams(5.0, 3.0, 0.4), GradParams(2.5, 0.85)
HEADS = {
    "decoupled": partial(DecoupledHead, num_classes=3, decouple_scale=0.5, sign=False, sign_clip=1.0),
    "spiking": partial(SpikingHead, num_classes=3, neuron=NEURON, grad=GRAD, weight_standardization=False),
}
BOTH = pytest.mark.parametrize("head", HEADS)
SMALL = {
    "stem": "4C3",
    "channels": [4, 6],
    "blocks": 2,
    "dropout": 0.3,
    "pool": 2,
    "in_channels": 2,
    "size": 8,
    "weight_standardization": True,
}
SRM_NAMES = [
    "0_4C3",
    *("1_R4s2.conv1", "1_R4s2.conv2", "1_R4s2.shortcut", "2_R4.conv1", "2_R4.conv2"),
    *("3_R6s2.conv1", "3_R6s2.conv2", "3_R6s2.shortcut", "4_R6.conv1", "4_R6.conv2"),
]


def make(head="decoupled", **changes):
    torch.manual_seed(0)
    return SRMResNet(**{**SMALL, **changes}, neuron=NEURON, grad=GRAD, head=HEADS[head])


@functools.cache
def _calibrated(head):
    net = make(head)
    Calibration(1.0, 64)(net, images(batch=16))
    return net


def calibrated(head="decoupled"):
    """Every layer fires, and not all of it at once."""
    return copy.deepcopy(_calibrated(head))


def images(batch=3, steps=6, seed=1, size=8):
    torch.manual_seed(seed)
    return torch.rand(steps, batch, 2, size, size)


def loss_of(head):
    return CrossEntropy() if head == "decoupled" else Count(5, 0)


# what is built


def test_names_and_values_reach_the_modules():
    net = make()
    assert [name for name, _ in net.layers.named_children()] == [
        *("0_4C3", "1_R4s2", "2_R4", "3_R6s2", "4_R6", "5_P2")
    ]
    srm = {name: module for name, module in net.layers.named_modules() if isinstance(module, SRMLayer)}
    assert list(srm) == SRM_NAMES
    assert all(layer.neuron == NEURON and layer.grad == GRAD for layer in srm.values())
    geometry = {name: (*layer.weight.shape, layer.stride, layer.padding) for name, layer in srm.items()}
    assert geometry["1_R4s2.conv1"] == (4, 4, 3, 3, 2, 1) and geometry["1_R4s2.conv2"] == (4, 4, 3, 3, 1, 1)
    assert geometry["3_R6s2.shortcut"] == (6, 4, 1, 1, 2, 0) and geometry["3_R6s2.conv1"][:2] == (6, 4)
    assert [net.layers[i].dropout.p for i in (1, 2, 3, 4)] == [0.3] * 4
    assert "layers.3_R6s2.shortcut.threshold" in net.state_dict()


@pytest.mark.parametrize("standardized", [False, True], ids=["plain", "standardized"])
def test_standardization_reaches_every_layer(standardized):
    modules = make(weight_standardization=standardized).modules()
    assert {m.weight_standardization for m in modules if isinstance(m, SRMLayer)} == {standardized}


@pytest.mark.parametrize(
    "changes",
    [{}, {"size": 9}, {"size": 13, "blocks": 1}, {"size": 2, "pool": 1}, {"stem": "5C5p0s2", "size": 21}],
    ids=["even", "odd", "one block", "one pixel", "stride"],
)
def test_recorded_shapes_are_those_of_the_tensors(changes):
    net, seen = make(**changes), {}
    for name in net.shapes:
        layer = net.layers.get_submodule(name)
        layer.register_forward_hook(lambda m, i, o, name=name: seen.update({name: tuple(o.shape[2:])}))
    assert net(images(size=changes.get("size", 8))).shape == (3, 3)
    assert seen == net.shapes


def test_it_prints_as_a_table():
    rows = [
        re.split(r"\s{2,}", line.strip())
        for line in repr(make(blocks=1, weight_standardization=False)).splitlines()
    ]
    head = 2 * 6 + 3 * 6 + 3  # affine, linear
    assert rows == [
        ["layer", "output", "parameters"],
        ["0_4C3", "4x8x8", "72"],
        ["1_R4s2.conv1", "4x4x4", "144"],
        ["1_R4s2.conv2", "4x4x4", "144"],
        ["1_R4s2.shortcut", "4x4x4", "16"],
        ["2_R6s2.conv1", "6x2x2", "216"],
        ["2_R6s2.conv2", "6x2x2", "324"],
        ["2_R6s2.shortcut", "6x2x2", "24"],
        ["3_P2", "6x1x1", "0"],
        ["head", "DecoupledHead", f"{head}"],
        ["total", f"{940 + head}"],
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"channels": []}, r"network.channels must be one or more integers of at least 1, got \[\]"),
        ({"channels": [4, 0]}, r"network.channels must be .* at least 1, got \[4, 0\]"),
        ({"blocks": 0}, r"network.blocks must lie in \[1, 999\], got 0"),
        ({"blocks": 10**12}, r"network.blocks must lie in \[1, 999\], got 1000000000000"),
        ({"dropout": 1.0}, r"network.dropout must lie in \[0, 1\), got 1.0"),
        ({"pool": 0}, "network.pool must be at least 1, got 0"),
        ({"stem": "P2"}, "network.stem must be one SRM convolution, like 128C5, got 'P2'"),
        ({"stem": "4C3-P2"}, "network.stem must be one SRM convolution, like 128C5, got '4C3-P2'"),
        ({"stem": "4C3x2"}, "network.stem must be one SRM convolution, like 128C5, got '4C3x2'"),
        ({"stem": "4Q3"}, "network.stem: token 1 of '4Q3' must read like .*, got '4Q3'"),
        ({"stem": "4C9p0"}, r"network.stem: '4C9p0' \(layer 0\) got 2x8x8: nothing of the map is left"),
        ({"size": 4}, r"network.pool: 'P2' \(layer 5\) got 6x1x1: nothing of the map is left"),
        ({"channels": [10**9]}, r"network.channels: 'R1000000000s2' \(layer 1\) .* 1,000,000,000 weights at"),
        ({"size": 0}, r"network.size \(data.size\) must be at least 1, got 0"),
        ({"size": 10**9}, "data.channels and data.size must make .* got 2 and 1000000000"),
        ({"in_channels": -1}, r"network.in_channels \(data.channels\) must be at least 1, got -1"),
        (
            {"stem": "1C3", "weight_standardization": True},
            r"network.channels: 'R4s2' \(layer 1\) got 1x8x8: weight_standardization needs at least 2",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_a_bad_value_names_its_key_and_a_layer_what_reached_it(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


# the sum law


@pytest.mark.parametrize("blocks", [1, 2])
def test_the_sum_law_from_the_pool_to_the_input(blocks):
    """With positive weights every gradient that reaches the last pool's windows arrives at the input."""
    torch.manual_seed(0)
    grad = GradParams(2.5, 1.0)
    changes = {**SMALL, "blocks": blocks, "weight_standardization": False}
    net = SRMResNet(**changes, neuron=NEURON, grad=grad, head=lambda shape: nn.Identity()).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.abs_().add_(0.02)
    sums = []
    net.layers[-1].register_forward_pre_hook(lambda module, inputs: sums.append(inputs[0].detach()))
    x = (torch.rand(6, 3, 2, 8, 8) < 0.1).double().requires_grad_()
    Calibration(1.0, 3)(net, x)
    y = net.train()(x)
    assert (sums[-1] > 1).any() and (sums[-1] == 0).any()  # places of two spikes, and of none
    grad_out = torch.rand_like(y) + 0.5
    y.backward(grad_out)
    expected = grad_out[y > 0].sum().item()
    assert y.any() and x.grad.sum().item() == pytest.approx(expected, rel=1e-9)


# calibration, monitor, precision, compilation


@BOTH
def test_calibration_meets_its_target_in_every_layer(head, caplog):
    net, x = make(head), images(batch=40, steps=9)
    Calibration(0.8, 64)(net, x)
    late = {}
    for name, module in net.named_modules():
        if isinstance(module, SRMLayer):
            module.register_forward_hook(lambda m, i, o, name=name: late.update({name: o[6:].mean() * 9}))
    net.eval()(x)
    for name, count in late.items():
        assert count.item() == pytest.approx(0.8, rel=0.05), name
    assert len(late) == len(SRM_NAMES) + (head == "spiking") and "warning" not in caplog.text


def test_calibration_names_a_layer_out_of_reach(caplog):
    net = make()
    with torch.no_grad():
        net.layers[3].shortcut.gain.zero_()  # no current, no spike at any threshold
        net.layers[3].shortcut.bias.zero_()
    Calibration(0.6, 64)(net, images(batch=16))
    assert "out of reach in layer 3_R6s2.shortcut:" in caplog.text


@BOTH
def test_the_monitor_counts_every_layer(head):
    net = calibrated(head)
    with SpikeMonitor(net) as monitor:
        net(images())
    assert list(monitor.rates()) == SRM_NAMES + (["head"] if head == "spiking" else [])
    assert all(0 < rate < 1 for rate in monitor.rates().values())


@BOTH
def test_hazard_12_bf16(head):
    net, x = calibrated(head), images()
    set_precision(net, torch.device("cpu"), "bf16")
    output = net(x)
    assert output.dtype == torch.float32
    loss_of(head)(output, torch.tensor([0, 1, 2])).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad.dtype == torch.float32 and parameter.grad.isfinite().all(), name


@BOTH
def test_compile_network_compiles_it_as_one_and_keeps_names_and_hooks(head, monkeypatch):
    net, x = calibrated(head).eval(), images()
    names, expected, compiled = list(net.state_dict()), net(x), []
    monkeypatch.setattr(torch, "compile", lambda forward, **options: compiled.append(options) or forward)
    compile_network(net)
    assert compiled == [{"fullgraph": True, "dynamic": False}] * 2  # forward and teach
    assert [name for name, module in net.named_modules() if "forward" in vars(module)] == [""]
    with SpikeMonitor(net) as monitor:
        assert torch.equal(net(x), expected)
    assert list(monitor.rates())[: len(SRM_NAMES)] == SRM_NAMES and list(net.state_dict()) == names


# no state between calls, and samples apart


@BOTH
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_hazard_16_no_state_between_calls(head, mode):
    net, x = calibrated(head), images()
    net.train(mode == "train")

    def run(x):
        torch.manual_seed(7)  # the same dropout masks
        return net(x)

    first = run(x)
    run(images(batch=5, steps=4, seed=2))
    assert torch.equal(run(x), first)
    assert first.any() and not torch.equal(run(images(seed=3)), first)


def test_hazards_10_14_samples_are_kept_apart():
    net, x = calibrated().eval(), images(batch=4)
    order = torch.tensor([2, 0, 3, 1])
    output = net(x)
    torch.testing.assert_close(net(x[:, order]), output[order])
    torch.testing.assert_close(net(x[:, 3:]), output[3:])
    assert not torch.equal(output[order], output)


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["copy", "pickle"]
)
def test_hazard_17_copies_of_a_net_that_has_run(way):
    net, x = calibrated(), images()
    net(x).sum().backward()
    twin = way(net).eval()
    assert torch.equal(twin(x), net.eval()(x)) and repr(twin) == repr(net)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert all(parameter.any() for parameter in net.parameters() if parameter.dim() > 1)


def test_expanded_input_equals_a_full_one():
    net, image = calibrated().eval(), torch.rand(1, 3, 2, 8, 8)
    assert torch.equal(net(image.expand(6, -1, -1, -1, -1)), net(image.repeat(6, 1, 1, 1, 1)))


@BOTH
def test_every_parameter_gets_a_gradient(head):
    net = calibrated(head)
    loss_of(head)(net(images(batch=12)), torch.arange(12) % 3).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name
