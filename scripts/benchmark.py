"""Measure what a training step costs: `python scripts/benchmark.py [--compile] [--device cuda]`.

Beside each network's step stands its *floor*: the same convolutions and matrix products alone, forward and
backward, over all T * N images, in torch's own layout, timed in turn with the step. A step is all of it:
encoding, network, loss, backward, optimizer. Peers (snnTorch, spikingjelly) run the same sizes with their
LIF neurons where they are installed: `pip install -e ".[bench]"`.
"""

import argparse
import ctypes
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from importlib import util
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from snn.calibrate import Calibration
from snn.device import compile_network
from snn.encoding import Direct
from snn.monitor import SpikeMonitor
from snn.networks import SRMNetwork
from snn.networks.architecture import Conv, Linear, Pool, parse
from snn.networks.heads import DecoupledHead
from snn.neuron import GradParams, SRMParams
from snn.ops.srm.reference import scan_backward as reference_backward
from snn.ops.srm.reference import scan_forward as reference_forward
from snn.ops.srm.scan import scan_backward, scan_forward
from snn.origin import machine
from snn.trainer import parameter_groups

NEURON, GRAD = SRMParams(), GradParams()
VGG = "128C3x2-P2-256C3x3-P2-512C3x3-P2-2048x2"
# layers, channels and size of the image, T, batch on a CPU and on a GPU
NETWORKS: dict[str, tuple[str, int, int, int, int, int]] = {
    "15C5p0-P2-40C5p0-P2-300": ("15C5p0-P2-40C5p0-P2-300", 1, 28, 5, 50, 50),
    "32C5-P2-64C5-P2-1024": ("32C5-P2-64C5-P2-1024", 1, 28, 5, 50, 50),
    "vgg": (VGG, 3, 32, 12, 4, 50),
}
NUM_CLASSES = 10
WARMUP, REPEATS = 5, 15
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
STEPS, BATCHES = [1, 2, 4, 8, 16, 32, 64], [8, 16, 32, 64, 128]


