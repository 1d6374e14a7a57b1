"""Where a network computes, and how."""

import logging
import os
import types
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

MOST_GRAPHS = 1024


def pick_device(name: str) -> torch.device:
    """Return the device that `name` means.

    Args:
        name: `auto` (a CUDA GPU if there is one, else the CPU), `cpu`, `cuda` or `cuda:N`.

    Raises:
        ValueError: No such device, here or anywhere.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={name}: there is no such CUDA GPU here ({torch.cuda.device_count()} found)")
    return device


def set_precision(network: Any, device: torch.device, precision: str) -> None:
    """Have `network` compute in `precision` from now on, in training and in evaluation.

    Args:
        network: On `device`; its output stays float32.
        device: Where it runs.
        precision: `fp32`; or `bf16`: convolutions and matrix products, forward and backward, in bfloat16, the
            neurons' scans and the weights in float32.
    """
    if precision == "fp32":
        return

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            output: Tensor = type(self).forward(self, x)
        return output.float()

    def teach(self: Any, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(device.type, torch.bfloat16):
            output, seen = type(self).teach(self, x, labels)
        return output.float(), seen.float()

    network.forward = types.MethodType(forward, network)  # methods, so that a copy runs its own weights
    network.teach = types.MethodType(teach, network)


def compile_network(network: Any) -> None:
    """Have `network` compiled by torch as a whole, at its next call; hooks on its layers still run.

    There is a graph for every batch size, in training and in evaluation, with hooks and without.
    """
    from torch._dynamo import config  # takes a second

    config.cache_size_limit = config.accumulated_cache_size_limit = MOST_GRAPHS
    config.skip_nnmodule_hook_guards = False  # a graph made without hooks is not for a network with some
    log.info("trainer.compile: the first steps compile the network, which takes up to a minute")
    for name in ("forward", "teach"):
        compiled = torch.compile(getattr(network, name).__func__, fullgraph=True, dynamic=False)
        setattr(network, name, types.MethodType(compiled, network))


def set_deterministic(wanted: bool) -> None:
    """Have torch use only algorithms that repeat to the bit, or whichever it likes.

    With such, an op that has none raises a RuntimeError which names it.
    """
    torch.use_deterministic_algorithms(wanted)
    torch.backends.cudnn.benchmark = False
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # asked for by torch, read by cuBLAS
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # our ops write all that they read
        log.info(
            "trainer.deterministic: equal bits for one seed, machine kind and number of threads (%d here); "
            "on a CPU it costs nothing, on a GPU convolutions may be slower",
            torch.get_num_threads(),
        )
