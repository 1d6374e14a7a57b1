"""The roots of a config, typed: what a run and an evaluation are told, and which values are legal."""

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from snn.targets import require_known

# What may differ when a run is resumed: where it runs and when it pauses, never what it computes.
RESUME_KEYS = [
    "device",
    "data.root",
    "data.num_workers",
    "trainer.stop_after",
    "trainer.checkpoint_every_steps",
    "trainer.checkpoint_every_minutes",
]
AUTO = "auto"  # resume=auto: go on in hydra.run.dir, or start there

# What an evaluation may change of the data: where they lie and which are used, not what shaped the network.
EVAL_DATA_KEYS = ("root", "download", "val_fraction", "split_seed", "num_workers", "augment", "limit")


@dataclass
class TrainerConfig:
    """The training loop.

    Attributes:
        epochs: Horizon of the schedule, in epochs.
        stop_after: End once this epoch is done and leave a resumable run; null = never.
        batch_size: Samples per forward pass, in training and in evaluation.
        accumulate: Batches whose gradients make one optimizer step.
        clip_norm: Largest norm of the whole gradient; null = no clip.
        clamp_weights: Largest magnitude of a weight (not of gains, biases and affine); null = no clamp.
        norm_weight_decay: Weight decay of gains, biases and affine; null = the optimizer's.
        precision: fp32; or bf16: convolutions and matrix products in bfloat16, the neurons in float32.
        compile: Whether torch compiles the network.
        test_each_epoch: Whether the test set is evaluated after each epoch as well, and the best accuracy on
            it reported beside that of the epoch chosen on validation. Most papers report the former.
        checkpoint_every_steps: Optimizer steps after which last.ckpt is written, besides at the end of each
            epoch; null = never.
        checkpoint_every_minutes: Minutes after which it is; null = never.
        on_nonfinite: What a step does whose loss or gradient is not finite: stop the run, or skip the step.
        deterministic: Whether to use only algorithms that repeat to the bit, and to fail where there is none.
    """

    epochs: int
    stop_after: int | None
    batch_size: int
    accumulate: int
    clip_norm: float | None
    clamp_weights: float | None
    norm_weight_decay: float | None
    precision: str
    compile: bool
    test_each_epoch: bool
    checkpoint_every_steps: int | None
    checkpoint_every_minutes: float | None
    on_nonfinite: str
    deterministic: bool

    def __post_init__(self) -> None:
        for key in ("epochs", "stop_after", "batch_size", "accumulate", "checkpoint_every_steps"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"trainer.{key} must be at least 1, got {value}")
        for key in ("clip_norm", "clamp_weights", "checkpoint_every_minutes"):
            value = getattr(self, key)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"trainer.{key} must be null or finite and > 0, got {value}")
            if value is not None and value > 1e30:
                raise ValueError(f"trainer.{key} must be at most 1e30, which float32 holds, got {value}")
        decay = self.norm_weight_decay
        if decay is not None and not (math.isfinite(decay) and decay >= 0):
            raise ValueError(f"trainer.norm_weight_decay must be null or finite and >= 0, got {decay}")
        if self.precision not in ("fp32", "bf16"):
            raise ValueError(f"trainer.precision must be fp32 or bf16, got {self.precision!r}")
        if self.on_nonfinite not in ("stop", "skip"):
            raise ValueError(f"trainer.on_nonfinite must be stop or skip, got {self.on_nonfinite!r}")


@dataclass
class TrainConfig:
    """Root of a training config; every component but the trainer is a `_target_` node."""

    seed: int
    device: str
    name: str
    resume: str | None
    data: dict[str, Any]
    encoding: dict[str, Any]
    neuron: dict[str, Any]
    surrogate: dict[str, Any]
    network: dict[str, Any]
    head: dict[str, Any]
    loss: dict[str, Any]
    calibrate: dict[str, Any]
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    trainer: TrainerConfig

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must lie in [0, 2^63), got {self.seed}")
        if not re.fullmatch(r"[\w.+=-]+", self.name) or self.name.startswith("."):
            raise ValueError(
                f"name must be made of letters, digits and _ . + = - (it names a folder), got {self.name!r}"
            )


@dataclass
class EvalConfig:
    """Root of an evaluation config; null means: as in the checkpoint."""

    checkpoint: str
    device: str | None
    batch_size: int | None
    split: str
    steps: int | None
    data: dict[str, Any]

    def __post_init__(self) -> None:
        if self.split not in ("train", "val", "test"):
            raise ValueError(f"split must be train, val or test, got {self.split!r}")
        for key in ("batch_size", "steps"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{key} must be at least 1, got {value}")
        require_known("data", self.data, EVAL_DATA_KEYS)


def flat(node: Any, path: str = "") -> dict[str, Any]:
    """Return a config's values by dotted key."""
    if not isinstance(node, dict):
        return {path: node}
    return {
        k: v for name, value in node.items() for k, v in flat(value, f"{path}.{name}".lstrip(".")).items()
    }


def require_same(
    here: dict[str, Any], there: dict[str, Any], folder: object, given: Collection[str] | None = None
) -> None:
    """Raise ValueError if the config `here` would compute something else than that of the run in `folder`.

    Args:
        here: The config at hand.
        there: The config of the run.
        folder: Of the run, for the message.
        given: Of the keys that `there` lacks, those that count: a run of an earlier version lacks younger
            ones. None = all.
    """
    ours, theirs = flat(here), flat(there)
    keys = ours.keys() | theirs.keys() if given is None else theirs.keys() | (ours.keys() & set(given))
    for key in sorted(keys - {*RESUME_KEYS, "resume"}):
        if ours.get(key) != theirs.get(key):
            values = f"{key} is {theirs.get(key)!r} there, {ours.get(key)!r} here"
            raise ValueError(f"{folder} holds a run with other settings: {values}")
