"""The add of two branches: values by hand, gradients shared by what each branch gave."""

import pytest
import torch

from snn.neuron import GradParams, SRMParams
from snn.ops import gradient_by_height, spike_add, spike_avg_pool2d, spike_dropout, srm_conv2d
from snn.ops.spike_add import SpikeAddFunc

NEURON, GRAD = SRMParams(tau_m=5.0, tau_s=3.0, threshold=1.0), GradParams(tau_grad=2.5, grad_scale=0.85)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)


@DTYPES
def test_by_hand(dtype):
    """Both spike, one does, none does, pooled spikes, and a spike kept by dropout beside another."""
    a = torch.tensor([1.0, 1, 0, 0, 0.25, 0, 3], dtype=dtype, requires_grad=True)
    b = torch.tensor([1.0, 0, 1, 0, 0.75, 0.5, 1], dtype=dtype, requires_grad=True)
    total = spike_add(a, b)
    assert total.dtype == dtype and total.tolist() == [2, 1, 1, 0, 1, 0.5, 4]
    total.backward(torch.tensor([8.0, -3, 5, 7, 4, -6, 8], dtype=dtype))
    assert a.grad.dtype == b.grad.dtype == dtype
    assert a.grad.tolist() == [4, -3, 0, 0, 1, 0, 6]
    assert b.grad.tolist() == [4, 0, 5, 0, 3, -6, 2]


def test_the_shares_of_any_values_add_up():
    torch.manual_seed(0)
    a, b = ((torch.rand(5, 2, 3, 4, 6) * (torch.rand(5, 2, 3, 4, 6) < 0.5)).double() for _ in range(2))
    grad_out = torch.randn_like(a)
    leaf_a, leaf_b = a.clone().requires_grad_(), b.clone().requires_grad_()
    spike_add(leaf_a, leaf_b).backward(grad_out)
    torch.testing.assert_close(leaf_a.grad + leaf_b.grad, grad_out * (a + b > 0), rtol=1e-14, atol=0)
    torch.testing.assert_close(leaf_a.grad * b, leaf_b.grad * a, rtol=1e-14, atol=1e-16)


def test_hazard_03_silent_branches_get_exactly_zero():
    a, b = (torch.zeros(3, 2, 4, requires_grad=True) for _ in range(2))
    spike_add(a, b).backward(torch.full((3, 2, 4), torch.inf))
    assert torch.equal(a.grad, torch.zeros(3, 2, 4)) and torch.equal(b.grad, torch.zeros(3, 2, 4))


def test_hazard_04_expanded_gradient_is_not_written():
    a, b = torch.tensor([1.0, 1, 0], requires_grad=True), torch.tensor([1.0, 0, 0], requires_grad=True)
    spike_add(a, b).sum().backward()
    assert a.grad.tolist() == [0.5, 1, 0] and b.grad.tolist() == [0.5, 0, 0]
    grad_out = torch.tensor([3.0]).expand(3)
    spike_add(a, b).backward(grad_out)
    assert grad_out.tolist() == [3, 3, 3] and a.tolist() == [1, 1, 0] and b.tolist() == [1, 0, 0]


def test_one_tensor_as_both_branches():
    a = torch.tensor([1.0, 0], requires_grad=True)
    spike_add(a, a).backward(torch.tensor([6.0, 5.0]))
    assert a.grad.tolist() == [6, 0]


@pytest.mark.parametrize("wanted", ["a", "b"])
def test_hazard_08_gradient_to_one_branch_alone(wanted):
    a = torch.tensor([1.0, 0.25], requires_grad=wanted == "a")
    b = torch.tensor([1.0, 0.75], requires_grad=wanted == "b")
    spike_add(a, b).backward(torch.tensor([8.0, 4.0]))
    got, other = (a, b) if wanted == "a" else (b, a)
    assert got.grad.tolist() == ([4, 1] if wanted == "a" else [4, 3]) and other.grad is None


@pytest.mark.parametrize("rate", [0.05, 0.5], ids=["packed", "kept"])
def test_hazard_09_memory_layouts(rate):
    torch.manual_seed(0)
    a, b = ((torch.rand(4, 2, 8, 9, 10) < rate).float() for _ in range(2))
    other = b.movedim(2, -1).contiguous().movedim(-1, 2)  # channels last
    gradients = []
    for second in (b, other):
        leaves = a.clone().requires_grad_(), second.detach().requires_grad_()
        total = spike_add(*leaves)
        assert torch.equal(total, a + b)
        total.backward(torch.arange(total.numel()).view_as(total).float())
        gradients.append([leaf.grad for leaf in leaves])
        second.grad = None
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_sparse_branches_are_kept_small():
    torch.manual_seed(0)
    a, b = ((torch.rand(40_000) < 0.08).float().requires_grad_() for _ in range(2))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.nbytes) or x, lambda x: x):
        spike_add(a, b)
    assert sum(kept) < 1.1 * 40_000  # a bit and 8 % of 4 bytes, for each of two branches: .9 bytes
    with torch.autograd.graph.saved_tensors_hooks(lambda x: pytest.fail("saved"), lambda x: x):
        spike_add(a.detach(), b.detach())


