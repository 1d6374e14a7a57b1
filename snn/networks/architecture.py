"""Architecture strings: `16C3-P2-32C3-P2-128` to a list of layer specifications.

- `{c}C{k}`: SRM convolution, c channels, kernel k; then `p{n}` padding (default k // 2), `s{n}` stride,
  `d{n}` dilation, `g{n}` groups
- `P{k}`: spike average pooling, window k
- `{n}`: SRM linear layer, n neurons
- `D{p}`: dropout with probability p, one mask for all steps
- `x{n}` after any token: repeat it n times

A number has nine digits at most, a string 999 layers. What no memory holds is refused before any is taken:
see :func:`require_room`.
"""

import math
import re
from dataclasses import dataclass

MOST_LAYERS = 999
MOST_WEIGHTS = 10**9  # of a network: 4 GB, and three times that in training
MOST_VALUES = 10**8  # of a layer's output, for one sample at one step

NUMBER = "[1-9][0-9]{0,8}"


@dataclass(frozen=True)
class Conv:
    """SRM convolution."""

    channels: int
    kernel: int
    padding: int
    stride: int
    dilation: int
    groups: int

    def out_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of a sample after this layer; ValueError if it does not fit what reaches it."""
        if len(shape) != 3:
            raise ValueError("a convolution needs a map, and a linear layer came before it")
        if shape[0] % self.groups or self.channels % self.groups:
            raise ValueError(
                f"{self.groups} groups must divide its {shape[0]} input and {self.channels} output channels"
            )
        reach = self.dilation * (self.kernel - 1)
        sides = [(side + 2 * self.padding - reach - 1) // self.stride + 1 for side in shape[1:]]
        return _require_map((self.channels, *sides))

    def weights(self, shape: tuple[int, ...]) -> int:
        """Number of weights, for a sample of `shape`."""
        return self.channels * shape[0] // self.groups * self.kernel**2


@dataclass(frozen=True)
class Pool:
    """Spike average pooling."""

    kernel: int

    def out_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of a sample after this layer; ValueError if it does not fit what reaches it."""
        if len(shape) != 3:
            raise ValueError("a pool needs a map, and a linear layer came before it")
        return _require_map((shape[0], *(side // self.kernel for side in shape[1:])))

    def weights(self, shape: tuple[int, ...]) -> int:
        """Number of weights."""
        return 0


@dataclass(frozen=True)
class Linear:
    """SRM linear layer."""

    neurons: int

    def out_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of a sample after this layer."""
        return (self.neurons,)

    def weights(self, shape: tuple[int, ...]) -> int:
        """Number of weights, for a sample of `shape`."""
        return self.neurons * math.prod(shape)


@dataclass(frozen=True)
class Dropout:
    """Dropout with one mask for all steps."""

    p: float

    def out_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of a sample after this layer."""
        return shape

    def weights(self, shape: tuple[int, ...]) -> int:
        """Number of weights."""
        return 0


Spec = Conv | Pool | Linear | Dropout


def parse(layers: str, key: str = "network.layers") -> list[tuple[str, Spec]]:
    """Read an architecture string.

    Args:
        layers: Tokens joined by `-`, as above.
        key: The config key that `layers` stands under, for the message.

    Returns:
        Token (without its repeat count) and specification of each layer, in order.

    Raises:
        ValueError: A token is not of the grammar; the message names the token and its place.
    """
    parsed: list[tuple[str, Spec]] = []
    for place, token in enumerate(layers.split("-"), start=1):
        body, _, times = token.partition("x")
        spec = _parse_token(body)
        if spec is None or (_ and not re.fullmatch(NUMBER, times)):
            raise ValueError(
                f"{key}: token {place} of {layers!r} must read like 16C3, 64C5p0s2, P2, 300 or D0.1 "
                f"(x3 repeats; nine digits at most), got {token!r}"
            )
        if len(parsed) + int(times or 1) > MOST_LAYERS:
            raise ValueError(
                f"{key}: token {place} of {layers!r} makes more layers than {MOST_LAYERS}, got {token!r}"
            )
        parsed += [(body, spec)] * int(times or 1)
    return parsed


def require_room(weights: int, shape: tuple[int, ...]) -> None:
    """Raise ValueError if no memory would hold a network of so many weights, or its output of `shape`."""
    if weights > MOST_WEIGHTS:
        raise ValueError(f"a network has {MOST_WEIGHTS:,} weights at most, and would have {weights:,}")
    if (values := math.prod(shape)) > MOST_VALUES:
        raise ValueError(f"a layer puts out {MOST_VALUES:,} values a step at most, and would {values:,}")


def _parse_token(token: str) -> Spec | None:
    if conv := re.fullmatch(rf"({NUMBER})C({NUMBER})((?:[psdg][0-9]{{1,9}})*)", token):
        channels, kernel = int(conv[1]), int(conv[2])
        options = re.findall(r"([psdg])([0-9]+)", conv[3])
        given = {key: int(value) for key, value in options}
        repeated = len(given) < len(options)
        if repeated or min(given.get(key, 1) for key in "sdg") < 1:
            return None
        return Conv(
            channels,
            kernel,
            given.get("p", kernel // 2),
            given.get("s", 1),
            given.get("d", 1),
            given.get("g", 1),
        )
    if pool := re.fullmatch(rf"P({NUMBER})", token):
        return Pool(int(pool[1]))
    if re.fullmatch(NUMBER, token):
        return Linear(int(token))
    if dropout := re.fullmatch(r"D(0?\.[0-9]+|0)", token):
        return Dropout(float(dropout[1]))
    return None


def _require_map(shape: tuple[int, ...]) -> tuple[int, ...]:
    if min(shape) < 1:
        raise ValueError("nothing of the map is left")
    return shape
