"""Networks from strings: names, shapes, the table, and no state between calls."""

import copy
import gc
import pickle
import re
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from snn.calibrate import Calibration
from snn.layers import SpikeAvgPool2d, SpikeDropout, SRMConv2d, SRMLinear
from snn.losses import Count, CrossEntropy
from snn.networks import DecoupledHead, SpikingHead, SRMNetwork, count_parameters
from snn.neuron import GradParams, SRMParams

NEURON, GRAD = SRMParams(5.0, 3.0, 0.4), GradParams(2.5, 0.85)
HEADS = {
    "decoupled": partial(DecoupledHead, num_classes=3, decouple_scale=0.5, sign=False, sign_clip=1.0),
    "spiking": partial(SpikingHead, num_classes=3, neuron=NEURON, grad=GRAD, weight_standardization=False),
}
BODY = "4C3-P2-D0.3-6C3-P2-10"
BOTH = pytest.mark.parametrize("head", HEADS)


def make(layers=BODY, head="decoupled", seed=0, in_channels=2, size=9, standardized=False):
    """Calibrated, so that every layer fires, and not all of it at once."""
    torch.manual_seed(seed)
    net = SRMNetwork(layers, in_channels, size, standardized, neuron=NEURON, grad=GRAD, head=HEADS[head])
    Calibration(2.0, 64)(net, torch.rand(6, 16, in_channels, size, size))
    return net


def images(batch=3, steps=6, seed=1, size=9):
    torch.manual_seed(seed)
    return torch.rand(steps, batch, 2, size, size)


# what a string builds


def test_names_and_modules():
    net = make("16C3-P2-D0.25-32C3s2x2-40x2")
    names = ["0_16C3", "1_P2", "2_D0_25", "3_32C3s2", "4_32C3s2", "5_40", "6_40"]
    assert [name for name, _ in net.layers.named_children()] == names
    kinds = [SRMConv2d, SpikeAvgPool2d, SpikeDropout, SRMConv2d, SRMConv2d, SRMLinear, SRMLinear]
    assert [type(module) for module in net.layers] == kinds
    assert "layers.0_16C3.weight" in net.state_dict() and "layers.6_40.threshold" in net.state_dict()


def test_tokens_reach_the_modules():
    net = make("4C3s2p0-8C3d2p2g4-P2-D0.25-7")
    first, second, pool, dropout, linear = net.layers
    assert (first.stride, first.padding, first.dilation, first.groups) == (2, 0, 1, 1)
    assert (second.stride, second.padding, second.dilation, second.groups) == (1, 2, 2, 4)
    assert first.weight.shape == (4, 2, 3, 3) and second.weight.shape == (8, 1, 3, 3)
    assert second.pool == 2 and isinstance(pool, nn.Identity)  # the convolution before it pools
    assert dropout.p == 0.25 and linear.weight.shape == (7, 8 * 2 * 2)
    assert all(module.neuron == NEURON and module.grad == GRAD for module in (first, second, linear))


@pytest.mark.parametrize("standardized", [False, True], ids=["plain", "standardized"])
def test_standardization_reaches_every_layer(standardized):
    net = make(standardized=standardized)
    assert {module.weight_standardization for module in net.layers if hasattr(module, "threshold")} == {
        standardized
    }


