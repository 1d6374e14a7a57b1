"""Encodings: images to what the network sees at each step."""

import math

import pytest
import torch

from snn.encoding import TTFS, Direct, Frames, Poisson


def images_of(n=3, channels=2, height=4, width=3):
    torch.manual_seed(0)
    return torch.rand(n, channels, height, width)


INDEX = torch.tensor([5, 0, 2])


# direct


def test_direct_shows_the_normalised_image_at_every_step():
    images = images_of()
    x = Direct(steps=6, mean=[0.5, 0.1], std=[0.25, 2.0])(images, INDEX, 0)
    assert x.shape == (6, 3, 2, 4, 3) and x.dtype == images.dtype
    assert x.stride(0) == 0  # one image in memory, not six
    for t in range(6):
        torch.testing.assert_close(x[t, :, 0], (images[:, 0] - 0.5) / 0.25)
        torch.testing.assert_close(x[t, :, 1], (images[:, 1] - 0.1) / 2.0)


def test_direct_leaves_the_images_alone():
    images = images_of()
    before = images.clone()
    Direct(2, [0.5, 0.5], [0.5, 0.5])(images, INDEX, 0)
    assert torch.equal(images, before)


@pytest.mark.parametrize(
    ("mean", "std"),
    [([0.5], [0.5, 0.5]), ([0.5], [0.0]), ([0.5], [-1.0]), ([0.5], [math.nan]), ([0.5], [math.inf])],
    ids=str,
)
def test_direct_rules(mean, std):
    with pytest.raises(ValueError, match="data.mean and data.std must pair up, std > 0, got") as error:
        Direct(4, mean, std)
    assert str(mean) in str(error.value) and str(std) in str(error.value)


# poisson


def test_poisson_fires_with_the_pixels_probability():
    images = torch.tensor([0.0, 0.2, 0.7, 1.0]).view(1, 1, 2, 2).expand(50, 1, 2, 2)
    x = Poisson(steps=100, seed=0)(images, torch.arange(50), 0)
    assert x.shape == (100, 50, 1, 2, 2) and set(x.unique().tolist()) == {0, 1} and x.dtype == images.dtype
    rate = x.mean(dim=(0, 1)).flatten().tolist()
    assert rate[0] == 0 and rate[3] == 1
    assert rate[1:3] == pytest.approx([0.2, 0.7], abs=0.03)


def test_poisson_steps_pixels_and_samples_are_independent():
    x = Poisson(steps=40, seed=0)(torch.full((40, 1, 40, 1), 0.5), torch.arange(40), 0)[:, :, 0, :, 0]
    x = x.double() * 2 - 1
    for pair in ((x[1:], x[:-1]), (x[:, 1:], x[:, :-1]), (x[:, :, 1:], x[:, :, :-1])):
        assert abs((pair[0] * pair[1]).mean().item()) < 0.03  # 62,400 products: a deviation of .004


def test_poisson_depends_on_seed_epoch_and_sample_alone():
    images, encode = images_of(), Poisson(steps=5, seed=1)
    x = encode(images, INDEX, 0)
    torch.manual_seed(99)
    assert torch.equal(encode(images, INDEX, 0), x)
    assert not torch.equal(encode(images, INDEX, 1), x)
    assert not torch.equal(Poisson(steps=5, seed=2)(images, INDEX, 0), x)
    assert not torch.equal(encode(images, INDEX + 10, 0), x)


def test_poisson_does_not_see_the_batch():
    images, encode = images_of(), Poisson(steps=5, seed=1)
    x = encode(images, INDEX, 3)
    order = torch.tensor([2, 0, 1])
    assert torch.equal(encode(images[order], INDEX[order], 3), x[:, order])
    assert torch.equal(encode(images[1:2], INDEX[1:2], 3), x[:, 1:2])


def test_poisson_leaves_the_global_generator_alone():
    images = images_of()
    state = torch.get_rng_state()
    Poisson(steps=5, seed=1)(images, INDEX, 0)
    assert torch.equal(torch.get_rng_state(), state)


# time to first spike


def test_ttfs_by_hand():
    """T = 5: x = 1 at step 0, .75 at 1, .5 at 2, .3 at round(2.8) = 3, .01 at round(3.96) = 4, 0 never."""
    images = torch.tensor([1.0, 0.75, 0.5, 0.3, 0.01, 0.0]).view(1, 1, 2, 3)
    x = TTFS(steps=5)(images, torch.tensor([0]), 0)
    assert x.shape == (5, 1, 1, 2, 3) and x.dtype == images.dtype
    trains = x.flatten(1).T
    assert trains.sum(dim=1).tolist() == [1, 1, 1, 1, 1, 0]
    assert trains[:5].argmax(dim=1).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("value", [0.0, 0.4, 1.0])
def test_ttfs_of_a_constant_image(value):
    x = TTFS(steps=6)(torch.full((2, 1, 3, 3), value), torch.arange(2), 0)
    assert x.isfinite().all()
    step = {0.0: None, 0.4: 3, 1.0: 0}[value]
    assert x.sum(dim=(1, 2, 3, 4)).tolist() == [18 if t == step else 0 for t in range(6)]


