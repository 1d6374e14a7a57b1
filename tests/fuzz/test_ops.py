"""Random input through every op: spikes and gradients against the reference and plain formulas.

No NaN, no crash, nothing that was given is written to. With `--nightly` they draw 12,000 inputs.
"""

import math
from dataclasses import dataclass

import torch
from hypothesis import assume, event, given
from hypothesis import strategies as st
from torch import Tensor

from snn.neuron import ATan, GradParams, Rectangle, Sigmoid, SRMParams, spike_response_kernel
from snn.ops import (
    count_to_time,
    gradient_by_height,
    gradient_decouple,
    lb_sign,
    spike_add,
    spike_avg_pool2d,
    spike_dropout,
    srm_conv2d,
    srm_linear,
    target_spikes,
)
from tests.fuzz.oracle import Conv, scan

TAUS = [1 + 1e-6, 1.05, 1.5, 2.0, 3.0, 3 + 1e-5, 5.0, 8.0, 100.0, 1e9]
DTYPES = st.sampled_from([torch.float32, torch.float64])
ANY = st.booleans()
STEPS, SAMPLES = st.integers(1, 33), st.sampled_from([1, 2, 3, 4, 0])
TIME = st.builds(
    GradParams,
    st.sampled_from(TAUS),
    st.sampled_from([0.0, 0.85, 1.0, 1e3]),
    st.sampled_from([1e-9, 0.3, 4.0, 1e9]),
    st.sampled_from([1e-9, 0.8, 123456789.0]),
)
SURROGATES = st.one_of(
    st.builds(kind, st.sampled_from([1e-3, 0.3, 1.0, 10.0, 1e6])) for kind in (ATan, Sigmoid, Rectangle)
)


@st.composite
def neurons(draw):
    tau_m, tau_s = draw(st.lists(st.sampled_from(TAUS), min_size=2, max_size=2, unique=True))
    return SRMParams(tau_m, tau_s)


class Source:
    """Tensors of every kind, from one seed."""

    def __init__(self, draw) -> None:
        self.draw = draw
        self.generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def fill(self, shape, kinds=("spikes", "grid", "real", "zeros", "large", "small")) -> Tensor:
        kind = self.draw(st.sampled_from(kinds))
        if kind in ("spikes", "zeros"):
            rate = 0.0 if kind == "zeros" else self.draw(st.sampled_from([0.05, 0.3, 1.0]))
            return (torch.rand(shape, generator=self.generator) < rate).double()
        if kind == "grid":  # sums of products of such are exact in float32 too
            return torch.randint(-16, 33, shape, generator=self.generator).double() / 8
        x = torch.randn(shape, generator=self.generator, dtype=torch.float64) + self.draw(
            st.sampled_from([0, 1])
        )
        return x * {"real": 1.0, "large": 1e6, "small": 1e-6}[kind]

    def laid_out(self, x: Tensor) -> Tensor:
        """The values of `x`, or some of them again and again, in any layout of memory."""
        layout = self.draw(st.sampled_from(["plain", "turned", "last", "gaps", "same", "shared"]))
        if x.dim() < 2:
            return x
        if layout == "turned":
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        if layout == "last":  # channels last, or batch last
            return x.movedim(-1, 1).contiguous().movedim(1, -1) if x.dim() < 5 else _channels_last(x)
        if layout == "gaps":
            return torch.stack([x, torch.full_like(x, 7.0)], dim=-1)[..., 0]
        if layout == "same":  # at every step, as direct encoding shows an image
            return x[:1].expand(x.shape) if len(x) else x
        if layout == "shared":
            return x[..., :1].expand(x.shape)
        return x

    def upstream(self, shape, dtype) -> Tensor:
        g = self.fill(shape, ("real", "zeros", "large", "spikes")).to(dtype)
        if self.draw(ANY):
            return self.laid_out(g)
        return torch.full((), 1.5, dtype=dtype).expand(shape)