def test_hazard_11_a_second_derivative_raises():
    a, b = torch.rand(3, requires_grad=True), torch.rand(3)
    (first,) = torch.autograd.grad((spike_add(a, b) ** 2).sum(), a, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 1), r"of a, \[2, 3\] torch.float32 on cpu, got \[2, 1\] torch.f"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), r"got \[2\] torch.float64 on cpu"),
        (torch.zeros(2), torch.zeros(2, device="meta"), r"got \[2\] torch.float32 on meta"),
        (torch.ones(2, dtype=torch.int64), torch.zeros(2), "a must be floating point, got torch.int64"),
    ],
    ids=["no broadcast", "dtype", "device", "integers"],
)
def test_rules(a, b, message):
    with pytest.raises(ValueError, match=message):
        spike_add(a, b)


def test_it_compiles_as_one_graph():
    def run(x, y):
        return spike_add(gradient_by_height(x), y)

    x, y = (torch.tensor(values, requires_grad=True) for values in ([1.0, 1, 0, 0], [1.0, 0, 1, 0]))
    torch.compile(run, fullgraph=True, backend="aot_eager")(x, y).backward(torch.tensor([8.0, 3, 5, 7]))
    assert x.grad.tolist() == [4, 3, 0, 0] and y.grad.tolist() == [4, 0, 5, 0]


# the sum law


def spikes_like(*shape, rate=0.3):
    return (torch.rand(shape) < rate).double()


def positive(*shape, mean):
    return (torch.rand(shape, dtype=torch.float64) + 0.05) * (2 * mean)


def residual_block(x, weights, grad, p):
    """A stride of 2, dropout within, and a convolution of kernel 1 beside."""
    main = srm_conv2d(x, weights[0], NEURON, grad, stride=2, padding=1)
    main = srm_conv2d(spike_dropout(main, p), weights[1], NEURON, grad, padding=1)
    return spike_add(main, srm_conv2d(x, weights[2], NEURON, grad, stride=2))


@pytest.mark.parametrize("p", [0.0, 0.4], ids=["no dropout", "dropout"])
@pytest.mark.parametrize("plain", [False, True], ids=["shared", "plain add"])
def test_sum_law_through_a_residual_block(p, plain, monkeypatch):
    """What the next layer hands back arrives at the input, once; a plain add would hand it out twice."""
    if plain:
        monkeypatch.setattr(SpikeAddFunc, "backward", lambda ctx, grad_out: (grad_out, grad_out))
    torch.manual_seed(0)
    grad = GradParams(tau_grad=2.5, grad_scale=1.0)
    x = spikes_like(9, 2, 3, 9, 7).requires_grad_()
    weights = [
        positive(4, 3, 3, 3, mean=0.2),
        positive(4, 4, 3, 3, mean=0.2),
        positive(4, 3, 1, 1, mean=0.5),
        positive(5, 4, 3, 3, mean=0.05),
    ]
    total = residual_block(x, weights, grad, p)
    assert (total > 1).any() and (total == 0).any()
    spikes = srm_conv2d(total, weights[3], NEURON, grad, padding=1)
    grad_out = torch.rand_like(spikes) + 0.5
    spikes.backward(grad_out)
    assert 20 < spikes.sum() < 0.8 * spikes.numel()
    expected = (grad_out * spikes).sum().item()
    assert (x.grad.sum().item() == pytest.approx(expected, rel=1e-9)) != plain


@pytest.mark.parametrize("by_height", [True, False], ids=["by height", "without"])
def test_a_pool_after_the_add(by_height):
    """A window of 1 + 1, 1 + 0 and two silent places, gradient 3: each of the three spikes is due 1."""
    a, b = torch.tensor([[1.0, 1], [0, 0]]), torch.tensor([[1.0, 0], [0, 0]])
    a, b = (x.view(1, 1, 1, 2, 2).requires_grad_() for x in (a, b))
    total = spike_add(a, b)
    y = spike_avg_pool2d(gradient_by_height(total) if by_height else total, 2)
    assert y.item() == 0.75
    y.backward(torch.tensor(3.0).view_as(y))
    assert a.grad.flatten().tolist() == [1 if by_height else 0.5, 1, 0, 0]
    assert b.grad.flatten().tolist() == [1 if by_height else 0.5, 0, 0, 0]
