"""A checkpoint is whole or absent, and reading one runs no code."""

import os
import pickle

import pytest
import torch

from snn.checkpoint import KEYS, find_checkpoint, load_checkpoint, rng_state, save_checkpoint, set_rng_state

STATE = {key: {"x": torch.arange(3)} for key in KEYS}


def test_saved_is_loaded(tmp_path):
    save_checkpoint(tmp_path / "a.ckpt", STATE)
    loaded = load_checkpoint(tmp_path / "a.ckpt")
    assert torch.equal(loaded["network"]["x"], torch.arange(3))
    assert loaded["versions"]["torch"] == str(torch.__version__)
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_a_save_that_fails_half_way_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "a.ckpt"
    save_checkpoint(path, STATE)
    before = path.read_bytes()

    def half(state, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(path, STATE)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]


class Evil:
    def __reduce__(self):
        return os.system, ("touch ran",)


def test_a_pickle_that_calls_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.ckpt").write_bytes(pickle.dumps(Evil()))
    torch.save({**STATE, "config": Evil()}, tmp_path / "b.ckpt")
    for name in ("a.ckpt", "b.ckpt"):
        with pytest.raises(ValueError, match=f"{name} is damaged, or no checkpoint"):
            load_checkpoint(tmp_path / name)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_a_truncated_file_is_named(tmp_path, cut):
    path = tmp_path / "a.ckpt"
    save_checkpoint(path, STATE)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match="a.ckpt is damaged"):
        load_checkpoint(path)


def test_find(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        find_checkpoint(str(tmp_path))
    save_checkpoint(tmp_path / "last.ckpt", STATE)
    assert (
        find_checkpoint(str(tmp_path))
        == find_checkpoint(str(tmp_path / "last.ckpt"))
        == tmp_path / "last.ckpt"
    )


def test_random_state_comes_back():
    state = rng_state()
    drawn = torch.rand(3)
    set_rng_state(state)
    assert torch.equal(torch.rand(3), drawn)
