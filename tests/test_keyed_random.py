import itertools
import math

import pytest
import torch

from snn import keyed_random
from snn.keyed_random import AUGMENT, ENCODING, keyed_uniform, stream_key

MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15


def mix(word):
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def slow_uniform(seed, epoch, index, n, stream):
    """Draw with Python's integers, one number at a time."""
    key = 0
    for part in (seed, epoch, stream):
        key = mix(((key ^ part) + STEP) & MASK)
    keys = [mix((key + (i + 1) * STEP) & MASK) for i in index]
    return torch.tensor([[(mix((k + (p + 1) * STEP) & MASK) >> 40) / 2**24 for p in range(n)] for k in keys])


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (7, 3), (-1, 0), (2**63 + 5, 10**6)])
def test_equals_the_slow_definition(seed, epoch):
    index = [0, 1, 59_999, 2**40]
    got = keyed_uniform(seed, epoch, torch.tensor(index), 5, ENCODING)
    assert torch.equal(got, slow_uniform(seed, epoch, index, 5, ENCODING))


def test_values_never_change():
    # A change here changes every augmented or Poisson-encoded run: results would no longer repeat.
    got = keyed_uniform(0, 0, torch.tensor([0, 1]), 3, AUGMENT) * 2**24
    assert got.tolist() == [[3993255.0, 5475044.0, 8304876.0], [14252254.0, 3790998.0, 11255241.0]]


def test_numbers_are_exact_and_below_one():
    u = keyed_uniform(0, 0, torch.arange(1000), 1000, AUGMENT)
    assert u.dtype == torch.float32
    assert 0 <= u.min() < 1e-5
    assert 1 - 1e-5 < u.max() < 1
    assert torch.equal((u.double() * 2**24) % 1, torch.zeros(1000, 1000, dtype=torch.double))


def test_uniform():
    u = keyed_uniform(0, 0, torch.arange(1000), 1000, AUGMENT).double()
    assert abs(u.mean() - 0.5) < 4 / math.sqrt(12e6)
    assert abs(u.var() - 1 / 12) < 4 * math.sqrt(1 / 180 / 1e6)
    counts = torch.histc(u, 64, 0, 1)
    chi2 = ((counts - 1e6 / 64) ** 2 / (1e6 / 64)).sum()
    assert 63 - 4 * math.sqrt(126) < chi2 < 63 + 4 * math.sqrt(126)
    assert (u.mean(0) - 0.5).abs().max() < 5 / math.sqrt(12e3)  # each position, over the samples
    assert (u.mean(1) - 0.5).abs().max() < 5 / math.sqrt(12e3)  # each sample, over the positions


@pytest.mark.parametrize("other", ["sample", "position", "epoch", "seed", "stream", "epoch-for-seed"])
def test_independent_of_its_neighbours(other):
    index = torch.arange(2000)
    first = keyed_uniform(1, 1, index, 100, AUGMENT)
    if other == "sample":
        a, b = first[1:], first[:-1]
    elif other == "position":
        a, b = first[:, 1:], first[:, :-1]
    else:
        seed, epoch, stream = {
            "epoch": (1, 2, AUGMENT),
            "seed": (2, 1, AUGMENT),
            "stream": (1, 1, ENCODING),
            "epoch-for-seed": (0, 2, AUGMENT),
        }[other]
        a, b = first, keyed_uniform(seed, epoch, index, 100, stream)
    correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
    assert abs(correlation) < 4 / math.sqrt(a.numel())
    assert (a == b).sum() < 10


def test_a_row_depends_on_its_own_index_only():
    index = torch.tensor([5, 900, 5, 3])
    u = keyed_uniform(0, 2, index, 7, AUGMENT)
    assert torch.equal(u[0], u[2])
    for row, i in zip(u, index.tolist(), strict=True):
        assert torch.equal(row, keyed_uniform(0, 2, torch.tensor([i]), 7, AUGMENT)[0])


def test_a_short_draw_is_the_start_of_a_long_one():
    index = torch.arange(4)
    long = keyed_uniform(0, 0, index, 9, AUGMENT)
    assert torch.equal(keyed_uniform(0, 0, index, 4, AUGMENT), long[:, :4])


@pytest.mark.parametrize("chunk", [1, 6, 14, 1000])
def test_chunks_do_not_show(monkeypatch, chunk):
    whole = keyed_uniform(0, 0, torch.arange(11), 7, AUGMENT)
    monkeypatch.setattr(keyed_random, "_CHUNK", chunk)
    assert torch.equal(keyed_uniform(0, 0, torch.arange(11), 7, AUGMENT), whole)


def test_leaves_the_global_generator_and_its_input_alone():
    index = torch.arange(4)
    before = torch.get_rng_state()
    keyed_uniform(0, 0, index, 3, AUGMENT)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(index, torch.arange(4))


@pytest.mark.parametrize(("samples", "n"), [(0, 3), (3, 0)])
def test_nothing_to_draw(samples, n):
    assert keyed_uniform(0, 0, torch.arange(samples), n, AUGMENT).shape == (samples, n)


def test_integer_types_agree():
    wide = keyed_uniform(0, 0, torch.arange(4), 3, AUGMENT)
    assert torch.equal(keyed_uniform(0, 0, torch.arange(4, dtype=torch.int32), 3, AUGMENT), wide)


@pytest.mark.parametrize("index", [torch.zeros(2), torch.zeros(2, 2, dtype=torch.long)], ids=["float", "2d"])
def test_refuses_a_bad_index(index):
    with pytest.raises(ValueError, match="index must be a 1-D integer tensor, got"):
        keyed_uniform(0, 0, index, 3, AUGMENT)


def test_refuses_a_negative_n():
    with pytest.raises(ValueError, match="n must be >= 0, got -1"):
        keyed_uniform(0, 0, torch.arange(2), -1, AUGMENT)


def test_stream_keys_differ():
    keys = {stream_key(*key) for key in itertools.product(range(20), range(20), range(3))}
    assert len(keys) == 20 * 20 * 3
    assert all(0 <= key <= MASK for key in keys)
