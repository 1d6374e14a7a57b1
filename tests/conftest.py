"""One thread per test process: the tensors are tiny, and threads on a busy machine wait for each other.

How many examples hypothesis draws: few and the same ones each time, or with `--nightly` many and new ones.
"""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # the GPU's kernels run on CPU tensors, step by step


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="the long versions of the fuzz tests")


def pytest_configure(config: pytest.Config) -> None:
    common = {"deadline": None, "suppress_health_check": list(HealthCheck)}
    settings.register_profile("small", max_examples=30, derandomize=True, database=None, **common)
    settings.register_profile("nightly", max_examples=1000, print_blob=True, **common)
    nightly = config.getoption("--nightly")
    settings.load_profile("nightly" if nightly else "small")
    if nightly:
        config.option.timeout = 0  # no limit