def test_ttfs_of_one_step():
    x = TTFS(steps=1)(torch.tensor([0.0, 0.1, 1.0]).view(1, 1, 1, 3), torch.tensor([0]), 0)
    assert x.flatten().tolist() == [0, 1, 1]


# frames


def frames_of(n=3, steps=6):
    return torch.randint(0, 5, (n, steps, 2, 4, 3), generator=torch.Generator().manual_seed(0)).float()


def test_frames_put_time_first():
    frames = frames_of()
    x = Frames(steps=6, cap=None, drawn=None, seed=0)(frames, INDEX, 3)
    assert x.shape == (6, 3, 2, 4, 3)
    for t in range(6):
        assert torch.equal(x[t], frames[:, t])


@pytest.mark.parametrize(("cap", "shown"), [(None, [0, 1, 2, 4]), (1, [0, 1, 1, 1]), (2.5, [0, 1, 2, 2.5])])
def test_frames_cut_counts(cap, shown):
    frames = torch.tensor([0.0, 1, 2, 4]).view(1, 1, 1, 2, 2)
    kept = frames.clone()
    x = Frames(1, cap, None, 0)(frames, torch.tensor([0]), 0)
    assert x.flatten().tolist() == shown
    assert torch.equal(frames, kept)


def drawn_steps(n=200, steps=20, drawn=14, seed=0, epoch=1, index=None):
    """The steps that each sample shows, `[n, drawn]`: frames that hold their own number."""
    frames = torch.arange(steps).float().view(1, steps, 1, 1, 1).expand(n, steps, 1, 1, 1)
    index = torch.arange(n) if index is None else index
    return Frames(steps, None, drawn, seed)(frames, index, epoch).flatten(1).T


def test_frames_draw_steps_in_training_in_their_order():
    shown = drawn_steps()
    assert shown.shape == (200, 14)
    assert (shown[:, 1:] > shown[:, :-1]).all()
    assert len(shown.unique(dim=0)) > 150
    often = torch.stack([(shown == t).sum() for t in range(20)])  # 200 * 0.7 = 140 each, deviation 6.5
    assert often.sum() == 2800 and (often - 140).abs().max() < 4 * 6.5
    assert torch.equal(drawn_steps(drawn=20), torch.arange(20.0).expand(200, 20))


def test_frames_show_all_steps_in_evaluation_and_calibration():
    assert torch.equal(drawn_steps(epoch=0), torch.arange(20.0).expand(200, 20))


def test_drawn_steps_depend_on_seed_epoch_and_sample_alone():
    shown = drawn_steps()
    state = torch.get_rng_state()
    assert torch.equal(drawn_steps(1, index=torch.tensor([7])), shown[7:8])
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(drawn_steps(epoch=2), shown)
    assert not torch.equal(drawn_steps(seed=1), shown)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cap": 0.0}, "encoding.cap must be null or finite and > 0, got 0.0"),
        ({"cap": math.nan}, "encoding.cap must be null or finite and > 0, got nan"),
        ({"drawn": 0}, r"encoding.drawn must be null or in \[1, 6\], got 0"),
        ({"drawn": 7}, r"encoding.drawn must be null or in \[1, 6\], got 7"),
    ],
    ids=str,
)
def test_frames_rules(changes, message):
    with pytest.raises(ValueError, match=message):
        Frames(**{"steps": 6, "cap": None, "drawn": None, "seed": 0, **changes})


def test_frames_need_as_many_frames_as_steps():
    with pytest.raises(ValueError, match="encoding.steps is 5, but the data have 6 frames"):
        Frames(5, None, None, 0)(frames_of(), INDEX, 0)


# all of them

ENCODINGS = {
    "direct": lambda steps: Direct(steps, [0.5, 0.5], [0.5, 0.5]),
    "poisson": lambda steps: Poisson(steps, 0),
    "ttfs": TTFS,
}


@pytest.mark.parametrize("name", ENCODINGS)
def test_images_and_frames_are_told_apart(name):
    with pytest.raises(ValueError, match=f"encoding={name} takes images .*: try encoding=frames$"):
        ENCODINGS[name](6)(frames_of(), INDEX, 0)
    with pytest.raises(ValueError, match="encoding=frames takes .*: try encoding=direct, poisson or ttfs$"):
        Frames(6, None, None, 0)(images_of(), INDEX, 0)


def test_direct_needs_mean_and_std():
    with pytest.raises(ValueError, match="data.mean and data.std, which are null: try encoding=frames"):
        Direct(4, None, None)


@pytest.mark.parametrize("name", [*ENCODINGS, "frames"])
def test_needs_a_step(name):
    with pytest.raises(ValueError, match="encoding.steps must be at least 1, got 0"):
        {**ENCODINGS, "frames": lambda steps: Frames(steps, None, None, 0)}[name](0)


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("steps", [1, 4], ids=lambda steps: f"T{steps}")
def test_shape_and_independence_of_the_batch(name, steps):
    images, encode = images_of(), ENCODINGS[name](steps)
    x = encode(images, INDEX, 0)
    assert x.shape == (steps, *images.shape)
    assert torch.equal(encode(images[2:], INDEX[2:], 0), x[:, 2:])
