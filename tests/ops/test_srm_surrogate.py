"""The surrogate twin: the time-based layer's spikes, and what backpropagation makes of them."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import Function

from snn.neuron import ATan, GradParams, Rectangle, Sigmoid, SRMParams, spike_response_kernel
from snn.ops import spike_avg_pool2d, spike_dropout, spike_heights, srm_conv2d, srm_linear
from snn.ops.srm import potential_cpu, reference

NEURON, TIME = SRMParams(tau_m=4.0, tau_s=2.0), GradParams(tau_grad=2.0, grad_scale=0.5)
SURROGATES = [ATan(1.0), Sigmoid(0.3), Rectangle(2.0)]


class Spike(Function):
    """A step with a surrogate derivative, for autograd to do the rest."""

    @staticmethod
    def forward(ctx, u, threshold, grad):
        ctx.save_for_backward(grad.slope(u / threshold - 1) / threshold)
        return (u >= threshold).to(u.dtype)

    @staticmethod
    def backward(ctx, grad_out):
        return grad_out * ctx.saved_tensors[0], None, None


def through_autograd(current, threshold, grad):
    """The neuron as the formulas read; a reset is a constant."""
    m = s = torch.zeros_like(current[0])
    spikes = []
    for incoming in current:
        m, s = (m + incoming) * NEURON.decay_m, (s + incoming) * NEURON.decay_s
        spike = Spike.apply(NEURON.coef * (m - s), threshold, grad)
        m, s = m * (1 - spike.detach()), s * (1 - spike.detach())
        spikes.append(spike)
    return torch.stack(spikes)


def batch(T=7, N=3, C=2, H=5, W=4, dtype=torch.float64):
    torch.manual_seed(0)
    x = (torch.rand(T, N, C, H, W) < 0.4).to(dtype)
    weight = (torch.randn(4, C, 3, 3) * 0.5 + 0.3).to(dtype)
    return x, weight, torch.tensor([0.7, 1.0, 1.5, 2.0], dtype=dtype)


@pytest.mark.parametrize("grad", SURROGATES, ids=lambda grad: type(grad).__name__)
def test_gradients_equal_those_of_autograd(grad):
    x, weight, threshold = batch()
    x.requires_grad_(), weight.requires_grad_()
    spikes = srm_conv2d(x, weight, NEURON, grad, threshold=threshold, padding=1, stride=2)
    current = F.conv2d(x.flatten(0, 1), weight, padding=1, stride=2).unflatten(0, x.shape[:2])
    expected = through_autograd(current, threshold[:, None, None], grad)
    assert torch.equal(spikes, expected) and 0.02 < spikes.mean() < 0.5
    upstream = torch.randn_like(spikes)
    got = torch.autograd.grad(spikes, [x, weight], upstream)
    wanted = torch.autograd.grad(expected, [x, weight], upstream)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("grad", SURROGATES, ids=lambda grad: type(grad).__name__)
def test_a_linear_layer_too(grad):
    x, _, _ = batch()
    x = x.flatten(2).requires_grad_()
    weight = (torch.randn(6, x.shape[2], dtype=x.dtype) * 0.3).requires_grad_()
    spikes = srm_linear(x, weight, NEURON, grad)
    expected = through_autograd(x @ weight.T, torch.ones(6, dtype=x.dtype), grad)
    assert torch.equal(spikes, expected) and spikes.any()
    upstream = torch.randn_like(spikes)
    got = torch.autograd.grad(spikes, [x, weight], upstream)
    wanted = torch.autograd.grad(expected, [x, weight], upstream)
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("pool", [1, 2])
@pytest.mark.parametrize("shown", [False, True], ids=["changing", "same-image"])
def test_spikes_equal_those_of_the_time_based_layer(dtype, pool, shown):
    x, weight, threshold = batch(T=12, N=5, C=3, H=8, W=8, dtype=dtype)
    if shown:
        x = torch.randn_like(x[:1]).expand(x.shape)
    twins = [
        srm_conv2d(x, weight.requires_grad_(), NEURON, grad, threshold=threshold, padding=1, pool=pool)
        for grad in (TIME, SURROGATES[0])
    ]
    assert torch.equal(*twins) and twins[0].any()


def test_an_image_that_stays_is_summed_over_the_steps():
    _, weight, threshold = batch()
    image = torch.randn(1, 3, 2, 5, 4, dtype=torch.float64)
    gradients = []
    for x in (image.expand(6, -1, -1, -1, -1), image.repeat(6, 1, 1, 1, 1)):
        weight = weight.detach().requires_grad_()
        srm_conv2d(x, weight, NEURON, SURROGATES[0], threshold=threshold).cumsum(0).sum().backward()
        gradients.append(weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_each_step_of_an_image_that_stays_gets_its_own_gradient():
    torch.manual_seed(0)
    image, weight = torch.randn(1, 3, 4, dtype=torch.float64), torch.rand(5, 4, dtype=torch.float64)
    gradients = []
    for x in (image.expand(6, -1, -1), image.repeat(6, 1, 1)):
        x.requires_grad_()
        gradients += torch.autograd.grad(srm_linear(x, weight, NEURON, SURROGATES[0]).sum(), x)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_by_hand():
    """One input of weight 3 at step 0: u = 1.5 fires at once; the input at step 1 alone reaches step 1."""
    x = torch.tensor([1.0, 0.5], dtype=torch.float64).view(2, 1, 1).requires_grad_()
    weight = torch.tensor([[3.0]], dtype=torch.float64, requires_grad=True)
    grad = Rectangle(4.0)
    spikes = srm_linear(x, weight, NEURON, grad)
    eps = spike_response_kernel(NEURON, 2)  # 1/2, 5/8
    assert spikes.flatten().tolist() == [1, 0] and eps.tolist() == [0.5, 0.625]
    spikes.backward(torch.tensor([2.0, 8.0], dtype=torch.float64).view(2, 1, 1))
    # g = grad_out / width = .5, 2; each times eps(1) and, to the weight, its input; to the input, the weight
    assert weight.grad.item() == 0.5 * 0.5 * 1 + 2 * 0.5 * 0.5
    assert x.grad.flatten().tolist() == [0.5 * 0.5 * 3, 2 * 0.5 * 3]


@pytest.mark.parametrize("grad", [type(grad)(w) for grad in SURROGATES for w in (0.5, 3.0)], ids=repr)
def test_slopes_enclose_the_area_1_and_peak_at_the_threshold(grad):
    v = torch.linspace(-2000, 2000, 4_000_001, dtype=torch.float64)
    slope = grad.slope(v)
    assert torch.trapezoid(slope, v).item() == pytest.approx(1, rel=2e-3)
    assert slope.max() == grad.slope(torch.zeros((), dtype=torch.float64))


def test_slopes_by_hand():
    v = torch.tensor([0.0, 0.5, -1.0], dtype=torch.float64)
    assert ATan(2.0).slope(v)[1].item() == pytest.approx(1 / (2 * (1 + (math.pi / 4) ** 2)))
    assert Sigmoid(0.5).slope(v)[2].item() == pytest.approx(2 * math.exp(2) / (1 + math.exp(2)) ** 2)
    assert Rectangle(2.0).slope(v).tolist() == [0.5, 0.5, 0]


@pytest.mark.parametrize("width", [0.0, -1.0, math.nan, math.inf])
def test_a_bad_width_is_named(width):
    with pytest.raises(ValueError, match="surrogate.width"):
        ATan(width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 1), (9, 2, 3, 7, 5), (4, 1, 50, 8, 8), (3, 0, 2, 2, 2)], ids=str
)
def test_the_kernels_equal_the_reference(dtype, shape):
    torch.manual_seed(1)
    current, threshold = torch.randn(shape, dtype=dtype) + 0.5, torch.rand(shape[2], dtype=dtype) + 0.5
    taus = [NEURON.tau_m, NEURON.tau_s]
    got = potential_cpu.potential_forward(current, threshold, shape[0], taus)
    wanted = reference.potential_forward(current, threshold[:, None, None], NEURON)
    assert all(map(torch.equal, got, wanted))
    grad_u = torch.randn_like(current)
    got = potential_cpu.potential_backward(grad_u, got[0], taus)
    assert torch.equal(got, reference.potential_backward(grad_u, wanted[0], NEURON))


def test_the_ops_pass_opcheck():
    current, threshold = torch.randn(4, 2, 3, 2, 2), torch.ones(3)
    torch.library.opcheck(torch.ops.snn.potential_forward, (current, threshold, 4, [4.0, 2.0]))
    torch.library.opcheck(torch.ops.snn.potential_backward, (current, (current > 0).float(), [4.0, 2.0]))


def test_pool_and_dropout_pass_their_derivative_and_counts_stay_counts():
    x = torch.tensor([1.0, 0, 1, 1]).view(1, 1, 1, 2, 2).requires_grad_()
    spike_avg_pool2d(x, 2, ATan(1.0)).sum().backward()
    assert x.grad.flatten().tolist() == [0.25] * 4
    torch.manual_seed(3)
    time = spike_dropout(torch.ones(2, 1, 64), 0.5)
    torch.manual_seed(3)
    ones = torch.ones(2, 1, 64, requires_grad=True)
    twin = spike_dropout(ones, 0.5, ATan(1.0))
    twin.sum().backward()
    assert torch.equal(time, twin) and torch.equal(ones.grad, twin)
    assert spike_heights(ones, ATan(1.0)) is ones and spike_heights(ones, TIME) is not ones


def test_nothing_is_written_to_and_expanded_gradients_pass():
    x, weight, threshold = batch()
    weight.requires_grad_()
    upstream = torch.ones((), dtype=x.dtype).expand(7, 3, 4, 3, 2)
    before = x.clone()
    srm_conv2d(x, weight, NEURON, SURROGATES[0], threshold=threshold).backward(upstream)
    assert torch.equal(x, before) and upstream.sum() == upstream.numel() and weight.grad.isfinite().all()


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_bad_threshold_is_named(bad):
    with pytest.raises(ValueError, match="threshold must be finite and > 0"):
        srm_linear(
            torch.ones(2, 1, 3), torch.ones(2, 3), NEURON, SURROGATES[0], threshold=torch.tensor([1.0, bad])
        )


@pytest.mark.slow
def test_a_twin_compiles_as_one_graph():
    x, weight, threshold = batch(dtype=torch.float32)

    def layer(x, weight):
        return srm_conv2d(x, weight, NEURON, SURROGATES[0], threshold=threshold, padding=1)

    gradients = []
    for function in (layer, torch.compile(layer, fullgraph=True, dynamic=False)):
        weight = weight.detach().requires_grad_()
        spikes = function(x, weight)
        spikes.sum().backward()
        gradients.append((spikes.detach(), weight.grad))
    assert torch.equal(gradients[0][0], gradients[1][0])
    torch.testing.assert_close(gradients[0][1], gradients[1][1])
