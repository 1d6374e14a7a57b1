"""How good a network is on a split: loss, accuracy, undecided samples, spikes."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snn.data import Loader
from snn.metrics import UNDECIDED, predict
from snn.monitor import SpikeMonitor

Encode = Callable[[Tensor, Tensor, int], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]

RATE = "spike_rate/"


class Tally:
    """Sample-weighted means over an epoch, kept on the device until they are read."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        self.samples = 0

    def add(self, loss: Tensor, output: Tensor, labels: Tensor) -> None:
        """Count a batch: its mean loss, its decisions."""
        decided = predict(output.detach())
        hits, undecided = (decided == labels).sum(), (decided == UNDECIDED).sum()
        self.sums += torch.stack([loss.detach().double() * len(labels), hits.double(), undecided.double()])
        self.samples += len(labels)

    def means(self) -> dict[str, float]:
        """Return `loss`, `accuracy` and `undecided`; an undecided sample is a wrong one."""
        loss, accuracy, undecided = (self.sums / self.samples).tolist()
        return {"loss": loss, "accuracy": accuracy, "undecided": undecided}


@torch.no_grad()
def evaluate(
    network: nn.Module,
    encode: Encode,
    loss_fn: Loss,
    loader: Loader,
    device: torch.device,
    between: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Evaluate `network` in eval mode over a split; its mode is kept.

    Args:
        network: Encoded images to logits or spikes; on `device` already.
        encode: `(images, index, epoch)` to `[T, N, ...]`.
        loss_fn: `(output, labels)` to a scalar, a mean over the batch.
        loader: Of the split.
        device: Where the network runs.
        between: Called after each batch.

    Returns:
        `loss`, `accuracy`, `undecided`, `spikes_per_image` of all SRM layers over T steps, and
        `spike_rate/<layer>` of each; of output that is spikes also `silent_classes`, the number of classes
        whose output neuron was silent for most of the class's own samples.
    """
    training = network.training
    network.eval()
    tally, balance = Tally(device), None
    try:
        with SpikeMonitor(network) as monitor:
            for images, labels, index in loader.batches(0):
                images, labels, index = images.to(device), labels.to(device), index.to(device)
                output = network(encode(images, index, 0))
                tally.add(loss_fn(output, labels), output, labels)
                if output.dim() == 3:  # of each class: samples that its neuron fired for, less the others
                    own, fired = F.one_hot(labels, output.shape[2]).bool(), (output != 0).any(dim=0)
                    here = (own & fired).sum(dim=0) - (own & ~fired).sum(dim=0)
                    balance = here if balance is None else balance + here
                between()
    finally:
        network.train(training)
    result = {**tally.means(), "spikes_per_image": monitor.spikes() / tally.samples}
    if balance is not None:
        result["silent_classes"] = float((balance < 0).sum())
    return result | named_rates(monitor)


def named_rates(monitor: SpikeMonitor) -> dict[str, float]:
    """Return the rates of a monitor under the keys of a row: `spike_rate/<layer>`."""
    return {f"{RATE}{name}": rate for name, rate in monitor.rates().items()}
