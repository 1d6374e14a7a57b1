"""Plain SGD on the SRM layers goes downhill for every head and loss, and uphill without the bridge to times.

The classifier is frozen, so that it cannot hide a body that learns backwards.
"""

import pytest
import torch

import snn.losses
import snn.networks.heads
from snn.calibrate import Calibration
from snn.layers import SRMLayer
from snn.losses import TET, TTFS, CEPlus, Count, CountPlus, CrossEntropy, Kernel, Timing
from snn.networks import DecoupledHead, SpikingHead, SRMNetwork, SRMResNet
from snn.neuron import ATan, GradParams, SRMParams

NEURON, TIME, SURROGATE = SRMParams(), GradParams(), ATan(1.0)
LOSSES = {  # and a step that suits the size of its gradients
    "cross_entropy": (0.1, lambda grad: CrossEntropy()),
    "count": (0.01, lambda grad: Count(4, 1, grad=grad)),
    "count_plus": (0.02, lambda grad: CountPlus(4, 1, grad=grad)),
    "ce_plus": (0.005, lambda grad: CEPlus(grad=grad)),
    "kernel": (0.002, lambda grad: Kernel(4, 1, tau_s=3.0, grad=grad)),
    "tet": (0.02, lambda grad: TET(grad=grad)),
    "ttfs": (0.005, lambda grad: TTFS(grad=grad)),
    "timing": (0.02, lambda grad: Timing(4, 1, grad=grad)),
}
BODY, SIZE, T, N, K = "6C3-P2-40", 6, 5, 18, 3


def make_head(loss, grad):
    if loss == "cross_entropy":
        return lambda shape: DecoupledHead(shape, K, decouple_scale=1.0, sign=True, sign_clip=1.0, grad=grad)
    return lambda shape: SpikingHead(
        shape, K, neuron=NEURON, grad=grad, weight_standardization=False, target_rise=0.05
    )


def chain(grad, head):
    return SRMNetwork(BODY, 1, SIZE, False, neuron=NEURON, grad=grad, head=head)


def resnet(grad, head):
    """Three joins: two of layers, and one of a layer and a join."""
    return SRMResNet("4C3", [6], 2, 0.0, 1, 1, SIZE, False, neuron=NEURON, grad=grad, head=head)


def train(name, seed, grad=TIME, steps=60, make=chain):
    """Loss on one fixed batch, before and after; ce_plus, deaf to a silent class, with target spikes."""
    torch.manual_seed(seed)
    net = make(grad, make_head(name, grad))
    labels = torch.arange(N) % K
    images = torch.rand(K, 1, SIZE, SIZE)[labels] + 0.2 * torch.randn(N, 1, SIZE, SIZE)
    x = images.expand(T, -1, -1, -1, -1)
    Calibration(spikes=1.0 if name == "ce_plus" else 0.6, batch_size=64)(net, x)
    net.requires_grad_(False)
    trained = [module.weight.requires_grad_() for module in net.modules() if isinstance(module, SRMLayer)]
    assert len(trained) == (2 if make is chain else 6) + (name != "cross_entropy")
    rate, make_loss = LOSSES[name]
    loss_fn, optimizer = make_loss(grad), torch.optim.SGD(trained, lr=rate)
    losses = []
    for _ in range(steps):
        loss = loss_fn(net.teach(x, labels)[1] if name == "ce_plus" else net(x), labels)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses[0], losses[-1]


@pytest.mark.parametrize("loss", ["cross_entropy", "count"])
def test_sgd_lowers_the_loss(loss):
    results = [train(loss, seed) for seed in range(10)]
    assert sum(after < before for before, after in results) >= 8, results


@pytest.mark.parametrize("loss", [name for name in LOSSES if name not in ("cross_entropy", "count")])
def test_sgd_lowers_every_other_loss(loss):
    results = [train(loss, seed) for seed in range(6)]
    assert sum(after < before for before, after in results) >= 5, results


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["cross_entropy", "count", "tet"])
def test_sgd_lowers_the_loss_with_a_surrogate_gradient(loss):
    results = [train(loss, seed, grad=SURROGATE) for seed in range(6)]
    assert sum(after < before for before, after in results) >= 5, results


@pytest.mark.parametrize(("loss", "module"), [("cross_entropy", snn.networks.heads), ("count", snn.losses)])
def test_without_count_to_time_it_raises_the_loss(loss, module, monkeypatch):
    monkeypatch.setattr(module, "spike_heights", lambda x, grad: x.clone())
    results = [train(loss, seed) for seed in range(10)]
    assert sum(after > before for before, after in results) >= 8, results


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["ttfs", "timing"])
def test_with_the_sign_of_times_turned_it_raises_the_loss(loss, monkeypatch):
    times = snn.losses._times
    monkeypatch.setattr(snn.losses, "_times", lambda spikes: 2 * times(spikes).detach() - times(spikes))
    results = [train(loss, seed) for seed in range(6)]
    assert sum(after > before for before, after in results) >= 5, results


@pytest.mark.parametrize("grad", [TIME, SURROGATE], ids=["time", "surrogate"])
@pytest.mark.parametrize("loss", ["cross_entropy", "count"])
def test_sgd_lowers_the_loss_of_a_residual_network(loss, grad):
    results = [train(loss, seed, grad, steps=30, make=resnet) for seed in range(4)]
    assert sum(after < before for before, after in results) >= 3, results
    assert sum(after for _, after in results) < 0.9 * sum(before for before, _ in results), results
