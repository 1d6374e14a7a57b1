"""A run killed again and again, and resumed each time, is the run that was never killed, bit for bit."""

import json
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.program.conftest import rows, summary
from tests.program.killing import Zygote
from tests.program.test_resume import equal

pytestmark = pytest.mark.slow

BASE = (
    "data=synthetic",
    "network.layers=8C3-P2-D0.2-16",
    "data.augment=crop4+flip",
    "encoding=poisson",
    "device=cpu",
    "trainer.batch_size=8",  # 8 steps an epoch
    "trainer.checkpoint_every_steps=1",
)
VARIANTS = {
    "adamw": (),
    "workers": ("data.num_workers=2", "optimizer=adam", "trainer.checkpoint_every_steps=2"),
    "accumulate": ("trainer.accumulate=3", "optimizer=sgd", "scheduler=constant", "trainer.clip_norm=0.1"),
    "minutes": (
        "trainer.checkpoint_every_steps=null",
        "trainer.checkpoint_every_minutes=1e-4",
        "trainer.test_each_epoch=true",
        "head=spiking",
        "loss=count",
    ),
}


@pytest.fixture
def zygote(tmp_path):
    started = Zygote(tmp_path)
    yield started
    started.close()


def contents(run: Path) -> dict:
    """What a run leaves, but for what depends on the clock."""
    held = {}
    for name in ("last.ckpt", "best.ckpt"):
        state = torch.load(run / name)
        held[name] = {key: value for key, value in state.items() if key != "seconds"}
        if state["progress"] is not None:
            state["progress"]["epoch"].pop("seconds")
    events = EventAccumulator(str(run / "tb"), size_guidance={"scalars": 0}).Reload()
    held["tensorboard"] = {
        tag: [(e.step, e.value) for e in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
        if "second" not in tag
    }
    held["summary"] = {
        key: v for key, v in summary(run).items() if "seconds" not in key and "_second" not in key
    }
    return {**held, "rows": rows(run)}


def kill_and_resume(
    zygote: Zygote, words: tuple[str, ...], run: Path, kills: int, draw: random.Random
) -> int:
    """Kill a run so often, or until it comes to its end all the same; then let it; return the kills."""
    command = (*words, "resume=auto", f"hydra.run.dir={run.name}")
    for number in range(kills):
        if number % 3 == 1:  # at a file, wherever the run is
            zygote.start(*command, moment=draw.randint(1, 120))
        else:
            pid = zygote.start(*command)
            if number % 3 == 2:  # while it trains
                before, patience = written(run / "last.ckpt"), time.monotonic() + 20
                while written(run / "last.ckpt") == before and time.monotonic() < patience:
                    time.sleep(0.01)
            time.sleep(draw.uniform(0, 0.2) if number % 3 == 2 else draw.uniform(0, 2))
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        code = zygote.wait()
        if code == 0:
            return number
        assert code == -signal.SIGKILL, f"kill {number}: {Path('output.txt').read_text()[-2000:]}"
    zygote.start(*command)
    assert zygote.wait() == 0, Path("output.txt").read_text()[-2000:]
    return kills


def written(path: Path) -> int:
    """When a file was written."""
    return path.stat().st_mtime_ns if path.exists() else 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_killed_at_random_moments_is_the_straight_run(tmp_path, monkeypatch, zygote, request, variant):
    monkeypatch.chdir(tmp_path)
    kills = 20 if variant == "adamw" else 5
    if request.config.getoption("--nightly"):
        kills *= 10
    words = (*BASE, *VARIANTS[variant], "trainer.epochs=60")
    zygote.start(*words, "hydra.run.dir=straight")
    assert zygote.wait() == 0, Path("output.txt").read_text()[-2000:]
    straight, done, draw = contents(tmp_path / "straight"), 0, random.Random(variant)
    while done < kills:
        run = tmp_path / f"killed-{done}"
        here = kill_and_resume(zygote, words, run, kills - done, draw)
        killed = contents(run)
        for part in straight:
            assert equal(straight[part], killed[part]), part
        assert not list(run.glob(".*")), "no half of a file stays"
        starts = [json.loads(start)["step"] for start in (run / "starts.jsonl").read_text().splitlines()]
        assert here < 5 or len(set(starts)) > here / 2, "it went on, and did not start again"
        done += here
