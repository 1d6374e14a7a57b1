"""Random architecture strings: a network that runs, or one ValueError that names the token."""

from functools import partial

import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from snn.networks import DecoupledHead, SRMNetwork
from snn.networks.architecture import Dropout, parse
from snn.neuron import GradParams, SRMParams

MANY = settings(max_examples=2 * settings.default.max_examples)
RUN_AT_MOST = 50_000  # weights, and values of all maps: larger networks are only described
SIZE, CHANNELS = 6, 2
HEAD = partial(DecoupledHead, num_classes=3, decouple_scale=1.0, sign=True, sign_clip=1.0)

NUMBERS = st.one_of(
    st.integers(1, 8),
    st.sampled_from([0, 16, 99, 300, 999, 30_000, 10**6, 999_999_999, 10**9, 10**30]),
    st.integers(0, 10**12),
)
SMALL = st.integers(1, 5)
OPTIONS = st.lists(st.tuples(st.sampled_from("psdg"), st.one_of(st.integers(0, 3), NUMBERS)), max_size=4)
REPEAT = st.one_of(st.just(""), st.just(""), st.one_of(SMALL, NUMBERS).map("x{}".format))


def tokens(numbers):
    conv = st.builds(
        lambda c, k, options: f"{c}C{k}" + "".join(f"{o}{n}" for o, n in options), numbers, numbers, OPTIONS
    )
    plain_conv = st.builds("{}C{}".format, numbers, numbers)
    dropouts = st.sampled_from(["D0", "D.5", "D0.99999999999999999999"])
    dropout = st.one_of(st.floats(0, 1).map("D{:.3f}".format), dropouts)
    body = st.one_of(plain_conv, conv, numbers.map("P{}".format), numbers.map(str), dropout)
    return st.builds(str.__add__, body, REPEAT)


def strings(*kinds):
    return st.lists(st.one_of(*kinds), min_size=1, max_size=6).map("-".join)


GRAMMATICAL = st.one_of(strings(tokens(SMALL)), strings(tokens(SMALL), tokens(NUMBERS)))
WORDS = ["²", "٣", "é", "Ｃ", "\x00", "x0", "x999999999", "--", "C3C3", "-P0", "x2x2", "${seed}", "1e9"]
STRANGE = st.sampled_from([*"0123456789CPDxpsdg-.+ _%{}$\n", *WORDS])


@st.composite
def mutated(draw):
    """A string of the grammar in which signs were deleted, inserted, replaced, swapped or repeated."""
    layers = list(draw(GRAMMATICAL))
    for _ in range(draw(st.integers(1, 4))):
        i = draw(st.integers(0, len(layers)))
        match draw(st.sampled_from(["delete", "insert", "replace", "swap", "repeat"])):
            case "delete":
                del layers[i : i + 1]
            case "insert":
                layers.insert(i, draw(st.one_of(STRANGE, st.characters())))
            case "replace":
                layers[i : i + 1] = [draw(STRANGE)]
            case "swap":
                layers[i : i + 2] = layers[i : i + 2][::-1]
            case "repeat":
                layers[i:i] = layers[i : i + 9] * draw(st.sampled_from([1, 3, 2000]))
    return "".join(layers)


@MANY
@given(st.one_of(GRAMMATICAL, mutated(), st.text()), st.booleans(), st.sampled_from([(1, 1), (2, 3)]))
def test_a_string_runs_or_its_token_is_named(layers, standardized, sizes):
    def build():
        constants = {"neuron": SRMParams(threshold=0.3), "grad": GradParams()}
        return SRMNetwork(layers, CHANNELS, SIZE, standardized, head=HEAD, **constants)

    try:
        with torch.device("meta"):  # costs no memory, whatever it is
            network = build()
    except ValueError as error:
        message, tokens = str(error), layers.split("-")
        assert "\n" not in message
        if not message.startswith("head.num_classes (data.num_classes) is 3, and the head got "):
            assert message.startswith("network.layers: ")
            assert any(repr(part) in message for token in tokens for part in (token, token.partition("x")[0]))
        event("refused: " + ("grammar" if "must read like" in message else "size or fit"))
        return
    assert len(network.layers) == len(parse(layers))
    weights = sum(parameter.numel() for parameter in network.parameters())
    values = sum(torch.Size(shape).numel() for shape in network.shapes.values())
    assert weights < 3 * 10**9
    if weights + values > RUN_AT_MOST:
        event("built")
        return
    event("run")
    torch.manual_seed(0)
    network = build()
    assert repr(network).count("\n") == len(network.layers) + 2
    x = (torch.rand(sizes[0], sizes[1], CHANNELS, SIZE, SIZE) < 0.5).float().requires_grad_()
    logits = network(x)
    assert logits.shape == (sizes[1], 3) and logits.isfinite().all()
    logits.square().sum().backward()
    kinds = "".join(type(spec).__name__[0] for _, spec in parse(layers) if not isinstance(spec, Dropout))
    if "PP" not in kinds:  # a pool's gradient is for a layer of neurons: pools in a row multiply theirs
        gradients = [x.grad, *(p.grad for p in network.parameters() if p.grad is not None)]
        assert all(gradient.isfinite().all() for gradient in gradients)
