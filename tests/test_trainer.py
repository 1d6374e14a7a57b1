"""The loop's arithmetic: means, groups, accumulation, clip, modes."""

import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from snn.evaluation import Tally, evaluate
from snn.layers import SRMLinear
from snn.neuron import GradParams, SRMParams
from snn.schedules import constant
from snn.trainer import Progress, Trainer, parameter_groups, steps_per_epoch

CPU = torch.device("cpu")


@dataclass
class Fixed:
    """A loader of given batches."""

    given: list

    @property
    def num_samples(self):
        return sum(len(labels) for _, labels, _ in self.given)

    @property
    def num_batches(self):
        return len(self.given)

    def batches(self, epoch, start=0):
        return iter(self.given[start:])


def batches(images, labels, size):
    index = torch.arange(len(labels))
    return Fixed(
        [
            (images[i : i + size], labels[i : i + size], index[i : i + size])
            for i in range(0, len(labels), size)
        ]
    )


def plain(images, index, epoch):
    return images


def make_trainer(network, loss_fn, data, tmp_path, **options):
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    defaults = {"teach": None, "device": CPU, "epochs": 1, "stop_after": None, "accumulate": 1}
    defaults |= {"clip_norm": None, "clamp_weights": None, "test_each_epoch": False}
    defaults |= {"checkpoint_every_steps": None, "checkpoint_every_minutes": None, "skip_nonfinite": False}
    settings = defaults | options
    folder = SimpleNamespace(last=tmp_path / "last.ckpt", previous=tmp_path / "previous.ckpt")
    return Trainer(network, plain, loss_fn, optimizer, constant(optimizer, 1), data, folder, {}, **settings)


def train_epoch(trainer):
    """The row of an epoch's training."""
    return trainer._train_epoch(Progress(CPU, 0.1))


def test_hazard_20_epoch_means_are_sample_weighted():
    tally = Tally(CPU)
    for size, loss, right in ((4, 0.0, 4), (4, 0.0, 4), (2, 1.0, 1)):
        output = torch.zeros(size, 2)
        output[:, 0] = 1
        labels = torch.tensor([0] * right + [1] * (size - right))
        tally.add(torch.tensor(loss), output, labels)
    means = tally.means()
    assert means["loss"] == pytest.approx(0.2) and means["accuracy"] == pytest.approx(0.9)
    assert all(type(value) is float for value in means.values())


def test_undecided_counts_as_wrong():
    tally = Tally(CPU)
    tally.add(torch.tensor(0.0), torch.zeros(5, 3, 2), torch.tensor([0, 0, 1]))  # silent output neurons
    assert tally.means() == {"loss": 0.0, "accuracy": 0.0, "undecided": 1.0}


def test_hazard_18_evaluation_is_in_eval_mode_and_puts_the_mode_back():
    seen = []

    class Spy(nn.Linear):
        def forward(self, x):
            seen.append(self.training)
            return super().forward(x)

    network = Spy(3, 2)
    loader = batches(torch.randn(5, 3), torch.zeros(5, dtype=torch.int64), 2)
    for mode in (True, False):
        network.train(mode)
        evaluate(network, plain, nn.functional.cross_entropy, loader, CPU)
        assert network.training is mode
    assert seen == [False] * 6


def test_rates_are_sample_weighted_over_a_short_last_batch():
    layer = SRMLinear(1, 1, SRMParams(), GradParams())
    layer.weight.data.fill_(10.0)  # fires at every step if its input does
    images = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]).view(1, 5, 1)
    loader = Fixed(
        [(images[:, :4], torch.zeros(4).long(), None), (images[:, 4:], torch.zeros(1).long(), None)]
    )
    loader.given = [(x, y, torch.zeros(1)) for x, y, _ in loader.given]
    network = nn.Sequential(layer, nn.Flatten(0, 1))
    result = evaluate(network, plain, lambda output, labels: output.sum() * 0, loader, CPU)
    assert result["spike_rate/0"] == pytest.approx(0.8)


def test_a_class_is_silent_if_its_output_neuron_is_for_most_of_its_samples():
    layer = SRMLinear(1, 3, SRMParams(), GradParams())
    layer.weight.data = torch.tensor([[10.0], [-10.0], [10.0]])  # neurons 0 and 2 fire for 1, neuron 1 for -1

    def result(network, inputs, labels):
        given = zip(torch.tensor(inputs).split(2), torch.tensor(labels).split(2), strict=True)
        loader = Fixed([(x.view(1, -1, 1), y, y) for x, y in given])
        return evaluate(network, plain, lambda output, labels: output.sum() * 0, loader, CPU)

    inputs = [1.0, 1.0, 1.0, 1.0, -1.0]
    assert result(layer, inputs, [0, 1, 1, 1, 1])["silent_classes"] == 1  # class 1, for 3 of 4
    assert result(layer, inputs, [0, 1, 0, 2, 1])["silent_classes"] == 0  # class 1 fires for 1 of 2
    assert result(layer, inputs, [1, 1, 0, 0, 0])["silent_classes"] == 1  # class 1, for both
    assert "silent_classes" not in result(nn.Sequential(layer, nn.Flatten(0, 1)), inputs, [0, 1, 0, 2, 1])


