"""Ops against the golden vectors: exact float64 results of a scalar program that shares no code with snn."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from snn.neuron import GradParams, SRMParams
from snn.ops import spike_avg_pool2d, srm_conv2d, srm_linear

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = json.loads((GOLDEN / "cases.json").read_text())
SRM_CASES = [name for name, case in CASES.items() if case["op"] != "spike_avg_pool2d"]
POOL_CASES = [name for name, case in CASES.items() if case["op"] == "spike_avg_pool2d"]
PRECISIONS = {"float64": (torch.float64, 1e-12), "float32": (torch.float32, 1e-5)}


def load(name, dtype):
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return {key: torch.from_numpy(array).to(dtype) for key, array in arrays.items()}


def assert_close(got, expected, tolerance):
    """Relative to the largest entry; an expectation of nothing but zeros is met by zeros alone."""
    assert got.shape == expected.shape and got.dtype == expected.dtype
    assert (got - expected).abs().max() <= tolerance * expected.abs().max()


def test_every_golden_file_has_a_case():
    assert {path.stem for path in GOLDEN.glob("*.npz")} == set(CASES) == {*SRM_CASES, *POOL_CASES}
    assert len(SRM_CASES) == 12 and len(POOL_CASES) == 4


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", SRM_CASES)
def test_srm_golden(name, precision):
    dtype, tolerance = PRECISIONS[precision]
    case, data = CASES[name], load(name, dtype)
    per_channel = isinstance(case["threshold"], list)
    neuron = SRMParams(case["tau_m"], case["tau_s"], 1.0 if per_channel else case["threshold"])
    caps = {
        long: case[short] for short, long in (("cap_w", "cap_weight"), ("cap_t", "cap_time")) if short in case
    }
    grad = GradParams(case["tau_grad"], case["grad_scale"], **caps)
    threshold = torch.tensor(case["threshold"], dtype=dtype) if per_channel else None
    x, weight = data["x"].requires_grad_(), data["weight"].requires_grad_()
    if case["op"] == "srm_conv2d":
        geometry = {key: case[key] for key in ("stride", "padding", "dilation", "groups")}
        spikes = srm_conv2d(x, weight, neuron, grad, threshold=threshold, **geometry)
    else:
        spikes = srm_linear(x, weight, neuron, grad, threshold=threshold)
    assert torch.equal(spikes, data["spikes"])
    spikes.backward(data["grad_out"])
    assert_close(x.grad, data["grad_x"], tolerance)
    assert_close(weight.grad, data["grad_weight"], tolerance)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", POOL_CASES)
def test_pool_golden(name, precision):
    dtype, tolerance = PRECISIONS[precision]
    data, size = load(name, dtype), CASES[name]["kernel_size"]
    x = data["x"].requires_grad_()
    y = spike_avg_pool2d(x, tuple(size) if isinstance(size, list) else size)
    assert_close(y.detach(), data["y"], tolerance)
    y.backward(data["grad_out"])
    assert_close(x.grad, data["grad_x"], tolerance)
