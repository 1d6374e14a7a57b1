"""Constants of the neuron and of its gradient, and the kernel."""

import dataclasses
import math

import pytest
import torch

from snn.neuron import GradParams, SRMParams, spike_response_kernel

BAD = [1.0, 0.5, 0.0, -2.0, math.nan, math.inf, -math.inf]


def test_defaults():
    assert dataclasses.asdict(SRMParams()) == {"tau_m": 5.0, "tau_s": 3.0, "threshold": 1.0}
    assert dataclasses.asdict(GradParams()) == {
        "tau_grad": 2.5,
        "grad_scale": 0.85,
        "cap_weight": 4.0,
        "cap_time": 123456789.0,
    }


@pytest.mark.parametrize("params", [SRMParams(), GradParams()], ids=lambda params: type(params).__name__)
def test_frozen(params):
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.threshold = 2.0


def test_derived_constants():
    """A decay is 1 - 1/tau, not exp(-1/tau)."""
    neuron = SRMParams(tau_m=4.0, tau_s=2.0)
    assert (neuron.decay_m, neuron.decay_s, neuron.coef) == (0.75, 0.5, 2.0)
    assert GradParams(tau_grad=4.0).decay_grad == 0.75


def test_kernel_by_hand():
    kernel = spike_response_kernel(SRMParams(tau_m=4.0, tau_s=2.0), 4)
    assert kernel.dtype == torch.float64
    assert kernel.tolist() == [0.5, 0.625, 0.59375, 0.5078125]


@pytest.mark.parametrize(("tau_m", "tau_s"), [(5.0, 3.0), (3.0, 6.0), (1.5, 20.0)])
def test_kernel_is_positive_and_fades(tau_m, tau_s):
    kernel = spike_response_kernel(SRMParams(tau_m, tau_s), 400)
    assert (kernel > 0).all() and kernel[-1] < 1e-6
    m = s = 0.0
    for k in range(20):  # one unit of current at step 0, through the two traces
        m, s = (m + (k == 0)) * (1 - 1 / tau_m), (s + (k == 0)) * (1 - 1 / tau_s)
        assert kernel[k].item() == pytest.approx(tau_m / (tau_m - tau_s) * (m - s), rel=1e-12)


def test_kernel_needs_a_step():
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        spike_response_kernel(SRMParams(), 0)


def test_hazard_13_equal_time_constants():
    with pytest.raises(ValueError, match="tau_m and tau_s must differ, but got 4.0 for both"):
        SRMParams(tau_m=4.0, tau_s=4.0)


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("name", ["tau_m", "tau_s", "tau_grad"])
def test_hazard_13_time_constants(name, value):
    with pytest.raises(ValueError, match=f"{name} must be finite and > 1 step, got {value}"):
        (GradParams if name == "tau_grad" else SRMParams)(**{name: value})


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_threshold(value):
    with pytest.raises(ValueError, match=f"threshold must be finite and > 0 .*, got {value}"):
        SRMParams(threshold=value)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["cap_weight", "cap_time"])
def test_caps(name, value):
    with pytest.raises(ValueError, match=f"{name} must be finite and > 0, got {value}"):
        GradParams(**{name: value})


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_grad_scale(value):
    with pytest.raises(ValueError, match=f"grad_scale must be finite and >= 0, got {value}"):
        GradParams(grad_scale=value)


def test_legal_corners():
    GradParams(grad_scale=0.0)
    SRMParams(tau_m=2.0, tau_s=6.0)
    SRMParams(tau_m=1.01, tau_s=1.02, threshold=1e-3)
