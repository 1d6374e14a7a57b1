"""One semantics: the scans of the CPU (numba) and of the GPU (Triton) against the reference."""

import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck
from torch.nn import functional as F

from snn.neuron import GradParams, SRMParams
from snn.ops import cpu_kernel, spike_avg_pool2d, srm_conv2d, srm_linear
from snn.ops.compact import restore
from snn.ops.srm import cpu, scan
from snn.ops.srm.reference import scan_backward as reference_backward
from snn.ops.srm.reference import scan_forward as reference_forward
from tests.ops.test_srm_golden import CASES, SRM_CASES, load

TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-12}


def triton_kernels():
    pytest.importorskip("triton", reason="Triton is not installed here")
    from snn.ops.srm import gpu

    return gpu


KERNELS = {"cpu": lambda: cpu, "triton": triton_kernels}
BOTH = pytest.mark.parametrize("kind", KERNELS)


def device_of(kind):
    return "cuda" if kind == "triton" and torch.cuda.is_available() else "cpu"


def by_reference(current, threshold, steps, pool, grad_out, neuron, grad):
    """Spikes or their averages, and both signals, with the pool's gradient shared as its own op does."""
    current = current.expand(steps, *current.shape[1:])
    spikes, slope_w, slope_t = reference_forward(current, threshold[:, None, None], neuron, grad)
    if pool == (1, 1) or spikes.numel() == 0:
        out = spikes.new_empty(grad_out.shape) if spikes.numel() == 0 else spikes
        return out, *reference_backward(grad_out.reshape_as(spikes), spikes, slope_w, slope_t, neuron, grad)
    leaf = spikes.clone().requires_grad_()
    out = spike_avg_pool2d(leaf, pool)
    out.backward(grad_out)
    return out.detach(), *reference_backward(leaf.grad, spikes, slope_w, slope_t, neuron, grad)


def by_kernels(kind, current, threshold, steps, pool, grad_out, neuron, grad, trim):
    kernels, device, constants = KERNELS[kind](), device_of(kind), scan._constants(neuron, grad)
    current, threshold, grad_out = (part.to(device) for part in (current, threshold, grad_out))
    out, *tape = kernels.scan_forward(current, threshold, steps, pool, constants, True, True, trim)
    signals = kernels.scan_backward(grad_out, tape, pool, constants, steps, steps)
    summed, none = kernels.scan_backward(grad_out, tape, pool, constants, 1, 0)
    assert none.shape[0] == 0
    return [part.cpu() for part in (out, *signals, summed)]


def assert_close(got, expected, tolerance):
    """Relative to the largest entry."""
    assert got.shape == expected.shape and got.dtype == expected.dtype
    if got.numel():
        assert (got - expected).abs().max() <= tolerance * expected.abs().max()


def assert_equal_scans(kind, current, threshold, steps, pool, grad_out, neuron, grad, trim):
    expected = by_reference(current, threshold, steps, pool, grad_out, neuron, grad)
    out, grad_w, grad_t, summed = by_kernels(
        kind, current, threshold, steps, pool, grad_out, neuron, grad, trim
    )
    tolerance = TOLERANCES[current.dtype]
    if pool == (1, 1):  # no product is fused with a sum: to the bit
        assert all(map(torch.equal, (out, grad_w, grad_t), expected)) or kind == "triton"
        assert torch.equal(out, expected[0])
    else:
        assert_close(out, expected[0], tolerance)  # sums of the same spikes
    assert_close(grad_w, expected[1], tolerance)
    assert_close(grad_t, expected[2], tolerance)
    if len(expected[1]):
        scale = expected[1].abs().sum(0, keepdim=True).max() if expected[1].numel() else 0
        assert ((summed - expected[1].sum(0, keepdim=True)).abs() <= tolerance * scale).all()
    return out


