"""Losses: closed forms by hand, the gradient on spike times, and the mean over the batch."""

import math

import pytest
import torch

from snn.losses import TET, TTFS, CEPlus, Count, CountPlus, CrossEntropy, Kernel, Timing
from snn.neuron import ATan


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
    assert CrossEntropy.reads == "logits"
    assert {loss.reads for loss in (Count, CountPlus, CEPlus, Kernel, TET, TTFS, Timing)} == {"spikes"}


def value_and_times(loss, spikes, labels):
    """The loss, and dL/dt of every place `[T, N, K]`."""
    spikes = spikes.clone().requires_grad_()
    value = loss(spikes, torch.tensor(labels))
    value.backward()
    return value.item(), spikes.grad


def test_count_plus_by_hand():
    """The value of count, 1.2; dL/dcount over the neuron's spikes; right spikes 1 + 4, others 3 + 5 + 1."""
    value, times = value_and_times(CountPlus(desired=3, undesired=1), SPIKES, LABELS.tolist())
    assert value == pytest.approx(1.2, rel=1e-14)
    per_spike = torch.tensor([[0.2 / 1, -0.2 / 3, 0], [-0.4 / 5, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(times, SPIKES * per_spike, rtol=1e-14, atol=0)


def test_count_plus_lifts_the_right_class_where_others_are_loud():
    """T = 25: right spikes 1 + 0, others 20 + 20: ratio 40, so the right class's gradient is 4 times."""
    spikes = train([[1, 20], [20, 0]], steps=25)
    value, times = value_and_times(CountPlus(desired=3, undesired=1), spikes, [0, 1])
    assert value == pytest.approx((4 + 361 + 361 + 9) / 100)
    # dL/dcount = (count - target) / (T N): -2/50 for the one right spike, 19/50 over 20 for the others
    assert times[:, 0, 0].sum().item() == pytest.approx(4 * 2 / 50)
    torch.testing.assert_close(times[:20, 0, 1], torch.full((20,), -19 / 50 / 20, dtype=torch.float64))
    assert not times[:, 1, 1].any() and not times[20:].any()  # a silent class has no time to move


def test_ce_plus_by_hand():
    """Counts 2, 1, 0 of T = 4: logits 1, .5, -20."""
    spikes = train([[2, 1, 0]], steps=4)
    value, times = value_and_times(CEPlus(), spikes, [0])
    exps = [math.exp(1), math.exp(0.5), math.exp(-20)]
    p = [e / sum(exps) for e in exps]
    assert value == pytest.approx(-math.log(p[0]), rel=1e-12)
    # dL/dlogit = p - y; dlogit/dcount = 2/T; times are minus that, over the count
    per_spike = torch.tensor([(1 - p[0]) * 0.5 / 2, -p[1] * 0.5 / 1, 0], dtype=torch.float64)
    torch.testing.assert_close(times, spikes * per_spike, rtol=1e-12, atol=0)


def test_ce_plus_leaves_a_sample_with_a_silent_right_class_alone():
    value, times = value_and_times(CEPlus(), train([[0, 1]], steps=4), [0])
    assert value == pytest.approx(20.5) and not times.any()


def test_kernel_by_hand():
    """tau_s 2: decay 1/2. Right class: target at steps 0 and 1 (both of T = 2), spikes at 1 alone."""
    spikes = torch.tensor([[[0.0, 1.0]], [[1.0, 0.0]]], dtype=torch.float64)  # [T=2, N=1, K=2]
    value, times = value_and_times(Kernel(desired=2, undesired=0, tau_s=2.0), spikes, [0])
    # gaps: class 0: -1, then -1/2 + 0; class 1: 1, then 1/2
    assert value == (1 + 0.25 + 1 + 0.25) / 2
    # dL/ds: class 0 at step 1: -1/2; class 1 at step 0: 1 + 1/2 * 1/2
    assert times[:, 0].tolist() == [[0, -1.25], [0.5, 0]]


def test_kernel_target_trains_are_evenly_spaced():
    """One spike of T = 4 stands at the last step, two at 1 and 3, three at 1, 2, 3, four everywhere."""
    for count, steps in ((1, [3]), (2, [1, 3]), (3, [1, 2, 3]), (4, [0, 1, 2, 3])):
        spikes = torch.zeros(4, 1, 1, dtype=torch.float64)
        spikes[steps] = 1
        assert Kernel(desired=count, undesired=0, tau_s=3.0)(spikes, torch.tensor([0])).item() == 0


def test_tet_by_hand():
    """Logits of the two steps: (1, 0), then (1, 1)."""
    spikes = torch.tensor([[[1.0, 0.0]], [[1.0, 1.0]]], dtype=torch.float64)
    value, times = value_and_times(TET(), spikes, [0])
    first = math.exp(1) / (math.exp(1) + 1)
    assert value == pytest.approx((-math.log(first) + math.log(2)) / 2)
    expected = torch.tensor([[[(1 - first) / 2, 0]], [[0.25, -0.25]]], dtype=torch.float64)
    torch.testing.assert_close(times, expected, rtol=1e-12, atol=0)


def test_ttfs_by_hand():
    """First spikes at steps 1, 0 and never (T = 3): logits -1, 0, -3; later ones have no say."""
    spikes = torch.tensor([[0.0, 1, 0], [1, 1, 0], [1, 0, 0]], dtype=torch.float64)[:, None]
    value, times = value_and_times(TTFS(), spikes, [0])
    exps = [math.exp(-1), math.exp(0), math.exp(-3)]
    p = [e / sum(exps) for e in exps]
    assert value == pytest.approx(-math.log(p[0]))
    # dL/dt = -dL/dlogit = y - p
    expected = torch.zeros(3, 3, dtype=torch.float64)
    expected[1, 0], expected[0, 1] = 1 - p[0], -p[1]
    torch.testing.assert_close(times[:, 0], expected, rtol=1e-12, atol=0)


def test_timing_by_hand():
    """T = 4. Class 0, right, target 1, 3: one spike, at 2. Class 1, target 3: at 0 and 2."""
    spikes = torch.zeros(4, 1, 2, dtype=torch.float64)
    spikes[2, 0, 0] = spikes[0, 0, 1] = spikes[2, 0, 1] = 1
    value, times = value_and_times(Timing(desired=2, undesired=1), spikes, [0])
    # class 0: 1^2, missing (4 - 3)^2; class 1: (0 - 3)^2, one too many (2 - 4)^2
    assert value == pytest.approx((1 + 1 + 9 + 4) / (2 * 16))
    expected = torch.zeros(4, 2, dtype=torch.float64)
    expected[2, 0], expected[0, 1], expected[2, 1] = 1 / 16, -3 / 16, -2 / 16
    torch.testing.assert_close(times[:, 0], expected, rtol=1e-12, atol=0)


SPIKE_LOSSES = [
    Count(3, 1),
    CountPlus(3, 1),
    CEPlus(),
    Kernel(3, 1, tau_s=3.0),
    TET(),
    TTFS(),
    Timing(3, 1),
]


@pytest.mark.parametrize("loss", SPIKE_LOSSES, ids=lambda loss: type(loss).__name__)
def test_every_loss_is_a_mean_leaves_its_input_alone_and_bears_silence(loss):
    torch.manual_seed(0)
    spikes = (torch.rand(5, 4, 3) < 0.5).double()
    spikes[:, 0] = 0
    labels, before = torch.tensor([0, 1, 2, 1]), spikes.clone()
    value, times = value_and_times(loss, spikes, labels.tolist())
    assert torch.equal(spikes, before) and times.isfinite().all() and not times[spikes == 0].any()
    if not isinstance(loss, CountPlus):  # its ratio is the batch's
        alone = [loss(spikes[:, n : n + 1], labels[n : n + 1]).item() for n in range(4)]
        assert value == pytest.approx(sum(alone) / 4)


def test_a_target_train_has_a_spike_a_step_at_most():
    for make in (lambda n: Kernel(n, 1, tau_s=3.0), lambda n: Timing(n, 1)):
        spikes, labels = train([[2, 1], [4, 0]], steps=5), torch.tensor([0, 1])
        assert make(9)(spikes, labels).item() == make(5)(spikes, labels).item()


def test_kernel_wants_a_time_constant():
    with pytest.raises(ValueError, match="loss.tau_s must be finite and > 1"):
        Kernel(3, 1, tau_s=1.0)


@pytest.mark.parametrize(
    "loss",
    [kind for kind in SPIKE_LOSSES if not isinstance(kind, TTFS | Timing)],
    ids=lambda x: type(x).__name__,
)
def test_with_a_surrogate_a_loss_has_its_ordinary_derivative(loss):
    """Against finite differences, silent neurons included; the value is the same."""
    torch.manual_seed(0)
    twin = type(loss)(**{**vars(loss), "grad": ATan(1.0)})
    spikes, labels = (torch.rand(4, 2, 3) < 0.5).double(), torch.tensor([0, 2])
    spikes[:, 1, 2] = 0
    assert twin(spikes, labels).item() == loss(spikes, labels).item()
    _, heights = value_and_times(twin, spikes, labels.tolist())
    step = 1e-6
    for place in [(0, 0, 0), (3, 0, 1), (2, 1, 1), (1, 0, 2)]:
        moved = [spikes.clone(), spikes.clone()]
        moved[0][place] += step
        moved[1][place] -= step
        slope = (twin(moved[0], labels) - twin(moved[1], labels)) / (2 * step)
        assert heights[place].item() == pytest.approx(slope.item(), abs=1e-7)


@pytest.mark.parametrize(("loss", "make"), [("ttfs", TTFS), ("timing", lambda grad: Timing(3, 1, grad=grad))])
def test_losses_of_times_refuse_a_surrogate(loss, make):
    with pytest.raises(ValueError, match=f"loss={loss} moves spike times: it needs surrogate=time, got ATan"):
        make(grad=ATan(1.0))
