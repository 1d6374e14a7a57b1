"""The training loop. It receives built objects and knows no class of network, data or loss by name."""

import itertools
import logging
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from snn.checkpoint import load_checkpoint, rng_state, save_checkpoint, set_rng_state
from snn.data import Loader, Loaders
from snn.metrics import UNDECIDED, predict
from snn.monitor import SpikeMonitor
from snn.run_folder import RunFolder

log = logging.getLogger(__name__)

LOG_EVERY = 50  # steps between two looks at the device

Batch = tuple[Tensor, Tensor, Tensor]  # images, labels, index
Encode = Callable[[Tensor, Tensor, int], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
Teach = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Tally:
    """Sample-weighted means over an epoch, kept on the device until they are read."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)
        self.samples = 0

    def add(self, loss: Tensor, output: Tensor, labels: Tensor) -> None:
        """Count a batch: its mean loss, its decisions."""
        decided = predict(output.detach())
        hits, undecided = (decided == labels).sum(), (decided == UNDECIDED).sum()
        self._sums += torch.stack([loss.detach().double() * len(labels), hits.double(), undecided.double()])
        self.samples += len(labels)

    def means(self) -> dict[str, float]:
        """Return `loss`, `accuracy` and `undecided`; an undecided sample is a wrong one."""
        loss, accuracy, undecided = (self._sums / self.samples).tolist()
        return {"loss": loss, "accuracy": accuracy, "undecided": undecided}


@torch.no_grad()
def evaluate(
    network: nn.Module, encode: Encode, loss_fn: Loss, loader: Loader, device: torch.device
) -> dict[str, float]:
    """Evaluate `network` in eval mode over a split; its mode is kept.

    Returns:
        `loss`, `accuracy`, `undecided`, `spikes_per_image` of all SRM layers over T steps, and
        `spike_rate/<layer>` of each.
    """
    training = network.training
    network.eval()
    tally = Tally(device)
    try:
        with SpikeMonitor(network) as monitor:
            for images, labels, index in loader.batches(0):
                images, labels, index = images.to(device), labels.to(device), index.to(device)
                output = network(encode(images, index, 0))
                tally.add(loss_fn(output, labels), output, labels)
    finally:
        network.train(training)
    return {**tally.means(), "spikes_per_image": monitor.spikes() / tally.samples, **_rates(monitor)}


def parameter_groups(network: nn.Module, norm_weight_decay: float | None) -> list[dict[str, Any]]:
    """Return the optimizer's groups: weights, and apart from them all vectors: gains, biases, affine.

    Args:
        network: Whose parameters.
        norm_weight_decay: Weight decay of the second group; None = the optimizer's.
    """
    weights = [p for p in network.parameters() if p.dim() > 1]
    vectors = [p for p in network.parameters() if p.dim() <= 1]
    own_decay = {} if norm_weight_decay is None else {"weight_decay": norm_weight_decay}
    return [group for group in ({"params": weights}, {"params": vectors, **own_decay}) if group["params"]]


def steps_per_epoch(loader: Loader, accumulate: int) -> int:
    """Return the optimizer steps of an epoch; the last may see fewer batches."""
    return math.ceil(loader.num_batches / accumulate)


class Trainer:
    """Trains a network epoch by epoch: step, evaluate, log, save, stop.

    Args:
        network: Encoded images to logits or spikes; on `device` already.
        encode: `(images, index, epoch)` to `[T, N, ...]`.
        loss_fn: `(output, labels)` to a scalar, a mean over the batch.
        optimizer: Over the network's parameters.
        scheduler: Stepped once per optimizer step.
        data: The loaders of the three splits.
        folder: Where rows and checkpoints go.
        config: The resolved config, kept in every checkpoint.
        teach: In training, `(encoded images, labels)` to the output and what the loss sees in its place
            (target spikes); None = the loss sees the output.
        device: Where the network runs.
        epochs: Horizon of the run.
        stop_after: Epoch after which to leave a resumable run; None = never.
        accumulate: Batches per optimizer step.
        clip_norm: Largest norm of the gradient; None = no clip.
        clamp_weights: Largest magnitude of a weight, cut after each step; None = no clamp.
        test_each_epoch: Whether the test split is evaluated after each epoch too; nothing is chosen by it.
    """

    def __init__(
        self,
        network: nn.Module,
        encode: Encode,
        loss_fn: Loss,
        optimizer: Optimizer,
        scheduler: LambdaLR,
        data: Loaders,
        folder: RunFolder,
        config: dict[str, Any],
        *,
        teach: Teach | None,
        device: torch.device,
        epochs: int,
        stop_after: int | None,
        accumulate: int,
        clip_norm: float | None,
        clamp_weights: float | None,
        test_each_epoch: bool,
    ) -> None:
        # what is trained, and how
        self.network, self.encode, self.loss_fn, self.teach = network, encode, loss_fn, teach
        self.optimizer, self.scheduler = optimizer, scheduler
        self.accumulate, self.clip_norm, self.clamp_weights = accumulate, clip_norm, clamp_weights
        # on what, how long, and where it is written
        self.data, self.epochs, self.stop_after, self.device = data, epochs, stop_after, device
        self.folder, self.config, self.test_each_epoch = folder, config, test_each_epoch
        # where it stands
        self.epoch, self.step = 0, 0
        self.best = {"accuracy": -math.inf, "epoch": 0}
        self.best_on_test: float | None = None
        self.seconds = {"total": 0.0, "training": 0.0}
        self._first_bad_step = torch.zeros((), dtype=torch.int64, device=device)  # 0: none so far
        self._silent: list[str] = []

    def fit(self) -> bool:
        """Train to the horizon and test the best epoch, or stop at `stop_after`; return whether it ended."""
        while self.epoch < self.epochs and (self.stop_after is None or self.epoch < self.stop_after):
            start = time.perf_counter()
            self.epoch += 1
            train = self._train_epoch()
            self._require_finite()
            val = self._evaluate(self.data.val)
            row = {"epoch": self.epoch, "step": self.step, **train, **_under("val", val)}
            if self.test_each_epoch:
                test = self._evaluate(self.data.test)
                row |= _under("test", test)
                self.best_on_test = max(test["accuracy"], self.best_on_test or 0.0)
            row["seconds"] = time.perf_counter() - start
            self.seconds["total"] += row["seconds"]
            self._log(row)
            self._save(val["accuracy"])
        if self.epoch < self.epochs:
            log.info("stopped after epoch %d of %d", self.epoch, self.epochs)
            return False
        self._finish()
        return True

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint: everything the next epoch depends on."""
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.epoch, self.step = state["epoch"], state["step"]
        self.best, self.seconds = state["best"], state["seconds"]
        self.best_on_test = state["best_on_test"]
        set_rng_state(state["rng"])

    def _train_epoch(self) -> dict[str, float]:
        self.network.train()
        start, first_step, lr = time.perf_counter(), self.step, self.optimizer.param_groups[0]["lr"]
        tally, norms = Tally(self.device), torch.zeros((), device=self.device)
        batches = self.data.train.batches(self.epoch)
        steps = steps_per_epoch(self.data.train, self.accumulate)
        no_terminal = not all(stream is not None and stream.isatty() for stream in (sys.stdout, sys.stderr))
        with (
            SpikeMonitor(self.network) as monitor,
            tqdm(total=steps, disable=no_terminal, leave=False) as bar,
        ):
            while group := list(itertools.islice(batches, self.accumulate)):
                norms += self._step(group, tally)
                bar.update()
                if self.step % LOG_EVERY == 0:
                    self._require_finite()
                    bar.set_postfix(epoch=self.epoch, loss=f"{tally.means()['loss']:.3f}")
        train = _under("train", {**tally.means(), **_rates(monitor)})
        seconds = time.perf_counter() - start
        self.seconds["training"] += seconds
        grad_norm = float(norms) / (self.step - first_step)
        speed = {"lr": lr, "samples_per_second": tally.samples / seconds}
        return {**train, "train/grad_norm": grad_norm, **speed}

    def _step(self, batches: list[Batch], tally: Tally) -> Tensor:
        """Take one optimizer step on the mean over the samples of `batches`; return the gradient's norm."""
        self.step += 1
        samples = sum(len(labels) for _, labels, _ in batches)
        losses = []
        for batch in batches:
            images, labels, index = (part.to(self.device, non_blocking=True) for part in batch)
            x = self.encode(images, index, self.epoch)
            output, seen = self.teach(x, labels) if self.teach else (self.network(x),) * 2
            loss = self.loss_fn(seen, labels)
            torch.autograd.backward(loss * (len(labels) / samples))
            tally.add(loss, output, labels)
            losses.append(loss.detach())
        trained = [p for p in self.network.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
        if self.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(trained, self.clip_norm, norm)
        bad = ~torch.isfinite(torch.stack([*losses, norm])).all()
        self._first_bad_step = torch.where(bad & (self._first_bad_step == 0), self.step, self._first_bad_step)
        self.optimizer.step()
        if self.clamp_weights is not None:
            for weight in (p for p in trained if p.dim() > 1):
                weight.data.clamp_(-self.clamp_weights, self.clamp_weights)
        self.scheduler.step()
        self.optimizer.zero_grad()
        return norm

    def _evaluate(self, loader: Loader) -> dict[str, float]:
        result = evaluate(self.network, self.encode, self.loss_fn, loader, self.device)
        if not math.isfinite(result["loss"]):
            raise FloatingPointError(
                f"the loss is not finite in evaluation after step {self.step}; {self._way_out()}"
            )
        return result

    def _require_finite(self) -> None:
        """Stop the run if a step since the last look was bad, or the weights are."""
        if bad := int(self._first_bad_step):
            raise FloatingPointError(f"loss or gradient is not finite at step {bad}; {self._way_out()}")
        if not all(bool(p.isfinite().all()) for p in self.network.parameters()):
            raise FloatingPointError(f"the weights are not finite at step {self.step}; {self._way_out()}")

    def _way_out(self) -> str:
        kept = (
            f"{self.folder.last} is the last good checkpoint"
            if self.folder.last.exists()
            else "nothing was saved"
        )
        return f"{kept}; lower optimizer.lr or set trainer.clip_norm"

    def _log(self, row: dict[str, float]) -> None:
        self.folder.log_row(row)
        log.info(
            "epoch %*d/%d  train loss %.4f acc %.4f  val loss %.4f acc %.4f undecided %.4f  lr %.2e  "
            "%.0f img/s  %.1f s",
            *(len(str(self.epochs)), self.epoch, self.epochs, row["train/loss"], row["train/accuracy"]),
            *(row["val/loss"], row["val/accuracy"], row["val/undecided"], row["lr"]),
            *(row["samples_per_second"], row["seconds"]),
        )
        prefix = "val/spike_rate/"
        silent = [
            key.removeprefix(prefix) for key, rate in row.items() if key.startswith(prefix) and rate == 0
        ]
        if silent and silent != self._silent:
            log.warning(
                "warning: layer %s is silent (spike rate 0): lower neuron.threshold or set calibrate.spikes",
                ", ".join(silent),
            )
        self._silent = silent

    def _save(self, accuracy: float) -> None:
        """Write last.ckpt, and best.ckpt before it if this epoch is the best on validation so far."""
        improved = accuracy > self.best["accuracy"]
        if improved:
            self.best = {"accuracy": accuracy, "epoch": self.epoch}
        state = {
            "config": self.config,
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": rng_state(),
            "epoch": self.epoch,
            "step": self.step,
            "best": self.best,
            "best_on_test": self.best_on_test,
            "seconds": self.seconds,
        }
        if improved:
            save_checkpoint(self.folder.best, state)
        save_checkpoint(self.folder.last, state)

    def _finish(self) -> None:
        """Evaluate best.ckpt once on validation and test, and write the run's summary."""
        start = time.perf_counter()
        self.network.load_state_dict(load_checkpoint(self.folder.best)["network"])
        val, test = self._evaluate(self.data.val), self._evaluate(self.data.test)
        self.seconds["total"] += time.perf_counter() - start
        samples = self.data.train.num_samples * self.epochs
        summary = {
            "test/accuracy": test["accuracy"],
            "test/loss": test["loss"],
            "test/undecided": test["undecided"],
            "test/spikes_per_image": test["spikes_per_image"],
            "val/accuracy": val["accuracy"],
            "best_epoch": self.best["epoch"],
            "epochs": self.epochs,
            "seconds": self.seconds["total"],
            "samples_per_second": samples / self.seconds["training"],
            "parameters": sum(p.numel() for p in self.network.parameters() if p.requires_grad),
        }
        if self.best_on_test is not None:
            summary["test/best_accuracy"] = self.best_on_test
        self.folder.log_scalars(_under("test", test), self.step)
        self.folder.write_summary(summary)
        rates = {key: value for key, value in test.items() if key.startswith("spike_rate/")}
        rows = [*summary.items(), *_under("test", rates).items(), ("run", self.folder.path)]
        width = max(len(key) for key, _ in rows)
        for key, value in rows:
            log.info("%-*s  %s", width, key, f"{value:.4f}" if isinstance(value, float) else value)


def _under(split: str, values: dict[str, float]) -> dict[str, float]:
    return {f"{split}/{key}": value for key, value in values.items()}


def _rates(monitor: SpikeMonitor) -> dict[str, float]:
    return {f"spike_rate/{name}": rate for name, rate in monitor.rates().items()}
