"""Gradient decouple: the identity forward, a factor backward."""

import math

import pytest
import torch

from snn.ops import gradient_decouple


@pytest.mark.parametrize("scale", [0.1, 0.0, 1.0, 3.0])
def test_hazard_07_scale(scale):
    torch.manual_seed(0)
    x = torch.randn(3, 2, 4, requires_grad=True)
    g = torch.randn(3, 2, 4)
    y = gradient_decouple(x, scale)
    assert torch.equal(y, x)  # bit-equal
    y.backward(g)
    assert torch.equal(x.grad, g * scale)  # at 0: zeros, not None


def test_hazard_04_sum_backward():
    x = torch.randn(3, 2, requires_grad=True)
    gradient_decouple(x, 0.25).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 0.25))


def test_skip_path_keeps_its_gradient():
    x, g = torch.tensor([1.0, -2.0], requires_grad=True), torch.tensor([3.0, 4.0])
    (gradient_decouple(x, 0.5) + x).backward(g)
    assert x.grad.tolist() == [4.5, 6.0] and g.tolist() == [3.0, 4.0]


def test_hazard_06_in_place_op_afterwards():
    leaf = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    h = leaf * 1
    torch.nn.functional.relu(gradient_decouple(h, 0.1), inplace=True).sum().backward()
    assert h.tolist() == [1, -2, 3]
    torch.testing.assert_close(leaf.grad, torch.tensor([0.1, 0, 0.1]))


def test_hazard_06_in_place_op_without_gradients():
    x = torch.tensor([1.0, -2.0])
    with torch.no_grad():
        gradient_decouple(x, 0.1).zero_()
    assert x.tolist() == [1, -2]


def test_hazard_11_a_second_derivative_raises():
    x = torch.randn(4, requires_grad=True)
    (first,) = torch.autograd.grad((gradient_decouple(x, 0.5) ** 2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("scale", [-0.1, math.nan, math.inf])
def test_rule(scale):
    with pytest.raises(ValueError, match=f"scale must be finite and >= 0, got {scale}"):
        gradient_decouple(torch.zeros(2), scale)