def _channels_last(x: Tensor) -> Tensor:
    return x.movedim(2, -1).contiguous().movedim(-1, 2)


def unchanged(*tensors: Tensor):
    """Return a check that none of them was written to."""
    before = [tensor.detach().clone() for tensor in tensors]
    return lambda: all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


def assert_near(got: Tensor, expected: Tensor, error: Tensor) -> None:
    assert got.shape == expected.shape and got.isfinite().all()
    wrong = (got.double() - expected).abs() - error
    assert not (wrong > 0).any(), f"by {wrong.max()} more than rounding explains"


# the SRM layers


@dataclass
class Layer:
    """One call of an SRM op; `pool` and `conv` are those of a linear layer seen as a convolution."""

    op: object
    x: Tensor
    weight: Tensor
    neuron: SRMParams
    grad: object
    threshold: Tensor  # one per channel
    keywords: dict
    grad_out: Tensor
    conv: Conv
    pool: tuple[int, int]

    @property
    def maps(self) -> tuple[Tensor, Tensor]:
        """Input and weight of the convolution, float64."""
        both = (self.x, self.weight)
        return tuple((part if part.dim() > 3 else part[..., None, None]).double() for part in both)

    @property
    def is_exact(self) -> bool:
        """Whether a sum of products of `x` and `weight` is exact in their dtype, in any order."""
        on_grid = all((part.double() * 8 % 1 == 0).all() for part in (self.x, self.weight))
        return on_grid and bool((self.conv.forward(*(part.abs() for part in self.maps)) < 2**16).all())