@pytest.mark.parametrize("size", [9, 12, 7])
def test_recorded_shapes_are_those_of_the_tensors(size):
    net, x = make("4C3-6C4s2-P2-D0.1-5C3d2p2-10x2", size=size), images(size=size)
    for name, module in net.layers.named_children():
        x, pool = module(x), getattr(module, "pool", 1)
        channels, *map_size = net.shapes[name]
        assert tuple(x.shape[2:]) == (channels, *(side // pool for side in map_size)), name


def test_a_pool_is_done_by_the_convolution_before_it_where_it_divides_the_map():
    """Else, and after anything but a convolution, it is a layer of its own; the output is the same."""
    torch.manual_seed(0)
    net, x = make("4C3-P2-6C3-D0.1-P2-5C3-P2", size=18), images(size=18)
    convs = [net.layers[i] for i in (0, 2, 5)]
    assert [conv.pool for conv in convs] == [2, 1, 2]
    assert isinstance(net.layers[4], SpikeAvgPool2d) and isinstance(net.layers[6], nn.Identity)
    net, x = make("4C3-P2-P2-7", size=8), images(size=8)
    together = net(x)
    net.layers[0].pool = 1
    net.layers[1] = SpikeAvgPool2d(2)
    assert torch.allclose(net(x), together) and isinstance(net.layers[2], SpikeAvgPool2d)
    assert make("4C3-P2", size=9).layers[0].pool == 1  # 9 is odd


@BOTH
def test_output_shape(head):
    output = make(head=head)(images())
    assert output.shape == ((3, 3) if head == "decoupled" else (6, 3, 3))


@BOTH
def test_the_head_may_follow_a_map(head):
    assert make("4C3-P2", head)(images()).shape[-1] == 3


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("16C3-P2-P2-P2-P2", r"network.layers: 'P2' \(layer 4\) got 16x1x1: nothing of the map is left"),
        ("16C3-P10", r"'P10' \(layer 1\) got 16x9x9: nothing of the map is left"),
        ("4C3p0x5", r"'4C3p0' \(layer 4\) got 4x1x1: nothing of the map is left"),
        ("4C11p0", r"'4C11p0' \(layer 0\) got 2x9x9: nothing of the map is left"),
        ("4C3d5p0", r"'4C3d5p0' \(layer 0\) got 2x9x9: nothing of the map is left"),
        ("10-P2", r"'P2' \(layer 1\) got 10: a pool needs a map"),
        ("10-4C3", r"'4C3' \(layer 1\) got 10: a convolution needs a map"),
        (
            "4C3-6C3g4",
            r"'6C3g4' \(layer 1\) got 4x9x9: 4 groups must divide its 4 input and 6 output channels",
        ),
        (
            "4C3-8C3g8",
            r"'8C3g8' \(layer 1\) got 4x9x9: 8 groups must divide its 4 input and 8 output channels",
        ),
        ("4C3-P3-6Q3", r"token 3 of '4C3-P3-6Q3' .*, got '6Q3'"),
    ],
)
def test_a_layer_that_does_not_fit_is_named_with_what_reached_it(layers, message):
    with pytest.raises(ValueError, match=message):
        make(layers)


@pytest.mark.parametrize(
    ("layers", "token"),
    [
        ("999999999C999", "999999999C999"),
        ("8C3-8C999999999", "8C999999999"),
        ("8C3-999999999", "999999999"),
        ("30000-30000x99", "30000"),
        ("8C3-1C1p99999-P2", "1C1p99999"),
    ],
)
def test_what_no_memory_holds_is_refused_before_any_is_taken(layers, token):
    with torch.device("meta"), pytest.raises(ValueError, match=f"'{token}' .* at most, and would"):
        make(layers)


def test_standardization_of_a_single_weight_names_the_token():
    with pytest.raises(
        ValueError, match=r"'3C1' \(layer 0\) got 1x9x9: weight_standardization needs at least 2"
    ):
        make("3C1", in_channels=1, standardized=True)


def test_it_prints_as_a_table():
    rows = [re.split(r"\s{2,}", line.strip()) for line in repr(make("4C3-P2-D0.3-1000")).splitlines()]
    head = 2 * 1000 + 3 * 1000 + 3  # affine, linear
    assert rows == [
        ["layer", "output", "parameters"],
        ["0_4C3", "4x9x9", "72"],
        ["1_P2", "4x4x4", "0"],
        ["2_D0_3", "4x4x4", "0"],
        ["3_1000", "1000", "64,000"],
        ["head", "DecoupledHead", f"{head:,}"],
        ["total", f"{64_072 + head:,}"],
    ]


def test_count_parameters_leaves_out_what_is_frozen():
    net = make()
    before = count_parameters(net)
    net.head.linear.requires_grad_(False)
    assert before - count_parameters(net) == 33


# no state between calls


@BOTH
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_hazard_16_no_state_between_calls(head, mode):
    net, x = make(head=head), images()
    net.train(mode == "train")

    def run(x):
        torch.manual_seed(7)  # the same dropout mask
        return net(x)

    first = run(x)
    run(images(batch=5, steps=4, seed=2))
    assert torch.equal(run(x), first)
    assert first.any() and not torch.equal(run(images(seed=3)), first)


