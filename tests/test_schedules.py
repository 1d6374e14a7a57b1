"""Learning rates over a run."""

import pytest
import torch

from snn.schedules import constant, cosine


def rates(schedule, total, base=0.1):
    """The rate each optimizer step uses, and the one after the last."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=base)
    scheduler = schedule(optimizer, total)
    seen = []
    for _ in range(total):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return [*seen, optimizer.param_groups[0]["lr"]]


@pytest.mark.parametrize("steps_per_epoch", [1, 7])
def test_hazard_23_cosine(steps_per_epoch):
    """Ten epochs from .1: the rate at the start of each epoch."""
    got = rates(cosine, 10 * steps_per_epoch)[::steps_per_epoch]
    expected = [0.1, 0.09755, 0.09045, 0.07939, 0.06545, 0.05, 0.03455, 0.02061, 0.00955, 0.00245, 0]
    assert got == pytest.approx(expected, abs=5e-6)


def test_cosine_falls_at_every_step():
    got = rates(cosine, 50)
    assert all(later < earlier for earlier, later in zip(got, got[1:], strict=False))


def test_cosine_resumes():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = cosine(optimizer, 10)
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    resumed = cosine(other, 10)
    resumed.load_state_dict(scheduler.state_dict())
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == pytest.approx(0.06545, abs=5e-6)
    other.step()
    resumed.step()
    assert other.param_groups[0]["lr"] == pytest.approx(0.05)


def test_every_parameter_group_keeps_its_base():
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.4)]
    optimizer = torch.optim.SGD(groups)
    scheduler = cosine(optimizer, 2)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.2])


def test_constant():
    assert rates(constant, 5) == [0.1] * 6
