"""Spike dropout: one mask for all steps, and a gradient that is masked but not scaled."""

import math

import pytest
import torch

from snn.ops import spike_dropout


def test_forward_and_backward_by_the_mask():
    torch.manual_seed(0)
    x = torch.ones(3, 4, 50, requires_grad=True)
    y = spike_dropout(x, 0.75)
    kept = y.detach()[0] != 0
    assert torch.equal(y, (kept * 4.0).expand(3, -1, -1))  # 1 / (1 - p), the same mask at each step
    assert 0.15 < kept.float().mean() < 0.35
    g = torch.randn_like(x)
    y.backward(g)
    assert torch.equal(x.grad, g * kept)  # unscaled


def test_masks_differ_between_samples_and_calls():
    torch.manual_seed(0)
    x = torch.ones(2, 2, 200)
    first, second = spike_dropout(x, 0.5), spike_dropout(x, 0.5)
    assert not torch.equal(first[:, 0], first[:, 1]) and not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(spike_dropout(x, 0.5), first)


def test_the_mean_is_kept():
    torch.manual_seed(0)
    assert spike_dropout(torch.ones(1, 1, 100_000), 0.3).mean().item() == pytest.approx(1, abs=0.01)


def test_zero_drops_nothing():
    x = torch.rand(2, 3, 4, requires_grad=True)
    y = spike_dropout(x, 0.0)
    y.sum().backward()
    assert torch.equal(y, x) and torch.equal(x.grad, torch.ones_like(x))


def test_hazard_04_sum_backward_and_dtype():
    x = torch.ones(2, 3, 4, dtype=torch.float64, requires_grad=True)
    y = spike_dropout(x, 0.5)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == torch.float64
    assert torch.equal(x.grad, (y != 0).double())


def test_hazard_11_a_second_derivative_raises():
    x = torch.rand(2, 3, requires_grad=True)
    (first,) = torch.autograd.grad((spike_dropout(x, 0.5) ** 2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, math.nan])
def test_rule_of_p(p):
    with pytest.raises(ValueError, match=rf"p must lie in \[0, 1\), got {p}"):
        spike_dropout(torch.zeros(2, 3), p)


def test_rule_of_shape():
    with pytest.raises(ValueError, match=r"\[T, N, ...\], got torch.float32 \[3\]"):
        spike_dropout(torch.zeros(3), 0.5)


def test_rule_of_dtype():
    with pytest.raises(ValueError, match="must be floating point"):
        spike_dropout(torch.zeros(2, 3, dtype=torch.int64), 0.5)
