"""Every rule of the SRM ops: the message names the rule and the value."""

import re

import pytest
import torch

from snn.layers import SRMConv2d
from snn.neuron import GradParams, SRMParams
from snn.ops import srm_conv2d, srm_linear

X, W = (3, 2, 4, 6, 5), (8, 4, 3, 3)  # legal shapes
LINEAR_X, LINEAR_W = (3, 2, 4), (8, 4)

CONV_ERRORS = {
    "T = 0": ((0, *X[1:]), W, {}, r"at least one step \(encoding.steps\), got T = 0"),
    "4-D input": (X[1:], W, {}, r"\[T, N, C, H, W\], got \[2, 4, 6, 5\]"),
    "2-D weight": (X, (8, 4), {}, r"\[C_out, C_in / groups, k_h, k_w\], got \[8, 4\]"),
    "channels": (X, (8, 3, 3, 3), {}, r"C_in = 3 channels .*, got 4"),
    "channels of groups": (X, W, {"groups": 2}, r"C_in = 8 channels .*, got 4"),
    "groups 0": (X, W, {"groups": 0}, r"groups must be at least 1 and divide C_out = 8, got 0"),
    "groups that do not divide": (
        X,
        W,
        {"groups": 3},
        r"groups must be at least 1 and divide C_out = 8, got 3",
    ),
    "stride 0": (X, W, {"stride": 0}, r"stride must be one or two integers of at least 1, got 0"),
    "stride pair": (X, W, {"stride": (1, 0)}, r"stride must be .* at least 1, got \(1, 0\)"),
    "stride triple": (X, W, {"stride": (1, 1, 1)}, r"stride must be one or two integers .*, got \(1, 1, 1\)"),
    "padding -1": (X, W, {"padding": -1}, r"padding must be .* at least 0, got -1"),
    "dilation 0": (X, W, {"dilation": 0}, r"dilation must be .* at least 1, got 0"),
    "kernel over the map": (
        (3, 2, 4, 2, 5),
        W,
        {},
        r"kernel must fit the padded map, got \[3, 3\] on \[2, 5\]",
    ),
    "dilated kernel": (
        X,
        W,
        {"dilation": (1, 3)},
        r"kernel must fit the padded map, got \[3, 3\] on \[6, 5\]",
    ),
}
LINEAR_ERRORS = {
    "T = 0": ((0, 2, 4), LINEAR_W, r"at least one step \(encoding.steps\), got T = 0"),
    "2-D input": ((2, 4), LINEAR_W, r"\[T, N, F\], got \[2, 4\]"),
    "4-D weight": (LINEAR_X, (8, 4, 1, 1), r"\[F_out, F_in\], got \[8, 4, 1, 1\]"),
    "features": (LINEAR_X, (8, 5), r"F_in = 5 features .*, got 4"),
}
OPS = {"conv": (srm_conv2d, X, W), "linear": (srm_linear, LINEAR_X, LINEAR_W)}
BOTH = pytest.mark.parametrize("op", OPS)


@pytest.mark.parametrize("case", CONV_ERRORS)
def test_conv_rule(case):
    x, weight, conv, message = CONV_ERRORS[case]
    with pytest.raises(ValueError, match=message):
        srm_conv2d(torch.zeros(x), torch.zeros(weight), SRMParams(), GradParams(), **conv)


@pytest.mark.parametrize("case", LINEAR_ERRORS)
def test_linear_rule(case):
    x, weight, message = LINEAR_ERRORS[case]
    with pytest.raises(ValueError, match=message):
        srm_linear(torch.zeros(x), torch.zeros(weight), SRMParams(), GradParams())


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64], ids=str)
def test_dtype_of_the_input(op, dtype):
    function, x, weight = OPS[op]
    with pytest.raises(
        ValueError, match=f"x must be float32 or float64 .*autocast.*, got {re.escape(str(dtype))}"
    ):
        function(torch.zeros(x, dtype=dtype), torch.zeros(weight, dtype=dtype), SRMParams(), GradParams())


@BOTH
def test_dtype_of_the_weight(op):
    function, x, weight = OPS[op]
    with pytest.raises(ValueError, match="dtype of x, torch.float32, got torch.float64"):
        function(torch.zeros(x), torch.zeros(weight).double(), SRMParams(), GradParams())


@BOTH
def test_device_of_the_weight(op):
    function, x, weight = OPS[op]
    with pytest.raises(ValueError, match="device of x, cpu, got meta"):
        function(torch.zeros(x), torch.zeros(weight, device="meta"), SRMParams(), GradParams())


@BOTH
@pytest.mark.parametrize(
    ("threshold", "message"),
    [
        (torch.ones(7), r"threshold must be \[8\] torch.float32 on cpu, one per output channel, got \[7\]"),
        (torch.ones(8, 1), r"got \[8, 1\]"),
        (torch.tensor(1.0), r"got \[\]"),
        (torch.ones(8).double(), r"threshold must be \[8\] torch.float32 .*, got \[8\] torch.float64"),
        (torch.tensor([1.0] * 7 + [0.0]), r"threshold must be finite and > 0 \(.*rest\), got \[1.0, .*0.0\]"),
        (torch.tensor([1.0] * 7 + [-2.0]), r"threshold must be finite and > 0 .*-2.0\]"),
        (torch.tensor([1.0] * 7 + [float("nan")]), r"threshold must be finite and > 0 .*nan\]"),
        (torch.tensor([1.0] * 7 + [float("inf")]), r"threshold must be finite and > 0 .*inf\]"),
    ],
    ids=["length", "column", "scalar", "dtype", "zero", "negative", "nan", "inf"],
)
def test_threshold(op, threshold, message):
    function, x, weight = OPS[op]
    with pytest.raises(ValueError, match=message):
        function(torch.zeros(x), torch.zeros(weight), SRMParams(), GradParams(), threshold=threshold)


def test_an_empty_weight_is_refused():
    with pytest.raises(ValueError, match=r"weight must not be empty, got \[0, 3\]"):
        srm_linear(torch.zeros(2, 1, 3), torch.zeros(0, 3), SRMParams(), GradParams())
    with pytest.raises(ValueError, match=r"weight must not be empty, got \[2, 0, 3, 3\]"):
        srm_conv2d(torch.zeros(2, 1, 0, 5, 5), torch.zeros(2, 0, 3, 3), SRMParams(), GradParams())
    with pytest.raises(ValueError, match="pool must be at least 1, got 0"):
        SRMConv2d(1, 2, 3, SRMParams(), GradParams(), pool=0)
