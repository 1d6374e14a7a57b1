"""What kernels of a CPU leave as it was."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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


@pytest.mark.slow
def test_a_full_disk_where_compiled_kernels_are_kept_ends_nothing(tmp_path):
    """To a program, a file-size limit is a disk that fills up."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "import torch; from snn.neuron import GradParams, SRMParams; from snn.ops import srm_linear\n"
        "w = torch.ones(2, 3, requires_grad=True)\n"
        "s = srm_linear(torch.ones(4, 1, 3), w, SRMParams(), GradParams()); s.sum().backward()\n"
        "print(int(s.sum()), w.grad.isfinite().all().item())"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ended.stdout.split() == ["8", "True"], ended.stderr
    assert "compiled kernels cannot be kept on the disk" in ended.stderr
