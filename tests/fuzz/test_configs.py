"""Random overrides of a whole config: one that is checked and can be built, or one line that names a key."""

import dataclasses
import functools
from typing import Any

import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from snn.config import build, build_network, check, compose
from snn.schema import TrainConfig
from snn.words import CONFIGS

WILD = "a key of any signs: a message may show it otherwise"
FEW = settings(max_examples=settings.default.max_examples // 3)  # each composes twice
BUILT_AT_MOST = 300_000  # parameters: larger networks are built without memory

GROUPS = {
    folder.name: sorted(file.stem for file in folder.glob("[!_]*.yaml"))
    for folder in sorted(CONFIGS.iterdir())
    if folder.is_dir()
}
NUMBERS = [
    "0",
    "1",
    "-1",
    "5",
    "0.5",
    "1.5",
    "-0.0",
    "nan",
    "inf",
    "-inf",
    "1e300",
    "-1e300",
    "1e-300",
    "9" * 30,
]
WORDS = [
    "null",
    "true",
    "abc",
    "",
    "''",
    "'a b'",
    "é",
    "~",
    "???",
    "'???'",
    "'a\nb'",
    "none",
    "16C3-P2",
    "0,1",
]
OTHERS = ["[]", "[1]", "[1,2]", "[nan]", "[a,[b]]", "{}", "{a:1}", "{_partial_:true}", "range(1,3)", "]", "{"]
LINKS = [
    "${seed}",
    "${nowhere}",
    "${neuron.tau_m}",
    "${data}",
    "${",
    "'${'",
    "${oc.env:NOWHERE}",
    "${a:b}",
    "${.x}",
]


def quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


VALUES = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(WORDS + OTHERS + LINKS),
    st.one_of(st.integers(), st.floats()).map(str),
    st.text(max_size=6).map(quoted),
    st.text(max_size=6),
)
INTEGERS = st.one_of(st.integers(-1, 9), st.integers(), st.just(10**30)).map(str)
FLOATS = st.one_of(st.sampled_from(NUMBERS), st.floats().map(str), st.floats(0, 10).map(str))
OF_KIND = {
    int: INTEGERS,
    float: st.one_of(FLOATS, INTEGERS),
    bool: st.sampled_from(["true", "false", "null"]),
    list: st.lists(FLOATS, max_size=3).map(lambda numbers: f"[{','.join(numbers)}]"),
    type(None): st.one_of(FLOATS, INTEGERS, st.just("null")),
}
CHOICES = st.one_of(
    st.just(()),
    st.sampled_from([f"{group}={file}" for group, files in GROUPS.items() for file in files]).map(
        lambda w: (w,)
    ),
    st.just(("head=spiking", "loss=kernel")),
    st.just(("data=moving_digits", "encoding=frames")),
)


@functools.cache
def keys_of(choices: tuple[str, ...]) -> dict[str, Any]:
    """The dotted keys and the values of the config that these words choose."""

    def walk(path, node):
        for key, value in node.items():
            name = f"{path}{key}"
            yield from walk(f"{name}.", value) if isinstance(value, dict) else [(name, value)]

    every = walk("", dataclasses.asdict(compose(list(choices))))
    return {key: value for key, value in every if not key.endswith(("_target_", "_partial_"))}


@st.composite
def commands(draw):
    """(words, the keys they set)."""
    choices = draw(CHOICES)
    keys, words = [choice.partition("=")[0] for choice in choices], list(choices)
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        key = draw(st.sampled_from(sorted(keys_of(choices))))
        values = VALUES
        match draw(
            st.sampled_from(["of its kind"] * 6 + ["any"] * 3 + ["misspelt", "deeper", "group", "wild"])
        ):
            case "of its kind":
                values = OF_KIND.get(type(keys_of(choices)[key]), VALUES)
            case "misspelt":
                at = draw(st.integers(0, len(key) - 1))
                key = key[:at] + key[at + 1 :]
            case "deeper":
                key += ".x"
            case "group":
                key = key.split(".")[0]
            case "wild":
                key = draw(st.text(max_size=4))
                keys.append(WILD)
        keys.append(key)
        words.append(draw(st.sampled_from(["", "", "", "+", "++", "~"])) + key + "=" + draw(values))
    return words, keys


@FEW
@given(commands())
def test_a_command_composes_and_builds_or_names_a_key(command):
    words, keys = command
    try:
        config = compose(words)
        assert isinstance(config, TrainConfig)
        again = check(dataclasses.asdict(config), TrainConfig)
        assert repr(again) == repr(config)
        with torch.device("meta"):  # costs no memory, whatever it is
            network, _ = build_network(config)
        if sum(parameter.numel() for parameter in network.parameters()) <= BUILT_AT_MOST:
            build_network(config)
        build(config.encoding, seed=config.seed)
        build(config.calibrate)
        build(config.optimizer, params=[torch.nn.Parameter(torch.zeros(2, 3))])
        event("built")
    except ValueError as error:
        event("refused")
        assert len(str(error).splitlines()) == 1
        told = [part for key in keys for part in (key, key.rpartition(".")[2], key.partition(".")[0])]
        assert any(part in str(error) for part in told) or WILD in keys, str(error)
