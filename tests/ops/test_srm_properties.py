"""What must hold for the SRM ops whatever the numbers: time, batch, memory layout, edges, autograd."""

import pytest
import torch
from torch.nn import functional as F

from snn.neuron import ATan, GradParams, SRMParams
from snn.ops import srm_conv2d, srm_linear

NEURON = SRMParams(tau_m=5.0, tau_s=3.0, threshold=1.0)
GRAD = GradParams(tau_grad=2.5, grad_scale=0.85)
CONV_SHAPES = ((2, 3, 7, 5), (4, 3, 3, 3))  # one step of input, weight
LINEAR_SHAPES = ((2, 6), (4, 6))
BOTH = pytest.mark.parametrize("op", ["conv", "linear"])


def apply(op, x, weight, neuron=NEURON, grad=GRAD, **kwargs):
    return (
        srm_conv2d(x, weight, neuron, grad, padding=1, **kwargs)
        if op == "conv"
        else srm_linear(x, weight, neuron, grad, **kwargs)
    )


def draw(op, steps=8, dtype=torch.float64, seed=0):
    """0/1 input of some 40 % and weights of both signs; both want gradients."""
    torch.manual_seed(seed)
    step_shape, weight_shape = CONV_SHAPES if op == "conv" else LINEAR_SHAPES
    x = (torch.rand(steps, *step_shape) < 0.4).to(dtype)
    weight = (torch.randn(weight_shape) * 0.5 + (0.15 if op == "conv" else 0.5)).to(dtype)
    return x.requires_grad_(), weight.requires_grad_()


