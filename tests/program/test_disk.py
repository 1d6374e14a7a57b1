"""A full, a small and a read-only disk: one clear line, and nothing that was there is lost."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from snn.checkpoint import load_checkpoint
from tests.program.conftest import SMALL, files, rows
from tests.program.killing import Zygote

ROOT = Path(__file__).parents[2]
KIB = 1024
SMALLEST = (  # of the files of a run of SMALL: 48 KiB a checkpoint, some 1 KiB an epoch in tb/
    pytest.param(20 * KIB, "run/best.ckpt", id="checkpoint"),
    pytest.param(60 * KIB, "run/tb", id="tensorboard"),
)


def limited(size: int, *words: str) -> subprocess.CompletedProcess:
    """Run train.py with no file larger than `size` bytes: to a program it is a disk that fills up."""
    return subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
        capture_output=True,
        text=True,
        timeout=120,
    )


def only_error(ended: subprocess.CompletedProcess) -> str:
    assert ended.returncode == 1, ended.stdout
    lines = ended.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), ended.stderr
    return lines[0]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "named"), SMALLEST)
def test_a_full_disk_ends_a_run_with_one_line(program, size, named):
    ended = limited(size, *SMALL, "trainer.epochs=200", "hydra.run.dir=run")
    assert f"cannot write {named}" in only_error(ended) and "File too large" in ended.stderr


@pytest.mark.slow
def test_a_run_on_a_full_disk_loses_nothing_and_goes_on_once_there_is_room(program):
    straight = program.small("trainer.epochs=4", run="straight")
    run = program.small("trainer.epochs=4", "trainer.stop_after=2")
    before = files(run)
    error = only_error(limited(20 * KIB, "resume=run"))
    assert "cannot write run/" in error and "File too large; the files of before are untouched" in error
    after = files(run)
    for name in ("last.ckpt", "previous.ckpt", "best.ckpt", "config.yaml"):
        assert after[name] == before[name]
    assert after["metrics.jsonl"].startswith(before["metrics.jsonl"])
    assert not [name for name in after if name.startswith(".")]
    assert program.train("resume=run").code == 0
    assert rows(run) == rows(straight)
    one, other = (load_checkpoint(folder / "last.ckpt")["network"] for folder in (run, straight))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_a_real_full_disk(tmp_path, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("cannot mount a small tmpfs here")
    monkeypatch.chdir(tmp_path)
    zygote = Zygote(tmp_path)
    try:
        zygote.start(*SMALL, "trainer.epochs=200", "hydra.run.dir=disk/run")
        assert zygote.wait() == 1
        said = Path("output.txt").read_text().splitlines()
        assert "error: cannot write disk/run/" in said[-1] and "No space left on device" in said[-1]
        assert sum("error" in line for line in said) == 1
        whole = [path for path in (disk / "run").glob("*.ckpt") if load_checkpoint(path)["epoch"] > 0]
        assert whole, "what was saved is whole"
    finally:
        zygote.close()
        subprocess.run(["umount", disk], check=True)


def read_only(tmp_path: Path) -> Path:
    """A folder in which nothing can be written; for root, permission bits do not bind."""
    folder = tmp_path / "read_only"
    folder.mkdir()
    folder.chmod(0o500)
    if os.access(folder, os.W_OK):
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder], capture_output=True)
        if mounted.returncode:
            pytest.skip("cannot make a folder read-only here")
    return folder


def test_a_read_only_folder_is_named_before_any_work(program, monkeypatch):
    monkeypatch.setattr("snn.trainer.Trainer.fit", lambda self: pytest.fail("trained"))
    folder = read_only(program.folder)
    try:
        error = program.train(*SMALL, "hydra.run.dir=read_only/run").error
        assert "read_only/run" in error and ("Read-only" in error or "Permission denied" in error)
        assert not list(folder.iterdir())
    finally:
        subprocess.run(["umount", folder], capture_output=True)


def test_a_file_where_the_folder_should_be_is_named(program):
    Path("taken").write_text("mine")
    error = program.train(*SMALL, "hydra.run.dir=taken/run").error
    assert "taken" in error and "Not a directory" in error
    assert Path("taken").read_text() == "mine"
