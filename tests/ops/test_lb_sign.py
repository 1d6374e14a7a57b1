"""LBSign: the sign forward, the clamped gradient backward."""

import math

import pytest
import torch

from snn.ops import lb_sign


def test_forward():
    assert lb_sign(torch.tensor([0.3, -2.0, 0.0, -0.0, 1e-30])).tolist() == [1, -1, 0, 0, 1]


def test_hazard_05_lb_sign_beside_a_skip_path():
    x, g = torch.tensor([0.3, -2.0], requires_grad=True), torch.tensor([5.0, 5.0])
    (lb_sign(x) + x).backward(g)
    assert x.grad.tolist() == [6, 6] and g.tolist() == [5, 5]


def test_hazard_05_the_value_of_the_gradient_is_clamped():
    """|x| plays no part: neither a small nor a large x is masked."""
    x = torch.tensor([10.0, 10.0, -0.001, 0.0, 7.0], requires_grad=True)
    lb_sign(x).backward(torch.tensor([-0.3, -3.0, 0.5, 2.0, 1.0]))
    torch.testing.assert_close(x.grad, torch.tensor([-0.3, -1.0, 0.5, 1.0, 1.0]))


def test_clip():
    x = torch.zeros(3, requires_grad=True)
    lb_sign(x, 0.25).backward(torch.tensor([-1.0, 0.2, 9.0]))
    torch.testing.assert_close(x.grad, torch.tensor([-0.25, 0.2, 0.25]))


def test_hazard_04_sum_backward():
    x = torch.randn(3, 2, requires_grad=True)
    lb_sign(x, 0.5).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 0.5))


def test_input_is_unchanged():
    x = torch.tensor([0.3, -2.0])
    lb_sign(x).zero_()
    assert torch.equal(x, torch.tensor([0.3, -2.0]))


def test_hazard_11_a_second_derivative_raises():
    x = torch.randn(4, requires_grad=True)
    (first,) = torch.autograd.grad((lb_sign(x) ** 2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("clip", [0.0, -1.0, math.nan, math.inf])
def test_rule(clip):
    with pytest.raises(ValueError, match=f"clip must be finite and > 0, got {clip}"):
        lb_sign(torch.zeros(2), clip)
