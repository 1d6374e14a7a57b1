"""Losses: closed forms by hand, the gradient on spike times, and the mean over the batch."""

import math

import pytest
import torch

from snn.losses import Count, CrossEntropy


def train(counts, steps):
    """Spikes `[T, N, K]` with the given counts `[N][K]`, in the first steps."""
    counts = torch.tensor(counts)
    return (torch.arange(steps)[:, None, None] < counts).double()


# T = 5, desired 3, undesired 1; sample 0 is of class 0, sample 1 of class 2
SPIKES = train([[1, 3, 0], [5, 1, 4]], steps=5)
LABELS = torch.tensor([0, 2])


def test_count_by_hand():
    """Sample 0: short by 2, over by 2, met: 8/10. Sample 1: over by 4, met, overshoot met: 16/10."""
    loss = Count(desired=3, undesired=1)(SPIKES, LABELS)
    assert loss.dim() == 0 and loss.item() == pytest.approx(1.2, rel=1e-14)


def test_count_gradient_by_hand():
    """dL/dcount = (count - target) / (T N); each spike's time gets -dL/dcount, other places nothing."""
    spikes = SPIKES.clone().requires_grad_()
    Count(desired=3, undesired=1)(spikes, LABELS).backward()
    # too few spikes of class 0: dL/dcount = -2/10, so +.2 on its spikes' times; descent moves them earlier
    per_spike = torch.tensor([[0.2, -0.2, 0], [-0.4, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(spikes.grad, SPIKES * per_spike, rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([[3, 1, 1]], 0),
        ([[5, 0, 0]], 0),  # overshoot of the right class, undershoot of the others
        ([[2, 1, 1]], 1 / 10),
        ([[3, 2, 1]], 1 / 10),
        ([[0, 5, 5]], (9 + 16 + 16) / 10),
    ],
)
def test_count_counts_overshoot_and_undershoot_as_met(counts, expected):
    spikes = train(counts, steps=5).requires_grad_()
    loss = Count(desired=3, undesired=1)(spikes, torch.tensor([0]))
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-14)
    assert spikes.grad.any() == (expected > 0)


def test_count_is_a_mean_over_the_batch():
    loss = Count(desired=3, undesired=1)
    alone = [loss(SPIKES[:, n : n + 1], LABELS[n : n + 1]).item() for n in range(2)]
    assert loss(SPIKES, LABELS).item() == pytest.approx(sum(alone) / 2)
    twice = loss(SPIKES.repeat(1, 2, 1), LABELS.repeat(2)).item()
    assert twice == pytest.approx(loss(SPIKES, LABELS).item())


def test_count_of_one_class():
    spikes = train([[1]], steps=2).requires_grad_()
    loss = Count(desired=2, undesired=0)(spikes, torch.tensor([0]))
    loss.backward()
    assert loss.item() == 0.25 and spikes.grad.flatten().tolist() == [0.5, 0]


def test_count_leaves_spikes_alone():
    spikes = SPIKES.clone().requires_grad_()
    Count(desired=3, undesired=1)(spikes, LABELS).backward()
    assert torch.equal(spikes.detach(), SPIKES)


@pytest.mark.parametrize(
    ("desired", "undesired"),
    [(1.0, 2.0), (1.0, -1.0), (math.nan, 0.0), (math.inf, 0.0), (1.0, math.nan), (-1.0, -2.0)],
    ids=str,
)
def test_count_rules(desired, undesired):
    with pytest.raises(ValueError, match=f"0 <= undesired <= desired, got {desired} and {undesired}"):
        Count(desired, undesired)


def test_cross_entropy_by_hand():
    """-log(e^2 / (e^2 + 1 + 1)) and -log(1/3), averaged."""
    logits = torch.tensor([[2.0, 0, 0], [5.0, 5.0, 5.0]], dtype=torch.float64, requires_grad=True)
    loss = CrossEntropy()(logits, torch.tensor([0, 1]))
    expected = (math.log(math.exp(2) + 2) - 2 + math.log(3)) / 2
    assert loss.dim() == 0 and loss.item() == pytest.approx(expected, rel=1e-12)
    loss.backward()
    total = math.exp(2) + 2
    by_hand = [[math.exp(2) / total - 1, 1 / total, 1 / total], [1 / 3, -2 / 3, 1 / 3]]
    torch.testing.assert_close(logits.grad, torch.tensor(by_hand, dtype=torch.float64) / 2)


def test_cross_entropy_of_one_class_is_zero():
    assert CrossEntropy()(torch.randn(3, 1), torch.zeros(3, dtype=torch.long)).item() == 0


def test_what_each_loss_reads():
    assert (CrossEntropy.reads, Count.reads) == ("logits", "spikes")