def main() -> int:
    """Run what the command line asks for; print tables, and write everything to a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--skip", nargs="+", default=[], choices=["peers", "growth", "scan"])
    parser.add_argument("--compile", action="store_true", help="the step too with trainer.compile=true")
    parser.add_argument("--json", type=Path, default=Path("benchmark.json"), help="where the figures go")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("error: --device cuda: there is no CUDA GPU here", file=sys.stderr)
        return 1
    device = torch.device(args.device)
    keep_memory()
    report: dict[str, Any] = {
        "machine": machine(device, "torch", "numba", "triton", "snntorch", "spikingjelly")
    }
    print(*(f"{key}: {value}" for key, value in report["machine"].items()), sep="\n")
    if "scan" not in args.skip:
        report["scan"] = scan_alone(device)
        show("the neuron's scan alone, forward and backward", [report["scan"]])
    report["networks"] = [
        network_row(name, device, "peers" not in args.skip, args.compile) for name in args.networks
    ]
    show("a training step", report["networks"])
    if "growth" not in args.skip:
        report["steps"] = growth("T", STEPS, device)
        report["batch"] = growth("batch", BATCHES, device)
        show("the scan against T (batch 10)", report["steps"])
        show("the scan against the batch (T = 5)", report["batch"])
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nwritten to {args.json}")
    return 0


def keep_memory() -> None:
    """Let malloc give no memory back to the system, where it is glibc's; else do nothing.

    A training that has run for a while takes its memory from what it freed before. A step that is timed next
    to other things would have new pages mapped, or not, by what those have freed: up to half of its time.
    Blocks of 32 MiB and more, which malloc never keeps, are still mapped anew each time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 2**25)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def timed(
    functions: dict[str, Callable[[], Any]], device: torch.device, repeats: int | None = None
) -> dict[str, float]:
    """Call the functions in turn, after a warm-up; return the median seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(WARMUP + (repeats or REPEATS)):
        for name, function in functions.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            function()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= WARMUP:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def network_row(name: str, device: torch.device, peers: bool, compiled: bool) -> dict[str, Any]:
    """Measure the training step of one network; also `compiled` as trainer.compile=true does."""
    layers, channels, size, steps, *batches = NETWORKS[name]
    batch = batches[device.type == "cuda"]
    images, labels = digits(batch, channels, size, device)
    network, encode = make_network(layers, channels, size, steps, images)
    functions = {
        "step": training_step(network, lambda: network(encode(images, labels, 0)), labels),
        "floor": floor(layers, channels, size, steps * batch, device),
    }
    if compiled:
        other, _ = make_network(layers, channels, size, steps, images)
        compile_network(other)
        functions["compiled"] = training_step(other, lambda: other(encode(images, labels, 0)), labels)
    if peers:
        for peer, make in (("snntorch", snntorch_network), ("spikingjelly", spikingjelly_network)):
            if util.find_spec(peer):
                torch.manual_seed(0)
                functions[peer] = peer_step(make(layers, channels, size).to(device), images, steps, labels)
    seconds = timed(functions, device, repeats=5 if name == "vgg" and device.type == "cpu" else None)
    row: dict[str, Any] = {"network": name, "T": steps, "batch": batch}
    row |= {"step ms": seconds["step"] * 1e3, "floor ms": seconds["floor"] * 1e3}
    row |= {"step / floor": seconds["step"] / seconds["floor"], "samples/s": batch / seconds["step"]}
    if compiled:
        row["compiled / floor"] = seconds["compiled"] / seconds["floor"]
    for peer in functions.keys() - {"step", "floor", "compiled"}:
        row[f"{peer} / floor"] = seconds[peer] / seconds["floor"]
        row[f"times {peer}"] = seconds[peer] / seconds["step"]
    with SpikeMonitor(network) as monitor, torch.no_grad():
        network(encode(images, labels, 0))
    row["spike rate after"] = statistics.mean(monitor.rates().values())
    return row | saved_bytes(layers, channels, size, steps, images)


def digits(batch: int, channels: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return real handwritten digits, enlarged: images `[N, C, size, size]` in [0, 1], and labels."""
    data = load_digits()
    images = torch.from_numpy(data.images[:batch]).float()[:, None] / 16
    images = F.interpolate(images, size=(size, size), mode="bilinear").expand(-1, channels, -1, -1)
    return images.contiguous().to(device), torch.from_numpy(data.target[:batch]).to(device)


def make_network(
    layers: str, channels: int, size: int, steps: int, images: Tensor, standardized: bool = True
) -> tuple[SRMNetwork, Direct]:
    """Return a calibrated network, with the settings of `configs/`, and its encoding."""
    torch.manual_seed(0)
    network = SRMNetwork(
        layers,
        channels,
        size,
        standardized,
        neuron=NEURON,
        grad=GRAD,
        head=lambda shape: DecoupledHead(shape, NUM_CLASSES, decouple_scale=0.1, sign=True, sign_clip=1.0),
    ).to(images.device)
    encode = Direct(steps, [float(images.mean())] * channels, [float(images.std())] * channels)
    Calibration(0.6, len(images))(network, encode(images, images, 0))
    return network, encode


def training_step(network: nn.Module, run: Callable[[], Tensor], labels: Tensor) -> Callable[[], None]:
    """Return a function that trains `network` for one step on the logits that `run` gives."""
    optimizer = torch.optim.AdamW(parameter_groups(network, None), lr=1e-3, fused=True)

    def step() -> None:
        torch.autograd.backward(F.cross_entropy(run(), labels))
        optimizer.step()
        optimizer.zero_grad()

    return step


