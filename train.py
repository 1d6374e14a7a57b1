"""Train a spiking network from a config: `python train.py [key=value ...]`."""

import logging
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snn.config import build, build_network, check, overridden, run, settle, update, words_of_job
from snn.schema import RESUME_KEYS, TrainConfig

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

    from snn.checkpoint import find_checkpoint, load_checkpoint
    from snn.run_folder import RunFolder

    hydra = HydraConfig.get()
    folder = RunFolder(hydra.runtime.output_dir)
    config, checkpoint = check(settle(cfg), TrainConfig), None
    if config.resume is None:
        folder.require_fresh()
    elif folder.summary.exists():
        log.info("%s is finished: nothing to resume", folder.path)
        return
    else:
        find_checkpoint(str(folder.best))  # the end of the run needs it
        checkpoint = load_checkpoint(find_checkpoint(config.resume))
        changes = {"trainer.stop_after": None, **overridden(cfg, RESUME_KEYS)}
        config = check(update(checkpoint["config"], changes), TrainConfig)
    try:
        train(config, checkpoint, folder, words_of_job())
    except Exception as error:
        if hydra.mode == RunMode.MULTIRUN:
            folder.write_error()
            log.error("job %s failed: %s", folder.path, error)
        raise


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
    """
    import torch

    from snn.device import compile_layers, pick_device, set_precision
    from snn.trainer import Trainer, parameter_groups, steps_per_epoch

    torch.manual_seed(config.seed)
    device, options = pick_device(config.device), config.trainer
    network, loss_fn = build_network(config)
    network.to(device)
    set_precision(network, device, options.precision)
    encode = build(config.encoding, seed=config.seed)
    calibrate = build(config.calibrate)
    optimizer = build(config.optimizer, params=parameter_groups(network, options.norm_weight_decay))
    data = build(config.data, batch_size=options.batch_size, seed=config.seed)
    encode(*data.train.first(1), 0)  # an encoding that does not fit the data: no folder is made
    total_steps = options.epochs * steps_per_epoch(data.train, options.accumulate)
    scheduler = build(config.scheduler, optimizer=optimizer, total_steps=total_steps)
    trainer = Trainer(
        network,
        encode,
        loss_fn,
        optimizer,
        scheduler,
        data,
        folder,
        asdict(config),
        teach=network.teach if network.head.teaches else None,
        device=device,
        epochs=options.epochs,
        stop_after=options.stop_after,
        accumulate=options.accumulate,
        clip_norm=options.clip_norm,
        clamp_weights=options.clamp_weights,
        test_each_epoch=options.test_each_epoch,
    )
    if checkpoint is not None:
        trainer.load(checkpoint)
    with folder.recording(asdict(config), overrides, trainer.epoch, trainer.step):
        log.info("%s on %s, seed %d\n%s", folder.path, device, config.seed, network)
        if checkpoint is None:
            if data.split is not None:
                folder.write_split(data.split)
            images, index = (part.to(device) for part in data.train.first(calibrate.batch_size))
            calibrate(network, encode(images, index, 0))
        if options.compile:
            compile_layers(network)
        finished = trainer.fit()
        if finished:
            script, word = Path(__file__).with_name("eval.py"), f"checkpoint={folder.best}"
        else:
            script, word = Path(__file__), f"resume={folder.path}"
        nearest = min(str(script), os.path.relpath(script), key=len)
        log.info("python %s %s", shlex.quote(nearest), shlex.quote(word))


if __name__ == "__main__":
    sys.exit(main())
