"""Modules: what they hold and train, what travels in state_dict, and that calls leave no state."""

import copy
import math
import pickle
from functools import partial

import pytest
import torch
from torch import nn

from snn.layers import (
    ChannelAffine,
    GradientDecouple,
    LBSign,
    SpikeAvgPool2d,
    SpikeDropout,
    SRMConv2d,
    SRMLinear,
)
from snn.neuron import GradParams, SRMParams
from snn.ops import srm_conv2d, srm_linear

NEURON, GRAD = SRMParams(5.0, 3.0, 0.5), GradParams(2.5, 0.85)
LAYERS = {
    "conv": (partial(SRMConv2d, 3, 4, 3, NEURON, GRAD, padding=1), (3, 6, 5)),
    "linear": (partial(SRMLinear, 6, 4, NEURON, GRAD), (6,)),
}
BOTH = pytest.mark.parametrize("kind", LAYERS)
WEIGHTS = pytest.mark.parametrize("standardized", [False, True], ids=["plain", "standardized"])


def make(kind, standardized=False, seed=0, positive=True):
    torch.manual_seed(seed)
    layer = LAYERS[kind][0](weight_standardization=standardized)
    with torch.no_grad():
        if standardized:
            layer.gain.mul_(2)
            layer.bias.add_(0.2 if kind == "conv" else 0.4)
        elif positive:
            layer.weight.add_(0.15 if kind == "conv" else 0.4)
    return layer


def spikes_for(kind, steps=8, batch=3, seed=1):
    torch.manual_seed(seed)
    return (torch.rand(steps, batch, *LAYERS[kind][1]) < 0.5).float()


# parameters and buffers


@BOTH
@WEIGHTS
def test_thresholds_and_standardization_travel_in_state_dict(kind, standardized):
    layer = make(kind, standardized)
    expected = {"weight", "threshold"} | ({"gain", "bias"} if standardized else set())
    assert set(layer.state_dict()) == expected
    assert {name for name, _ in layer.named_parameters()} == expected - {"threshold"}
    assert torch.equal(layer.threshold, torch.full((4,), 0.5))


@BOTH
@WEIGHTS
def test_state_dict_carries_the_spikes_over(kind, standardized):
    x = spikes_for(kind)
    layer, other = make(kind, standardized), make(kind, standardized, seed=5)
    layer.threshold.copy_(torch.tensor([0.3, 0.6, 0.4, 50.0]))
    assert not torch.equal(layer(x), other(x))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), other(x)) and not other(x)[:, :, 3].any()


@BOTH
def test_an_integer_threshold_is_a_number(kind):
    """`neuron.threshold=1` on a command line is an int."""
    layer = LAYERS[kind][0].func(*LAYERS[kind][0].args[:-2], SRMParams(5, 3, 1), GradParams(2, 1))
    assert layer.threshold.dtype == torch.float32
    layer(spikes_for(kind)).sum()


def test_conv_hands_its_geometry_on():
    conv = {"stride": 2, "padding": 2, "dilation": 2, "groups": 2}
    torch.manual_seed(0)
    layer = SRMConv2d(4, 6, (3, 2), NEURON, GRAD, **conv)
    assert layer.weight.shape == (6, 2, 3, 2)
    x = (torch.rand(6, 2, 4, 9, 8) < 0.6).float()
    with torch.no_grad():
        layer.weight.add_(0.2)
    expected = srm_conv2d(x, layer.weight, NEURON, GRAD, **conv)
    assert torch.equal(layer(x), expected) and expected.any()


def test_linear_flattens_maps():
    torch.manual_seed(0)
    layer = SRMLinear(12, 5, NEURON, GRAD)
    with torch.no_grad():
        layer.weight.add_(0.3)
    x = (torch.rand(6, 2, 3, 2, 2) < 0.6).float()
    expected = srm_linear(x.flatten(2), layer.weight, NEURON, GRAD)
    assert torch.equal(layer(x), expected) and expected.any()


@BOTH
def test_both_parameter_sets_reach_the_op(kind):
    x = spikes_for(kind).requires_grad_()
    layer = make(kind)
    layer.grad = GradParams(2.5, 0.0)
    spikes = layer(x)
    spikes.sum().backward()
    assert spikes.any() and not x.grad.any() and layer.weight.grad.any()
    layer.neuron = SRMParams(30.0, 20.0, 0.5)
    assert not torch.equal(layer(x), spikes)


# weight standardization


@BOTH
def test_standardization_closed_form(kind):
    layer = make(kind, standardized=True).double()
    rows = layer.weight.detach().flatten(1).tolist()
    expected = []
    for row, gain, bias in zip(rows, layer.gain.tolist(), layer.bias.tolist(), strict=True):
        mean = math.fsum(row) / len(row)
        variance = math.fsum((w - mean) ** 2 for w in row) / (len(row) - 1)  # unbiased
        expected.append([(w - mean) / math.sqrt(variance + 1e-5) * gain + bias for w in row])
    got = layer.effective_weight().detach().flatten(1)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-13)