def run(op, x, weight, grad_out=None, **kwargs):
    """Spikes and both gradients, on leaves of their own."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    spikes = apply(op, x, weight, **kwargs)
    spikes.backward(upstream(spikes) if grad_out is None else grad_out)
    return spikes.detach(), x.grad, weight.grad


def upstream(spikes, seed=9):
    return torch.randn(spikes.shape, generator=torch.Generator().manual_seed(seed), dtype=spikes.dtype)


@BOTH
def test_the_draws_fire_sometimes(op):
    spikes = apply(op, *draw(op))
    assert 0.03 < spikes.mean() < 0.5
    assert set(spikes.unique().tolist()) == {0, 1}


# time


@BOTH
@pytest.mark.parametrize("changed", [0, 3, 7], ids=lambda t: f"t{t}")
def test_causality(op, changed):
    x, weight = draw(op)
    later = x.detach().clone()
    later[changed:] = 1 - later[changed:]
    before, after = apply(op, x, weight), apply(op, later, weight)
    assert torch.equal(before[:changed], after[:changed])
    assert not torch.equal(before[changed:], after[changed:])


@BOTH
def test_credit_goes_to_the_next_spike_alone(op):
    """dL/dt of a spike reaches the inputs since the spike before, of its own sample, and none after it."""
    x, weight = draw(op)
    x = torch.ones_like(x)
    spikes = apply(op, x, weight)
    t, *place = spikes[3:6, 1].nonzero()[0].tolist()
    t += 3
    grad_out = torch.zeros_like(spikes)
    grad_out[(t, 1, *place)] = 1
    spikes, grad_x, _ = run(op, x, weight, grad_out)
    fired = spikes[(slice(t), 1, *place)]
    since = int(fired.nonzero()[-1]) + 1 if fired.any() else 0
    reached = grad_x.flatten(2).abs().sum(dim=2)
    assert (reached[since : t + 1, 1] > 0).all()
    assert reached[since : t + 1, 1].sum() == reached.sum()


@BOTH
def test_grad_out_is_read_at_spikes_alone(op):
    x, weight = draw(op)
    spikes = apply(op, x, weight)
    grad_out = upstream(spikes)
    poisoned = grad_out.masked_fill(spikes == 0, float("nan"))
    for clean, poisonous in zip(run(op, x, weight, grad_out), run(op, x, weight, poisoned), strict=True):
        assert torch.equal(clean, poisonous)


@BOTH
def test_backward_is_linear_in_grad_out(op):
    x, weight = draw(op)
    g = upstream(apply(op, x, weight))
    _, grad_x, grad_weight = run(op, x, weight, g)
    _, twice_x, twice_weight = run(op, x, weight, -2 * g)
    assert torch.equal(twice_x, -2 * grad_x) and torch.equal(twice_weight, -2 * grad_weight)


# batch and axes


@BOTH
def test_batch_invariance(op):
    x, weight = draw(op)
    spikes, grad_x, grad_weight = run(op, x, weight)
    alone = [run(op, x[:, n : n + 1], weight, upstream(spikes)[:, n : n + 1]) for n in range(2)]
    assert torch.equal(torch.cat([a[0] for a in alone], dim=1), spikes)
    torch.testing.assert_close(torch.cat([a[1] for a in alone], dim=1), grad_x, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(alone[0][2] + alone[1][2], grad_weight, rtol=1e-12, atol=1e-13)


@BOTH
def test_hazard_14_axis_mix_ups(op):
    torch.manual_seed(14)
    x = (torch.rand(4, 4, 4, 4, 4) < 0.5).double() if op == "conv" else (torch.rand(4, 4, 4) < 0.5).double()
    weight = (
        torch.randn(4, 4, 3, 3, dtype=torch.float64)
        if op == "conv"
        else torch.randn(4, 4, dtype=torch.float64)
    )
    weight += 0.6
    spikes = apply(op, x, weight)
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(apply(op, x[:, order], weight), spikes[:, order])
    assert not torch.equal(spikes[:, order], spikes)

    third_step = x.clone()
    third_step[2] = 1 - third_step[2]
    changed = apply(op, third_step, weight) != spikes
    assert not changed[:2].any() and changed[2:].any()

    sample_2 = x.clone()
    sample_2[:, 2] = 1 - sample_2[:, 2]
    changed = apply(op, sample_2, weight) != spikes
    assert changed[:, 2].any() and not changed[:, [0, 1, 3]].any()

    threshold = torch.tensor([1.0, 1.0, 50.0, 1.0], dtype=torch.float64)
    masked = apply(op, x, weight, threshold=threshold)
    assert not masked[:, :, 2].any() and torch.equal(masked[:, :, [0, 1, 3]], spikes[:, :, [0, 1, 3]])


def test_linear_is_a_1x1_convolution_on_one_pixel():
    x, weight = draw("linear")
    spikes, grad_x, grad_weight = run("linear", x, weight)
    x, weight = (a.detach()[..., None, None].requires_grad_() for a in (x, weight))
    twin = srm_conv2d(x, weight, NEURON, GRAD)
    twin.backward(upstream(spikes)[..., None, None])
    assert torch.equal(twin[..., 0, 0], spikes)
    torch.testing.assert_close(x.grad[..., 0, 0], grad_x, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(weight.grad[..., 0, 0], grad_weight, rtol=1e-12, atol=1e-14)


def test_pairs_are_height_then_width():
    x, weight = draw("conv")
    conv = {"stride": (2, 1), "padding": (0, 2), "dilation": (1, 2)}
    spikes = srm_conv2d(x, weight, NEURON, GRAD, **conv)
    assert spikes.shape == (8, 2, 4, *F.conv2d(x[0], weight, **conv).shape[2:]) == (8, 2, 4, 3, 5)
    turned = srm_conv2d(
        x.transpose(3, 4),
        weight.transpose(2, 3),
        NEURON,
        GRAD,
        stride=(1, 2),
        padding=(2, 0),
        dilation=(2, 1),
    )
    assert torch.equal(turned.transpose(3, 4), spikes)


@pytest.mark.parametrize("grad", [GRAD, ATan(1.0)], ids=lambda grad: type(grad).__name__)
def test_a_weight_in_odd_memory(grad):
    """Channels last but for the stride of its height, 1: oneDNN's grouped convolution reads it wrongly."""
    torch.manual_seed(0)
    x, weight = (torch.rand(5, 2, 4, 3, 3) < 0.5).float(), torch.randn(2, 2, 1, 2) + 0.5
    odd = weight.movedim(3, 1).contiguous().movedim(1, 3)
    assert odd.stride() == (4, 1, 1, 2) and torch.equal(odd, weight)
    results = []
    for kernels in (weight, odd):
        kernels.requires_grad_()
        spikes = srm_conv2d(x, kernels, NEURON, grad, groups=2)
        results.append((spikes.detach(), *torch.autograd.grad(spikes.sum(), kernels)))
    assert torch.equal(results[0][0], results[1][0]) and results[0][0].any()
    torch.testing.assert_close(results[0][1], results[1][1])


