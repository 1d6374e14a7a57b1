"""trainer.precision and trainer.compile: the whole program, faster or smaller, to the same end."""

import copy
import shutil

import pytest
import torch

from snn.device import compile_network, set_precision
from snn.networks import DecoupledHead, SpikingHead, SRMNetwork
from snn.neuron import GradParams, SRMParams
from tests.program.conftest import rows, summary

RESNET = ("network=resnet", "network.stem=4C3", "network.channels=[4]", "network.blocks=1")
COMPILER = shutil.which("g++") or shutil.which("clang++")
HEADS = {
    "decoupled": lambda shape: DecoupledHead(shape, 3, decouple_scale=0.1, sign=True, sign_clip=1.0),
    "spiking": lambda shape: SpikingHead(
        shape, 3, neuron=SRMParams(), grad=GradParams(), weight_standardization=True
    ),
}


def make(head):
    torch.manual_seed(0)
    return SRMNetwork(
        "4C3-P2-6C3-D0.1-P2-5C3-P2-7",  # a pool within, a dropout, and a pool of an odd map
        2,
        20,
        True,
        neuron=SRMParams(threshold=0.3),
        grad=GradParams(),
        head=HEADS[head],
    )


def test_bf16_trains_evaluates_and_resumes(program):
    words = ("trainer.precision=bf16", "network.layers=8C3-P2-16")
    whole = program.small(*words, run="whole")
    assert program.train("data=synthetic", "device=cpu", "trainer.epochs=2", "trainer.batch_size=16",
                         *words, "trainer.stop_after=1", "hydra.run.dir=parts").code == 0  # fmt: skip
    assert program.train("resume=parts").code == 0
    assert rows(program.folder / "parts") == rows(whole)
    ended = program.evaluate("checkpoint=whole")
    assert f"accuracy {summary(whole)['test/accuracy']:.4f}" in ended.out
    assert f"loss {summary(whole)['test/loss']:.4f}" in ended.out


def test_bf16_convolves_low_and_answers_in_float32():
    network = make("decoupled")
    seen = []
    network.layers[0].register_forward_hook(lambda module, inputs, out: seen.append(out.dtype))
    set_precision(network, torch.device("cpu"), "bf16")
    out = network(torch.rand(3, 2, 2, 20, 20))
    assert out.dtype == torch.float32 and seen == [torch.float32]
    assert torch.equal(out, out.bfloat16().float())  # the classifier's product was in bfloat16
    out.sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in network.parameters())


def test_bf16_holds_where_a_teacher_sets_spikes():
    """Training with target spikes runs the network through `teach`: its output is that of a forward."""

    def head(shape):
        return SpikingHead(
            shape, 3, neuron=SRMParams(), grad=GradParams(), weight_standardization=True, target_rise=0.05
        )

    torch.manual_seed(0)
    network = SRMNetwork("6C3-P2-20", 2, 8, True, neuron=SRMParams(), grad=GradParams(), head=head).eval()
    x, labels, products = torch.rand(5, 4, 2, 8, 8), torch.tensor([0, 1, 2, 0]), []
    full = network(x)
    set_precision(network, torch.device("cpu"), "bf16")
    layer = network.layers[2]
    layer.register_forward_pre_hook(lambda *_: products.append(torch.is_autocast_enabled("cpu")))
    output, seen = network.teach(x, labels)
    assert torch.equal(output, network(x)) and products == [True, True]
    assert output.dtype == seen.dtype == full.dtype == torch.float32 and (seen >= output).all()
    seen.sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in network.parameters())


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("trainer.precision=fp16", "trainer.precision must be fp32 or bf16, got 'fp16'"),
        ("trainer.compile=1", "trainer.compile must be bool, got 1"),
    ],
)
def test_bad_values_are_refused(program, word, message):
    assert message in program.train("data=synthetic", word).error
    assert not (program.folder / "runs").exists()


@pytest.mark.slow
@pytest.mark.skipif(not COMPILER, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("encoding", ["direct", "spikes"])
def test_a_whole_network_compiles_without_a_break(head, encoding):
    """Equal spikes and logits; gradients up to the order of sums."""
    network = make(head).eval()
    x = torch.rand(4, 2, 20, 20).expand(5, 4, 2, 20, 20) * 3
    if encoding == "spikes":
        x = (torch.rand(5, 4, 2, 20, 20) < 0.4).float()
    results = []
    for run in (network, torch.compile(network, fullgraph=True)):
        network.zero_grad()
        out = run(x)
        out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
        results.append((out.detach(), [p.grad.clone() for p in network.parameters()]))
    assert torch.equal(results[0][0], results[1][0])
    for ours, theirs in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()) + 1e-7)
    assert sum(float(grad.abs().sum()) for grad in results[0][1]) > 0


@pytest.mark.slow
@pytest.mark.skipif(not COMPILER, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize("network", ["chain", "resnet"])
def test_a_compiled_run_trains_and_counts_its_spikes(program, network):
    """Several layers of a class, and a smaller last batch; dropout would draw other masks if compiled."""
    words = {"chain": ("network.layers=8C3-P2-4C3-16",), "resnet": (*RESNET, "network.dropout=0")}[network]
    words = ("data=synthetic", "device=cpu", *words, "trainer.epochs=1", "trainer.batch_size=20")
    assert program.train(*words, "trainer.compile=true", "hydra.run.dir=compiled").code == 0
    assert program.train(*words, "hydra.run.dir=plain").code == 0
    (ours,), (theirs,) = (rows(program.folder / run) for run in ("compiled", "plain"))
    rates = [key for key in theirs if key.startswith("train/spike_rate/")]
    assert len(rates) == (3 if network == "chain" else 4)
    for key in rates:
        assert ours[key] == pytest.approx(theirs[key], rel=0.05), key
    assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=0.05)
    assert program.evaluate("checkpoint=compiled").code == 0


def test_a_copy_runs_its_own_weights():
    network = make("decoupled").eval()
    set_precision(network, torch.device("cpu"), "bf16")
    other, x = copy.deepcopy(network), torch.rand(3, 2, 2, 20, 20)
    assert torch.equal(other(x), network(x))
    torch.nn.init.zeros_(other.head.linear.weight)
    assert torch.equal(other(x), other.head.linear.bias.bfloat16().float().expand(2, 3))
    assert not torch.equal(other(x), network(x))


def test_compile_network_leaves_names_and_weights_alone():
    network = make("spiking")
    names = list(network.state_dict())
    compile_network(network)  # compiles at the first call, not here
    assert list(network.state_dict()) == names
