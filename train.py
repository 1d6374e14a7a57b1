"""Train a spiking network from a config: `python train.py [key=value ...]`."""

import logging
import os
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snn.config import build, build_network, check, overridden, run, settle, update, words_of_job
from snn.schema import AUTO, RESUME_KEYS, TrainConfig, flat, require_same
from snn.words import key_of

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from snn.run_folder import RunFolder

log = logging.getLogger("snn.train")


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (None: the process's own); return the exit code."""
    return run(job, TrainConfig, argv)


def job(cfg: "DictConfig") -> None:
    """Train in a fresh folder, or go on in that of `resume`; a job of a sweep that fails leaves error.txt."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from snn.run_folder import RunFolder

    hydra = HydraConfig.get()
    folder = RunFolder(hydra.runtime.output_dir)
    folder.require_writable()
    try:
        with folder.locked():
            config, checkpoint = prepare(cfg, folder)
            if folder.summary.exists():
                log.info("%s is finished: nothing to resume", folder.path)
                return
            train(config, checkpoint, folder, words_of_job())
    except Exception as error:
        if hydra.mode == RunMode.MULTIRUN:
            if folder.run_in_it() is None:  # a run in it has written its own, or is another one
                folder.write_error()
            log.error("job %s failed: %s", folder.path, error)
        raise


def prepare(cfg: "DictConfig", folder: "RunFolder") -> "tuple[TrainConfig, dict[str, Any] | None]":
    """Return the config of a job, and the checkpoint it goes on from; None starts afresh.

    Raises:
        ValueError: The folder holds a run where none is to be, or one of another config.
    """
    from snn.checkpoint import find_checkpoint, load_checkpoint, newest_checkpoint

    config = check(settle(cfg), TrainConfig)
    if config.resume is None:
        folder.require_fresh()
        return config, None
    if config.resume == AUTO:
        checkpoint = newest_checkpoint(folder.checkpoints)
        if checkpoint is None:
            if folder.summary.exists():
                given = map(key_of, words_of_job())
                require_same(asdict(config), folder.config(), folder.path, set(given))
            return replace(config, resume=None), None
        require_same(asdict(config), checkpoint["config"], folder.path)
        changes = {key: flat(asdict(config))[key] for key in RESUME_KEYS}
    else:
        found = find_checkpoint(config.resume)
        whole_folder = Path(config.resume).expanduser().is_dir()
        checkpoint = newest_checkpoint(folder.checkpoints if whole_folder else [found])
        assert checkpoint is not None
        changes = {"trainer.stop_after": None, **overridden(cfg, RESUME_KEYS)}
    if checkpoint["best"].get("epoch"):  # the end of the run needs that file
        best = load_checkpoint(find_checkpoint(str(folder.best)))
        require_same(checkpoint["config"], best["config"], folder.best)
    return check(update(checkpoint["config"], changes), TrainConfig), checkpoint


def train(
    config: TrainConfig, checkpoint: dict[str, Any] | None, folder: "RunFolder", overrides: list[str]
) -> None:
    """Build each object from its node of the config and what exists already, then fit.

    What needs no data comes first, so that a bad value ends the run before any are loaded.

    Args:
        config: The checked config.
        checkpoint: Where to go on; None starts afresh.
        folder: Where the run is written.
        overrides: Words of the command line.

    Raises:
        SystemExit: A signal ended the run: 143 for SIGTERM, 130 for SIGINT.
    """
    import torch

    from snn.device import compile_network, pick_device, set_deterministic, set_precision
    from snn.origin import code_diff, origin
    from snn.trainer import Trainer, parameter_groups, steps_per_epoch

    options = config.trainer
    torch.manual_seed(config.seed)
    device = pick_device(config.device)
    network, loss_fn = build_network(config)
    network.to(device)
    set_precision(network, device, options.precision)
    encode = build(config.encoding, seed=config.seed)
    calibrate = build(config.calibrate)
    optimizer = build(config.optimizer, params=parameter_groups(network, options.norm_weight_decay))
    data = build(config.data, batch_size=options.batch_size, seed=config.seed)
    images, _, index = data.train.first(1)
    encode(images, index, 0)  # an encoding that does not fit the data: nothing is written
    total_steps = options.epochs * steps_per_epoch(data.train, options.accumulate)
    scheduler = build(config.scheduler, optimizer=optimizer, total_steps=total_steps)

    def teach(x: Any, labels: Any) -> Any:
        return network.teach(x, labels)  # looked up at each call: it may be compiled later

    trainer = Trainer(
        network,
        encode,
        loss_fn,
        optimizer,
        scheduler,
        data,
        folder,
        asdict(config),
        teach=teach if network.head.teaches else None,
        device=device,
        epochs=options.epochs,
        stop_after=options.stop_after,
        accumulate=options.accumulate,
        clip_norm=options.clip_norm,
        clamp_weights=options.clamp_weights,
        test_each_epoch=options.test_each_epoch,
        checkpoint_every_steps=options.checkpoint_every_steps,
        checkpoint_every_minutes=options.checkpoint_every_minutes,
        skip_nonfinite=options.on_nonfinite == "skip",
    )
    if checkpoint is not None:
        trainer.load(checkpoint)
    start = {"overrides": overrides, "seed": config.seed, **origin(device)}
    with folder.recording(asdict(config), start, code_diff(), trainer.epoch, trainer.step):
        log.info("%s on %s, seed %d\n%s", folder.path, device, config.seed, network)
        set_deterministic(options.deterministic)
        if checkpoint is None:
            if data.split is not None:
                folder.write_split(data.split)
            images, _, index = (part.to(device) for part in data.train.first(calibrate.batch_size))
            calibrate(network, encode(images, index, 0))
        if options.compile:
            compile_network(network)
        finished = trainer.fit()
        if finished:
            script, word = Path(__file__).with_name("eval.py"), f"checkpoint={folder.best}"
        else:
            script, word = Path(__file__), f"resume={folder.path}"
        nearest = min(str(script), os.path.relpath(script), key=len)
        log.info("python %s %s", shlex.quote(nearest), shlex.quote(word))
    if trainer.ended_by is not None:
        raise SystemExit(128 + trainer.ended_by)


if __name__ == "__main__":
    sys.exit(main())
