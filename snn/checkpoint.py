"""Checkpoints: written whole or not at all, read without running anything."""

import os
import platform
from pathlib import Path
from typing import Any

import torch

KEYS = {"config", "network", "optimizer", "scheduler", "rng", "epoch", "step", "best", "seconds", "versions"}


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write `state` to `path` atomically: beside it, flushed to the disk, then renamed over it.

    Args:
        path: Checkpoint file.
        state: Plain containers, numbers, strings and tensors, under the keys `KEYS` (the versions are added
            here).
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            torch.save({**state, "versions": versions()}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU; only tensors and plain containers are ever unpickled.

    Raises:
        ValueError: The file is damaged, or no checkpoint of this project.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # noqa: BLE001  a damaged file fails in many ways; the cause is kept
        raise ValueError(f"{path} is damaged, or no checkpoint") from error
    groups = ("config", "network", "optimizer", "scheduler", "rng")
    if not (
        isinstance(state, dict)
        and set(state) >= KEYS
        and all(isinstance(state[group], dict) for group in groups)
    ):
        raise ValueError(f"{path} is no checkpoint of this project")
    return state


def find_checkpoint(path: str, default: str = "last.ckpt") -> Path:
    """Return the checkpoint that `path` means: the file itself, or `default` in a run folder.

    Raises:
        FileNotFoundError: There is none.
    """
    found = Path(path).expanduser()
    if found.is_dir():
        found = found / default
    if not found.is_file():
        raise FileNotFoundError(f"there is no checkpoint {found}")
    return found


def rng_state() -> dict[str, Any]:
    """Return the state of torch's global generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what :func:`rng_state` returned, for as many devices as are here."""
    torch.set_rng_state(state["cpu"])
    for device, value in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(value, device)


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    return {"python": platform.python_version(), "torch": str(torch.__version__)}