@BOTH
def test_hazard_10_short_last_batch(head):
    net, x = make(head=head).eval(), images(batch=5)
    together = net(x)
    alone = net(x[:, 4:])
    batch_axis = 0 if head == "decoupled" else 1
    torch.testing.assert_close(together.select(batch_axis, 4), alone.select(batch_axis, 0))


@BOTH
@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["copy", "pickle"]
)
def test_hazard_17_copies_of_a_net_that_has_run(head, way):
    net, x = make(head=head), images()
    net(x).sum().backward()
    twin = way(net).eval()
    assert torch.equal(twin(x), net.eval()(x)) and repr(twin) == repr(net)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert all(parameter.any() for parameter in net.parameters())


class Kept:
    """A saved tensor that can be watched: alive as long as the graph that saved it."""

    def __init__(self, tensor):
        self.tensor = tensor


@BOTH
def test_hazard_17_steps_leave_nothing_behind(head):
    """No graph and no tensor outlives its step: 100 forwards and 100 training steps hold what five do."""
    net, x, labels = make(head=head), images(), torch.tensor([0, 1, 2])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loss_fn = CrossEntropy() if head == "decoupled" else Count(3, 1)
    graphs = weakref.WeakSet()

    def pack(tensor):
        kept = Kept(tensor.detach())  # a saved output would keep its own graph alive
        graphs.add(kept)
        return kept

    def alive():
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()), len(graphs)

    def work(times):
        for _ in range(times):
            net(x)
            optimizer.zero_grad()
            loss_fn(net(x), labels).backward()
            optimizer.step()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        work(5)
        before = alive()
        held = net(x)
        assert len(graphs) > before[1]  # the watch sees a graph that is held
        del held
        work(100)
        tensors, kept = alive()  # fewer, if what other tests left has gone
        assert tensors <= before[0] and kept == before[1] == 0


@BOTH
def test_hazard_18_eval_returns_the_net_and_stops_dropout(head):
    net, x = make(head=head), images()
    assert net.eval() is net
    assert torch.equal(net(x), net(x))
    net.train()
    torch.manual_seed(0)
    outputs = [net.layers[2](torch.ones(2, 3, 50)) for _ in range(2)]
    assert not torch.equal(*outputs)


@BOTH
def test_hazard_14_a_net_keeps_samples_apart(head):
    net, x = make(head=head).eval(), images(batch=4)
    order = torch.tensor([2, 0, 3, 1])
    output = net(x)
    batch_axis = 0 if head == "decoupled" else 1
    permuted = output.index_select(batch_axis, order)
    torch.testing.assert_close(net(x[:, order]), permuted)
    assert not torch.equal(permuted, output)


@BOTH
def test_hazard_12_autocast_of_a_whole_net(head):
    net, x = make(head=head), images()
    loss_fn = CrossEntropy() if head == "decoupled" else Count(3, 1)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_fn(net(x), torch.tensor([0, 1, 2]))
    loss.backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad.dtype == torch.float32 and parameter.grad.isfinite().all(), name


@BOTH
def test_expanded_input_equals_a_full_one(head):
    net, image = make(head=head).eval(), torch.rand(1, 3, 2, 9, 9)
    assert torch.equal(net(image.expand(6, -1, -1, -1, -1)), net(image.repeat(6, 1, 1, 1, 1)))


@BOTH
def test_every_parameter_gets_a_gradient(head):
    net = make(head=head)
    loss_fn = CrossEntropy() if head == "decoupled" else Count(5, 0)
    loss_fn(net(images()), torch.tensor([0, 1, 2])).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ("4C3-P2-6C3-P2-7", None),
        ("4C3-P2-P2-7", "layer 2_P2 reads a pool, so that the time gradient grows up to 4 times"),
        ("4C3-P3-D0.1-P2-7", "layer 3_P2 reads a pool, so that the time gradient grows up to 9 times"),
    ],
)
def test_two_pools_in_a_row_are_said_by_name_and_figure(caplog, layers, said):
    make(layers, size=12)
    assert [text for text in caplog.messages if "pool" in text] == [] if said is None else said in caplog.text
