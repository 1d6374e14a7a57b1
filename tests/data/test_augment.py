import pytest
import torch

from snn.data.augment import AUGMENTATIONS, augment_images, crop, flip, parse
from snn.keyed_random import AUGMENT, keyed_uniform


def some_images(N=6, C=2, H=5, W=7):
    return torch.rand(N, C, H, W, generator=torch.Generator().manual_seed(0))


def slow_flip(image, draws):
    out = torch.zeros_like(image)
    C, H, W = image.shape
    for c in range(C):
        for h in range(H):
            for w in range(W):
                out[c, h, w] = image[c, h, W - 1 - w if draws[0] < 0.5 else w]
    return out


def slow_crop(image, draws):
    out = torch.zeros_like(image)
    C, H, W = image.shape
    dy, dx = int(draws[0] * 9) - 4, int(draws[1] * 9) - 4
    for c in range(C):
        for h in range(H):
            for w in range(W):
                if 0 <= h + dy < H and 0 <= w + dx < W:
                    out[c, h, w] = image[c, h + dy, w + dx]
    return out


@pytest.mark.parametrize(("fast", "slow"), [(flip, slow_flip), (crop, slow_crop)], ids=["flip", "crop"])
@pytest.mark.parametrize("shape", [(40, 1, 8, 8), (7, 3, 5, 7), (1, 2, 1, 3)], ids=str)
def test_equals_a_loop_over_samples(fast, slow, shape):
    images = some_images(*shape)
    draws = keyed_uniform(0, 0, torch.arange(len(images)), 2, AUGMENT)
    kept = images.clone()
    out = fast(images, draws)
    assert out.dtype == images.dtype
    assert torch.equal(out, torch.stack([slow(x, d) for x, d in zip(images, draws.tolist(), strict=True)]))
    assert torch.equal(images, kept)


def test_flip_by_hand():
    images = torch.tensor([1.0, 2.0, 3.0]).expand(2, 1, 1, 3)
    out = flip(images, torch.tensor([[0.4999, 0.9], [0.5, 0.1]]))
    assert out.flatten(1).tolist() == [[3, 2, 1], [1, 2, 3]]


@pytest.mark.parametrize(
    ("draw", "row"),
    [(0.0, [0, 0, 0, 0, 1, 2]), (0.5, [1, 2, 3, 4, 5, 6]), (1 - 2.0**-24, [5, 6, 0, 0, 0, 0])],
    ids=["first", "middle", "last"],
)
def test_crop_by_hand(draw, row):
    images = torch.arange(1.0, 7.0).expand(1, 1, 6, 6)
    out = crop(images, torch.tensor([[0.5, draw]]))
    assert out[0, 0].tolist() == [row] * 6


def test_every_outcome_comes_equally_often():
    index = torch.arange(8100)
    images = torch.zeros(8100, 1, 9, 9)
    images[:, :, 4, 4] = 1  # where it ends up tells the offsets
    out = augment_images(images, index, ("crop",), seed=0, epoch=0).flatten(1)
    assert torch.equal(out.sum(1), torch.ones(8100))
    counts = out.sum(0)
    assert ((counts - 100) ** 2 / 100).sum() < 80 + 4 * (2 * 80) ** 0.5
    mirrored = augment_images(torch.arange(2.0).expand(8100, 1, 1, 2), index, ("flip",), 0, 0)[:, 0, 0, 0]
    assert abs(mirrored.mean() - 0.5) < 4 * 0.5 / 90


def test_flip_and_crop_draw_independently():
    index = torch.arange(8100)
    images = torch.zeros(8100, 1, 9, 9)
    images[:, :, 4, 4] = 1
    at = augment_images(images, index, ("crop",), 0, 0).flatten(1).argmax(1)
    flipped = augment_images(torch.arange(2.0).expand(8100, 1, 1, 2), index, ("flip",), 0, 0)[:, 0, 0, 0]
    table = torch.corrcoef(torch.stack([at // 9, at % 9, flipped]).float())
    assert (table - torch.eye(3)).abs().max() < 4 / 90


@pytest.mark.parametrize("names", [("crop", "flip"), ("flip", "crop")], ids="+".join)
def test_a_pipeline_is_its_parts_in_order(names):
    images, index = some_images(), torch.tensor([3, 1, 4, 15, 9, 2])
    out = images
    for name in names:
        out = augment_images(out, index, (name,), seed=5, epoch=6)
    assert torch.equal(augment_images(images, index, names, seed=5, epoch=6), out)


def test_epochs_seeds_and_samples_differ():
    images = some_images(1, 1, 16, 16).expand(8, 1, 16, 16)
    index = torch.arange(8)
    runs = [augment_images(images, index, ("crop",), seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert not torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert not all(torch.equal(runs[0][0], other) for other in runs[0][1:])


@pytest.mark.parametrize(
    ("text", "names"), [("none", ()), ("flip", ("flip",)), ("crop+flip", ("crop", "flip"))], ids=str
)
def test_parse(text, names):
    assert parse(text) == names


@pytest.mark.parametrize("text", ["", "rotate", "crop+", "none+flip", "Flip", "crop,flip", "crop + flip"])
def test_parse_names_the_legal_ones(text):
    with pytest.raises(ValueError, match="data.augment must be none, or names of .* joined by") as caught:
        parse(text)
    assert all(name in str(caught.value) for name in AUGMENTATIONS)
    assert repr(text) in str(caught.value)


def test_parse_refuses_a_name_that_stands_twice():
    with pytest.raises(ValueError, match="data.augment must name each augmentation once, got 'flip.flip'"):
        parse("flip+flip")
