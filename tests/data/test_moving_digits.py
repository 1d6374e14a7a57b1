import math

import pytest
import torch

from snn.data import moving_digits as module
from snn.data.moving_digits import events, intensities, moving_digits, paths, record
from snn.data.sources import digits


def test_a_digit_is_magnified_and_lies_where_its_path_says():
    """One white pixel of 3x3, the image's first at (10, 20): its middle is 2.5 pixels on, at (12.5, 22.5)."""
    images = torch.zeros(1, 3, 3)
    images[0, 1, 1] = 1
    path = torch.tensor([[[10.0, 20.0], [16.0, 23.0], [10.0, 26.0], [10.0, 20.0]]])
    (seen,) = intensities(images, path, [0.0])
    assert seen.shape == (1, 34, 34)
    near, far = 1 - 0.5 / 2.5, 1 - 1.5 / 2.5  # hat at half a pixel and one and a half from the middle
    row = torch.tensor([0, far, near, near, far, 0])
    torch.testing.assert_close(seen[0, 10:16, 20:26], row[:, None] * row)
    assert seen.sum().item() == pytest.approx((2 * near + 2 * far) ** 2)  # nothing elsewhere


def test_a_digit_moves_along_three_legs_of_a_third_each():
    images = torch.zeros(1, 1, 1)
    images[0, 0, 0] = 1
    path = torch.tensor([[[10.0, 20.0], [16.0, 23.0], [10.0, 26.0], [10.0, 20.0]]])
    times = [0, 1 / 9, 2 / 9, 1 / 3, 1 / 2, 2 / 3, 5 / 6, 1]
    at = [divmod(seen[0].argmax().item(), 34) for seen in intensities(images, path, times)]
    assert at == [(10, 20), (12, 21), (14, 22), (16, 23), (13, 24), (10, 26), (10, 23), (10, 20)]


def test_events_of_a_pixel_by_hand():
    """CONTRAST .3; the pixel remembers R, at first 0:

    L    .2    .5    1.3    1.0    .89    -.1
    n    0     1     3      0      -1     -3        of (L - R) / .3 = .67 1.67 3.33 -.67 -1.03 -3.33
    R    0     .3    1.2    1.2    .9     0
    """
    levels = [0, 0.2, 0.5, 1.3, 1.0, 0.89, -0.1]
    seen = [torch.tensor([0.1 * math.exp(level) - 0.1, 0.7]) for level in levels]  # L = log(.1 + I) + log(10)
    counts = list(events(seen))
    assert [count[0].item() for count in counts] == [0, 1, 3, 0, -1, -3]
    assert all(count[1] == 0 for count in counts)  # a pixel that sees no change is silent
    assert (module.CONTRAST, module.DARK) == (0.3, 0.1)


def test_frames_of_a_ramp_by_hand(monkeypatch):
    """L rises (in the second sample: falls) by .27 a look, 4 looks make a step, and R follows in units of .3:

    look      1     2     3     4    |  5     6     7     8
    L         .27   .54   .81   1.08 |  1.35  1.62  1.89  2.16
    events    0     1     1     1    |  1     1     1     1
    R         0     .3    .6    .9   |  1.2   1.5   1.8   2.1
    """
    asked = []

    def ramps(images, path, times):
        for look, time in enumerate(times):
            asked.append(time)
            levels = torch.tensor([0.27 * look, 3 - 0.27 * look])
            yield (levels.exp() - 0.1)[:, None, None].expand(2, 34, 34)

    monkeypatch.setattr(module, "intensities", ramps)
    frames = record(torch.zeros(2, 1, 1), torch.zeros(2, 4, 2), 2)
    assert asked == [k / 8 for k in range(9)]
    assert (frames.shape, frames.dtype) == ((2, 2, 2, 34, 34), torch.uint8)
    assert frames[:, :, :, 5, 7].tolist() == [[[0, 3], [0, 4]], [[3, 0], [4, 0]]]
    assert torch.equal(frames, frames[..., :1, :1].expand_as(frames))


def test_paths_are_triangles_in_the_middle_of_the_camera():
    path = paths(torch.arange(500))
    assert torch.equal(path[:, 0], path[:, 3])
    down, right = (path[:, 1] - path[:, 0]).T
    torch.testing.assert_close(path[:, 2], path[:, 0] + torch.stack([torch.zeros(500), 2 * right], 1))
    for reach in (down, 2 * right):
        assert 4 <= reach.min() < 4.1 and 7.9 < reach.max() <= 8
    assert path.min() >= 7 - 2 - 4 and path.max() <= 7 + 2 + 4  # the 20x20 pixels stay on the camera
    assert torch.equal(paths(torch.tensor([7, 499])), path[[7, 499]])


@pytest.fixture(scope="module")
def recorded():
    return moving_digits("", False, steps=4)


def test_moving_digits_are_the_digits_in_their_split(recorded):
    for made, still in zip(recorded, digits("", False), strict=True):
        assert made.images.shape == (len(still.labels), 4, 2, 34, 34)
        assert (made.images.dtype, made.unit, made.names) == (torch.uint8, 1, ())
        assert torch.equal(made.labels, still.labels)


def test_how_a_sample_moves_depends_on_its_index_alone(recorded):
    """The test samples are counted after the 1437 of training."""
    images = digits("", False)[1].images[:32, 0] / 255
    assert torch.equal(record(images, paths(torch.arange(1437, 1469)), 4), recorded[1].images[:32])
    assert not torch.equal(record(images, paths(torch.arange(32)), 4), recorded[1].images[:32])


def test_there_are_as_many_events_as_the_config_says():
    images, path = digits("", False)[1].images[:100, 0] / 255, paths(torch.arange(100))
    assert record(images, path, 20).sum().item() / 100 == pytest.approx(5000, rel=0.05)


def test_events_lie_before_and_behind_what_moves():
    """White comes where the digit goes (down on the first third, up on the second): ON there, OFF behind."""
    frames = record(digits("", False)[1].images[:20, 0] / 255, paths(torch.arange(20)), 3).float()
    rows = torch.arange(34.0)
    for frame, sign in ((0, 1), (1, -1)):
        off, on = ((frames[:, frame, p].sum(2) @ rows) / frames[:, frame, p].sum((1, 2)) for p in (0, 1))
        assert ((on - off) * sign > 0).all()


def test_steps_must_be_positive():
    with pytest.raises(ValueError, match="data.source.steps must be at least 1, got 0"):
        moving_digits("", False, steps=0)
