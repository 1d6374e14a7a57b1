"""The time-based and the surrogate run of a network differ in nothing but the gradient."""

import sys

import pytest
import torch

from snn.calibrate import Calibration
from snn.config import build_network, compose

SHAPES = ["data=synthetic", "data.size=12", "data.channels=2", "data.num_classes=4"]
NETWORKS = {
    "chain": ["network.layers=6C3-P2-D0.3-8C3p0-P3-20"],
    "uneven-pool": ["network.layers=6C3-P5-8C3-20"],
    "resnet": ["network=resnet", "network.stem=4C3", "network.channels=[6]", "network.dropout=0.2"],
}
HEADS = {"decoupled": ["head=decoupled"], "spiking": ["head=spiking", "loss=count_plus"]}


def twins(*words):
    """The two networks with the same weights, and their losses."""
    pairs = []
    for surrogate in ("time", "atan"):
        torch.manual_seed(0)
        pairs.append(build_network(compose([*SHAPES, *words, f"surrogate={surrogate}"])))
    Calibration(spikes=1.0, batch_size=8)(pairs[0][0], 3 * torch.rand(6, 8, 2, 12, 12))
    pairs[1][0].load_state_dict(pairs[0][0].state_dict())
    return pairs


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("network", NETWORKS)
def test_equal_weights_give_equal_spikes_and_losses(network, head):
    (time, time_loss), (twin, twin_loss) = twins(*NETWORKS[network], *HEADS[head])
    labels, spikes = torch.arange(8) % 4, []
    for encoded in (torch.rand(1, 8, 2, 12, 12).expand(6, -1, -1, -1, -1), torch.rand(6, 8, 2, 12, 12)):
        for training in (True, False):
            outputs = []
            for net in (time.train(training), twin.train(training)):
                torch.manual_seed(1)  # the same dropout masks
                outputs.append(net(3 * encoded))
            assert torch.equal(*outputs)
            assert torch.equal(time_loss(outputs[0], labels), twin_loss(outputs[1], labels))
            spikes.append(outputs[0])
    assert all(output.any() for output in spikes)


def test_the_gradients_differ_and_no_state_does():
    (time, time_loss), (twin, twin_loss) = twins(*NETWORKS["chain"], *HEADS["decoupled"])
    x, labels = 3 * torch.rand(6, 8, 2, 12, 12), torch.arange(8) % 4
    for net, loss in ((time.eval(), time_loss), (twin.eval(), twin_loss)):
        loss(net(x), labels).backward()
    assert time.state_dict().keys() == twin.state_dict().keys()
    first = [next(net.layers.parameters()).grad for net in (time, twin)]
    assert not torch.allclose(*first) and all(grad.isfinite().all() and grad.any() for grad in first)
    for a, b in zip(time.head.linear.parameters(), twin.head.linear.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # behind the last spike there is one gradient


def test_no_bridge_and_no_teacher_for_a_surrogate(monkeypatch):
    """`count_to_time` is left out by construction: called, it would fail here."""
    heads = (["head=decoupled"], ["head=spiking", "loss=count"])
    built = [twins(*NETWORKS["chain"], *words)[1] for words in heads]
    monkeypatch.setattr(sys.modules["snn.ops.count_to_time"], "count_to_time", None)
    for twin, loss in built:
        assert not twin.head.teaches
        loss(twin(torch.rand(6, 8, 2, 12, 12)), torch.arange(8) % 4).backward()
