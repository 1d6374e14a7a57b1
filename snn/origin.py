"""What a result was made with: the machine, the versions, and the state of the code."""

import os
import platform
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
CODE = ("snn", "configs", "train.py", "eval.py")  # what a result depends on
PACKAGES = ("torch", "torchvision", "numba", "triton", "numpy", "hydra-core")
GIT_SECONDS = 20.0


def origin(device: torch.device) -> dict[str, Any]:
    """Return the date, the machine, the versions, and the commit, where git tells it.

    `commit` is the code's, `changed` whether the code differs from it; both are missing outside git.
    """
    facts = {"date": now(), **machine(device, *PACKAGES)}
    commit = _git("rev-parse", "HEAD")
    if commit is not None:
        facts |= {"commit": commit.strip(), "changed": _is_changed()}
    return facts


def code_diff() -> str:
    """Return how the code differs from its commit, new files included; "" if it does not, or without git."""
    if not _is_changed():
        return ""
    changes = _git("-c", "diff.autoRefreshIndex=false", "diff", "HEAD", "--", *CODE) or ""
    for name in (_git("ls-files", "--others", "--exclude-standard", "--", *CODE) or "").splitlines():
        changes += _git("diff", "--no-index", "--", os.devnull, name) or ""
    return changes


def machine(device: torch.device, *packages: str) -> dict[str, Any]:
    """Return what a measurement on `device` depends on: processor, threads, and versions.

    Args:
        device: Where it is made; a GPU's name is added.
        packages: Whose versions are told, of those that are installed.
    """
    facts: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **_versions(packages),
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts


def now() -> str:
    """Return date and time."""
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"


def _is_changed() -> bool:
    return bool(_git("status", "--porcelain", "--", *CODE))


def _git(*words: str) -> str | None:
    """Return what git says of the code; None if there is no git, or it is no repository of git.

    Git must not write meanwhile: a run that is killed would leave a locked index behind.
    """
    command = ["git", "--no-optional-locks", "-C", str(ROOT), *words]
    try:
        done = subprocess.run(command, capture_output=True, timeout=GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    differs = "--no-index" in words and done.returncode == 1
    return done.stdout.decode(errors="replace") if done.returncode == 0 or differs else None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed, under just these names."""
    found = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