def test_accumulated_batches_are_one_large_batch(tmp_path):
    torch.manual_seed(0)
    images, labels = torch.randn(10, 3), torch.randint(0, 4, (10,))
    weights = []
    for size, accumulate in ((10, 1), (4, 3)):  # 4 + 4 + 2 samples: one step
        torch.manual_seed(1)
        network = nn.Linear(3, 4)
        data = SimpleNamespace(train=batches(images, labels, size))
        trainer = make_trainer(network, nn.functional.cross_entropy, data, tmp_path, accumulate=accumulate)
        row = train_epoch(trainer)
        assert trainer.step == 1 == steps_per_epoch(data.train, accumulate)
        weights.append((network.weight.detach().clone(), row["train/loss"], row["train/grad_norm"]))
    (one, loss, norm), (other, other_loss, other_norm) = weights
    torch.testing.assert_close(one, other)
    assert loss == pytest.approx(other_loss, rel=1e-6) and norm == pytest.approx(other_norm, rel=1e-5)


def test_the_wait_for_the_device_counts_as_training(tmp_path, monkeypatch):
    """On a GPU the sums can be read when all steps are done, and not before."""
    real = Tally.means
    monkeypatch.setattr(Tally, "means", lambda tally: (time.sleep(0.2), real(tally))[1])
    data = SimpleNamespace(train=batches(torch.randn(6, 3), torch.randint(0, 4, (6,)), 4))
    trainer = make_trainer(nn.Linear(3, 4), nn.functional.cross_entropy, data, tmp_path)
    progress = Progress(CPU, 0.1)
    row = trainer._train_epoch(progress)
    assert progress.seconds >= 0.2 and row["samples_per_second"] == 6 / progress.seconds


@pytest.mark.parametrize("clip", [None, 0.01, 1e6])
def test_the_whole_gradient_is_clipped_to_its_norm(tmp_path, clip):
    torch.manual_seed(0)
    network = nn.Linear(3, 4)
    before = torch.cat([p.detach().flatten().clone() for p in network.parameters()])
    data = SimpleNamespace(train=batches(torch.randn(6, 3), torch.randint(0, 4, (6,)), 6))
    trainer = make_trainer(network, nn.functional.cross_entropy, data, tmp_path, clip_norm=clip)
    norm = train_epoch(trainer)["train/grad_norm"]  # as it was before the clip
    moved = torch.cat([p.detach().flatten() for p in network.parameters()]) - before
    assert norm > 0.01
    assert float(moved.norm()) == pytest.approx(0.1 * (min(norm, clip) if clip else norm), rel=1e-3)


@pytest.mark.parametrize(("decay", "group_decay"), [(None, 0.3), (0.0, 0.0), (0.1, 0.1)])
def test_vectors_have_a_group_of_their_own(decay, group_decay):
    layer = SRMLinear(4, 3, SRMParams(), GradParams(), weight_standardization=True)
    groups = parameter_groups(nn.Sequential(layer, nn.Linear(3, 2)), decay)
    weights, vectors = torch.optim.AdamW(groups, weight_decay=0.3).param_groups
    assert [tuple(p.shape) for p in weights["params"]] == [(3, 4), (2, 3)]
    assert [tuple(p.shape) for p in vectors["params"]] == [(3,), (3,), (2,)]
    assert weights["weight_decay"] == 0.3 and vectors["weight_decay"] == group_decay


def test_without_vectors_there_is_one_group():
    assert len(parameter_groups(SRMLinear(4, 3, SRMParams(), GradParams()), 0.1)) == 1


def test_hazard_17_rows_hold_plain_numbers(tmp_path):
    data = SimpleNamespace(train=batches(torch.randn(6, 3), torch.randint(0, 4, (6,)), 4))
    row = train_epoch(make_trainer(nn.Linear(3, 4), nn.functional.cross_entropy, data, tmp_path))
    assert all(type(value) in (int, float) for value in row.values())


def test_weights_are_clamped_and_vectors_are_not(tmp_path):
    network = nn.Linear(3, 4)
    with torch.no_grad():
        network.weight.fill_(9.0)
        network.bias.fill_(9.0)
    data = SimpleNamespace(train=batches(torch.zeros(2, 3), torch.tensor([0, 1]), 2))
    trainer = make_trainer(network, nn.functional.cross_entropy, data, tmp_path, clamp_weights=4.0)
    train_epoch(trainer)
    assert (network.weight == 4).all() and (network.bias > 8).all()


def test_the_loss_sees_what_the_teacher_shows_and_the_accuracy_does_not(tmp_path):
    network, seen = nn.Linear(3, 2), []

    def teach(x, labels):
        output = torch.zeros(5, len(x), 2)  # silent: undecided
        return output, output + 0 * network(x) + nn.functional.one_hot(labels, 2)

    def loss_fn(spikes, labels):
        seen.append(spikes.detach())
        return spikes.sum()

    data = SimpleNamespace(train=batches(torch.zeros(2, 3), torch.tensor([0, 1]), 2))
    row = train_epoch(make_trainer(network, loss_fn, data, tmp_path, teach=teach))
    assert row["train/undecided"] == 1 and row["train/accuracy"] == 0 and seen[0].sum() == 10
