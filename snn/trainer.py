"""The training loop. It receives built objects and knows no class of network, data or loss by name."""

import itertools
import logging
import math
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from snn.checkpoint import (
    load_checkpoint,
    load_optimizer,
    load_weights,
    require_like,
    rng_state,
    save_checkpoint,
    set_rng_state,
)
from snn.data import Batch, Loader, Loaders
from snn.evaluation import Encode, Loss, Tally, evaluate, named_rates
from snn.monitor import SpikeMonitor, named_srm_layers
from snn.run_folder import RunFolder
from snn.signals import Signals
from snn.watch import Watch

log = logging.getLogger(__name__)

LOG_EVERY = 50  # steps between two looks at the device

Teach = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Progress:
    """An epoch in progress: where it stands, and what its row is made of.

    Attributes:
        batches: Batches done.
        steps: Optimizer steps done or skipped.
        skipped: Steps skipped, since loss or gradient was not finite.
        lr: Learning rate at the start of the epoch.
        seconds: Spent on its steps, by every run that took some.
    """

    def __init__(self, device: torch.device, lr: float) -> None:
        self.batches = self.steps = self.skipped = 0
        self.lr, self.seconds = lr, 0.0
        self.tally = Tally(device)
        self.norms = torch.zeros((), device=device)  # sum over the steps

    def state(self) -> dict[str, Any]:
        """Return it as a checkpoint can hold it."""
        return {**vars(self), "tally": vars(self.tally)}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state` returned."""
        device = self.norms.device
        vars(self).update({**state, "tally": self.tally, "norms": state["norms"].to(device)})
        sums, samples = state["tally"]["sums"], state["tally"]["samples"]
        self.tally.sums, self.tally.samples = sums.to(device), samples


class Stopped(Exception):
    """A signal asks the run to end."""


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
        checkpoint_every_steps: Steps after which last.ckpt is written, within an epoch too; None = never.
        checkpoint_every_minutes: Minutes after which it is; None = never.
        skip_nonfinite: Whether a step whose loss or gradient is not finite is left out; otherwise it ends the
            run.

    Attributes:
        ended_by: The signal that ended the run, or None.
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
        checkpoint_every_steps: int | None,
        checkpoint_every_minutes: float | None,
        skip_nonfinite: bool,
    ) -> None:
        # what is trained, and how
        self.network, self.encode, self.loss_fn, self.teach = network, encode, loss_fn, teach
        self.optimizer, self.scheduler = optimizer, scheduler
        self.accumulate, self.clip_norm, self.clamp_weights = accumulate, clip_norm, clamp_weights
        self.skip_nonfinite = skip_nonfinite
        self.watch = Watch(network, encode, loss_fn, data.train, device, taught=teach is not None)
        # on what, how long, and where it is written
        self.data, self.epochs, self.stop_after, self.device = data, epochs, stop_after, device
        self.folder, self.config, self.test_each_epoch = folder, config, test_each_epoch
        self.every_steps, self.every_minutes = checkpoint_every_steps, checkpoint_every_minutes
        # where it stands: whole epochs, steps, and the epoch in progress
        self.epoch, self.step = 0, 0
        self.progress: Progress | None = None
        self.monitor = SpikeMonitor(network)
        self.best = {"accuracy": -math.inf, "epoch": 0}
        self.best_on_test: float | None = None
        self.seconds = {"total": 0.0, "training": 0.0}
        self.ended_by: signal.Signals | None = None
        self._resumed_monitor: dict[str, Any] | None = None
        self._first_bad_step = torch.zeros((), dtype=torch.int64, device=device)  # 0: none so far
        self._signals = Signals()
        self._saved_at = time.monotonic()

    def fit(self) -> bool:
        """Train to the horizon and test the best epoch; return whether it came so far.

        It also ends at `stop_after`, or when a signal asks for it: then `ended_by` tells which, and last.ckpt
        holds where it stood. One that came too late to stop anything is told, too.
        """
        last = self.epochs if self.stop_after is None else min(self.epochs, self.stop_after)
        finished = False
        try:
            with self._signals:
                self._saved_at = time.monotonic()
                while self.epoch < last:
                    self._run_epoch()
                if self.epoch == self.epochs:
                    self._finish()
                    finished = True
                else:
                    log.info("stopped after epoch %d of %d", self.epoch, self.epochs)
        except Stopped as stop:
            if self.progress is not None:  # otherwise last.ckpt is of just here
                self._save()
            log.info("%s: stopped at step %d", stop, self.step)
        self.ended_by = self._signals.ending
        return finished

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint: everything the next step depends on.

        Raises:
            ValueError: It is of another network or another schedule.
        """
        load_weights(self.network, state["network"], "the checkpoint")
        self._require_fit(state)
        load_optimizer(self.optimizer, state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.epoch, self.step = state["epoch"], state["step"]
        self.best, self.seconds = state["best"], state["seconds"]
        self.best_on_test = state["best_on_test"]
        if state["progress"] is not None:
            self.progress = Progress(self.device, 0.0)
            self.progress.load(state["progress"]["epoch"])
            self._resumed_monitor = state["progress"]["monitor"]
        set_rng_state(state["rng"])

    def _require_fit(self, state: dict[str, Any]) -> None:
        """Raise ValueError if a checkpoint holds what no run of this config can have saved."""
        own = self._state()
        done = {"steps": 0, "batches": 0, "skipped": 0}
        if state["progress"] is not None:
            layers = named_srm_layers(self.network)
            spikes = dict.fromkeys(layers, torch.zeros((), dtype=torch.float64))
            monitor = {"spikes": spikes, "places": dict.fromkeys(layers, 0)}
            own["progress"] = {"epoch": Progress(torch.device("cpu"), 0.0).state(), "monitor": monitor}
            require_like(state["progress"], own["progress"], "progress")
            done = state["progress"]["epoch"]
        if state["best_on_test"] is not None:
            own["best_on_test"] = 0.0
        own["rng"] = {**state["rng"], "cpu": own["rng"]["cpu"]}  # of GPUs there may be more or fewer
        for key in ("epoch", "step", "best", "best_on_test", "seconds", "rng"):
            require_like(state[key], own[key], key)
        epoch, step, steps = state["epoch"], state["step"], steps_per_epoch(self.data.train, self.accumulate)
        if not (
            0 <= epoch <= self.epochs
            and 0 < step == epoch * steps + done["steps"] <= self.epochs * steps
            and step == state["scheduler"].get("last_epoch")
            and self.scheduler.base_lrs == state["scheduler"].get("base_lrs")
            and done["batches"] == min(done["steps"] * self.accumulate, self.data.train.num_batches)
            and 0 <= done["skipped"] <= done["steps"]
            and 0 <= state["best"]["epoch"] <= epoch
        ):
            raise ValueError(
                f"the checkpoint is of epoch {epoch}, step {step}, where this run of {self.epochs} epochs of "
                f"{steps} steps never is: it was changed, or the data were"
            )

    def _run_epoch(self) -> None:
        """Train an epoch, or the rest of it, evaluate, log, save."""
        if self.progress is None:
            self.progress = Progress(self.device, self.optimizer.param_groups[0]["lr"])
        train = self._train_epoch(self.progress)
        start = time.perf_counter()
        self._require_finite()
        val = self._evaluate(self.data.val)
        row = {"epoch": self.epoch + 1, "step": self.step, **train, **_under("val", val)}
        if self.test_each_epoch:
            test = self._evaluate(self.data.test)
            row |= _under("test", test)
            self.best_on_test = max(test["accuracy"], self.best_on_test or 0.0)
        row["seconds"] = self.progress.seconds + time.perf_counter() - start
        self.seconds["training"] += self.progress.seconds
        self.seconds["total"] += row["seconds"]
        self.epoch, self.progress = self.epoch + 1, None
        self._log(row)
        self.watch(val)
        if val["accuracy"] > self.best["accuracy"]:
            self.best = {"accuracy": val["accuracy"], "epoch": self.epoch}
            save_checkpoint(self.folder.best, self._state())
        self._save()

    def _train_epoch(self, progress: Progress) -> dict[str, float]:
        """Take the steps of an epoch that are left; return the row of all of them."""
        self.network.train()
        start = time.perf_counter()
        batches = self.data.train.batches(self.epoch + 1, progress.batches)
        steps = steps_per_epoch(self.data.train, self.accumulate)
        no_terminal = not all(stream is not None and stream.isatty() for stream in (sys.stdout, sys.stderr))
        with (
            self.monitor,
            tqdm(total=steps, initial=progress.steps, disable=no_terminal, leave=False) as bar,
        ):
            if self._resumed_monitor is not None:
                self.monitor.load(self._resumed_monitor)
                self._resumed_monitor = None
            while group := list(itertools.islice(batches, self.accumulate)):
                self._step(group, progress)
                bar.update()
                now = time.perf_counter()
                progress.seconds, start = progress.seconds + now - start, now
                if self.step % LOG_EVERY == 0:
                    self._require_finite()
                    bar.set_postfix(epoch=self.epoch + 1, loss=f"{progress.tally.means()['loss']:.3f}")
                self._save_if_due()
                self._heed_signals()
        taken = progress.steps - progress.skipped
        if not taken:
            raise FloatingPointError(f"no step of epoch {self.epoch + 1} was finite; {self._way_out()}")
        row = _under("train", {**progress.tally.means(), **named_rates(self.monitor)})
        row |= {"train/grad_norm": float(progress.norms) / taken, "lr": progress.lr}
        progress.seconds += time.perf_counter() - start  # only now has a GPU done what it was given
        if self.skip_nonfinite:
            row["train/skipped_steps"] = progress.skipped
        return {**row, "samples_per_second": progress.tally.samples / progress.seconds}

    def _step(self, batches: list[Batch], progress: Progress) -> None:
        """Take one optimizer step on the mean over the samples of `batches`."""
        samples = sum(len(labels) for _, labels, _ in batches)
        results = []
        for batch in batches:
            images, labels, index = (part.to(self.device, non_blocking=True) for part in batch)
            x = self.encode(images, index, self.epoch + 1)
            output, seen = self.teach(x, labels) if self.teach else (self.network(x),) * 2
            loss = self.loss_fn(seen, labels)
            torch.autograd.backward(loss * (len(labels) / samples))
            results.append((loss.detach(), output.detach(), labels))
        self.step += 1
        progress.batches, progress.steps = progress.batches + len(batches), progress.steps + 1
        trained = [p for p in self.network.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
        bad = ~torch.isfinite(torch.stack([*(loss for loss, _, _ in results), norm])).all()
        if self.skip_nonfinite and bool(bad):
            self._skip(progress)
            return
        self._first_bad_step = torch.where(bad & (self._first_bad_step == 0), self.step, self._first_bad_step)
        for result in results:
            progress.tally.add(*result)
        progress.norms += norm
        if self.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(trained, self.clip_norm, norm)
        self.optimizer.step()
        if self.clamp_weights is not None:
            for weight in (p for p in trained if p.dim() > 1):
                weight.data.clamp_(-self.clamp_weights, self.clamp_weights)
        self.scheduler.step()
        self.optimizer.zero_grad()

    def _skip(self, progress: Progress) -> None:
        """Leave a step out; the schedule goes on."""
        progress.skipped += 1
        log.warning(
            "warning: loss or gradient is not finite at step %d: skipped, as trainer.on_nonfinite says",
            self.step,
        )
        self.optimizer.zero_grad()
        with warnings.catch_warnings():  # that the schedule moved first, if it is the first step of all
            warnings.simplefilter("ignore")
            self.scheduler.step()

    def _evaluate(self, loader: Loader) -> dict[str, float]:
        result = evaluate(
            self.network, self.encode, self.loss_fn, loader, self.device, between=self._heed_signals
        )
        if not math.isfinite(result["loss"]):
            raise FloatingPointError(
                f"the loss is not finite in evaluation after step {self.step}; {self._way_out()}"
            )
        return result

    def _save_if_due(self) -> None:
        steps_are = self.every_steps is not None and self.step % self.every_steps == 0
        minutes = (time.monotonic() - self._saved_at) / 60
        if steps_are or (self.every_minutes is not None and minutes >= self.every_minutes):
            self._save()

    def _heed_signals(self) -> None:
        if self._signals.saving:
            self._signals.saving = False
            if self.progress is not None:
                self._save()
            log.info("SIGUSR1: %s holds step %d", self.folder.last, self.step)
        if self._signals.ending is not None:
            raise Stopped(self._signals.ending.name)

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
        skipped = f"  skipped {n} steps" if (n := row.get("train/skipped_steps")) else ""
        log.info(
            "epoch %*d/%d  train loss %.4f acc %.4f  val loss %.4f acc %.4f undecided %.4f  lr %.2e  "
            "%.0f img/s  %.1f s%s",
            *(len(str(self.epochs)), self.epoch, self.epochs, row["train/loss"], row["train/accuracy"]),
            *(row["val/loss"], row["val/accuracy"], row["val/undecided"], row["lr"]),
            *(row["samples_per_second"], row["seconds"], skipped),
        )

    def _save(self) -> None:
        """Write last.ckpt, and keep the one before it."""
        self._require_finite()
        save_checkpoint(self.folder.last, self._state(), self.folder.previous)
        self._saved_at = time.monotonic()

    def _state(self) -> dict[str, Any]:
        progress = None
        if self.progress is not None:
            progress = {"epoch": self.progress.state(), "monitor": self.monitor.state()}
        return {
            "config": self.config,
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": rng_state(),
            "epoch": self.epoch,
            "step": self.step,
            "progress": progress,
            "best": self.best,
            "best_on_test": self.best_on_test,
            "seconds": self.seconds,
        }

    def _finish(self) -> None:
        """Evaluate best.ckpt once on validation and test, and write the run's summary."""
        start = time.perf_counter()
        load_weights(self.network, load_checkpoint(self.folder.best)["network"], self.folder.best)
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
        if "silent_classes" in test:
            summary["test/silent_classes"] = test["silent_classes"]
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
