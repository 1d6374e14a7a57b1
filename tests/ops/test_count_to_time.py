"""The bridge from counts to times: the identity forward, `-grad * x` backward."""

import pytest
import torch

from snn.ops import count_to_time, gradient_decouple


def test_by_hand():
    x = torch.tensor([1.0, 0.0, 0.25, 1.0], requires_grad=True)
    y = count_to_time(x)
    assert torch.equal(y, x)
    y.backward(torch.tensor([2.0, 5.0, -4.0, -1.0]))
    assert x.grad.tolist() == [-2, 0, 1, 1]


def test_hazard_04_sum_backward():
    x = (torch.rand(5, 2, 3) < 0.5).float().requires_grad_()
    count_to_time(x).sum().backward()
    assert torch.equal(x.grad, -x.detach())


def test_skip_path_keeps_its_gradient():
    x, g = torch.tensor([1.0, 0.5], requires_grad=True), torch.tensor([3.0, 4.0])
    (count_to_time(x) + x).backward(g)
    assert x.grad.tolist() == [0, 2] and g.tolist() == [3, 4]


def test_hazard_06_in_place_op_afterwards():
    leaf = torch.tensor([1.0, 0.5], requires_grad=True)
    h = leaf * 1
    count_to_time(gradient_decouple(h, 0.5)).mul_(2).sum().backward()
    assert h.tolist() == [1, 0.5]
    assert leaf.grad.tolist() == [-1, -0.5]
    with torch.no_grad():
        count_to_time(h).zero_()
    assert h.tolist() == [1, 0.5]


def test_hazard_11_a_second_derivative_raises():
    x = torch.rand(4, requires_grad=True)
    (first,) = torch.autograd.grad((count_to_time(x) ** 2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
