"""Pooling: the mean forward, the window's gradient over the window's sum backward."""

import math

import pytest
import torch

from snn.ops import spike_avg_pool2d

WINDOWS = pytest.mark.parametrize("window", [2, (2, 2), (2, 1), 3], ids=str)


def slow_pool(x, grad_out, window):
    """Window by window, for one step and one channel at a time."""
    k_h, k_w = (window, window) if isinstance(window, int) else window
    height, width = x.shape[3] // k_h, x.shape[4] // k_w
    y, grad_x = torch.zeros(*x.shape[:3], height, width, dtype=x.dtype), torch.zeros_like(x)
    for t, n, c in torch.cartesian_prod(*(torch.arange(size) for size in x.shape[:3])).tolist():
        for i in range(height):
            for j in range(width):
                place = (t, n, c, slice(i * k_h, (i + 1) * k_h), slice(j * k_w, (j + 1) * k_w))
                total = math.fsum(x[place].flatten().tolist())
                y[t, n, c, i, j] = total / (k_h * k_w)
                grad_x[place] = grad_out[t, n, c, i, j] / total if total else 0
    return y, grad_x


@WINDOWS
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 4, 3), (2, 1, 3, 5, 5), (3, 2, 2, 7, 6)], ids=lambda shape: "x".join(map(str, shape))
)
@pytest.mark.parametrize("height", [1.0, 0.25, 2.5], ids=lambda h: f"h{h}")
def test_equals_slow_reference(shape, window, height):
    torch.manual_seed(0)
    x = (torch.rand(shape) < 0.3).double() * height
    x.requires_grad_()
    y = spike_avg_pool2d(x, window)
    grad_out = torch.randn(y.shape, dtype=y.dtype)
    y.backward(grad_out)
    expected_y, expected_grad = slow_pool(x.detach(), grad_out, window)
    torch.testing.assert_close(y.detach(), expected_y, rtol=1e-14, atol=0)
    torch.testing.assert_close(x.grad, expected_grad, rtol=1e-14, atol=0)


@WINDOWS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_hazard_01_windows_without_a_spike(window, dtype):
    x = torch.zeros(3, 2, 2, 6, 6, dtype=dtype, requires_grad=True)
    y = spike_avg_pool2d(x, window)
    y.backward(torch.randn_like(y) * 1e6)
    assert y.dtype == x.grad.dtype == dtype
    assert torch.equal(y, torch.zeros_like(y)) and torch.equal(x.grad, torch.zeros_like(x))


def test_hazard_01_silent_windows_among_others():
    x = torch.zeros(1, 1, 1, 2, 4, requires_grad=True)
    with torch.no_grad():
        x[..., 0, 0] = x[..., 1, 1] = 1
    y = spike_avg_pool2d(x, 2)
    assert y.flatten().tolist() == [0.5, 0]
    y.backward(torch.tensor([3.0, 5.0]).view_as(y))
    assert x.grad.view(2, 4).tolist() == [[1.5, 1.5, 0, 0], [1.5, 1.5, 0, 0]]


def test_hazard_02_border_that_no_window_covers():
    x = torch.ones(1, 1, 1, 5, 5, requires_grad=True)
    spike_avg_pool2d(x, 2).backward(torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(1, 1, 1, 2, 2))
    top, bottom = [0.25, 0.25, 0.5, 0.5, 0], [0.75, 0.75, 1, 1, 0]
    assert x.grad.view(5, 5).tolist() == [top, top, bottom, bottom, [0] * 5]


def test_hazard_02_pool_after_pool():
    """The second window's sum is .25: it hands 4 to its four places, and the one spike takes 4 / 1."""
    x = torch.zeros(1, 1, 1, 4, 4)
    x[..., 2, 1] = 1
    x.requires_grad_()
    y = spike_avg_pool2d(spike_avg_pool2d(x, 2), 2)
    assert y.item() == 1 / 16
    y.sum().backward()
    assert x.grad.view(4, 4).tolist() == [[0] * 4, [0] * 4, [4, 4, 0, 0], [4, 4, 0, 0]]


def test_hazard_04_sum_backward():
    x = (torch.rand(3, 2, 2, 6, 5) < 0.4).float().requires_grad_()
    spike_avg_pool2d(x, 2).sum().backward()
    windows = torch.nn.functional.avg_pool2d(x.detach().flatten(0, 1), 2) > 0
    assert (x.grad * x).sum().item() == pytest.approx(windows.sum().item(), rel=1e-6)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "channels last", "expanded gradient"])
def test_hazard_09_memory_layouts(layout):
    torch.manual_seed(9)
    x = (torch.rand(4, 2, 3, 5, 6) < 0.4).double()
    if layout == "transposed":
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "expanded":
        x = x[:1].expand(4, -1, -1, -1, -1)
    elif layout == "channels last":
        x = x.movedim(2, -1).contiguous().movedim(-1, 2)
    leaf, plain = x.requires_grad_(), x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    grad_out = torch.randn(4, 2, 3, 2, 3, dtype=torch.float64)
    if layout == "expanded gradient":
        grad_out = grad_out[..., :1].expand(-1, -1, -1, -1, 3)
    before, x_before = grad_out.clone(), x.detach().clone()
    y = spike_avg_pool2d(leaf, 2)
    y.backward(grad_out)
    y_plain = spike_avg_pool2d(plain, 2)
    y_plain.backward(grad_out.contiguous())
    torch.testing.assert_close(y, y_plain, rtol=1e-15, atol=0)
    torch.testing.assert_close(leaf.grad, plain.grad, rtol=1e-15, atol=0)
    assert torch.equal(grad_out, before) and torch.equal(x.detach(), x_before)


def test_hazard_11_a_second_derivative_raises():
    x = torch.rand(2, 1, 1, 4, 4, requires_grad=True)
    (first,) = torch.autograd.grad((spike_avg_pool2d(x, 2) ** 2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize(
    ("shape", "window", "message"),
    [
        ((2, 3, 4, 4), 2, r"\[T, N, C, H, W\] with C >= 1, got torch.float32 \[2, 3, 4, 4\]"),
        ((2, 3, 0, 4, 4), 2, r"\[T, N, C, H, W\] with C >= 1, got torch.float32 \[2, 3, 0, 4, 4\]"),
        ((1, 2, 3, 4, 4), 0, "kernel_size must be one or two integers of at least 1, got 0"),
        ((1, 2, 3, 4, 4), (2, -1), r"kernel_size must be one or two integers of at least 1, got \(2, -1\)"),
        ((1, 2, 3, 4, 3), 4, "kernel_size must fit the map, got 4 for a map of 4x3"),
        ((1, 2, 3, 4, 3), (5, 1), r"kernel_size must fit the map, got \(5, 1\) for a map of 4x3"),
    ],
    ids=["4-D", "no channel", "zero", "negative", "too wide", "too high"],
)
def test_rules(shape, window, message):
    with pytest.raises(ValueError, match=message):
        spike_avg_pool2d(torch.zeros(shape), window)


def test_integers_are_refused():
    with pytest.raises(ValueError, match="floating point .* got torch.int64"):
        spike_avg_pool2d(torch.zeros(1, 1, 1, 2, 2, dtype=torch.int64), 2)