def floor(layers: str, channels: int, size: int, images: int, device: torch.device) -> Callable[[], None]:
    """Return a function that does the convolutions and matrix products of a network, and nothing else."""
    shape: tuple[int, ...] = (channels, size, size)
    work = []
    for _, spec in [*parse(layers), ("head", Linear(NUM_CLASSES))]:
        out_shape = spec.out_shape(shape)
        if isinstance(spec, Conv):
            x = torch.rand(images, *shape, device=device)
            weight = torch.randn(
                spec.channels, shape[0] // spec.groups, spec.kernel, spec.kernel, device=device
            )
            work.append((spec, x.requires_grad_(bool(work)), weight.requires_grad_()))
        elif isinstance(spec, Linear):
            rows = images if spec.neurons != NUM_CLASSES else 1
            x = torch.rand(rows, math.prod(shape), device=device)
            weight = torch.randn(spec.neurons, math.prod(shape), device=device)
            work.append((spec, x.requires_grad_(bool(work)), weight.requires_grad_()))
        shape = out_shape
    grads = [torch.rand_like(forward(*item)) for item in work]

    def run() -> None:
        for item, grad in zip(work, grads, strict=True):
            _, x, weight = item
            wanted = [tensor for tensor in (x, weight) if tensor.requires_grad]
            torch.autograd.grad(forward(*item), wanted, grad)

    return run


def forward(spec: Conv | Linear, x: Tensor, weight: Tensor) -> Tensor:
    """Do the product of one layer."""
    if isinstance(spec, Conv):
        return F.conv2d(x, weight, None, spec.stride, spec.padding, spec.dilation, spec.groups)
    return x @ weight.T


