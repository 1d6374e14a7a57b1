"""Where a run computes."""

import torch


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
