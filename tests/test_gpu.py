"""What a CUDA GPU must do as the CPU does."""

import pytest
import torch

from snn.device import pick_device
from snn.keyed_random import ENCODING, keyed_uniform
from snn.neuron import GradParams, SRMParams
from snn.ops import srm_conv2d, srm_linear
from tests.program.conftest import SMALL, program, rows  # noqa: F401  a fixture

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")


def test_auto_is_the_gpu():
    assert pick_device("auto").type == "cuda"


@pytest.mark.parametrize("kind", ["conv", "linear"])
def test_ops_equal_the_cpu(kind):
    torch.manual_seed(0)
    if kind == "conv":
        x, weight = (torch.rand(7, 3, 4, 9, 9) < 0.3).double(), torch.randn(5, 4, 3, 3, dtype=torch.float64)
    else:
        x, weight = (torch.rand(7, 3, 20) < 0.3).double(), torch.randn(5, 20, dtype=torch.float64)
    results = []
    for device in ("cpu", "cuda"):
        leaves = [t.detach().to(device).requires_grad_() for t in (x, weight)]
        op = srm_conv2d if kind == "conv" else srm_linear
        spikes = op(*leaves, SRMParams(), GradParams())
        grad_out = torch.linspace(-1, 1, spikes.numel(), dtype=torch.float64).view_as(spikes)
        spikes.backward(grad_out.to(device))
        results.append([spikes.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)])
    (spikes, *grads), (other_spikes, *other_grads) = results
    assert torch.equal(spikes, other_spikes) and spikes.sum() > 0
    torch.testing.assert_close(grads, other_grads, rtol=1e-10, atol=1e-12)


def test_draws_are_those_of_the_cpu():
    index = torch.arange(5)
    drawn = [keyed_uniform(3, 1, index.to(device), 100, ENCODING).cpu() for device in ("cpu", "cuda")]
    assert torch.equal(*drawn)


@pytest.mark.parametrize("head", [(), ("head=spiking", "loss=count")], ids=["decoupled", "spiking"])
def test_a_run_uses_the_gpu_and_resumes(program, head):  # noqa: F811
    words = [word for word in SMALL if not word.startswith("device")]
    assert program.train(*words, *head, "hydra.run.dir=run", "trainer.stop_after=1").code == 0
    assert " on cuda" in (program.folder / "run" / "train.log").read_text()
    assert program.train("resume=run").code == 0
    assert len(rows(program.folder / "run")) == 2
    assert program.evaluate("checkpoint=run").code == 0