@pytest.mark.parametrize("grad", [GRAD, ATan(1.0)], ids=lambda grad: type(grad).__name__)
def test_one_channel_that_becomes_one_column(grad):
    """oneDNN reads beyond such images, with a stride above 1, if they lie channels last."""
    torch.manual_seed(0)
    x, weight = torch.rand(3, 2, 1, 6, 2) * 2, torch.randn(4, 1, 3, 3)
    single = srm_conv2d(x, weight, NEURON, grad, stride=(1, 2), padding=(0, 1))
    double = srm_conv2d(x.double(), weight.double(), NEURON, grad, stride=(1, 2), padding=(0, 1))
    assert single.shape == (3, 2, 4, 4, 1) and single.any() and torch.equal(single.double(), double)


# silent neurons


@BOTH
@pytest.mark.parametrize("steps", [1, 2, 3, 100], ids=lambda t: f"T{t}")
def test_hazard_03_silent_neurons(op, steps):
    x, weight = draw(op, steps)
    spikes, grad_x, grad_weight = run(op, x, weight, neuron=SRMParams(5.0, 3.0, 1000.0))
    for tensor in (spikes, grad_x, grad_weight):
        assert torch.equal(tensor, torch.zeros_like(tensor))


@BOTH
def test_hazard_03_silent_neurons_among_firing_ones(op):
    x, weight = draw(op)
    threshold = torch.tensor([1.0, 1000.0, 1.0, 1000.0], dtype=torch.float64)
    spikes, grad_x, grad_weight = run(op, x, weight, threshold=threshold)
    assert spikes[:, :, [0, 2]].any() and not spikes[:, :, [1, 3]].any()
    assert (
        torch.equal(grad_weight[[1, 3]], torch.zeros_like(grad_weight[[1, 3]]))
        and (grad_weight[[0, 2]] != 0).any()
    )
    _, firing_alone, _ = run(
        op, x, weight[[0, 2]], upstream(spikes)[:, :, [0, 2]], threshold=threshold[[0, 2]]
    )
    torch.testing.assert_close(grad_x, firing_alone, rtol=1e-12, atol=1e-14)


# autograd manners


@BOTH
def test_hazard_04_sum_backward(op):
    """The gradient of a sum is one expanded number; writing into it would fail or change the others."""
    x, weight = draw(op)
    apply(op, x, weight).sum().backward()
    _, grad_x, grad_weight = run(op, x, weight, torch.ones_like(apply(op, x, weight)))
    assert torch.equal(x.grad, grad_x) and torch.equal(weight.grad, grad_weight)
    assert (grad_x != 0).any() and (grad_weight != 0).any()


@BOTH
def test_nothing_given_is_modified(op):
    x, weight = draw(op)
    threshold = torch.full((4,), 0.9, dtype=torch.float64)
    before = [tensor.detach().clone() for tensor in (x, weight, threshold)]
    spikes = apply(op, x, weight, threshold=threshold)
    grad_out = upstream(spikes) * 100
    grad_before = grad_out.clone()
    spikes.backward(grad_out)
    assert torch.equal(grad_out, grad_before)
    for tensor, old in zip((x, weight, threshold), before, strict=True):
        assert torch.equal(tensor.detach(), old)


@BOTH
def test_a_skip_path_beside_the_op_gets_its_own_gradient(op):
    torch.manual_seed(1)
    shape = (6, 2, 4, 5, 5) if op == "conv" else (6, 2, 6)
    x = (torch.rand(shape) < 0.4).double().requires_grad_()
    weight = torch.rand((4, 4, 3, 3) if op == "conv" else (6, 6), dtype=torch.float64)
    spikes = apply(op, x, weight)
    g = upstream(spikes)
    (spikes + x).backward(g)
    torch.testing.assert_close(x.grad, g + run(op, x, weight, g)[1], rtol=1e-12, atol=1e-14)