@st.composite
def scans(draw, most_steps, most_side):
    """Everything a scan depends on: any sizes, layout, constants, one threshold per channel."""
    steps = draw(st.integers(1, most_steps))
    samples, channels = draw(st.integers(0, 3)), draw(st.integers(1, 5))
    pool = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    sides = [k * draw(st.integers(1, max(1, most_side // k))) for k in pool]
    dtype = draw(st.sampled_from(list(TOLERANCES)))
    same = draw(st.booleans())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    layout = draw(st.sampled_from(["channels first", "channels last", "every second", "expanded"]))
    rows = 1 if same else steps
    if layout == "channels last":
        current = normal(rows, samples, *sides, channels).permute(0, 1, 4, 2, 3)
    elif layout == "every second":
        current = normal(rows, samples, channels, sides[0], 2 * sides[1])[..., ::2]
    elif layout == "expanded":
        current = normal(rows, samples, 1, *sides).expand(-1, -1, channels, -1, -1)
    else:
        current = normal(rows, samples, channels, *sides)
    current = current * draw(st.sampled_from([0.1, 1.0, 5.0])) + draw(st.sampled_from([-0.5, 0.0, 1.0]))
    grad_out = normal(steps, samples, channels, sides[0] // pool[0], sides[1] // pool[1])
    if draw(st.booleans()):
        grad_out = grad_out[:1].expand(steps, -1, -1, -1, -1)
    tau_m, tau_s = draw(st.sampled_from([(5.0, 3.0), (2.0, 6.5), (20.0, 1.5)]))
    neuron = SRMParams(tau_m, tau_s, 1.0)
    grad = GradParams(draw(st.sampled_from([2.5, 1.2, 9.0])), 1.0, draw(st.sampled_from([4.0, 0.3])))
    threshold = torch.rand(channels, generator=generator, dtype=torch.float64) + 0.3
    tensors = [part.to(dtype) for part in (current, threshold, grad_out)]
    trim = draw(st.booleans())
    return tensors[0], tensors[1], steps, pool, tensors[2], neuron, grad, trim


@settings(max_examples=max(200, settings.default.max_examples))
@given(scans(most_steps=33, most_side=13))
def test_cpu_kernels_equal_the_reference(case):
    assert_equal_scans("cpu", *case)


@settings(max_examples=15)
@given(scans(most_steps=9, most_side=6))
def test_triton_kernels_equal_the_reference(case):
    assert_equal_scans("triton", *case)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", SRM_CASES)
@BOTH
def test_kernels_equal_the_reference_on_the_golden_cases(kind, name, dtype):
    case, data = CASES[name], load(name, dtype)
    neuron = SRMParams(case["tau_m"], case["tau_s"], 1.0)
    grad = GradParams(case["tau_grad"], 1.0, case.get("cap_w", 4.0), case.get("cap_t", 123456789.0))
    if case["op"] == "srm_conv2d":
        geometry = [case[key] for key in ("stride", "padding", "dilation", "groups")]
        geometry = [tuple(value) if isinstance(value, list) else value for value in geometry]
        current = F.conv2d(data["x"].flatten(0, 1), data["weight"], None, *geometry)
        current = current.unflatten(0, data["x"].shape[:2])
    else:
        current, data["grad_out"] = (
            (data["x"] @ data["weight"].T)[..., None, None],
            data["grad_out"][..., None, None],
        )
    threshold = torch.as_tensor(case["threshold"], dtype=dtype).expand(current.shape[2]).contiguous()
    out = assert_equal_scans(
        kind, current, threshold, len(current), (1, 1), data["grad_out"], neuron, grad, True
    )
    assert torch.equal(out.flatten(), data["spikes"].flatten())


@BOTH
def test_extreme_rates(kind):
    """No neuron spikes, and every neuron spikes at every step: tapes of length 0 and of full length."""
    neuron, grad = SRMParams(5.0, 3.0, 1.0), GradParams()
    for level, rate in ((-1.0, 0.0), (100.0, 1.0)):
        current = torch.full((7, 2, 3, 6, 4), level)
        for trim in (True, False):
            grad_out = torch.randn(7, 2, 3, 6, 4)
            out = assert_equal_scans(kind, current, torch.ones(3), 7, (1, 1), grad_out, neuron, grad, trim)
            assert out.mean() == rate


@pytest.mark.parametrize("channels", [1, 7, 1030, 3000])
def test_cpu_blocks_of_any_width(channels):
    """More neurons than a block, rows of windows larger than a block, more blocks than chunks."""
    neuron, grad = SRMParams(5.0, 3.0, 1.0), GradParams()
    for pool in ((1, 1), (2, 2)):
        current = torch.randn(3, 2, channels, 4, 6) * 2
        grad_out = torch.randn(3, 2, channels, 4 // pool[0], 6 // pool[1])
        assert_equal_scans("cpu", current, torch.ones(channels), 3, pool, grad_out, neuron, grad, True)


@pytest.mark.slow
def test_a_row_of_windows_too_long_for_16_bits():
    """A pool over a whole map of many channels makes one block of 131,072 neurons."""
    neuron, grad = SRMParams(5.0, 3.0, 1.0), GradParams()
    current, grad_out = torch.randn(3, 1, 128, 32, 32).double() * 2, torch.randn(3, 1, 128, 1, 1).double()
    threshold = torch.ones(128).double()
    assert_equal_scans("cpu", current, threshold, 3, (32, 32), grad_out, neuron, grad, True)


@BOTH
@pytest.mark.parametrize("layout", ["expanded", "batch first", "sliced", "scalar"])
def test_gradients_and_thresholds_of_any_layout(kind, layout):
    """What `sum`, a batch-first reader or a slice hand back need not lie in memory as the spikes do."""
    current = torch.randn(6, 3, 4, 1, 1).double() * 3
    grad_out = {
        "expanded": torch.randn(1, 3, 4, 1, 1).expand(6, -1, -1, -1, -1),
        "batch first": torch.randn(3, 6, 4, 1, 1).transpose(0, 1),
        "sliced": torch.randn(12, 6, 4, 1, 1)[::2, ::2],
        "scalar": torch.ones(()).expand(6, 3, 4, 1, 1),
    }[layout].double()
    for threshold in (torch.rand(8).double()[::2] + 0.5, torch.tensor([0.7]).double().expand(4)):
        neuron, grad = SRMParams(), GradParams()
        assert_equal_scans(kind, current, threshold, 6, (1, 1), grad_out, neuron, grad, True)


def test_a_chunk_does_not_write_into_the_next():
    """The list of events is filled eight at a time: what lies beyond the last must not be another's."""
    neuron, grad = SRMParams(5.0, 3.0, 1.0), GradParams()
    current = torch.zeros(4, 130, 1, 1, 9)
    current[:, ::2] = 100.0  # a full chunk beside an empty one
    grad_out = torch.randn(4, 130, 1, 1, 9)
    assert_equal_scans("cpu", current, torch.ones(1), 4, (1, 1), grad_out, neuron, grad, True)


def test_number_of_threads_changes_no_bit():
    current, grad_out = torch.randn(5, 8, 6, 10, 10) * 2, torch.randn(5, 8, 6, 5, 5)
    args = (current, torch.ones(6), 5, (2, 2), grad_out, SRMParams(), GradParams(), True)
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(by_kernels("cpu", *args))
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_threads_of_python_do_not_disturb_each_other():
    currents = [torch.randn(5, 8, 6, 10, 10) * 2 for _ in range(4)]
    constants = scan._constants(SRMParams(), GradParams())
    expected = [cpu.scan_forward(c, torch.ones(6), 5, (2, 2), constants, True, True, True) for c in currents]
    wrong = []

    def work(current, good):
        for _ in range(20):
            got = cpu.scan_forward(current, torch.ones(6), 5, (2, 2), constants, True, True, True)
            wrong.extend(not torch.equal(a, b) for a, b in zip(got, good, strict=True))

    workers = [threading.Thread(target=work, args=pair) for pair in zip(currents, expected, strict=True)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(wrong) == 4 * 20 * 6 and not any(wrong)


# the ops of torch.library


@pytest.mark.parametrize("trim", [True, False], ids=["trimmed", "fixed size"])
@pytest.mark.parametrize("needs_t", [True, False], ids=["inner layer", "first layer"])
def test_opcheck(trim, needs_t, monkeypatch):
    monkeypatch.setattr(cpu.np, "empty", np.zeros)  # opcheck compares what no event is written to
    constants = scan._constants(SRMParams(), GradParams())
    current = torch.randn(5 if needs_t else 1, 3, 6, 4, 4) * 2
    forward = (current, torch.ones(6), 5, (2, 2), constants, True, needs_t, trim)
    opcheck(torch.ops.snn.scan_forward.default, forward)
    out, *tape = torch.ops.snn.scan_forward(*forward)
    backward = (torch.randn_like(out), tape, (2, 2), constants, len(current), 5 if needs_t else 0)
    opcheck(torch.ops.snn.scan_backward.default, backward)


def test_other_devices_are_refused():
    x, weight = torch.zeros(2, 1, 3, device="meta"), torch.zeros(4, 3, device="meta")
    with pytest.raises(ValueError, match="x must be on a CPU or a CUDA GPU, got meta"):
        srm_linear(x, weight, SRMParams(), GradParams())


# memory: what backward keeps


def saved_by(function, *apart):
    """Bytes of the tensors that autograd saves while `function` runs, those of `apart` not counted."""
    known, saved = {tensor.untyped_storage().data_ptr() for tensor in apart}, []

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in known:
            saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function()
    return out, sum(tensor.numel() * tensor.itemsize for tensor in saved)


@pytest.mark.parametrize("pool", [1, 2])
def test_at_most_three_bytes_per_neuron_and_step_at_a_tenth(pool):
    """Two layers, so that an input is spikes too; the published code keeps 16 bytes."""
    torch.manual_seed(0)
    neuron, grad = SRMParams(threshold=1.0), GradParams()
    x = (torch.rand(6, 8, 4, 20, 20) < 0.1).float().requires_grad_()
    weights = [torch.randn(16, c, 3, 3, requires_grad=True) for c in (4, 16)]
    thresholds = [torch.full((16,), 0.9), torch.full((16,), 1.8 if pool == 1 else 1.0)]

    def run():
        hidden = srm_conv2d(x, weights[0], neuron, grad, threshold=thresholds[0], padding=1, pool=pool)
        return hidden, srm_conv2d(hidden, weights[1], neuron, grad, threshold=thresholds[1], padding=1)

    (hidden, out), size = saved_by(run, *weights)
    assert 0.08 < hidden.mean() < 0.12 and 0.08 < out.mean() < 0.12
    neurons_and_steps = hidden.numel() * pool**2 + out.numel()
    assert size / neurons_and_steps <= 3
    assert (size / neurons_and_steps) < 1.9  # as measured: 1.5 without a pool, 1.8 with one


def test_silent_neurons_keep_next_to_nothing():
    x = torch.zeros(6, 8, 4, 20, 20, requires_grad=True)
    weight = torch.randn(16, 4, 3, 3, requires_grad=True)
    out, size = saved_by(lambda: srm_conv2d(x, weight, SRMParams(), GradParams(), padding=1), weight)
    assert size / out.numel() < 0.1


def test_the_saved_input_is_restored_to_the_value():
    """The gradient of the weight reads the input: packed or not, it is the same."""
    torch.manual_seed(0)
    x = torch.randn(5, 4, 3, 9, 9) * (torch.rand(5, 4, 3, 9, 9) < 0.1)  # real values, mostly 0: packed
    weight = torch.randn(6, 3, 3, 3, requires_grad=True)
    spikes = srm_conv2d(x, weight, SRMParams(), GradParams())
    saved = spikes.grad_fn.saved_tensors
    assert all(tensor.data_ptr() != x.data_ptr() for tensor in saved)
    assert torch.equal(restore(saved[6:], x.shape, x.stride()), x)


# no work done twice


def test_first_layer_convolves_once_forward_and_backward(monkeypatch):
    """An image shown at every step: one convolution, one weight gradient, and none for the input."""
    calls = []
    for name in ("conv2d", "convolution_backward"):
        owner = F if name == "conv2d" else torch.ops.aten
        real = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args, real=real, name=name: calls.append((name, args)) or real(*args)
        )
    torch.manual_seed(0)
    image, weight = torch.rand(1, 3, 2, 8, 8).double(), torch.randn(5, 2, 3, 3).double()
    results = []
    for x in (image.expand(6, -1, -1, -1, -1), image.repeat(6, 1, 1, 1, 1)):
        leaf = weight.clone().requires_grad_()
        spikes = srm_conv2d(x, leaf, SRMParams(), GradParams(), padding=1)
        spikes.backward(torch.linspace(-1, 1, spikes.numel()).double().view_as(spikes))
        results.append((spikes.detach(), leaf.grad))
    sizes = [(name, len(args[0])) for name, args in calls]
    assert sizes == [("conv2d", 3), ("convolution_backward", 3), ("conv2d", 18), ("convolution_backward", 18)]
    assert all(args[-1] == (False, True, False) for name, args in calls if name == "convolution_backward")
    assert torch.equal(results[0][0], results[1][0]) and results[0][0].sum() > 0
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", ["conv", "linear"])
def test_repeated_input_that_wants_a_gradient(op):
    torch.manual_seed(0)
    shape, weight = ((1, 3, 2, 8, 8), (5, 2, 3, 3)) if op == "conv" else ((1, 3, 7), (5, 7))
    apply = srm_conv2d if op == "conv" else srm_linear
    image, weight = torch.rand(shape, dtype=torch.float64), torch.randn(weight, dtype=torch.float64)
    grads = []
    for repeat in (lambda x: x.expand(6, *shape[1:]), lambda x: x.repeat(6, *(1,) * (len(shape) - 1))):
        leaf, own = image.clone().requires_grad_(), weight.clone().requires_grad_()
        spikes = apply(repeat(leaf), own, SRMParams(), GradParams())
        spikes.backward(torch.linspace(-1, 1, spikes.numel(), dtype=torch.float64).view_as(spikes))
        grads.append((leaf.grad, own.grad))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        assert ours.abs().sum() > 0


@pytest.mark.parametrize("pool", [2, (2, 1), (3, 4)], ids=str)
def test_pool_within_is_the_pool_after(pool):
    torch.manual_seed(0)
    results = []
    for within in (True, False):
        torch.manual_seed(0)
        x = (torch.rand(7, 2, 3, 12, 12, dtype=torch.float64) < 0.3).double().requires_grad_()
        weight = torch.randn(4, 3, 3, 3, dtype=torch.float64, requires_grad=True)
        out = srm_conv2d(x, weight, SRMParams(), GradParams(), padding=1, pool=pool if within else 1)
        out = out if within else spike_avg_pool2d(out, pool)
        out.backward(torch.randn(out.shape, dtype=torch.float64))
        results.append((out.detach(), x.grad, weight.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        assert ours.abs().sum() > 0


def test_pool_within_must_divide_the_map():
    x, weight = torch.zeros(1, 1, 1, 5, 6), torch.zeros(1, 1, 1, 1)
    with pytest.raises(ValueError, match="pool must divide the map of side 5, got"):
        srm_conv2d(x, weight, SRMParams(), GradParams(), pool=2)
    with pytest.raises(ValueError, match="pool must be one or two integers of at least 1, got 0"):
        srm_conv2d(x, weight, SRMParams(), GradParams(), pool=0)


# lower precision


def test_autocast_convolves_in_bfloat16_and_scans_in_float32(monkeypatch):
    dtypes = []
    real = F.conv2d
    monkeypatch.setattr(F, "conv2d", lambda *args: dtypes.append(args[0].dtype) or real(*args))
    x = (torch.rand(5, 2, 3, 8, 8) < 0.4).float().requires_grad_()
    weight = torch.randn(4, 3, 3, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        spikes = srm_conv2d(x, weight, SRMParams(), GradParams())
    assert dtypes == [torch.bfloat16] and spikes.dtype == torch.float32
    spikes.sum().backward()
    assert x.grad.dtype == weight.grad.dtype == torch.float32
    plain = weight.detach().clone().requires_grad_()
    (srm_conv2d(x.detach(), plain, SRMParams(), GradParams())).sum().backward()
    assert F.cosine_similarity(plain.grad.flatten(), weight.grad.flatten(), dim=0) > 0.95


# compilation


@pytest.mark.slow
def test_the_time_of_compilation_is_told_once(tmp_path):
    """The first process compiles and says so; the next loads what it left."""
    program = """
import logging, sys, torch
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
from snn.neuron import GradParams, SRMParams
from snn.ops import srm_linear
for _ in range(2):
    srm_linear(torch.ones(2, 1, 3), torch.ones(4, 3), SRMParams(), GradParams())
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
        ).stdout
        for _ in range(2)
    ]
    assert outputs[0].count("compiled the CPU kernel forward in ") == 1
    assert "compiled" not in outputs[1]


def test_damaged_machine_code_is_named(monkeypatch):
    def broken(*arguments):
        raise EOFError("Ran out of input")

    broken.overloads, broken.stats = {}, SimpleNamespace(cache_path="/somewhere")
    with pytest.raises(RuntimeError, match=r"compiled kernels in /somewhere are damaged: delete \*.nbi and"):
        cpu_kernel.launch(broken)


def test_without_a_place_for_its_cache_a_kernel_still_works(monkeypatch):
    def refuse(*args, **kwargs):
        if kwargs.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return real(*args, **kwargs)

    real = cpu_kernel.numba.njit
    monkeypatch.setattr(cpu_kernel.numba, "njit", refuse)

    def double(x):
        for i in range(len(x)):
            x[i] *= 2

    x = np.ones(3)
    cpu_kernel.launch(cpu_kernel.cpu_kernel(double), x)
    assert x.tolist() == [2, 2, 2]
