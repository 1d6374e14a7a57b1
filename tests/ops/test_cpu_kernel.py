"""What kernels of a CPU leave as it was."""

import os
import subprocess
import sys

import pytest

CODE = """
import torch
from snn.neuron import GradParams, SRMParams
from snn.ops import srm_linear
for threads in (None, 1, 2):
    if threads is not None:
        torch.set_num_threads(threads)
    srm_linear(torch.ones(2, 3, 4), torch.ones(2, 4), SRMParams(), GradParams())
    print(torch.get_num_threads())
"""


@pytest.mark.skipif(os.cpu_count() == 1, reason="one CPU: numba starts one thread in any case")
def test_torch_keeps_its_number_of_threads():
    """Numba starts a thread per CPU at its first call; OMP_NUM_THREADS=1 must go on meaning 1."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["1", "1", "2"], done.stderr