@BOTH
@pytest.mark.parametrize("frozen", ["x", "weight", "both"])
def test_hazard_08_frozen_weight_and_plain_input(op, frozen):
    x, weight = draw(op)
    _, grad_x, grad_weight = run(op, x, weight)
    x.requires_grad_(frozen == "weight")
    weight.requires_grad_(frozen == "x")
    spikes = apply(op, x, weight)
    assert spikes.requires_grad == (frozen != "both")
    if frozen == "both":
        return
    spikes.backward(upstream(spikes))
    assert (x.grad is None) == (frozen == "x") and (weight.grad is None) == (frozen == "weight")
    assert torch.equal(x.grad, grad_x) if frozen == "weight" else torch.equal(weight.grad, grad_weight)


@pytest.mark.parametrize(
    "conv",
    [
        {"stride": 2},
        {"stride": 3, "padding": 2},
        {"padding": 3},
        {"dilation": 2, "padding": 1},
        {"groups": 2},
        {"stride": (1, 2), "padding": (2, 0), "dilation": (2, 1), "groups": 4},
    ],
    ids=lambda conv: "-".join(f"{k}{v}" for k, v in conv.items()).replace(" ", ""),
)
def test_hazard_08_gradient_shapes(conv):
    torch.manual_seed(8)
    x = (torch.rand(3, 2, 4, 9, 7) < 0.5).float().requires_grad_()
    weight = torch.rand(8, 4 // conv.get("groups", 1), 3, 3, requires_grad=True)
    spikes = srm_conv2d(x, weight, NEURON, GRAD, **conv)
    assert spikes.shape[2:] == F.conv2d(x[0], weight, **conv).shape[1:]
    spikes.sum().backward()
    assert x.grad.shape == x.shape and weight.grad.shape == weight.shape
    assert (x.grad != 0).any() and (weight.grad != 0).any()


@BOTH
@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded over time", "channels last"])
def test_hazard_09_memory_layouts(op, layout):
    x, weight = (tensor.detach() for tensor in draw(op))
    if layout == "transposed":  # batch-major memory
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "strided":  # every second entry of a larger map
        x = torch.stack([x, torch.full_like(x, 7.0)], dim=-1)[..., 0]
    elif layout == "expanded over time":
        x = x[:1].expand(8, *x.shape[1:])
    else:
        x = x.movedim(2, -1).contiguous().movedim(-1, 2)
        weight = (
            weight.contiguous(memory_format=torch.channels_last) if op == "conv" else weight.T.contiguous().T
        )
    assert not x.is_contiguous() or op == "linear"
    spikes, grad_x, grad_weight = run(op, x, weight)
    plain = run(op, x.contiguous(), weight.contiguous())
    assert torch.equal(spikes, plain[0]) and spikes.any()
    torch.testing.assert_close(grad_x, plain[1], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(grad_weight, plain[2], rtol=1e-12, atol=1e-14)


@BOTH
def test_hazard_09_expanded_gradient(op):
    x, weight = draw(op)
    shape = apply(op, x, weight).shape
    row = torch.linspace(-1, 2, shape[-1], dtype=torch.float64)
    _, grad_x, grad_weight = run(op, x, weight, row.expand(shape))
    plain = run(op, x, weight, row.expand(shape).contiguous())
    assert torch.equal(grad_x, plain[1]) and torch.equal(grad_weight, plain[2])


@BOTH
def test_hazard_10_batch_of_one_sample_and_one_step(op):
    x, weight = draw(op)
    spikes, grad_x, _ = run(op, x[:1, :1], weight * 4)
    assert spikes.shape[:2] == grad_x.shape[:2] == (1, 1) and spikes.any() and (grad_x != 0).any()


@BOTH
def test_hazard_11_a_second_derivative_raises(op):
    x, weight = draw(op)
    for height in (lambda spikes: spikes.sum(), lambda spikes: (spikes**2).sum()):
        for leaf in (x, weight):
            (first,) = torch.autograd.grad(height(apply(op, x, weight)), leaf, create_graph=True)
            with pytest.raises(RuntimeError, match="once_differentiable|does not require grad"):
                first.sum().backward()


@BOTH
@pytest.mark.parametrize("backward", ["outside", "inside"])
def test_hazard_12_autocast(op, backward):
    x, weight = draw(op, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        spikes = apply(op, x, weight)
        assert spikes.dtype == torch.float32 and spikes.any()
        if backward == "inside":
            spikes.sum().backward()
    if backward == "outside":
        spikes.sum().backward()
    for leaf in (x, weight):
        assert leaf.grad.dtype == torch.float32 and leaf.grad.isfinite().all() and (leaf.grad != 0).any()


@BOTH
def test_autocast_around_the_backward_alone_changes_nothing(op):
    x, weight = draw(op, dtype=torch.float32)
    spikes = apply(op, x, weight)
    plain = torch.autograd.grad(spikes, [x, weight], upstream(spikes), retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        inside = torch.autograd.grad(spikes, [x, weight], upstream(spikes))
    assert all(map(torch.equal, plain, inside))


@BOTH
def test_nothing_is_saved_without_gradients(op):
    x, weight = draw(op)
    saved = []
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
        assert apply(op, x, weight).grad_fn is None
    assert not saved


# constants: each acts where it should, and nowhere else


@BOTH
@pytest.mark.parametrize(
    ("constant", "value"), [("tau_m", 9.0), ("tau_s", 2.0), ("threshold", 1.4)], ids=lambda v: str(v)
)
def test_neuron_constants_change_the_spikes(op, constant, value):
    x, weight = draw(op)
    other = SRMParams(**{"tau_m": 5.0, "tau_s": 3.0, "threshold": 1.0, constant: value})
    assert not torch.equal(apply(op, x, weight), apply(op, x, weight, neuron=other))


@BOTH
@pytest.mark.parametrize(
    ("constant", "value", "path"),
    [("tau_grad", 4.0, "x"), ("grad_scale", 0.3, "x"), ("cap_time", 0.5, "x"), ("cap_weight", 0.5, "weight")],
    ids=lambda v: str(v),
)
def test_gradient_constants_change_their_path_and_no_spike(op, constant, value, path):
    x, weight = draw(op)
    other = GradParams(**{"tau_grad": 2.5, "grad_scale": 0.85, constant: value})
    spikes, grad_x, grad_weight = run(op, x, weight)
    other_spikes, other_x, other_weight = run(op, x, weight, grad=other)
    assert torch.equal(spikes, other_spikes)
    assert torch.equal(grad_x, other_x) == (path != "x")
    assert torch.equal(grad_weight, other_weight) == (path != "weight")


@BOTH
def test_threshold_argument_overrides_the_neuron(op):
    x, weight = draw(op)
    threshold = torch.full((4,), 1.4, dtype=torch.float64)
    high = SRMParams(5.0, 3.0, 1.4)
    assert torch.equal(apply(op, x, weight, threshold=threshold), apply(op, x, weight, neuron=high))
    assert torch.equal(
        apply(op, x, weight, neuron=SRMParams(5.0, 3.0, 77.0), threshold=threshold),
        apply(op, x, weight, neuron=high),
    )


def test_grad_scale_acts_once_per_layer_of_a_chain():
    """Through three layers the input's gradient carries s^3, the third layer's weight gradient none."""

    def gradients(scale):
        torch.manual_seed(3)
        grad = GradParams(2.5, scale)
        x = (torch.rand(8, 2, 2, 6, 6) < 0.5).double().requires_grad_()
        weights = [
            torch.rand(shape, dtype=torch.float64).div(2).requires_grad_()
            for shape in ((3, 2, 3, 3), (4, 3, 3, 3), (5, 16))
        ]
        spikes = srm_conv2d(x, weights[0], NEURON, grad)
        spikes = srm_conv2d(spikes, weights[1], NEURON, grad)
        spikes = srm_linear(spikes.flatten(2), weights[2], NEURON, grad)
        spikes.backward(upstream(spikes))
        return [x.grad, *(weight.grad for weight in weights)]

    full, half = gradients(1.0), gradients(0.5)
    for power, one, scaled in zip((3, 2, 1, 0), full, half, strict=True):
        assert (one != 0).any()
        assert torch.equal(scaled, one * 0.5**power)  # a power of two: exact
