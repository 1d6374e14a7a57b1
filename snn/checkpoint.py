"""Checkpoints: written whole or not at all, known to be whole when read, read without running anything.

A checkpoint is a zip as `torch.save` writes it, and `torch.load` reads it. The comment that ends the zip
holds the SHA-256 of every byte before it, so that a changed, missing or added byte is seen, wherever it is.
"""

import copy
import hashlib
import io
import logging
import os
import platform
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

log = logging.getLogger(__name__)

KEYS = {
    "config",
    "network",
    "optimizer",
    "scheduler",
    "rng",
    "epoch",
    "step",
    "progress",
    "best",
    "best_on_test",
    "seconds",
    "versions",
}
RESUMABLE = ("last.ckpt", "previous.ckpt", "best.ckpt")  # of a run folder, from which it can go on
ZIP_END = b"PK\x05\x06"  # the record that ends a zip, 22 bytes, of which the last two count the comment's
MARK = b"sha256:"
SEAL_BYTES = len(MARK) + 64


def save_checkpoint(path: Path, state: dict[str, Any], previous: Path | None = None) -> None:
    """Write `state` to `path` atomically: beside it, flushed to the disk, then renamed over it.

    Args:
        path: Checkpoint file.
        state: Plain containers, numbers, strings and tensors, under the keys `KEYS` (the versions are added
            here).
        previous: Where what `path` held until now is kept, once the new one is whole; a damaged one is not.

    Raises:
        OSError: It could not be written; what `path` and `previous` held is still there.
    """
    buffer = io.BytesIO()
    torch.save({**state, "versions": versions()}, buffer)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.write(_sealed(buffer.getvalue()))
            file.flush()
            os.fsync(file.fileno())
        if previous is not None and path.exists() and _is_whole(path.read_bytes()):
            os.replace(path, previous)
        os.replace(beside, path)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror}; the files of before are untouched") from error
    finally:
        beside.unlink(missing_ok=True)
    _sync_folder(path.parent)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU; only tensors and plain containers are ever unpickled.

    Raises:
        ValueError: The file is damaged, or no checkpoint of this project.
    """
    content = path.read_bytes()
    if not _is_whole(content):
        raise ValueError(f"{path} is damaged, or no checkpoint: it does not end with its own checksum")
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  what is no checkpoint fails in many ways; the cause is kept
        raise ValueError(f"{path} is no checkpoint of this project") from error
    groups = ("config", "network", "optimizer", "scheduler", "rng", "best")
    if not (
        isinstance(state, dict)
        and set(state) >= KEYS
        and all(isinstance(state[group], dict) for group in groups)
    ):
        raise ValueError(f"{path} is no checkpoint of this project")
    return state


def find_checkpoint(path: str, names: tuple[str, ...] = RESUMABLE) -> Path:
    """Return the checkpoint that `path` means: the file itself, or the first of `names` in a run folder.

    Raises:
        FileNotFoundError: There is none.
    """
    found = Path(path).expanduser()
    files = [found / name for name in names] if found.is_dir() else [found]
    for file in files:
        if file.is_file():
            return file
    raise FileNotFoundError(f"there is no checkpoint {files[0]}")


def newest_checkpoint(paths: list[Path]) -> dict[str, Any] | None:
    """Return the newest whole checkpoint of `paths`; None if none of them is there.

    The first is the newest as a rule, and the others are read only if it is damaged or missing. A damaged
    one is named in a warning.

    Raises:
        ValueError: All that are there are damaged.
    """
    states: list[tuple[Path, dict[str, Any]]] = []
    damage: list[str] = []
    for path in filter(Path.is_file, paths):
        try:
            states.append((path, load_checkpoint(path)))
        except ValueError as error:
            damage.append(str(error))
        if states and path == paths[0]:
            break
    if not states:
        if damage:
            raise ValueError("; ".join(damage))
        return None
    path, state = max(states, key=lambda found: found[1]["step"])
    for text in damage:
        log.warning("warning: %s; going on from %s, step %d", text, path, state["step"])
    return state


def load_weights(network: nn.Module, weights: dict[str, Any], path: object) -> None:
    """Load `weights` into `network`, all of them.

    Raises:
        ValueError: They are another network's; one line names the first tensor that does not fit.
    """
    own = {name: list(value.shape) for name, value in network.state_dict().items()}
    given = {name: list(getattr(value, "shape", ())) for name, value in weights.items()}
    here, there = "the network that its config describes", "the checkpoint"
    for name in sorted(own.keys() & given.keys()):
        if own[name] != given[name]:
            raise ValueError(f"{path}: {name} has shape {given[name]} in {there}, {own[name]} in {here}")
    for name in sorted(own.keys() ^ given.keys()):
        has, lacks = (here, there) if name in own else (there, here)
        raise ValueError(f"{path}: {name}, of shape {(own | given)[name]} in {has}, is missing in {lacks}")
    network.load_state_dict(weights)


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load `state` into a fresh `optimizer`, if it is one that this could have.

    torch does not look, and its fused optimizers read past the end of a tensor that is too small.

    Raises:
        ValueError: It is not; one line names the first value that does not fit.
    """
    stepped = copy.deepcopy(optimizer)
    for parameter in (p for group in stepped.param_groups for p in group["params"]):
        parameter.grad = torch.zeros_like(parameter)
    stepped.step()
    own = stepped.state_dict()
    held, groups = state.get("state"), state.get("param_groups")
    if not (isinstance(held, dict) and isinstance(groups, list) and len(groups) == len(own["param_groups"])):
        raise ValueError("the checkpoint: optimizer is none of torch's, or of other groups")
    for key, values in held.items():  # a parameter that had no gradient yet holds none
        require_like(values, own["state"].get(key), f"optimizer.state.{key}")
    for given, group in zip(groups, own["param_groups"], strict=True):
        require_like(given.get("lr"), group["lr"], "optimizer.lr")
        for key in given.keys() & group.keys() - {"lr"}:  # keys come and go with torch's versions
            if given[key] != group[key]:
                raise ValueError(
                    f"the checkpoint: optimizer.{key} is {given[key]}, in its config {group[key]}"
                )
    optimizer.load_state_dict(state)


def require_like(given: Any, own: Any, key: str) -> None:
    """Refuse what a checkpoint holds under `key` unless it is made as `own`: keys, kinds, shapes and dtypes.

    Raises:
        ValueError: One line that names the key.
    """
    made, wanted = _make(given), _make(own)
    if made != wanted:
        raise ValueError(f"the checkpoint: {key} must be {wanted}, got {made}")
    if isinstance(own, dict):
        for name in own:
            require_like(given[name], own[name], f"{key}.{name}")


def _make(value: Any) -> str:
    """Say in words how a value is made."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {list(value.shape)}"
    if isinstance(value, dict):
        return f"a group of {', '.join(sorted(map(str, value)))}"
    return "not a number" if value != value else type(value).__name__


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


def _sealed(content: bytes) -> bytes:
    """Return a zip without a comment as the same zip whose comment is the checksum of all before it."""
    assert content[-22:-18] == ZIP_END and content[-2:] == b"\0\0"
    content = content[:-2] + SEAL_BYTES.to_bytes(2, "little")
    return content + MARK + hashlib.sha256(content).hexdigest().encode()


def _is_whole(content: bytes) -> bool:
    body, seal = content[:-SEAL_BYTES], content[-SEAL_BYTES:]
    return seal == MARK + hashlib.sha256(body).hexdigest().encode()


def _sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)
