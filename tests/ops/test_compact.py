"""Packed tensors come back as they were, and are small."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snn.ops.compact import compact, pack_bits, restore, unpack_bits


@settings(max_examples=100)
@given(
    st.integers(1, 70_000), st.sampled_from([0.0, 0.01, 0.1, 0.14, 1.0]), st.booleans(), st.integers(0, 2**31)
)
def test_round_trip(length, rate, double, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(length, generator=generator, dtype=torch.float64 if double else torch.float32)
    x *= torch.rand(length, generator=generator) < rate
    back = restore(compact(x), x.shape, x.stride())
    assert torch.equal(back, x) and back.dtype == x.dtype


@pytest.mark.parametrize("where", ["first", "last", "middle"])
def test_a_single_value(where):
    x = torch.zeros(5, 3, 1001)
    place = {"first": 0, "last": -1, "middle": 7001}[where]
    x.view(-1)[place] = float("nan")
    parts = compact(x)
    assert sum(part.numel() * part.itemsize for part in parts) < 0.04 * x.numel() * x.itemsize
    assert torch.equal(restore(parts, x.shape, x.stride()).isnan(), x.isnan())


def test_size_at_a_tenth():
    x = (torch.rand(100_000, generator=torch.Generator().manual_seed(0)) < 0.1).float()
    assert sum(part.numel() * part.itemsize for part in compact(x)) / len(x) == pytest.approx(0.53, abs=0.02)


@pytest.mark.parametrize(
    "x",
    [
        torch.rand(4, 500),
        torch.zeros(1, 500).expand(4, 500),
        torch.zeros(0, 3),
        torch.zeros(500, dtype=torch.bfloat16),
        torch.zeros(500, dtype=torch.int64),
    ],
    ids=["dense", "expanded", "empty", "bfloat16", "int64"],
)
def test_what_is_kept_as_it_is(x):
    (kept,) = compact(x)
    assert kept is x and restore([kept], x.shape, x.stride()) is x


def test_dense_beyond_the_sample():
    """The sample looks sparse, the rest is not: counted in full, and kept."""
    x = torch.ones(40_960)
    x[::10] = 0
    assert compact(x)[0] is x


def test_other_layouts():
    x = (torch.rand(6, 40, 50) < 0.1).float()
    for view in (x.permute(2, 0, 1), x[::2], x[..., 3:]):
        back = restore(compact(view), view.shape, view.stride())
        assert torch.equal(back, view) and back.stride() == view.stride()
    assert len(compact(x.permute(2, 0, 1))) == 3 and len(compact(x[..., 3:])) == 1  # gaps: kept as it is


@pytest.mark.parametrize("length", [1, 7, 8, 9, 1000])
def test_bits(length):
    mask = torch.rand(length, generator=torch.Generator().manual_seed(length)) < 0.5
    bits = pack_bits(mask)
    assert bits.dtype == torch.uint8 and len(bits) == -(-length // 8)
    assert torch.equal(unpack_bits(bits, length), mask)
