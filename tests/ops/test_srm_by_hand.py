"""Traces worked out by hand: tau_m 4, tau_s 2, tau_grad 2 make the kernel .5, .625, .59375, .5078125."""

import pytest
import torch

from snn.neuron import GradParams, SRMParams
from snn.ops import srm_conv2d, srm_linear

KW = SRMParams(tau_m=4.0, tau_s=2.0, threshold=1.0)
KG = GradParams(tau_grad=2.0, grad_scale=1.0)

# name: x, weight, grad_out, spikes, grad_weight, grad_x
TRACES = {
    # u = .9, 1.125: fires at step 1, du = .225, so 1/du = 4.44 is capped at 4; grad_w[0] = -4 * .625
    "one input, steep cap": ([1, 0, 0, 0], 1.8, [1, 1, 1, 1], [0, 1, 0, 0], -2.5, [1, 0, 0, 0]),
    # step 1: u = 1.5 * .625 + .5 = 1.4375, du = u - .75 = .6875, r = 1.5 * .25 + .5 = .875.
    # step 6: u = .5078125 + .2 * .625 + 2.5 * .5 = 1.8828125, du = u - .69375 = 1.1890625,
    # r = .0625 + .05 + 1.25 = 1.3625
    "two spikes": (
        [1.5, 1, 0, 1, 0, 0.2, 2.5, 0],
        1.0,
        [1, 2, 3, 4, 5, 6, 7, 8],
        [0, 1, 0, 0, 0, 0, 1, 0],
        -2 * 1.4375 / 0.6875 - 7 * 1.8828125 / 1.1890625,  # -15.265918
        [
            2 * 0.375 / 0.875,  # .857143
            2 * 0.5 / 0.875,  # 1.142857
            0,
            7 * 0.0625 / 1.3625,  # .321101
            0,
            7 * 0.05 / 1.3625,  # .256881
            7 * 1.25 / 1.3625,  # 6.422018
            0,
        ],
    ),
    # u = 1.5 = du, r = 1.5: grad_weight = -1/1.5 * .5, grad_x = 1/1.5 * .5 * 3
    "hazard 10, T = 1": ([1], 3.0, [1], [1], -1 / 3, [1]),
    # fires at step 0 with u = 2: -1/2 * .5 * 4 = -1; the inhibition comes after the spike and belongs to none
    "inhibition after the spike": ([4, -3, 0, 0], 1.0, [1, 1, 1, 1], [1, 0, 0, 0], -1.0, [1, 0, 0, 0]),
    # u is exactly 1, and >= fires: -1/1 * .5
    "threshold met exactly": ([1, 0, 0, 0], 2.0, [1, 1, 1, 1], [1, 0, 0, 0], -0.5, [1, 0, 0, 0]),
    # u = .9999995 at step 0 stays silent; at lag 2 u = 1.249999, du = .2499999, capped at 4: -4 * .625
    "threshold missed by a hair": ([1, 0, 0, 0], 1.999999, [1, 1, 1, 1], [0, 1, 0, 0], -2.5, [1, 0, 0, 0]),
    # every step: u = du = 1.5 after the reset, so -g / 1.5 * .5 goes to the weight and g to its own input
    "a spike at each step": ([1, 1, 1], 3.0, [1, 2, 3], [1, 1, 1], -2.0, [1, 2, 3]),
    # u = .5, .625, .59375: below 1 for good
    "no spike": ([1, 0, 0], 1.0, [1, 1, 1], [0, 0, 0], 0.0, [0, 0, 0]),
}


@pytest.mark.parametrize("op", ["conv", "linear"])
@pytest.mark.parametrize("name", TRACES)
def test_trace(name, op):
    values, w, grad_out, spikes, grad_weight, grad_x = TRACES[name]
    steps = len(values)
    one_pixel, one_weight = ((steps, 1, 1, 1, 1), (1, 1, 1, 1)) if op == "conv" else ((steps, 1, 1), (1, 1))
    x = torch.tensor(values, dtype=torch.float64).view(one_pixel).requires_grad_()
    weight = torch.full(one_weight, w, dtype=torch.float64, requires_grad=True)
    out = (srm_conv2d if op == "conv" else srm_linear)(x, weight, KW, KG)
    assert out.flatten().tolist() == spikes
    out.backward(torch.tensor(grad_out, dtype=torch.float64).view(one_pixel))
    torch.testing.assert_close(weight.grad.item(), grad_weight, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        x.grad.flatten(), torch.tensor(grad_x, dtype=torch.float64), rtol=1e-12, atol=0
    )


def test_printed_digits_of_the_two_spike_trace():
    """The same trace against the decimals as printed, so that a slip in the fractions above shows."""
    trace = TRACES["two spikes"]
    assert round(trace[4], 6) == -15.265918
    assert [round(g, 6) for g in trace[5]] == [0.857143, 1.142857, 0, 0.321101, 0, 0.256881, 6.422018, 0]


# tau_grad 8/7 makes the rise trace decay by 1/8; weight 1.875; u[0] = .9375, just below the threshold of .95
@pytest.mark.parametrize(
    ("second", "grad_weight", "grad_x"),
    [
        # r = (1.875 / 8 - 1.875 / 8) / 8 = 0: 1/r is capped at 100.
        # u = 1.171875 - .1171875, du = .1171875: 1/du is capped at 4
        (-0.125, -4 * (0.625 - 0.125 * 0.5), [100 * 1.875 / 64, -100 * 1.875 / 64]),
        # r = (.234375 - .3515625) / 8 < 0: the time path gives nothing. u = .99609375
        (-0.1875, -4 * (0.625 - 0.1875 * 0.5), [0, 0]),
    ],
    ids=["rise of zero", "rise below zero"],
)
def test_rise_of_zero_or_below_at_a_spike(second, grad_weight, grad_x):
    x = torch.tensor([1, second], dtype=torch.float64).view(2, 1, 1).requires_grad_()
    weight = torch.full((1, 1), 1.875, dtype=torch.float64, requires_grad=True)
    out = srm_linear(x, weight, SRMParams(4.0, 2.0, 0.95), GradParams(8 / 7, 1.0, 4.0, 100.0))
    assert out.flatten().tolist() == [0, 1]
    out.sum().backward()
    assert weight.grad.item() == grad_weight
    assert x.grad.flatten().tolist() == grad_x


def test_default_cap_keeps_a_rise_of_zero_finite():
    x = torch.tensor([1, -0.125]).view(2, 1, 1).requires_grad_()
    out = srm_linear(x, torch.full((1, 1), 1.875), SRMParams(4.0, 2.0, 0.95), GradParams(8 / 7, 1.0))
    out.backward(torch.zeros_like(out))
    assert x.grad.flatten().tolist() == [0, 0]  # an infinite slope would give inf * 0
