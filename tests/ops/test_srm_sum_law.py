"""The sum law: an SRM layer hands its input grad_scale times the time gradient of its spikes, no more."""

import pytest
import torch

from snn.neuron import GradParams, SRMParams
from snn.ops import spike_avg_pool2d, spike_dropout, srm_conv2d, srm_linear

NEURON = SRMParams(tau_m=5.0, tau_s=3.0, threshold=1.0)
GRAD = GradParams(tau_grad=2.5, grad_scale=0.85)
GEOMETRIES = [(1, 1, 1, 1), (2, 1, 1, 1), (2, 0, 2, 1), (1, 1, 1, 2)]
CONVS = [
    dict(zip(("stride", "padding", "dilation", "groups"), geometry, strict=True)) for geometry in GEOMETRIES
]
by_geometry = pytest.mark.parametrize(
    "conv", CONVS, ids=lambda conv: "-".join(f"{k[0]}{v}" for k, v in conv.items())
)


def spikes_like(*shape, rate=0.3):
    return (torch.rand(shape) < rate).double()


def positive(*shape, mean):
    return (torch.rand(shape, dtype=torch.float64) + 0.05) * (2 * mean)


def rise_at_spikes(current, spikes):
    """The rise trace, summed from its definition over the steps since the last spike."""
    decay, rise = 1 - 1 / GRAD.tau_grad, torch.zeros_like(current)
    for t in range(len(current)):
        silent_since = torch.ones_like(current[0])
        for s in range(t, -1, -1):
            if s < t:
                silent_since = silent_since * (1 - spikes[s])
            rise[t] += silent_since * current[s] * decay ** (t - s + 1)
    return rise


def assert_sum(got, expected):
    torch.testing.assert_close(got.item(), expected.item(), rtol=1e-9, atol=0)


@by_geometry
def test_positive_weights_every_spike(conv):
    torch.manual_seed(0)
    x = spikes_like(9, 3, 4, 9, 7).requires_grad_()
    weight = positive(6, 4 // conv["groups"], 3, 3, mean=0.25)
    spikes = srm_conv2d(x, weight, NEURON, GRAD, **conv)
    grad_out = torch.randn_like(spikes) + 0.5
    spikes.backward(grad_out)
    assert 0.05 < spikes.mean() < 0.7
    assert_sum(x.grad.sum(), 0.85 * (grad_out * spikes).sum())


@by_geometry
def test_weights_of_both_signs_where_the_rise_is_positive(conv):
    torch.manual_seed(1)
    x = spikes_like(9, 3, 4, 9, 7).requires_grad_()
    weight = torch.randn(6, 4 // conv["groups"], 3, 3, dtype=torch.float64) * 0.8
    spikes = srm_conv2d(x, weight, NEURON, GRAD, **conv)
    grad_out = torch.randn_like(spikes) + 0.5
    spikes.backward(grad_out)
    current = torch.nn.functional.conv2d(x.detach().flatten(0, 1), weight, **conv).unflatten(0, x.shape[:2])
    rising = (rise_at_spikes(current, spikes.detach()) > 0) & (spikes > 0)
    assert rising.sum() > 50
    assert_sum(x.grad.sum(), 0.85 * grad_out[rising].sum())


def test_the_condition_on_the_rise_bites():
    """A fast rise trace is below zero at some spikes; those must be left out, or the law fails."""
    torch.manual_seed(2)
    grad = GradParams(tau_grad=1.1, grad_scale=1.0)
    x = spikes_like(9, 8, 30).requires_grad_()
    weight = torch.randn(20, 30, dtype=torch.float64) * 0.5
    spikes = srm_linear(x, weight, SRMParams(8.0, 6.0), grad)
    grad_out = torch.rand_like(spikes) + 0.5
    spikes.backward(grad_out)
    assert x.grad.sum() < 0.999 * (grad_out * spikes).sum()


@pytest.mark.parametrize("p", [0.0, 0.4], ids=["no dropout", "dropout"])
def test_through_conv_pool_conv_pool_linear(p):
    torch.manual_seed(3)
    x = spikes_like(10, 2, 2, 13, 9, rate=0.4).requires_grad_()
    weights = [
        positive(5, 2, 3, 3, mean=0.3),
        positive(6, 5, 3, 3, mean=0.2),
        positive(7, 6 * 3 * 2, mean=0.3),
    ]
    spikes = srm_conv2d(x, weights[0], NEURON, GRAD, padding=1)
    spikes = spike_dropout(spike_avg_pool2d(spikes, 2), p)
    spikes = srm_conv2d(spikes, weights[1], NEURON, GRAD, padding=1)
    spikes = spike_dropout(spike_avg_pool2d(spikes, 2), p)
    spikes = srm_linear(spikes.flatten(2), weights[2], NEURON, GRAD)
    grad_out = torch.randn_like(spikes) + 1
    spikes.backward(grad_out)
    assert spikes.sum() > 20
    assert_sum(x.grad.sum(), 0.85**3 * (grad_out * spikes).sum())


def test_through_dropout_between_two_layers():
    """A kept spike is 1 / (1 - p) high, but its time gradient passes unscaled."""
    torch.manual_seed(4)
    x = spikes_like(8, 4, 20).requires_grad_()
    spikes = srm_linear(x, positive(15, 20, mean=0.3), NEURON, GRAD)
    spikes = srm_linear(spike_dropout(spikes, 0.5), positive(6, 15, mean=0.3), NEURON, GRAD)
    grad_out = torch.rand_like(spikes)
    spikes.backward(grad_out)
    assert spikes.sum() > 20
    assert_sum(x.grad.sum(), 0.85**2 * (grad_out * spikes).sum())


def test_pool_keeps_the_sum_over_windows_with_a_spike():
    torch.manual_seed(5)
    x = spikes_like(6, 2, 3, 7, 5, rate=0.15).requires_grad_()
    y = spike_avg_pool2d(x, (2, 1))
    grad_out = torch.randn_like(y)
    y.backward(grad_out)
    assert (y == 0).any()
    assert_sum((x.grad * x).sum(), grad_out[y > 0].sum())
