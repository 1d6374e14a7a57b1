"""Identity forward, the gradient times the height backward."""

import pytest
import torch

from snn.ops import gradient_by_height


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_by_hand(dtype):
    x = torch.tensor([0.0, 1, 2, 0.5], dtype=dtype, requires_grad=True)
    y = gradient_by_height(x)
    y.backward(torch.tensor([7.0, 3, 3, -4], dtype=dtype))
    assert torch.equal(y, x) and y.dtype == x.grad.dtype == dtype
    assert x.grad.tolist() == [0, 3, 6, -2]


def test_hazard_04_expanded_gradient_is_not_written():
    x = torch.tensor([0.0, 2], requires_grad=True)
    grad_out = torch.tensor([3.0]).expand(2)
    gradient_by_height(x).backward(grad_out)
    assert x.grad.tolist() == [0, 6] and grad_out.tolist() == [3, 3]


def test_hazard_06_the_output_is_a_copy():
    x = torch.tensor([-1.0, 2], requires_grad=True)
    torch.relu_(gradient_by_height(x)).sum().backward()
    assert x.tolist() == [-1, 2] and x.grad.tolist() == [0, 2]
    with torch.no_grad():
        gradient_by_height(x).zero_()
    assert x.tolist() == [-1, 2]


def test_hazard_11_a_second_derivative_raises():
    x = torch.rand(3, requires_grad=True)
    (first,) = torch.autograd.grad((gradient_by_height(x) ** 2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_integers_are_refused():
    with pytest.raises(ValueError, match="x must be floating point, got torch.int64"):
        gradient_by_height(torch.ones(2, dtype=torch.int64))
