import numpy as np
import pytest

from snn.data.events.framing import Sensor, by_count, by_time, to_frames
from snn.data.events.readers import Events
from tests.data.events import writers

SENSOR = Sensor(2, 3, 4)


def events(*rows):
    return Events(*np.array(rows, np.int64).reshape(-1, 4).T)


@pytest.mark.parametrize(
    ("t", "steps", "expected"),
    [
        ([0, 1, 2, 3, 4, 5], 3, [0, 0, 1, 1, 2, 2]),
        ([0, 1, 2, 3, 4, 5, 6], 3, [0, 0, 0, 1, 1, 2, 2]),  # floor(3 i / 7)
        ([0, 1, 2, 3, 4, 5, 6, 7], 3, [0, 0, 0, 1, 1, 1, 2, 2]),
        ([0, 0, 0, 900], 2, [0, 0, 1, 1]),  # times play no part but for the order
        ([30, 10, 20, 0], 4, [3, 1, 2, 0]),  # out of order in the file
        ([5, 5, 1, 5], 2, [0, 1, 0, 1]),  # equal times keep the file's order
        ([9, 8], 5, [2, 0]),  # fewer events than steps: floor(5 / 2) = 2
        ([], 3, []),
    ],
    ids=str,
)
def test_by_count(t, steps, expected):
    assert by_count(np.array(t, np.int64), steps).tolist() == expected


@pytest.mark.parametrize(
    ("t", "steps", "expected"),
    [
        ([0, 1, 2, 3, 4, 5], 3, [0, 0, 1, 1, 2, 2]),
        ([100, 101, 102, 109], 2, [0, 0, 0, 1]),  # ten microseconds: two slices of five
        ([100, 104, 105, 109], 2, [0, 0, 1, 1]),
        ([0, 1, 2, 3, 4, 5, 6], 3, [0, 0, 0, 1, 1, 2, 2]),  # 7 us: slices end before 7/3 and 14/3
        ([109, 100], 2, [1, 0]),  # out of order in the file
        ([7, 7, 7], 4, [0, 0, 0]),  # one microsecond long
        ([0, 9], 5, [0, 4]),
        ([2**40, 2**40 + 10**9], 30, [0, 29]),
        ([], 3, []),
    ],
    ids=str,
)
def test_by_time(t, steps, expected):
    assert by_time(np.array(t, np.int64), steps).tolist() == expected


def test_frames_by_hand():
    # 3 rows, 4 columns; two ON events at (x 1, y 2), then OFF at (3, 0), and late ON at (0, 0)
    frames = to_frames(events((0, 1, 2, 1), (1, 1, 2, 1), (2, 3, 0, 0), (11, 0, 0, 1)), SENSOR, 2, "time")
    assert frames.dtype == np.uint8
    assert frames.tolist() == [
        [[[0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0]], [[0, 0, 0, 0], [0, 0, 0, 0], [0, 2, 0, 0]]],
        [[[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]], [[1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]],
    ]
    by_number = to_frames(events((0, 1, 2, 1), (1, 1, 2, 1), (2, 3, 0, 0), (11, 0, 0, 1)), SENSOR, 2, "count")
    assert by_number[0, 1, 2, 1] == 2
    assert by_number[1, 0, 0, 3] == by_number[1, 1, 0, 0] == 1
    assert by_number.sum() == 4


@pytest.mark.parametrize("framing", ["count", "time"])
@pytest.mark.parametrize("steps", [1, 3, 7, 100])
def test_frames_equal_a_loop_over_events(framing, steps):
    some = writers.some_events(1, 34, 60)
    expected = np.zeros((steps, 2, 34, 34), np.uint8)
    first, last = some[0][0], some[-1][0]
    for i, (t, x, y, p) in enumerate(some):
        share = i / len(some) if framing == "count" else (t - first) / (last - first + 1)
        expected[int(share * steps + 1e-9), p, y, x] += 1
    assert np.array_equal(to_frames(events(*some), Sensor(2, 34, 34), steps, framing), expected)


@pytest.mark.parametrize("framing", ["count", "time"])
def test_no_event_gives_empty_frames(framing):
    frames = to_frames(events(), SENSOR, 5, framing)
    assert frames.shape == (5, 2, 3, 4)
    assert not frames.any()


def test_counts_saturate():
    frames = to_frames(
        events(*[(0, 0, 0, 1)] * 255, *[(0, 1, 0, 1)] * 256, *[(0, 2, 0, 1)] * 999), SENSOR, 1, "time"
    )
    assert frames[0, 1, 0].tolist() == [255, 255, 255, 0]


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ((0, 4, 0, 0), r"has an event whose x is 4, but it must lie in \[0, 4\)"),
        ((0, 0, 3, 0), r"has an event whose y is 3, but it must lie in \[0, 3\)"),
        ((0, 0, -1, 0), r"has an event whose y is -1"),
        ((0, 0, 0, 2), r"has an event whose polarity or channel is 2, but it must lie in \[0, 2\)"),
    ],
    ids=str,
)
def test_an_event_outside_is_refused(event, message):
    with pytest.raises(ValueError, match=message):
        to_frames(events((0, 0, 0, 0), event), SENSOR, 2, "count")
