"""Heads: what they compute, and what they hand back to the body."""

import math
from functools import partial

import pytest
import torch

from snn.networks import DecoupledHead, SpikingHead
from snn.neuron import GradParams, SRMParams
from snn.ops import srm_linear

make = partial(DecoupledHead, (4,), 3, decouple_scale=0.5, sign=True, sign_clip=1.0)


def spikes_for(*shape, seed=0):
    torch.manual_seed(seed)
    return (torch.rand(6, 2, *shape) < 0.5).float()


def test_decoupled_head_by_hand():
    """Two channels with rates 3/4 and 1/4; bias -1/2 makes the code +1, -1."""
    head = DecoupledHead((2,), 2, decouple_scale=0.5, sign=True, sign_clip=1.0)
    with torch.no_grad():
        head.affine.bias.fill_(-0.5)
        head.linear.weight.copy_(torch.tensor([[1.0, 2.0], [10.0, 20.0]]))
        head.linear.bias.copy_(torch.tensor([0.25, 0.5]))
    spikes = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]], [[0.0, 1.0]], [[1.0, 0.0]]], requires_grad=True)
    logits = head(spikes)
    assert logits.tolist() == [[1 - 2 + 0.25, 10 - 20 + 0.5]]
    logits.backward(torch.tensor([[0.5, 0.0]]))
    # dL/dcode = .5, 1 (clip 1); over T = 4: .125, .25; lambda .5: .0625, .125; then -grad at each spike
    assert spikes.grad[:, 0].tolist() == [[-0.0625, 0], [-0.0625, 0], [0, -0.125], [-0.0625, 0]]


def test_without_sign_the_rate_itself_is_read():
    head = DecoupledHead((2,), 1, decouple_scale=1.0, sign=False, sign_clip=1.0)
    with torch.no_grad():
        head.linear.weight.copy_(torch.tensor([[4.0, 8.0]]))
        head.linear.bias.zero_()
    assert head(torch.tensor([[[1.0, 0.0]], [[1.0, 1.0]]])).tolist() == [[4 + 4]]


def test_sign_clip_reaches_lb_sign():
    head = make(sign_clip=0.125)
    with torch.no_grad():
        head.linear.weight.fill_(1)
    spikes = torch.ones(1, 1, 4, requires_grad=True)
    head(spikes)[0, 0].backward()
    assert spikes.grad.flatten().tolist() == [-0.125 * 0.5] * 4


def test_the_affine_has_one_value_per_channel_and_the_linear_one_per_place():
    head = DecoupledHead((4, 3, 2), 5, decouple_scale=1.0, sign=True, sign_clip=1.0)
    assert head.affine.weight.shape == head.affine.bias.shape == (4,) and head.linear.weight.shape == (5, 24)
    assert head(spikes_for(4, 3, 2)).shape == (2, 5)


@pytest.mark.parametrize("scale", [0.25, 0.0])
def test_decouple_scale_acts_on_the_body_alone(scale):
    """It multiplies what reaches the spikes, changes no output, and leaves the head's own gradients."""

    def run(decouple_scale):
        torch.manual_seed(0)
        head = make(decouple_scale=decouple_scale)
        with torch.no_grad():
            head.affine.bias.fill_(-0.5)
        spikes = spikes_for(4).requires_grad_()
        logits = head(spikes)
        (logits**2).sum().backward()
        return logits, spikes.grad, [parameter.grad for parameter in head.parameters()]

    logits, body, own = run(1.0)
    scaled_logits, scaled_body, scaled_own = run(scale)
    assert torch.equal(scaled_logits, logits) and body.any()
    assert torch.equal(scaled_body, body * scale)
    assert all(torch.equal(a, b) for a, b in zip(own, scaled_own, strict=True))


def test_time_gradient_has_the_sign_of_earlier_is_more():
    """A logit that grows with a channel's rate pulls that channel's spikes earlier: dL/dt = -dL/drate."""
    head = make(sign=False)
    spikes = spikes_for(4).requires_grad_()
    head(spikes)[:, 0].sum().backward()
    expected = -head.linear.weight[0].detach() * 0.5 / 6 * spikes.detach()
    torch.testing.assert_close(spikes.grad, expected)


def test_hazard_10_one_class():
    assert DecoupledHead((4,), 1, decouple_scale=1.0, sign=True, sign_clip=1.0)(spikes_for(4)).shape == (2, 1)


@pytest.mark.parametrize("standardized", [False, True], ids=["plain", "standardized"])
def test_spiking_head_is_an_srm_layer(standardized):
    torch.manual_seed(0)
    neuron, grad = SRMParams(4.0, 2.0, 0.1), GradParams(2.0, 0.5)
    head = SpikingHead((4, 2, 2), 3, neuron=neuron, grad=grad, weight_standardization=standardized)
    spikes = spikes_for(4, 2, 2)
    output = head(spikes)
    assert output.shape == (6, 2, 3) and output.any()
    assert torch.equal(output, srm_linear(spikes.flatten(2), head.effective_weight(), neuron, grad))
    assert head.neuron == neuron and head.grad == grad
    assert ("gain" in head.state_dict()) == standardized and "threshold" in head.state_dict()


def test_what_each_head_gives():
    assert (DecoupledHead.output, SpikingHead.output) == ("logits", "spikes")


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_rule_of_decouple_scale(value):
    with pytest.raises(ValueError, match=f"head.decouple_scale must be finite and >= 0, got {value}"):
        make(decouple_scale=value)


@pytest.mark.parametrize("kind", [DecoupledHead, SpikingHead])
@pytest.mark.parametrize(("classes", "message"), [(0, "at least 1, got 0"), (10**12, "weights at most")])
def test_rule_of_classes(kind, classes, message):
    own = {"decouple_scale": 1.0, "sign": True, "sign_clip": 1.0}
    if kind is SpikingHead:
        own = {"neuron": SRMParams(), "weight_standardization": False}
    with pytest.raises(ValueError, match=rf"head.num_classes \(data.num_classes\) .*{message}"):
        kind((4, 3, 3), classes, grad=GradParams(), **own)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_rule_of_sign_clip(value):
    with pytest.raises(ValueError, match=f"head.sign_clip must be finite and > 0, got {value}"):
        make(sign_clip=value)


@pytest.mark.parametrize("standardized", [True, False])
def test_spiking_head_starts_with_every_class_alive(standardized):
    """A mean above 0 in the weights: without it an output neuron that never fires is lost for good."""
    torch.manual_seed(0)
    head = SpikingHead((500,), 7, neuron=SRMParams(), grad=GradParams(), weight_standardization=standardized)
    weight = head.effective_weight()
    assert (weight.mean() / weight.std()).item() == pytest.approx(0.15, abs=0.03)
