"""Repeat a checkpoint's accuracy from the checkpoint alone: `python eval.py checkpoint=PATH`."""

import logging
import sys
from typing import TYPE_CHECKING

from snn.config import build, build_network, check, overridden, run, update
from snn.schema import EvalConfig, TrainConfig

if TYPE_CHECKING:
    from omegaconf import DictConfig

log = logging.getLogger("snn.eval")


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (None: the process's own); return the exit code."""
    return run(evaluate_checkpoint, EvalConfig, argv)


def evaluate_checkpoint(cfg: "DictConfig") -> None:
    """Rebuild the network of a checkpoint from the config in it, and evaluate it on one split."""
    from snn.checkpoint import find_checkpoint, load_checkpoint, load_weights
    from snn.device import pick_device, set_precision
    from snn.evaluation import evaluate

    options = check(cfg, EvalConfig)
    checkpoint = load_checkpoint(find_checkpoint(options.checkpoint, ("best.ckpt",)))
    changes = {"data.augment": "none", **overridden(cfg, [f"data.{key}" for key in options.data])}
    renamed = {
        "device": options.device,
        "encoding.steps": options.steps,
        "trainer.batch_size": options.batch_size,
    }
    changes |= {key: value for key, value in renamed.items() if value is not None}
    config = check(update(checkpoint["config"], changes), TrainConfig)

    device = pick_device(config.device)
    network, loss_fn = build_network(config)
    load_weights(network, checkpoint["network"], options.checkpoint)
    network.to(device)
    set_precision(network, device, config.trainer.precision)
    encode = build(config.encoding, seed=config.seed)
    data = build(config.data, batch_size=config.trainer.batch_size, seed=config.seed)
    result = evaluate(network, encode, loss_fn, getattr(data, options.split), device)
    for key, value in (*result.items(), ("accuracy", result["accuracy"])):  # accuracy again: the last line
        log.info("%s/%s %.4f", options.split, key, value)


if __name__ == "__main__":
    sys.exit(main())
