import math

import pytest
import torch

from snn.data.augment import (
    AUGMENTATIONS,
    augment_images,
    autoaugment,
    crop,
    cutout,
    flip,
    parse,
    resizedcrop,
    roll,
    rotate,
)
from snn.keyed_random import AUGMENT, keyed_uniform

LAST = 1 - 2.0**-24  # the largest draw
EVENTS = "resizedcrop0.7+flip+roll5|rotate30|cutout16"  # of CIFAR10-DVS
ALL = [known.example for known in AUGMENTATIONS.values()]


def some_images(N=6, C=2, H=5, W=7):
    return torch.rand(N, C, H, W, generator=torch.Generator().manual_seed(0))


def slow_flip(image, draws, number):
    W = image.shape[2]
    return lambda h, w: (h, W - 1 - w if draws[0] < 0.5 else w)


def slow_crop(image, draws, number):
    dy, dx = (int(draw * (2 * number + 1)) - number for draw in draws[:2])
    return lambda h, w: (h + dy, w + dx)


def slow_roll(image, draws, number):
    _, H, W = image.shape
    dy, dx = (int(draw * (2 * number + 1)) - number for draw in draws[:2])
    return lambda h, w: ((h - dy) % H, (w - dx) % W)


def slow_rotate(image, draws, number):
    _, H, W = image.shape
    angle = math.radians((2 * draws[0] - 1) * number)
    y, x = (H - 1) / 2, (W - 1) / 2
    return lambda h, w: (
        round(math.sin(angle) * (w - x) + math.cos(angle) * (h - y) + y),
        round(math.cos(angle) * (w - x) - math.sin(angle) * (h - y) + x),
    )


def slow_resizedcrop(image, draws, number):
    _, H, W = image.shape
    share = number + (1 - number) * draws[0]
    widest = min(4 / 3, 1 / share)
    aspect = widest ** (2 * draws[1] - 1)
    height = min(H, max(1, round(H * math.sqrt(share / aspect))))
    width = min(W, max(1, round(W * math.sqrt(share * aspect))))
    top, left = int(draws[2] * (H - height + 1)), int(draws[3] * (W - width + 1))
    return lambda h, w: (top + int((h + 0.5) * height / H), left + int((w + 0.5) * width / W))


def slow_cutout(image, draws, number):
    _, H, W = image.shape
    top, left = int(draws[0] * H) - number // 2, int(draws[1] * W) - number // 2
    return lambda h, w: (-1, -1) if 0 <= h - top < number and 0 <= w - left < number else (h, w)