@st.composite
def convolutions(draw, grads):
    source = Source(draw)

    def pair(low, high):
        return draw(st.tuples(st.integers(low, high), st.integers(low, high)))

    steps, samples, groups = (
        draw(st.integers(1, 33)),
        draw(st.sampled_from([1, 2, 3, 4, 0])),
        draw(st.integers(1, 3)),
    )
    channels = (groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 3)))
    kernel, stride, padding, dilation = pair(1, 3), pair(1, 3), pair(0, 2), pair(1, 2)
    pool = draw(st.sampled_from([(1, 1), (1, 1), (2, 2), (2, 1), (1, 3)]))
    conv = Conv(stride, padding, dilation, groups)
    sides = []
    for i in (0, 1):
        outside = pool[i] * draw(st.integers(1, 4))
        least = (outside - 1) * stride[i] + dilation[i] * (kernel[i] - 1) + 1 - 2 * padding[i]
        sides.append(least + draw(st.integers(0, stride[i] - 1)))
    assume(min(sides) >= 1)
    x = source.fill((steps, samples, channels[0], *sides))
    weight = source.fill((channels[1], channels[0] // groups, *kernel), ("grid", "grid", "real", "large"))
    names = dict(
        zip(("stride", "padding", "dilation", "pool"), (stride, padding, dilation, pool), strict=True)
    )
    keywords = {k: v[0] if v[0] == v[1] and draw(ANY) else v for k, v in names.items()}
    return _layer(source, srm_conv2d, x, weight, grads, keywords | {"groups": groups}, conv, pool)


@st.composite
def linears(draw, grads):
    source = Source(draw)
    steps, samples = draw(STEPS), draw(SAMPLES)
    fan_in, fan_out = draw(st.integers(1, 12)), draw(st.integers(1, 7))
    x = source.fill((steps, samples, fan_in))
    weight = source.fill((fan_out, fan_in), ("grid", "grid", "real", "large"))
    return _layer(source, srm_linear, x, weight, grads, {}, Conv(), (1, 1))


def _layer(source, op, x, weight, grads, keywords, conv, pool):
    draw, dtype = source.draw, source.draw(DTYPES)
    x, weight = (source.laid_out(part.to(dtype)).requires_grad_(draw(ANY)) for part in (x, weight))
    neuron = draw(neurons())
    layer = Layer(op, x, weight, neuron, draw(grads), None, keywords, None, conv, pool)
    current = conv.forward(*(part.detach() for part in layer.maps))
    # thresholds near what the potentials reach, so that some fire; or far from it
    reach = float(current.abs().mean()) if current.numel() else 1.0
    reach *= float(spike_response_kernel(neuron, len(x)).abs().max())
    level = draw(st.sampled_from([1.0, 0.3, 0.1, 3.0, 1e-6, 1e6])) * max(reach, 1e-9)
    threshold = torch.rand(len(weight), generator=source.generator, dtype=torch.float64) + 0.3
    threshold = source.laid_out((threshold * level).to(dtype))
    if draw(ANY):  # one for all, from the neuron
        threshold = threshold[:1].expand(len(weight))
        layer.neuron = SRMParams(neuron.tau_m, neuron.tau_s, float(threshold[0]))
    else:
        keywords["threshold"] = threshold
    shape = (*current.shape[:3], *(side // k for side, k in zip(current.shape[3:], pool, strict=True)))
    layer.threshold, layer.grad_out = threshold, source.upstream(shape[: x.dim()], dtype)
    return layer


def check_layer(layer: Layer) -> None:
    x, weight, dtype = layer.x, layer.weight, layer.x.dtype
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    untouched = unchanged(x, weight, layer.threshold, layer.grad_out)
    out = layer.op(x, weight, layer.neuron, layer.grad, **layer.keywords)
    leaves = [leaf for leaf in (x, weight) if leaf.requires_grad]
    assert out.isfinite().all() and out.dtype == dtype and out.requires_grad == bool(leaves)
    if leaves:
        full = torch.autograd.grad(out, leaves, layer.grad_out, retain_graph=True)
        assert all(part.isfinite().all() for part in full) and untouched()

    maps, kernels = (part.detach() for part in layer.maps)
    current, size = layer.conv.forward(maps, kernels), layer.conv.forward(maps.abs(), kernels.abs())
    error = size * eps * (kernels[0].numel() + 4) + tiny
    exact = layer.is_exact
    expected = scan(
        current, None if exact else error, layer.threshold.double(), layer.neuron, layer.grad, dtype
    )
    spikes = _windows(expected.spikes, layer.pool)
    count, area = spikes.sum((-1, -3)), layer.pool[0] * layer.pool[1]
    sure = ~_windows(expected.unsure, layer.pool).any(-1).any(-2)
    event(f"{'exact' if exact else 'rounded'}, {'fires' if count.any() else 'silent'}")
    event(f"sure of {10 * round(10 * float(sure.double().mean()) if sure.numel() else 10)} %")
    got = out.detach().double().view(count.shape)
    assert_near(got * sure, count / area * sure, 4 * eps * count)
    if area == 1:
        assert torch.equal(got * sure, count * sure)
    if not leaves:
        return

    grad_out = layer.grad_out.reshape(count.shape).double() * sure
    gradients = list(torch.autograd.grad(out, leaves, grad_out.to(dtype).view(out.shape)))
    share = grad_out / (count.clamp(min=1) if isinstance(layer.grad, GradParams) else area)
    share = share.repeat_interleave(layer.pool[0], 3).repeat_interleave(layer.pool[1], 4)
    (to_w, error_w), (to_x, error_x) = expected.signals(share)
    rounding = 8 * eps * math.sqrt(maps[:, :, 0].numel() + kernels[0].numel())
    error_w, error_x = error_w + rounding * to_w.abs(), error_x + rounding * to_x.abs()
    height = maps * layer.grad.grad_scale if isinstance(layer.grad, GradParams) else torch.ones_like(maps)
    if x.requires_grad:
        wanted = layer.conv.to_input(to_x, maps, kernels) * height
        error = layer.conv.to_input(error_x, maps, kernels.abs()) * height.abs() + tiny
        assert_near(gradients.pop(0).view(maps.shape), wanted, error)
    if weight.requires_grad:
        wanted = layer.conv.to_weight(to_w, maps, kernels)
        error = layer.conv.to_weight(error_w, maps.abs(), kernels) + tiny
        assert_near(gradients.pop(0).view(kernels.shape), wanted, error)


def _windows(maps: Tensor, pool: tuple[int, int]) -> Tensor:
    """`[..., H, W]` to `[..., H / k_h, k_h, W / k_w, k_w]`."""
    return maps.unflatten(-1, (-1, pool[1])).unflatten(-3, (-1, pool[0]))


@given(convolutions(TIME))
def test_convolutions(layer):
    check_layer(layer)


@given(linears(TIME))
def test_linear_layers(layer):
    check_layer(layer)


@given(st.one_of(convolutions(SURROGATES), linears(SURROGATES)))
def test_layers_under_a_surrogate_gradient(layer):
    check_layer(layer)


# what holds through a stack of layers


@given(st.data())
def test_the_sum_law(data):
    """Through two layers, whatever their geometry, the input's gradient sums to that of the output."""
    first = data.draw(convolutions(TIME))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))

    def positive(*shape):
        return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.05

    x = (positive(*first.x.shape) < 0.5).double().requires_grad_()
    neuron, scale = SRMParams(5.0, 3.0, data.draw(st.sampled_from([0.1, 0.5, 2.0]))), 0.7
    grad = GradParams(data.draw(st.sampled_from([1.05, 2.5, 1e6])), scale)
    keywords = {k: v for k, v in first.keywords.items() if k != "threshold"}
    hidden = srm_conv2d(x, positive(*first.weight.shape), neuron, grad, **keywords)
    hidden = spike_dropout(hidden, data.draw(st.sampled_from([0.0, 0.5]))).flatten(2)
    out = srm_linear(hidden, positive(4, hidden.shape[2]), neuron, grad)
    upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    out.backward(upstream)
    event("fires" if out.any() else "silent")
    law = scale**2 * upstream * out.detach()
    assert abs(float(x.grad.sum() - law.sum())) <= 1e-9 * float(law.abs().sum())


# a target spike, by the kernel of the neuron and without recurrences


@given(st.data())
def test_target_spikes(data):
    source = Source(data.draw)
    steps, samples, fan_in, classes = (data.draw(st.integers(1, most)) for most in (33, 4, 9, 5))
    x = source.laid_out(source.fill((steps, samples, fan_in), ("spikes", "grid", "zeros")))
    weight = source.laid_out(source.fill((classes, fan_in), ("grid",)))
    labels = torch.randint(0, classes, (samples,), generator=source.generator)
    neuron, grad, least = data.draw(neurons()), data.draw(TIME), data.draw(st.sampled_from([1e-6, 0.05, 3.0]))
    neuron = SRMParams(neuron.tau_m, neuron.tau_s, data.draw(st.sampled_from([0.5, 1e3, 1e6])))
    spikes = srm_linear(x, weight, neuron, grad)
    x.requires_grad_(), weight.requires_grad_()
    untouched = unchanged(x, weight, spikes, labels)
    got = target_spikes(x, weight, neuron, grad, spikes, labels, least)
    grad_out = torch.randn(got.shape, generator=source.generator, dtype=torch.float64)
    grad_x, grad_w = torch.autograd.grad(got, [x, weight], grad_out)
    assert untouched() and set(got.unique().tolist()) <= {0.0, 1.0}
    eps = spike_response_kernel(neuron, steps)
    decay = grad.decay_grad ** torch.arange(1, steps + 1).double()
    current = (x @ weight.T).detach()
    expected = torch.zeros_like(x), torch.zeros_like(weight)
    size = [torch.zeros_like(part) for part in expected]
    for n, k in enumerate(labels.tolist()):
        u = torch.stack([(current[: t + 1, n, k] * eps[: t + 1].flip(0)).sum() for t in range(steps)])
        du = torch.diff(u, prepend=torch.zeros(1, dtype=u.dtype))
        rising = (du > least).nonzero().flatten().tolist()
        set_at = got[:, n, k].nonzero().flatten().tolist()
        rounding = 1e-9 * (1 + abs(neuron.coef) * float(current[:, n, k].abs().sum()))
        if (du - least).abs().min() <= rounding:
            event("unsure")
        else:
            assert set_at == (rising[-1:] if not spikes[:, n, k].any() else [])
        for t in set_at:
            rise = float((current[: t + 1, n, k] * decay[: t + 1].flip(0)).sum())
            slopes = [
                min(1 / float(du[t]), grad.cap_weight),
                min(1 / rise, grad.cap_time) if rise > 0 else 0.0,
            ]
            if abs(rise) <= rounding:  # its sign is rounding's
                return
            a, b = (-float(grad_out[t, n, k]) * slope for slope in slopes)
            for s in range(t + 1):
                to_w = a * eps[t - s] * x[s, n].detach()
                to_x = -b * decay[t - s] * weight[k].detach() * x[s, n].detach() * grad.grad_scale
                expected[0][s, n] += to_x
                expected[1][k] += to_w
                size[0][s, n] += to_x.abs() * (1e-9 + rounding / abs(rise))
                size[1][k] += to_w.abs() * (1e-9 + rounding / float(du[t])) + abs(a) * rounding
    assert got.sum() == sum(int(got[:, n, k].sum()) for n, k in enumerate(labels.tolist()))
    assert_near(grad_x, expected[0], size[0] + 1e-300)
    assert_near(grad_w, expected[1], size[1] + 1e-300)


# ops without a neuron


@st.composite
def tensors(draw, shape=None):
    """(source, a tensor of any layout that wants a gradient, a gradient for one of its shape)."""
    source = Source(draw)
    shape = draw(st.lists(st.integers(0, 6), max_size=5)) if shape is None else draw(shape)
    dtype = draw(DTYPES)
    x = source.laid_out(source.fill(tuple(shape)).to(dtype)).requires_grad_()
    return source, x, source.upstream(tuple(shape), dtype)


def given_back(op, x: Tensor, grad_out: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """What an op of one tensor puts out, and its gradient."""
    untouched = unchanged(x, grad_out)
    torch.manual_seed(seed)
    out = op(x)
    (grad_x,) = torch.autograd.grad(out, x, grad_out)
    assert untouched() and out.isfinite().all() and grad_x.isfinite().all()
    assert out.dtype == grad_x.dtype == x.dtype and grad_x.shape == x.shape
    with torch.no_grad():
        torch.manual_seed(seed)
        assert torch.equal(op(x), out)
    return out.detach(), grad_x


@given(tensors())
def test_count_to_time(case):
    _, x, g = case
    out, grad_x = given_back(count_to_time, x, g)
    assert torch.equal(out, x) and torch.equal(grad_x, -g * x)


@given(tensors())
def test_gradient_by_height(case):
    _, x, g = case
    out, grad_x = given_back(gradient_by_height, x, g)
    assert torch.equal(out, x) and torch.equal(grad_x, g * x)


@given(tensors(), st.sampled_from([0.0, 1e-30, 0.1, 1.0, 1e6]))
def test_gradient_decouple(case, scale):
    _, x, g = case
    out, grad_x = given_back(lambda x: gradient_decouple(x, scale), x, g)
    assert torch.equal(out, x) and torch.equal(grad_x, g * scale)


@given(tensors(), st.sampled_from([1e-30, 0.1, 1.0, 1e30]))
def test_lb_sign(case, clip):
    _, x, g = case
    out, grad_x = given_back(lambda x: lb_sign(x, clip), x, g)
    assert torch.equal(out, (x > 0).to(x.dtype) - (x < 0).to(x.dtype))
    assert torch.equal(grad_x, torch.where(g > clip, clip, torch.where(g < -clip, -clip, g)))


@given(
    tensors(st.lists(st.integers(0, 6), min_size=2, max_size=5)),
    st.sampled_from([0.0, 0.1, 0.5, 0.999, math.nextafter(1, 0)]),
    st.one_of(TIME, SURROGATES),
    st.integers(0, 2**31),
)
def test_spike_dropout(case, p, grad, seed):
    _, x, g = case
    out, grad_x = given_back(lambda x: spike_dropout(x, p, grad), x, g, seed)
    torch.manual_seed(seed)
    keep = torch.rand(x.shape[1:]) >= p  # one mask for all steps
    height = torch.where(keep, 1 / (1 - p), 0).to(x.dtype)
    assert torch.equal(out, x * height)
    assert torch.equal(grad_x, g * keep if isinstance(grad, GradParams) else g * height)


@given(
    tensors(st.tuples(*[st.integers(lowest, 6) for lowest in (0, 0, 1, 1, 1)])),
    st.tuples(st.integers(1, 6), st.integers(1, 6)),
    ANY,
    st.one_of(TIME, SURROGATES),
)
def test_spike_avg_pool2d(case, window, square, grad):
    source, x, _ = case
    window = tuple(min(k, side) for k, side in zip(window, x.shape[3:], strict=True))
    if square:
        window = (min(window),) * 2
    sides = [side // k for side, k in zip(x.shape[3:], window, strict=True)]
    g = source.upstream((*x.shape[:3], *sides), x.dtype)
    kernel_size = window[0] if square else window
    eps = torch.finfo(x.dtype).eps * window[0] * window[1]
    covered = x.detach().double()[..., : sides[0] * window[0], : sides[1] * window[1]]
    inside = _windows(covered, window)
    total, size = inside.sum((-1, -3)), inside.abs().sum((-1, -3))
    area = window[0] * window[1]
    sure = (total == 0) | (total.abs() > 1000 * eps * size)  # else the sum hangs on the order of its terms
    sure &= (size == 0) | (total != 0) | torch.tensor(bool((covered * 8 % 1 == 0).all()))
    g = g * sure
    out, grad_x = given_back(lambda x: spike_avg_pool2d(x, kernel_size, grad), x, g)
    assert_near(out, total / area, 4 * eps * size / area)
    if isinstance(grad, GradParams):
        share = torch.where(total == 0, 0, g.double() / total)
        error = share.abs() * (4 * eps + 4 * eps * size / total.abs().clamp(min=1e-300))
    else:
        share = g.double() / area
        error = share.abs() * 4 * eps
    expected = torch.zeros_like(x, dtype=torch.float64)
    allowed = torch.zeros_like(expected)
    for whole, part in ((expected, share), (allowed, error)):
        spread = part.repeat_interleave(window[0], 3).repeat_interleave(window[1], 4)
        whole[..., : sides[0] * window[0], : sides[1] * window[1]] = spread
    assert_near(grad_x, expected, allowed)


@given(tensors(), st.one_of(TIME, SURROGATES), ANY)
def test_spike_add(case, grad, frozen):
    source, a, g = case
    b = source.laid_out(source.fill(tuple(a.shape)).to(a.dtype)).requires_grad_(not frozen)
    untouched = unchanged(a, b, g)
    out = spike_add(a, b, grad)
    gradients = torch.autograd.grad(out, [a] if frozen else [a, b], g)
    assert untouched() and torch.equal(out, a + b)
    total = (a + b).detach()
    for part, got in zip((a, b), gradients, strict=False):
        share = torch.where(total == 0, 0, g * (part / total)) if isinstance(grad, GradParams) else g
        assert torch.equal(got, share.detach()) and got.isfinite().all()
    if isinstance(grad, GradParams) and not frozen:
        parts = gradients[0].double() + gradients[1].double() - g.double() * (total != 0)
        bound = 8 * torch.finfo(a.dtype).eps * (gradients[0].abs() + gradients[1].abs() + g.abs())
        assert (parts.abs() <= bound).all()
