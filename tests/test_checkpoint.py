"""A checkpoint is whole or absent, is known to be whole, and reading one runs no code."""

import errno
import os
import pickle
import random
from pathlib import Path

import pytest
import torch
from torch import nn

import snn.checkpoint
from snn.checkpoint import (
    KEYS,
    find_checkpoint,
    load_checkpoint,
    load_weights,
    newest_checkpoint,
    rng_state,
    save_checkpoint,
    set_rng_state,
)

STATE = {key: {"x": torch.arange(3)} for key in KEYS} | {"step": 7}


def at_step(step: int) -> dict:
    return STATE | {"step": step}


def test_saved_is_loaded(tmp_path):
    save_checkpoint(tmp_path / "a.ckpt", STATE)
    loaded = load_checkpoint(tmp_path / "a.ckpt")
    assert torch.equal(loaded["network"]["x"], torch.arange(3))
    assert loaded["versions"]["torch"] == str(torch.__version__)
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_torch_alone_reads_it_too(tmp_path):
    save_checkpoint(tmp_path / "a.ckpt", STATE)
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["step"] == 7


def test_the_one_before_is_kept(tmp_path):
    path, previous = tmp_path / "last.ckpt", tmp_path / "previous.ckpt"
    for step in (1, 2, 3):
        save_checkpoint(path, at_step(step), previous)
    assert load_checkpoint(path)["step"] == 3 and load_checkpoint(previous)["step"] == 2
    path.write_bytes(path.read_bytes()[:-1])
    save_checkpoint(path, at_step(4), previous)
    assert load_checkpoint(path)["step"] == 4 and load_checkpoint(previous)["step"] == 2, "not the damaged"


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_a_save_that_fails_anywhere_leaves_what_was(tmp_path, monkeypatch, step):
    path, previous = tmp_path / "last.ckpt", tmp_path / "previous.ckpt"
    save_checkpoint(path, at_step(1), previous)
    save_checkpoint(path, at_step(2), previous)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if step == "write":
        monkeypatch.setattr(Path, "open", full)
    else:
        monkeypatch.setattr(snn.checkpoint.os, step, full)
    with pytest.raises(OSError, match="cannot write .*last.ckpt: No space left on device"):
        save_checkpoint(path, at_step(3), previous)
    monkeypatch.undo()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


class Evil:
    def __reduce__(self):
        return os.system, ("touch ran",)


def sealed(path: Path, content: object) -> None:
    """Write a file that ends with the checksum of a checkpoint, whatever is in it."""
    torch.save(content, path)
    path.write_bytes(snn.checkpoint._sealed(path.read_bytes()))


def test_a_pickle_that_calls_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.ckpt").write_bytes(pickle.dumps(Evil()))
    torch.save({**STATE, "config": Evil()}, tmp_path / "b.ckpt")
    sealed(tmp_path / "c.ckpt", {**STATE, "config": Evil()})
    for name, message in (
        ("a", "is damaged, or no"),
        ("b", "is damaged, or no"),
        ("c", "is no checkpoint of"),
    ):
        with pytest.raises(ValueError, match=f"{name}.ckpt {message}"):
            load_checkpoint(tmp_path / f"{name}.ckpt")
    assert not (tmp_path / "ran").exists()


def test_a_whole_file_that_is_none_of_ours_is_refused(tmp_path):
    for content in ([1], {"network": {}}, torch.zeros(3)):
        sealed(tmp_path / "a.ckpt", content)
        with pytest.raises(ValueError, match="a.ckpt is no checkpoint of this project"):
            load_checkpoint(tmp_path / "a.ckpt")


def test_a_thousand_flips_cuts_and_additions_are_each_refused_by_name(tmp_path, request):
    path, draw = tmp_path / "a.ckpt", random.Random(5)
    save_checkpoint(path, STATE)
    whole = path.read_bytes()
    for number in range(10_000 if request.config.getoption("--nightly") else 1_000):
        bad = bytearray(whole)
        match number % 4:
            case 0:
                bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
            case 1:  # where a zip keeps its tables, and ours its checksum
                bad[-1 - draw.randrange(600)] ^= draw.randrange(1, 256)
            case 2:
                del bad[draw.randrange(len(bad)) :]
            case 3:
                start = draw.randrange(len(bad))
                bad[start : start + draw.randrange(4)] = draw.randbytes(draw.randrange(1, 9))
        if bytes(bad) == whole:
            continue
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="a.ckpt is damaged, or no checkpoint"):
            load_checkpoint(path)


def test_find(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no checkpoint .*last.ckpt"):
        find_checkpoint(str(tmp_path))
    for name in ("best.ckpt", "previous.ckpt", "last.ckpt"):
        save_checkpoint(tmp_path / name, STATE)
        assert find_checkpoint(str(tmp_path)) == find_checkpoint(str(tmp_path / name)) == tmp_path / name
    assert find_checkpoint(str(tmp_path), ("best.ckpt",)) == tmp_path / "best.ckpt"


@pytest.mark.parametrize(
    ("steps", "damaged", "newest"),
    [((5, 4, 3), "", 5), ((5, 4, 3), "last", 4), ((5, 3, 4), "last", 4), ((5, 4, 3), "last previous", 3)],
)
def test_the_newest_whole_one_is_found_and_damage_is_said(tmp_path, caplog, steps, damaged, newest):
    paths = [tmp_path / name for name in snn.checkpoint.RESUMABLE]
    for path, step in zip(paths, steps, strict=True):
        save_checkpoint(path, at_step(step))
        if path.stem in damaged.split():
            path.write_bytes(path.read_bytes()[:100])
    assert newest_checkpoint(paths)["step"] == newest
    assert len(caplog.messages) == len(damaged.split())
    for name, text in zip(damaged.split(), caplog.messages, strict=True):
        assert f"{name}.ckpt is damaged" in text and f"step {newest}" in text


def test_of_none_there_is_none_and_of_damaged_ones_an_error(tmp_path):
    paths = [tmp_path / name for name in snn.checkpoint.RESUMABLE]
    assert newest_checkpoint(paths) is None
    paths[0].write_bytes(b"x")
    paths[2].write_bytes(b"")
    with pytest.raises(ValueError, match="last.ckpt is damaged.*best.ckpt is damaged"):
        newest_checkpoint(paths)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"weight": torch.zeros(2, 4)},
            r"weight has shape \[2, 4\] in the checkpoint, \[2, 3\] in the network",
        ),
        ({"extra": torch.zeros(1)}, r"extra, of shape \[1\] in the checkpoint, is missing in the network"),
        (
            {"bias": None},
            r"bias, of shape \[2\] in the network that its config describes, is missing in the checkpoint",
        ),
    ],
)
def test_weights_of_another_network_name_the_tensor_and_change_nothing(change, message):
    network = nn.Linear(3, 2)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    weights = {"weight": torch.ones(2, 3), "bias": torch.ones(2)} | change
    weights = {name: value for name, value in weights.items() if value is not None}
    with pytest.raises(ValueError, match=f"^x: {message}"):
        load_weights(network, weights, "x")
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_random_state_comes_back():
    state = rng_state()
    drawn = torch.rand(3)
    set_rng_state(state)
    assert torch.equal(torch.rand(3), drawn)
