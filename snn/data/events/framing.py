"""Events to T frames of counts."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from snn.data.events.readers import Array, Events

_LARGEST = 255  # of uint8; a higher count stays here


class Sensor(NamedTuple):
    """What can fire: `channels` (the two polarities, or those of sound) of `height` x `width` pixels."""

    channels: int
    height: int
    width: int


def by_count(t: Array, steps: int) -> Array:
    """Return each event's step if all steps are to hold equally many events.

    The event of rank i among n, by time and then by place in the file, falls into step `floor(i T / n)`. So
    the numbers of two steps differ by 1 at most, and with n < T some steps stay empty.
    """
    order = np.argsort(t, kind="stable")
    step = np.empty(len(t), np.int64)
    step[order] = np.arange(len(t)) * steps // max(len(t), 1)
    return step


def by_time(t: Array, steps: int) -> Array:
    """Return each event's step if all steps are to last equally long.

    The recording lasts from its first event's microsecond to its last one's, `D = max(t) - min(t) + 1` of
    them; an event falls into step `floor((t - min(t)) T / D)`.
    """
    if len(t) == 0:
        return t
    since: Array = t - t.min()
    step: Array = since * steps // (since.max() + 1)
    return step


FRAMINGS: dict[str, Callable[[Array, int], Array]] = {"count": by_count, "time": by_time}


def to_frames(events: Events, sensor: Sensor, steps: int, framing: str) -> Array:
    """Count events per step, channel and pixel.

    Args:
        events: Of one recording, in any order; none gives frames of 0.
        sensor: What can fire.
        steps: Number of steps T, >= 1.
        framing: Name in `FRAMINGS`.

    Returns:
        uint8 `[T, channels, height, width]`; counts above 255 are 255.

    Raises:
        ValueError: An event lies outside the sensor.
    """
    require_inside(events, sensor)
    step = FRAMINGS[framing](events.t, steps)
    place = ((step * sensor.channels + events.p) * sensor.height + events.y) * sensor.width + events.x
    shape = (steps, *sensor)
    counts = np.bincount(place, minlength=int(np.prod(shape)))
    return np.minimum(counts, _LARGEST).astype(np.uint8).reshape(shape)


def require_inside(events: Events, sensor: Sensor) -> None:
    """Raise ValueError if an event lies outside the sensor."""
    for name, values, size in (
        ("x", events.x, sensor.width),
        ("y", events.y, sensor.height),
        ("polarity or channel", events.p, sensor.channels),
    ):
        if len(values) and not (0 <= values.min() and values.max() < size):
            outside = values[(values < 0) | (values >= size)][0]
            raise ValueError(f"has an event whose {name} is {outside}, but it must lie in [0, {size})")