@pytest.mark.parametrize(
    ("fast", "slow", "number"),
    [
        (flip, slow_flip, 0),
        (crop, slow_crop, 4),
        (roll, slow_roll, 5),
        (rotate, slow_rotate, 30.5),
        (resizedcrop, slow_resizedcrop, 0.3),
        (cutout, slow_cutout, 3),
        (cutout, slow_cutout, 4),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.parametrize("shape", [(40, 1, 8, 8), (7, 3, 5, 7), (1, 2, 1, 3)], ids=str)
def test_equals_a_loop_over_samples(fast, slow, number, shape):
    images = some_images(*shape)
    draws = keyed_uniform(0, 0, torch.arange(len(images)), 5, AUGMENT)
    kept = images.clone()
    out = fast(images, draws, number)
    expected = torch.zeros_like(images)
    N, _, H, W = shape
    for n in range(N):
        source = slow(images[n], draws[n].tolist(), number)
        for h in range(H):
            for w in range(W):
                y, x = source(h, w)
                if 0 <= y < H and 0 <= x < W:
                    expected[n, :, h, w] = images[n, :, y, x]
    assert out.dtype == images.dtype
    assert torch.equal(out, expected)
    assert torch.equal(images, kept)


def test_flip_by_hand():
    images = torch.tensor([1.0, 2.0, 3.0]).expand(2, 1, 1, 3)
    out = flip(images, torch.tensor([[0.4999, 0.9], [0.5, 0.1]]), 0)
    assert out.flatten(1).tolist() == [[3, 2, 1], [1, 2, 3]]


@pytest.mark.parametrize(
    ("draw", "row"),
    [(0.0, [0, 0, 0, 0, 1, 2]), (0.5, [1, 2, 3, 4, 5, 6]), (LAST, [5, 6, 0, 0, 0, 0])],
    ids=["first", "middle", "last"],
)
def test_crop_by_hand(draw, row):
    images = torch.arange(1.0, 7.0).expand(1, 1, 6, 6)
    out = crop(images, torch.tensor([[0.5, draw]]), 4)
    assert out[0, 0].tolist() == [row] * 6


@pytest.mark.parametrize(
    ("draw", "row"),
    [(0.0, [3, 4, 1, 2]), (0.5, [1, 2, 3, 4]), (0.7, [4, 1, 2, 3]), (LAST, [3, 4, 1, 2])],
)
def test_roll_by_hand(draw, row):
    """roll2: -2, -1, 0, 1 or 2, a fifth of the draws each; one to the right brings the last one first."""
    images = torch.arange(1.0, 5.0).expand(1, 1, 4, 4)
    assert roll(images, torch.tensor([[0.5, draw]]), 2)[0, 0].tolist() == [row] * 4
    assert roll(images.mT, torch.tensor([[draw, 0.5]]), 2)[0, 0].T.tolist() == [row] * 4


def test_rotate_by_hand():
    """By 90, 0 and -90 degrees; counter-clockwise, so that the right column becomes the top row."""
    images = torch.arange(1.0, 10.0).view(1, 1, 3, 3).expand(3, 1, 3, 3)
    out = rotate(images, torch.tensor([[0.75], [0.5], [0.25]]), 180)
    assert out[0, 0].tolist() == [[3, 6, 9], [2, 5, 8], [1, 4, 7]]
    assert out[1, 0].tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert out[2, 0].tolist() == [[7, 4, 1], [8, 5, 2], [9, 6, 3]]
    # of 3x5 only the middle 3x3 has something to turn
    wide = torch.arange(1.0, 16.0).view(1, 1, 3, 5)
    assert rotate(wide, torch.tensor([[0.75]]), 180)[0, 0].tolist() == [
        [0, 4, 9, 14, 0],
        [0, 3, 8, 13, 0],
        [0, 2, 7, 12, 0],
    ]


def test_resizedcrop_by_hand():
    """Share 1/4 and aspect 1 of 4x4: a box of 2x2, at one of 3 x 3 places; each pixel becomes 2x2."""
    images = torch.arange(1.0, 17.0).view(1, 1, 4, 4).expand(2, 1, 4, 4)
    out = resizedcrop(images, torch.tensor([[0.0, 0.5, 0.0, LAST], [0.0, 0.5, 0.4, 0.5]]), 0.25)
    assert out[0, 0].tolist() == [[3, 3, 4, 4], [3, 3, 4, 4], [7, 7, 8, 8], [7, 7, 8, 8]]
    assert out[1, 0].tolist() == [[6, 6, 7, 7], [6, 6, 7, 7], [10, 10, 11, 11], [10, 10, 11, 11]]
    whole = resizedcrop(images, torch.tensor([[0.3, 0.9, 0.1, 0.2]]).expand(2, 4), 1)
    assert torch.equal(whole, images)


def test_resizedcrop_keeps_its_share_and_aspect():
    """The sides of a box of 300x300 show in what two ramps span; a share of .9 has aspects up to 1/.9."""
    ramp = torch.arange(300.0).expand(300, 300)
    images = torch.stack([ramp.T, ramp]).expand(60, 2, 300, 300)
    for number, widest in ((0.4, 4 / 3), (0.9, 1 / 0.9)):
        draws = keyed_uniform(0, 0, torch.arange(60), 5, AUGMENT)
        out = resizedcrop(images, draws, number).flatten(2)
        height, width = (out.amax(2) - out.amin(2) + 1).T
        share, aspect = height * width / 90_000, width / height
        assert (share - (number + (1 - number) * draws[:, 0])).abs().max() < 0.01
        assert aspect.max() < widest * 1.01 and aspect.min() > 0.99 / widest
        assert aspect.max() > 1.02 and aspect.min() < 0.98


def test_cutout_by_hand():
    """cutout3 covers a pixel more on each side of its centre, cutout2 one before it; it may stick out."""
    images = torch.ones(2, 1, 4, 4)
    draws = torch.tensor([[0.25, 0.5], [0.0, LAST]])  # centres (1, 2) and (0, 3)
    out = cutout(images, draws, 3)
    assert out[0, 0].tolist() == [[1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert out[1, 0].tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    out = cutout(images, draws, 2)
    assert out[0, 0].tolist() == [[1, 0, 0, 1], [1, 0, 0, 1], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert out[1, 0].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]


def test_autoaugment_is_torchvisions_policy_seeded_by_the_draws():
    from torchvision.transforms import AutoAugmentPolicy, v2

    pixels = torch.randint(0, 256, (5, 3, 12, 12), generator=torch.Generator().manual_seed(0)).byte()
    draws = torch.tensor([[a, 3 * 2.0**-24] for a in (0.0, 0.25, 0.5, 2.0**-24, 0.25)])
    state = torch.get_rng_state()
    out = autoaugment(pixels / 255, draws, 0)
    assert torch.equal(torch.get_rng_state(), state)
    policy = v2.AutoAugment(AutoAugmentPolicy.CIFAR10)
    try:
        for n, seed in enumerate((3, 2**46 + 3, 2**47 + 3, 2**24 + 3, 2**46 + 3)):
            torch.manual_seed(seed)
            assert torch.equal(out[n], policy(pixels[n]) / 255)
    finally:
        torch.set_rng_state(state)
    assert not torch.equal(out, pixels / 255)


def test_autoaugment_needs_three_channels():
    with pytest.raises(ValueError, match="autoaugment takes images of 3 channels, got 2"):
        augment_images(some_images(), torch.arange(6), parse("autoaugment"), 0, 0)


def test_every_outcome_comes_equally_often():
    index = torch.arange(8100)
    images = torch.zeros(8100, 1, 9, 9)
    images[:, :, 4, 4] = 1  # where it ends up tells the offsets
    out = augment_images(images, index, parse("crop4"), seed=0, epoch=0).flatten(1)
    assert torch.equal(out.sum(1), torch.ones(8100))
    counts = out.sum(0)
    assert ((counts - 100) ** 2 / 100).sum() < 80 + 4 * (2 * 80) ** 0.5
    two = torch.arange(2.0).expand(8100, 1, 1, 2)
    mirrored = augment_images(two, index, parse("flip"), 0, 0)[:, 0, 0, 0]
    assert abs(mirrored.mean() - 0.5) < 4 * 0.5 / 90


def test_flip_and_crop_draw_independently():
    index = torch.arange(8100)
    images = torch.zeros(8100, 1, 9, 9)
    images[:, :, 4, 4] = 1
    at = augment_images(images, index, parse("crop4"), 0, 0).flatten(1).argmax(1)
    two = torch.arange(2.0).expand(8100, 1, 1, 2)
    flipped = augment_images(two, index, parse("flip"), 0, 0)[:, 0, 0, 0]
    table = torch.corrcoef(torch.stack([at // 9, at % 9, flipped]).float())
    assert (table - torch.eye(3)).abs().max() < 4 / 90


@pytest.mark.parametrize("text", ["crop4+flip", "flip+crop4", "rotate30+resizedcrop0.6+cutout2", EVENTS])
def test_a_pipeline_is_its_tokens_in_order_whatever_stands_beside_them(text):
    images, index = some_images(H=9, W=9), torch.tensor([3, 1, 4, 15, 9, 2])
    out = images
    for token in text.split("+"):
        out = augment_images(out, index, parse(token), seed=5, epoch=6)
    assert torch.equal(augment_images(images, index, parse(text), seed=5, epoch=6), out)


def test_a_choice_gives_each_sample_one_of_its_steps():
    images, index = some_images(600, 1, 9, 9), torch.arange(600)
    single = [augment_images(images, index, parse(t), 0, 1) for t in ("roll5", "rotate30", "cutout16")]
    out = augment_images(images, index, parse("roll5|rotate30|cutout16"), 0, 1)
    chosen = torch.stack([(out == one).all(1).all(1).all(1) for one in single])
    assert chosen.any(0).all()
    assert (chosen.sum(1) - 200).abs().max() < 4 * 12  # a deviation of sqrt(600 * 1/3 * 2/3) = 11.5
    assert torch.equal(images, some_images(600, 1, 9, 9))


def test_choices_are_independent_of_each_other():
    images, index = some_images(600, 1, 9, 9), torch.arange(600)
    out = [augment_images(images, index, parse(text), 0, 1) for text in ("flip|cutout2", "roll2|rotate30")]
    first = [augment_images(images, index, parse(text), 0, 1) for text in ("flip", "roll2")]
    same = [(a == b).flatten(1).all(1).float() for a, b in zip(out, first, strict=True)]
    assert abs(torch.corrcoef(torch.stack(same))[0, 1]) < 4 / 600**0.5


@pytest.mark.parametrize("text", [*[t for t in ALL if t != "autoaugment"], EVENTS])
def test_one_draw_for_all_frames_of_a_sample(text):
    images, index = some_images(4, 2, 9, 9), torch.tensor([3, 1, 4, 15])
    frames = images[:, None].repeat(1, 5, 1, 1, 1)
    frames[:, 2] *= 2
    out = augment_images(frames, index, parse(text), seed=5, epoch=6)
    alone = augment_images(images, index, parse(text), seed=5, epoch=6)
    for t in range(5):
        assert torch.equal(out[:, t], alone * (2 if t == 2 else 1))


@pytest.mark.parametrize("text", [*ALL, EVENTS, "crop4+flip+autoaugment"])
def test_a_sample_does_not_see_its_batch(text):
    images, index = some_images(30, 3, 11, 13), torch.arange(30) * 7
    state = torch.get_rng_state()
    whole = augment_images(images, index, parse(text), 1, 2)
    for members in (torch.arange(30).flip(0), torch.tensor([17]), torch.arange(5, 12)):
        part = augment_images(images[members], index[members], parse(text), 1, 2)
        assert torch.equal(part, whole[members])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("text", [*ALL, EVENTS])
def test_epochs_seeds_and_samples_differ(text):
    images = some_images(1, 3, 40, 40).expand(16, 3, 40, 40)
    index = torch.arange(16)
    runs = [
        augment_images(images, index, parse(text), seed, epoch) for seed, epoch in ((0, 1), (0, 2), (1, 1))
    ]
    assert not torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert not all(torch.equal(runs[0][0], other) for other in runs[0][1:])


@pytest.mark.parametrize(
    ("text", "pipeline"),
    [
        ("none", ()),
        ("flip", ((("flip", 0),),)),
        ("crop4+flip", ((("crop", 4),), (("flip", 0),))),
        (
            EVENTS,
            ((("resizedcrop", 0.7),), (("flip", 0),), (("roll", 5), ("rotate", 30), ("cutout", 16))),
        ),
        ("rotate22.5", ((("rotate", 22.5),),)),
        ("resizedcrop1+rotate180", ((("resizedcrop", 1),), (("rotate", 180),))),
    ],
    ids=str,
)
def test_parse(text, pipeline):
    assert parse(text) == pipeline


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", ""),
        ("spin3", "spin3"),
        ("crop4+", ""),
        ("flip|", ""),
        ("none+flip", "none"),
        ("Flip", "Flip"),
        ("crop4,flip", "crop4,flip"),
        ("crop4 + flip", "crop4 "),
        ("flip+crop-4", "crop-4"),
        ("rotate1e2", "rotate1e2"),
    ],
)
def test_parse_names_the_bad_token_and_the_legal_ones(text, word):
    with pytest.raises(ValueError, match="data.augment must be none, or some of .* joined by") as caught:
        parse(text)
    assert all(token in str(caught.value) for token in ALL)
    assert str(caught.value).endswith(f"got {word!r} in {text!r}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("flip+crop", "crop needs a number, as in crop4, got 'crop'"),
        ("rotate", "rotate needs a number, as in rotate30, got 'rotate'"),
        ("flip2", "flip takes no number, got 'flip2'"),
        ("crop0", "crop takes a whole number >= 1, got 'crop0'"),
        ("roll1.5", "roll takes a whole number >= 1, got 'roll1.5'"),
        ("flip|cutout0", "cutout takes a whole number >= 1, got 'cutout0'"),
        ("resizedcrop0", r"resizedcrop takes a number in \(0, 1\], got 'resizedcrop0'"),
        ("resizedcrop1.5", r"resizedcrop takes a number in \(0, 1\], got 'resizedcrop1.5'"),
        ("rotate181", r"rotate takes a number in \(0, 180\], got 'rotate181'"),
    ],
)
def test_parse_checks_numbers(text, message):
    with pytest.raises(ValueError, match=f"^data.augment: {message}$"):
        parse(text)


@pytest.mark.parametrize("text", ["flip+flip", "crop4+flip+crop3", "roll5+rotate3|roll5"])
def test_parse_refuses_a_name_that_stands_twice(text):
    with pytest.raises(ValueError, match="data.augment must name each augmentation once, got ") as caught:
        parse(text)
    assert repr(text) in str(caught.value)
