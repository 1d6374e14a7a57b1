"""Target spikes: where they are set, and that their gradient is that of any spike."""

import math

import pytest
import torch

from snn.neuron import GradParams, SRMParams
from snn.ops import srm_linear, target_spikes
from snn.ops.srm import reference

NEURON = SRMParams(tau_m=4.0, tau_s=2.0, threshold=100.0)
GRAD = GradParams(tau_grad=2.0, grad_scale=1.0)


def set_for(x, weight, labels, least_rise=0.05, neuron=NEURON, grad=GRAD):
    spikes = srm_linear(x, weight, neuron, grad)
    return spikes, target_spikes(x, weight, neuron, grad, spikes, labels, least_rise)


def test_by_hand():
    """Input 1 at step 0, weight 2: u = 1, 1.25, 1.125, ...; the last rise above .05 is .25, at step 1."""
    x = torch.zeros(4, 1, 1, dtype=torch.float64)
    x[0] = 1
    x.requires_grad_()
    weight = torch.tensor([[1.0], [2.0]], dtype=torch.float64, requires_grad=True)
    spikes, extra = set_for(x, weight, torch.tensor([1]))
    assert not spikes.any()
    assert extra[:, 0].tolist() == [[0, 0], [0, 1], [0, 0], [0, 0]]
    upstream = torch.zeros_like(extra)
    upstream[1, 0, 1] = 3.0
    extra.backward(upstream)
    # du = 1/4: slope -4, the cap; eps(2) = 5/8. r = 2/4: slope -2; decay^2 = 1/4, times the weight
    assert weight.grad.tolist() == [[0], [3 * -4 * 0.625]]
    assert x.grad.flatten().tolist() == [3 * 2 * 0.25 * 2, 0, 0, 0]


def test_only_labelled_silent_neurons_get_one():
    torch.manual_seed(0)
    x = (torch.rand(9, 40, 12) < 0.3).float()
    weight, labels = torch.randn(5, 12), torch.randint(5, (40,))
    neuron = SRMParams(threshold=2.0)
    spikes, extra = set_for(x, weight, labels, neuron=neuron)
    counts, added = spikes.sum(0), extra.sum(0)
    right = torch.nn.functional.one_hot(labels, 5).bool()
    assert set(extra.unique().tolist()) == {0, 1} and (added <= 1).all()
    assert not added[~right | (counts > 0)].any()
    assert 0 < added.sum() < 40 and (counts[right] > 0).any()


def test_the_gradient_is_that_of_the_reference_with_the_spike_in_it():
    torch.manual_seed(1)
    x = torch.rand(7, 6, 8, dtype=torch.float64).requires_grad_()
    weight = torch.randn(3, 8, dtype=torch.float64).requires_grad_()
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    spikes, extra = set_for(x, weight, labels)
    assert not spikes.any() and extra.any()
    upstream = torch.randn_like(extra)
    got = torch.autograd.grad(extra, [x, weight], upstream)
    current = (x @ weight.T).detach()
    rise = SRMParams(tau_m=4.0, tau_s=2.0, threshold=100.0)
    m = s = r = u_last = torch.zeros_like(current[0])
    slope_w, slope_t = torch.zeros_like(current), torch.zeros_like(current)
    for t in range(7):
        m, s = (m + current[t]) * rise.decay_m, (s + current[t]) * rise.decay_s
        r, u = (r + current[t]) * GRAD.decay_grad, rise.coef * (m - s)
        slope_w[t] = (-1 / (u - u_last)).clamp(-GRAD.cap_weight, 0)
        slope_t[t] = (-1 / r).clamp(-GRAD.cap_time, 0)
        u_last = u
    grad_w, grad_t = reference.scan_backward(
        upstream, extra.detach(), slope_w * extra.detach(), slope_t * extra.detach(), rise, GRAD
    )
    wanted = [grad_t @ weight * x, torch.einsum("tnk,tnf->kf", grad_w, x)]
    torch.testing.assert_close(list(got), [w.detach() for w in wanted], rtol=1e-12, atol=1e-12)


def test_a_potential_that_never_rises_gets_none():
    x = torch.ones(4, 2, 1, requires_grad=True)
    weight = torch.tensor([[-1.0], [0.0]], requires_grad=True)
    _, extra = set_for(x, weight, torch.tensor([0, 1]))
    extra.sum().backward()
    assert not extra.any() and not x.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("least", [0.0, -1.0, math.nan, math.inf])
def test_the_least_rise_is_checked(least):
    with pytest.raises(ValueError, match="least_rise must be finite and > 0"):
        set_for(torch.ones(2, 1, 1), torch.ones(1, 1), torch.tensor([0]), least)


@pytest.mark.parametrize(("steps", "tau_grad"), [(250, 2.5), (30, 1.05)])
def test_no_step_after_an_early_spike_overflows(steps, tau_grad):
    x = torch.zeros(steps, 2, 3)
    x[0] = 1
    x.requires_grad_()
    weight = torch.tensor([[1.0, 1, 1], [0.0, 0, 0]], requires_grad=True)
    grad = GradParams(tau_grad=tau_grad)
    _, extra = set_for(x, weight, torch.tensor([0, 1]), grad=grad)  # the second one gets none
    extra.sum().backward()
    assert (
        extra.sum() == 1 and x.grad[0, 0].any() and x.grad.isfinite().all() and weight.grad.isfinite().all()
    )


def test_autocast_around_the_backward_alone_changes_nothing():
    torch.manual_seed(1)
    x, weight = torch.rand(7, 6, 8).requires_grad_(), torch.randn(3, 8).requires_grad_()
    _, extra = set_for(x, weight, torch.tensor([0, 1, 2, 0, 1, 2]))
    assert extra.any()
    plain = torch.autograd.grad(extra.sum(), [x, weight], retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        inside = torch.autograd.grad(extra.sum(), [x, weight])
    assert all(map(torch.equal, plain, inside))
