"""The SRM ops against a second program: loops over single neurons, from the kernel, no recurrences."""

import itertools

import pytest
import torch

from snn.neuron import GradParams, SRMParams
from snn.ops import srm_conv2d, srm_linear


def slow_neuron(current, threshold, grad_out, neuron, grad):
    """One neuron: currents and dL/dt, lists over T, to spikes, grad_w and grad_t, lists over T."""
    steps = len(current)
    dm, ds, dr = 1 - 1 / neuron.tau_m, 1 - 1 / neuron.tau_s, 1 - 1 / grad.tau_grad
    scale = neuron.tau_m / (neuron.tau_m - neuron.tau_s)
    eps = [scale * (dm**k - ds**k) for k in range(steps + 1)]
    spikes, a, b = [0] * steps, [0.0] * steps, [0.0] * steps
    first, u_before = 0, 0.0  # first step since the last spike
    for t in range(steps):
        u = sum(current[s] * eps[t - s + 1] for s in range(first, t + 1))
        if u >= threshold:
            rise = sum(current[s] * dr ** (t - s + 1) for s in range(first, t + 1))
            spikes[t] = 1
            a[t] = -grad_out[t] * min(1 / (u - u_before), grad.cap_weight)
            b[t] = -grad_out[t] * (min(1 / rise, grad.cap_time) if rise > 0 else 0.0)
            first, u_before = t + 1, 0.0
        else:
            u_before = u
    grad_w, grad_t = [0.0] * steps, [0.0] * steps
    for s in range(steps):
        t = next((t for t in range(s, steps) if spikes[t]), None)
        if t is not None:
            grad_w[s] = a[t] * eps[t - s + 1]
            grad_t[s] = -b[t] * dr ** (t - s + 1)
    return spikes, grad_w, grad_t


def slow_srm(x, weight, synapses, out_shape, grad_out, thresholds, neuron, grad):
    """Any layer: `synapses(o)` lists the (input position, weight position) pairs of output position `o`."""
    steps, batch = x.shape[:2]
    spikes, grad_x, grad_weight = (
        torch.zeros(steps, batch, *out_shape),
        torch.zeros_like(x),
        torch.zeros_like(weight),
    )
    spikes = spikes.to(x.dtype)
    for n, o in itertools.product(range(batch), itertools.product(*map(range, out_shape))):
        pairs = synapses(o)
        current = [sum(float(x[(t, n, *i)] * weight[w]) for i, w in pairs) for t in range(steps)]
        upstream = [float(grad_out[(t, n, *o)]) for t in range(steps)]
        fired, grad_w, grad_t = slow_neuron(current, float(thresholds[o[0]]), upstream, neuron, grad)
        for t, (i, w) in itertools.product(range(steps), pairs):
            spikes[(t, n, *o)] = fired[t]
            grad_weight[w] += grad_w[t] * x[(t, n, *i)]
            grad_x[(t, n, *i)] += grad_t[t] * weight[w] * x[(t, n, *i)] * grad.grad_scale
    return spikes, grad_x, grad_weight


def conv_synapses(x_shape, weight_shape, stride, padding, dilation, groups):
    c_out, c_per_group, k_h, k_w = weight_shape
    height, width = x_shape[3:]

    def synapses(o):
        c, row, column = o
        first = c // (c_out // groups) * c_per_group
        pairs = []
        for j, p, q in itertools.product(range(c_per_group), range(k_h), range(k_w)):
            y, z = (
                row * stride[0] - padding[0] + p * dilation[0],
                column * stride[1] - padding[1] + q * dilation[1],
            )
            if 0 <= y < height and 0 <= z < width:
                pairs.append(((first + j, y, z), (c, j, p, q)))
        return pairs

    rows = (height + 2 * padding[0] - dilation[0] * (k_h - 1) - 1) // stride[0] + 1
    columns = (width + 2 * padding[1] - dilation[1] * (k_w - 1) - 1) // stride[1] + 1
    return synapses, (c_out, rows, columns)


NEURONS = {
    "default": (SRMParams(), GradParams()),
    "slow synapse": (SRMParams(3.0, 6.0), GradParams(2.0, 1.0)),
    "low caps": (SRMParams(4.0, 2.0), GradParams(3.5, 0.5, cap_weight=1.5, cap_time=0.8)),
}
GEOMETRIES = [  # N, C_in, C_out, H, W, kernel, stride, padding, dilation, groups
    (1, 3, 2, 5, 3, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    (2, 2, 3, 5, 4, (3, 3), (2, 2), (1, 1), (1, 1), 1),
    (1, 2, 2, 7, 5, (2, 3), (2, 1), (0, 1), (2, 1), 1),
    (1, 4, 2, 3, 5, (3, 1), (1, 2), (1, 0), (1, 1), 2),
]


def draw(steps, in_shape, weight_shape, seed):
    """Input half silent, the rest spikes or shares; weights of both signs; a threshold per channel."""
    torch.manual_seed(seed)
    x = torch.rand(steps, *in_shape, dtype=torch.float64).clamp(min=0.5) * 2 - 1
    x = x.sign() if seed % 2 else x
    weight = torch.randn(weight_shape, dtype=torch.float64) + 0.4
    thresholds = (
        torch.linspace(0.4, 1.6, weight_shape[0], dtype=torch.float64) * min(steps, 4) / 4
    )  # early spikes too
    return x, weight, thresholds


def compare(op, slow_arguments, x, weight, thresholds, neuron, grad):
    synapses, out_shape = slow_arguments
    grad_out = torch.randn(*x.shape[:2], *out_shape, dtype=torch.float64)
    expected = slow_srm(x, weight, synapses, out_shape, grad_out, thresholds, neuron, grad)
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    spikes = op(x, weight, neuron, grad, threshold=thresholds)
    spikes.backward(grad_out)
    assert 0 < spikes.sum() < spikes.numel()  # else the case says little
    assert torch.equal(spikes.detach(), expected[0])
    torch.testing.assert_close(x.grad, expected[1], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(weight.grad, expected[2], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("constants", NEURONS)
@pytest.mark.parametrize("steps", [1, 2, 7, 12], ids=lambda steps: f"T{steps}")
@pytest.mark.parametrize(
    "geometry", GEOMETRIES, ids=lambda g: f"N{g[0]}-C{g[1]}-H{g[3]}-W{g[4]}-s{g[6][0]}{g[6][1]}-g{g[9]}"
)
def test_conv_equals_slow_reference(geometry, steps, constants):
    batch, c_in, c_out, height, width, kernel, stride, padding, dilation, groups = geometry
    x, weight, thresholds = draw(
        steps,
        (batch, c_in, height, width),
        (c_out, c_in // groups, *kernel),
        seed=steps + GEOMETRIES.index(geometry),
    )

    def op(*args, **kwargs):
        conv = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        return srm_conv2d(*args, **kwargs, **conv)

    slow = conv_synapses(x.shape, weight.shape, stride, padding, dilation, groups)
    compare(op, slow, x, weight, thresholds, *NEURONS[constants])


@pytest.mark.parametrize("constants", NEURONS)
@pytest.mark.parametrize("steps", [1, 2, 7, 12], ids=lambda steps: f"T{steps}")
@pytest.mark.parametrize("batch", [1, 3], ids=lambda batch: f"N{batch}")
def test_linear_equals_slow_reference(batch, steps, constants):
    x, weight, thresholds = draw(steps, (batch, 5), (4, 5), seed=steps + batch + 3)
    slow = (lambda o: [((i,), (o[0], i)) for i in range(5)], (4,))
    compare(srm_linear, slow, x, weight, thresholds, *NEURONS[constants])