def saved_bytes(layers: str, channels: int, size: int, steps: int, images: Tensor) -> dict[str, float]:
    """Return what backward keeps of a network's layers per neuron and step, and the spike rate.

    Counted are all tensors that autograd saves, each memory once, except the weights and the images.
    """
    network, encode = make_network(layers, channels, size, steps, images, standardized=False)
    x = encode(images, images, 0)
    kept: dict[int, int] = {}
    apart = {tensor.untyped_storage().data_ptr() for tensor in (x, *network.parameters())}

    def pack(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in apart:
            kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    with SpikeMonitor(network) as monitor, torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        out = network(x)  # kept alive: what it has saved must not be freed and counted twice
    srm = [
        name
        for (_, spec), name in zip(parse(layers), network.shapes, strict=True)
        if not isinstance(spec, Pool)
    ]
    neurons = sum(math.prod(network.shapes[name]) for name in srm)
    rates = monitor.rates()
    del out
    return {
        "saved bytes per neuron-step": sum(kept.values()) / (neurons * steps * len(images)),
        "spike rate": statistics.mean(rates.values()),
    }


def scan_alone(device: torch.device) -> dict[str, Any]:
    """Time reference and kernels at [T=5, N=50, 15, 24, 24], both signals wanted at every step."""
    current, threshold = random_current(5, 50, device)
    grad_out = torch.randn_like(current)

    def reference() -> Any:
        spikes = reference_forward(current, threshold[:, None, None], NEURON, GRAD)
        return reference_backward(grad_out, *spikes, NEURON, GRAD)

    def kernels() -> Any:
        return scan(current, threshold, grad_out)

    seconds = timed({"reference": reference, "kernels": kernels}, device)
    rate = float(reference_forward(current, threshold[:, None, None], NEURON, GRAD)[0].mean())
    return {
        "reference ms": seconds["reference"] * 1e3,
        "kernels ms": seconds["kernels"] * 1e3,
        "reference / kernels": seconds["reference"] / seconds["kernels"],
        "spike rate": rate,
    }


def scan(current: Tensor, threshold: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    """Run both scans, as an inner layer does."""
    steps = len(current)
    _, tape = scan_forward(current, threshold, steps, (1, 1), NEURON, GRAD, needs_w=True, needs_t=True)
    return scan_backward(grad_out, tape, (1, 1), NEURON, GRAD, rows_w=steps, rows_t=steps)


def random_current(steps: int, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return currents `[T, N, 15, 24, 24]` that make some 10 % of the neurons spike, and thresholds."""
    generator = torch.Generator().manual_seed(0)
    current = torch.randn(steps, batch, 24, 24, 15, generator=generator).permute(0, 1, 4, 2, 3)
    return current.to(device), torch.full((15,), 0.45, device=device)


def growth(what: str, values: list[int], device: torch.device) -> list[dict[str, float]]:
    """Time the kernels against T or the batch; `slope` is the time per unit since the row before."""
    rows: list[dict[str, float]] = []
    functions = {}
    for value in values:
        current, threshold = random_current(*((value, 10) if what == "T" else (5, value)), device)
        grad_out = torch.randn_like(current)
        functions[str(value)] = lambda c=current, t=threshold, g=grad_out: scan(c, t, g)
    seconds = timed(functions, device)
    for value in values:
        row = {what: value, "ms": seconds[str(value)] * 1e3}
        row["ms per unit"] = row["ms"] / value
        if rows:
            row["slope"] = (row["ms"] - rows[-1]["ms"]) / (value - rows[-1][what])
        rows.append(row)
    return rows


def snntorch_network(layers: str, channels: int, size: int) -> nn.Module:
    """Return the same sizes with snnTorch's leaky neurons, to be called with one step after another."""
    import snntorch

    return nn.Sequential(
        *peer_layers(layers, channels, size, nn, lambda: snntorch.Leaky(beta=0.8, init_hidden=True))
    )


def spikingjelly_network(layers: str, channels: int, size: int) -> nn.Module:
    """Return the same sizes with spikingjelly's LIF neurons, all steps at once."""
    from spikingjelly.activation_based import functional, layer, neuron

    network = nn.Sequential(*peer_layers(layers, channels, size, layer, lambda: neuron.LIFNode(tau=5.0)))
    functional.set_step_mode(network, "m")
    return network


def peer_layers(
    layers: str, channels: int, size: int, library: Any, neuron: Callable[[], nn.Module]
) -> list[nn.Module]:
    """Return the layers of an architecture string, made of a peer's modules, with a linear readout."""
    shape: tuple[int, ...] = (channels, size, size)
    modules: list[nn.Module] = []
    for _, spec in parse(layers):
        out_shape = spec.out_shape(shape)
        if isinstance(spec, Conv):
            conv = library.Conv2d(shape[0], spec.channels, spec.kernel, spec.stride, spec.padding, bias=False)
            modules += [conv, neuron()]
        elif isinstance(spec, Pool):
            modules.append(library.AvgPool2d(spec.kernel))
        elif isinstance(spec, Linear):
            if len(shape) == 3:
                modules.append(library.Flatten())
            modules += [library.Linear(math.prod(shape), spec.neurons, bias=False), neuron()]
        shape = out_shape
    return [*modules, library.Linear(math.prod(shape), NUM_CLASSES)]


def peer_step(network: nn.Module, images: Tensor, steps: int, labels: Tensor) -> Callable[[], None]:
    """Return a training step of a peer on the mean of its logits over the steps, the same input at each."""
    multi_step = any(hasattr(module, "step_mode") for module in network.modules())

    def run() -> Tensor:
        if multi_step:
            from spikingjelly.activation_based import functional

            functional.reset_net(network)
            logits: Tensor = network(images.expand(steps, *images.shape)).mean(0)
            return logits
        from snntorch import utils

        utils.reset(network)
        return torch.stack([network(images) for _ in range(steps)]).mean(0)

    return training_step(network, run, labels)


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Print rows as a table."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[text(row.get(key, "")) for key in keys] for row in rows]
    widths = [max(len(line[i]) for line in [keys, *cells]) for i in range(len(keys))]
    print(f"\n{title}")
    for line in [keys, *cells]:
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)))


def text(value: Any) -> str:
    """Write a figure with three digits or more."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


if __name__ == "__main__":
    sys.exit(main())
