"""What an output decides: the readout, ties, and outputs that decide nothing."""

import pytest
import torch

from snn.metrics import UNDECIDED, predict, readout


def trains(*times, steps=5):
    """One sample; per class the steps of its spikes."""
    spikes = torch.zeros(steps, 1, len(times), dtype=torch.float64)
    for k, steps_of_class in enumerate(times):
        spikes[steps_of_class, 0, k] = 1
    return spikes


def test_readout_by_hand():
    """A spike at t of T = 5 scores 1.1 - .02 t."""
    score = readout(trains([0], [4], [], [0, 2, 3], [0, 1, 2, 3, 4]))
    expected = torch.tensor([[1.1, 1.02, 0, 1.1 + 1.06 + 1.04, 5.5 - 0.2]], dtype=torch.float64)
    torch.testing.assert_close(score, expected, rtol=1e-14, atol=0)


def test_readout_at_one_step():
    assert readout(torch.ones(1, 2, 3)).tolist() == [[pytest.approx(1.1)] * 3] * 2


def test_earlier_spikes_break_ties_but_counts_come_first():
    assert predict(trains([2, 3], [1, 3], [2, 4])).tolist() == [1]
    assert predict(trains([3, 4], [0], [])).tolist() == [0]


def test_an_exact_tie_goes_to_one_of_the_tied():
    assert predict(trains([], [1, 2], [1, 2])).item() in (1, 2)


def test_hazard_19_all_silent_is_undecided_and_wrong():
    spikes = torch.cat([trains([], [], []), trains([], [], [4]), trains([0], [], [])], dim=1)
    predicted = predict(spikes)
    assert predicted.tolist() == [UNDECIDED, 2, 0] and UNDECIDED == -1
    assert (predicted == torch.tensor([0, 2, 0])).tolist() == [False, True, True]  # class 0 gains nothing
    assert predicted.dtype == torch.int64


def test_logits():
    logits = torch.tensor([[0.1, 0.3, -2.0], [5.0, 0.0, 0.0], [-3.0, -2.0, -1.0]])
    assert predict(logits).tolist() == [1, 0, 2]


def test_equal_logits_are_undecided():
    assert predict(torch.tensor([[0.5, 0.5, 0.5], [0.5, 0.5, 0.4]])).tolist()[0] == UNDECIDED
    assert predict(torch.tensor([[0.5, 0.5, 0.4]])).item() in (0, 1)


def test_hazard_10_one_class():
    assert predict(torch.tensor([[0.5], [-1.0]])).tolist() == [0, 0]
    assert predict(trains([2])).tolist() == [0] and predict(trains([])).tolist() == [UNDECIDED]


def test_batch_of_the_readout():
    torch.manual_seed(0)
    spikes = (torch.rand(7, 5, 4) < 0.3).float()
    together = readout(spikes)
    for n in range(5):
        torch.testing.assert_close(readout(spikes[:, n : n + 1])[0], together[n])
