"""Architecture strings: every token, and what a bad one says."""

import re

import pytest

from snn.networks.architecture import Conv, Dropout, Linear, Pool, parse


def conv(channels, kernel, padding, stride=1, dilation=1, groups=1):
    return Conv(channels, kernel, padding, stride, dilation, groups)


@pytest.mark.parametrize(
    ("token", "spec"),
    [
        ("15C5", conv(15, 5, 2)),
        ("64C3", conv(64, 3, 1)),
        ("8C1", conv(8, 1, 0)),
        ("8C4", conv(8, 4, 2)),
        ("8C3p0", conv(8, 3, 0)),
        ("64C3s2p1", conv(64, 3, 1, stride=2)),
        ("64C3p1s2", conv(64, 3, 1, stride=2)),
        ("8C3d2", conv(8, 3, 1, dilation=2)),
        ("8C3g4", conv(8, 3, 1, groups=4)),
        ("128C11p12s13d14g16", conv(128, 11, 12, 13, 14, 16)),
        ("P2", Pool(2)),
        ("P10", Pool(10)),
        ("300", Linear(300)),
        ("D0.1", Dropout(0.1)),
        ("D.25", Dropout(0.25)),
        ("D0", Dropout(0.0)),
    ],
)
def test_every_kind_of_token(token, spec):
    assert parse(token) == [(token, spec)]


def test_a_papers_string():
    tokens = ["15C5", "P2", "40C5", "P2", "300"]
    assert parse("15C5-P2-40C5-P2-300") == list(
        zip(tokens, [conv(15, 5, 2), Pool(2), conv(40, 5, 2), Pool(2), Linear(300)], strict=True)
    )


def test_repeats():
    tokens = [token for token, _ in parse("128C3x2-P2-256C3s1x3-D0.2x2-P2x1-2048x2")]
    assert tokens == [*["128C3"] * 2, "P2", *["256C3s1"] * 3, *["D0.2"] * 2, "P2", *["2048"] * 2]
    assert len(parse("8C3x12")) == 12


@pytest.mark.parametrize(
    "token",
    [
        *(
            "16c3",
            "C3",
            "16C",
            "0C3",
            "16C0",
            "16C3s0",
            "16C3d0",
            "16C3g0",
            "16C3s",
            "16C3s1s2",
            "16C3q2",
            "016C3",
        ),
        *(
            "P",
            "P0",
            "P2.5",
            "p2",
            "0",
            "",
            "3.5",
            "+3",
            "D",
            "D1",
            "D1.5",
            "D0.1.2",
            "conv",
            " 16C3",
            "16C3 ",
        ),
        *("16C3x0", "16C3x", "16C3x2x2", "x2", "16C3x1.5", "16C3,P2"),
    ],
    ids=repr,
)
def test_a_bad_token_is_named_with_its_place(token):
    layers = f"8C3-{token}-10"
    start, end = (
        re.escape(f"network.layers: token 2 of {layers!r} must read like 16C3"),
        re.escape(f", got {token!r}"),
    )
    with pytest.raises(ValueError, match=f"^{start}.*{end}$"):
        parse(layers)


@pytest.mark.parametrize(
    ("layers", "place", "piece"),
    [
        ("", 1, ""),
        ("8C3-", 2, ""),
        ("-8C3", 1, ""),
        ("8C3--10", 2, ""),
        ("D-0.1", 1, "D"),
        ("P2-16C-3", 2, "16C"),
    ],
    ids=repr,
)
def test_a_stray_dash(layers, place, piece):
    with pytest.raises(ValueError, match=f"token {place} of {layers!r} .*, got {piece!r}$"):
        parse(layers)


@pytest.mark.parametrize(
    ("spec", "shape", "expected"),
    [
        (conv(8, 3, 1), (2, 7, 5), (8, 7, 5)),
        (conv(8, 3, 0), (2, 7, 5), (8, 5, 3)),
        (conv(8, 3, 1, stride=2), (2, 7, 6), (8, 4, 3)),
        (conv(8, 3, 0, dilation=2), (2, 7, 5), (8, 3, 1)),
        (conv(8, 4, 2), (2, 6, 6), (8, 7, 7)),
        (Pool(2), (4, 7, 6), (4, 3, 3)),
        (Linear(9), (4, 7, 6), (9,)),
        (Dropout(0.5), (4, 7, 6), (4, 7, 6)),
    ],
    ids=str,
)
def test_output_shapes(spec, shape, expected):
    assert spec.out_shape(shape) == expected


@pytest.mark.parametrize("layers", ["16x1000", "8C3x99999999", "8C3-1\u0663", "16x999-16", "9999999999"])
def test_endless_repeats_and_foreign_digits_are_refused(layers):
    with pytest.raises(ValueError, match="network.layers: token"):
        parse(layers)