def test_standardization_by_hand():
    """Weights 1, 2, 6: mean 3, variance (4 + 1 + 9) / 2 = 7."""
    layer = SRMLinear(3, 1, NEURON, GRAD, weight_standardization=True)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 2.0, 6.0]]))
        layer.gain.fill_(2.0)
        layer.bias.fill_(0.5)
    root = math.sqrt(7 + 1e-5)
    expected = torch.tensor([[-2 / root * 2 + 0.5, -1 / root * 2 + 0.5, 3 / root * 2 + 0.5]])
    torch.testing.assert_close(layer.effective_weight().detach(), expected)


def test_standardization_of_equal_weights_is_finite():
    layer = SRMLinear(3, 1, NEURON, GRAD, weight_standardization=True)
    with torch.no_grad():
        layer.weight.fill_(0.7)
        layer.bias.fill_(0.5)
    weight = layer.effective_weight()
    weight.sum().backward()
    # the kernel adds -mean / sqrt(var + eps) as one number, some 220 here: float32 leaves 1e-5 of it
    assert torch.allclose(weight, torch.full_like(weight, 0.5), atol=1e-4)
    assert layer.weight.grad.isfinite().all()


@BOTH
def test_standardization_gradcheck(kind):
    """Standardization is plain calculus, so its gradient is a true derivative."""

    class Effective(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = make(kind, standardized=True).double()

        def forward(self):
            return self.layer.effective_weight()

    module = Effective()
    names = ["layer.weight", "layer.gain", "layer.bias"]
    leaves = [module.get_parameter(name).detach().clone().requires_grad_() for name in names]

    def effective(*values):
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), ())

    assert torch.autograd.gradcheck(effective, leaves)


@BOTH
def test_standardized_parameters_are_trained(kind):
    layer = make(kind, standardized=True)
    layer(spikes_for(kind)).sum().backward()
    for name in ("weight", "gain", "bias"):
        assert getattr(layer, name).grad.any(), name


@BOTH
def test_standardized_layer_calls_the_op_with_the_effective_weight(kind):
    layer, x = make(kind, standardized=True), spikes_for(kind)
    weight = layer.effective_weight()
    op = partial(srm_conv2d, padding=1) if kind == "conv" else srm_linear
    spikes = layer(x)
    assert torch.equal(spikes, op(x, weight, NEURON, GRAD)) and spikes.any()


# no state between calls


@BOTH
@WEIGHTS
def test_hazard_15_steps_and_batch_may_change_between_calls(kind, standardized):
    layer, x = make(kind, standardized), spikes_for(kind)
    first = layer(x)
    assert first.any()
    layer(spikes_for(kind, steps=3, batch=1, seed=2))
    layer(spikes_for(kind, steps=13, batch=5, seed=3))
    assert torch.equal(layer(x), first)


@BOTH
@WEIGHTS
def test_hazard_15_double_equals_a_fresh_float64_layer(kind, standardized):
    layer, x = make(kind, standardized), spikes_for(kind)
    layer(x)
    state = copy.deepcopy(layer.state_dict())
    layer.double()
    fresh = LAYERS[kind][0](weight_standardization=standardized).double()
    fresh.load_state_dict(state)
    got = layer(x.double())
    assert got.dtype == torch.float64 and torch.equal(got, fresh(x.double()))
    assert torch.equal(layer.float()(x), make(kind, standardized)(x))


@BOTH
@WEIGHTS
@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["copy", "pickle"]
)
def test_hazard_17_copies_of_a_layer_that_has_run(kind, standardized, way):
    layer, x = make(kind, standardized), spikes_for(kind)
    layer(x).sum().backward()
    twin = way(layer)
    assert torch.equal(twin(x), layer(x))
    with torch.no_grad():
        twin.weight.zero_()
        twin.threshold.add_(1)
    assert layer.weight.any() and torch.equal(layer.threshold, torch.full((4,), 0.5))


# the small modules


def test_pool_module():
    x = torch.rand(2, 1, 3, 5, 4)
    torch.testing.assert_close(SpikeAvgPool2d((2, 1))(x)[0], nn.functional.avg_pool2d(x[0], (2, 1)))


def test_hazard_07_scale_changed_between_forward_and_backward():
    layer = GradientDecouple(0.1)
    x = torch.ones(3, requires_grad=True)
    y = layer(x)
    layer.scale = 7.0
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 0.1))


