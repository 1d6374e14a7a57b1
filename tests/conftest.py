"""One thread per test process: the tensors are tiny, and threads on a busy machine wait for each other."""

import os

import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # the GPU's kernels run on CPU tensors, step by step


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="the long versions of the fuzz tests")
