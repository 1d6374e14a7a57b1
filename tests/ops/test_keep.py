"""The list of values by their flags, with the vector instruction and without."""

import importlib

import numba
import numpy as np
import pytest

module = importlib.import_module("snn.ops.keep")


@pytest.fixture(scope="module", params=["this CPU's way", "one by one"])
def keep(request):
    if request.param == "this CPU's way":
        yield module.keep
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "HAS_COMPRESS", False)
        function = numba.njit(error_model="numpy")(module.keep.py_func)
        function(np.zeros(1, np.uint8), np.zeros(1, np.uint16), np.zeros(1, np.uint16))  # compiled so
        yield function


@pytest.mark.parametrize("kind", [np.uint16, np.uint32])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("count", [0, 1, 15, 16, 31, 32, 33, 63, 64, 700, 1024])
def test_it_keeps_what_is_flagged_in_order_and_writes_no_further_than_the_flags(keep, kind, share, count):
    random = np.random.default_rng(count)
    flags = (random.random(count) < share).astype(np.uint8)
    values = random.integers(0, np.iinfo(kind).max, count).astype(kind)
    beyond = np.full(count + 64, 7, kind)
    n = keep(flags, values, beyond[:count])
    assert n == flags.sum()
    assert np.array_equal(beyond[:n], values[flags == 1])
    assert (beyond[count:] == 7).all()