def test_lb_sign_module_passes_its_clip():
    x = torch.tensor([2.0, -3.0], requires_grad=True)
    y = LBSign(0.5)(x)
    assert y.tolist() == [1, -1]
    y.backward(torch.tensor([0.4, 4.0]))
    torch.testing.assert_close(x.grad, torch.tensor([0.4, 0.5]))
    assert LBSign().clip == 1.0


def test_hazard_18_dropout_is_off_in_eval():
    layer, x = SpikeDropout(0.5), torch.ones(2, 3, 40)
    torch.manual_seed(0)
    assert set(layer(x).unique().tolist()) == {0, 2}
    assert layer.eval() is layer and torch.equal(layer(x), x)
    layer.train()
    assert not torch.equal(layer(x), x)


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((4, 3), 1), ((5, 4, 3), 2), ((4, 3, 2, 2), 1), ((5, 4, 3, 2, 2), 2)],
    ids=["N-F", "T-N-F", "N-C-H-W", "T-N-C-H-W"],
)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_hazard_07_channel_affine_axis(shape, axis, bias):
    layer = ChannelAffine(3, bias=bias)
    weights, biases = [2.0, -1.0, 0.5], [10.0, 20.0, 30.0]
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weights))
        if bias:
            layer.bias.copy_(torch.tensor(biases))
    x = torch.randn(shape)
    y = layer(x)
    assert y.shape == x.shape
    for c in range(3):
        expected = x.select(axis, c) * weights[c] + (biases[c] if bias else 0)
        torch.testing.assert_close(y.select(axis, c), expected)
    assert ("bias" in layer.state_dict()) == bias


def test_channel_affine_starts_as_the_identity_and_trains():
    layer, x = ChannelAffine(3, bias=True).double(), torch.randn(4, 3, dtype=torch.float64)
    assert torch.equal(layer(x), x)
    assert torch.autograd.gradcheck(
        lambda *values: torch.func.functional_call(
            layer, dict(zip(("weight", "bias"), values[1:], strict=True)), values[0]
        ),
        [tensor.detach().clone().requires_grad_() for tensor in (x, layer.weight, layer.bias)],
    )


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((3, 4), 1), ((3, 3, 1), 2), ((3, 1, 3, 3), 1), ((3, 3, 1, 3, 3), 2), ((3, 3, 6, 3, 3), 2)],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_hazard_07_channel_affine_never_broadcasts(shape, axis):
    with pytest.raises(
        ValueError, match=rf"x must have 3 channels on axis {axis}, got \[{', '.join(map(str, shape))}\]"
    ):
        ChannelAffine(3)(torch.zeros(shape))


@pytest.mark.parametrize("shape", [(3,), (1, 1, 1, 1, 1, 3)], ids=["1-D", "6-D"])
def test_hazard_07_channel_affine_dimensions(shape):
    with pytest.raises(ValueError, match=r"x must have 2 to 5 dimensions, got \["):
        ChannelAffine(3)(torch.zeros(shape))


@pytest.mark.parametrize(
    ("make_module", "message"),
    [
        (lambda: ChannelAffine(0), "num_channels must be at least 1, got 0"),
        (lambda: SpikeDropout(1.0), r"p must lie in \[0, 1\), got 1.0"),
        (lambda: SpikeDropout(-0.5), r"p must lie in \[0, 1\), got -0.5"),
        (
            lambda: SRMConv2d(4, 6, 3, NEURON, GRAD, groups=4),
            "groups must divide the channels 4 and 6, got 4",
        ),
        (
            lambda: SRMConv2d(4, 6, 3, NEURON, GRAD, groups=3),
            "groups must divide the channels 4 and 6, got 3",
        ),
        (
            lambda: SRMConv2d(4, 6, 3, NEURON, GRAD, groups=0),
            "groups must divide the channels 4 and 6, got 0",
        ),
        (
            lambda: SRMConv2d(1, 6, 1, NEURON, GRAD, weight_standardization=True),
            "weight_standardization needs at least 2 weights per output channel, got 1",
        ),
        (
            lambda: SRMLinear(1, 6, NEURON, GRAD, weight_standardization=True),
            "weight_standardization needs at least 2 weights per output channel, got 1",
        ),
    ],
    ids=[
        "affine",
        "dropout 1",
        "dropout -.5",
        "groups out",
        "groups in",
        "groups 0",
        "1x1 conv",
        "one input",
    ],
)
def test_rules(make_module, message):
    with pytest.raises(ValueError, match=message):
        make_module()


@pytest.mark.parametrize(
    ("layer", "value", "message"),
    [
        (GradientDecouple(-1.0), 0.0, "scale must be .*, got -1.0"),
        (LBSign(0.0), 0.0, "clip must be .*, got 0.0"),
    ],
    ids=["decouple", "sign"],
)
def test_rules_of_the_op_show_at_the_call(layer, value, message):
    with pytest.raises(ValueError, match=message):
        layer(torch.full((2,), value))
