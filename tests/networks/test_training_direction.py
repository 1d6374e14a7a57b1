"""Plain SGD on the SRM layers goes downhill, and uphill without the bridge from counts to times.

The classifier is frozen, so that it cannot hide a body that learns backwards.
"""

import pytest
import torch

import snn.losses
import snn.networks.heads
from snn.calibrate import Calibration
from snn.layers import SRMLayer
from snn.losses import Count, CrossEntropy
from snn.networks import DecoupledHead, SpikingHead, SRMNetwork, SRMResNet
from snn.neuron import GradParams, SRMParams

STEP_SIZE = {"decoupled": 0.1, "spiking": 0.01}
SEEDS, STEPS = range(10), 60
BODY, SIZE, T, N, K = "6C3-P2-40", 6, 5, 18, 3
NEURON, GRAD = SRMParams(), GradParams()


def make_head(kind, shape):
    if kind == "decoupled":
        return DecoupledHead(shape, K, decouple_scale=1.0, sign=True, sign_clip=1.0)
    return SpikingHead(shape, K, neuron=NEURON, grad=GRAD, weight_standardization=False)


def chain(head):
    return SRMNetwork(BODY, 1, SIZE, False, neuron=NEURON, grad=GRAD, head=head)


def resnet(head):
    """Three joins: two of layers, and one of a layer and a join."""
    return SRMResNet("4C3", [6], 2, 0.0, 1, 1, SIZE, False, neuron=NEURON, grad=GRAD, head=head)


def train(kind, seed, make=chain, steps=STEPS):
    """Loss on one fixed batch, before and after."""
    torch.manual_seed(seed)
    net = make(lambda shape: make_head(kind, shape))
    labels = torch.arange(N) % K
    images = torch.rand(K, 1, SIZE, SIZE)[labels] + 0.2 * torch.randn(N, 1, SIZE, SIZE)
    x = images.expand(T, -1, -1, -1, -1)
    Calibration(spikes=0.6, batch_size=64)(net, x)
    net.requires_grad_(False)
    trained = [module.weight.requires_grad_() for module in net.modules() if isinstance(module, SRMLayer)]
    assert len(trained) == (2 if make is chain else 6) + (kind == "spiking")
    loss_fn = CrossEntropy() if kind == "decoupled" else Count(desired=4, undesired=1)
    optimizer = torch.optim.SGD(trained, lr=STEP_SIZE[kind])
    losses = []
    for _ in range(steps):
        loss = loss_fn(net(x), labels)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses[0], loss_fn(net(x), labels).item()


@pytest.mark.parametrize("kind", ["decoupled", "spiking"])
def test_sgd_lowers_the_loss(kind):
    results = [train(kind, seed) for seed in SEEDS]
    assert sum(after < before for before, after in results) >= 8, results


@pytest.mark.parametrize("kind", ["decoupled", "spiking"])
def test_sgd_lowers_the_loss_of_a_residual_network(kind):
    results = [train(kind, seed, resnet, steps=20) for seed in SEEDS[:4]]
    assert all(after < before for before, after in results), results


@pytest.mark.parametrize(("kind", "module"), [("decoupled", snn.networks.heads), ("spiking", snn.losses)])
def test_without_count_to_time_it_raises_the_loss(kind, module, monkeypatch):
    monkeypatch.setattr(module, "count_to_time", lambda x: x.clone())
    results = [train(kind, seed) for seed in SEEDS]
    assert sum(after > before for before, after in results) >= 8, results
