"""Run experiments over seeds, and tabulate them beside the published figures.

    python scripts/reproduce.py fashion_l23 fashion_l23+surrogate=atan --seeds 0 1 2 --out results/fashion

A row of the table is a file of configs/experiment/, alone or with overrides joined by `+`. Each run is a
`train.py` of its own, in OUT/runs/ROW/sSEED: a run that fails is told in the table, the others go on. The
same command again runs what is missing, and goes on with what was interrupted. All rows get their first
seed before any gets its second. `--minutes` is for the whole call: what runs when they are over is stopped,
goes on from there another time, and is told as unfinished.

Written to OUT: results.md, results.json, and results.png, which needs `pip install -e ".[report]"`.
"""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import report  # noqa: E402

from snn import schema  # noqa: E402
from snn.config import compose  # noqa: E402
from snn.device import pick_device  # noqa: E402
from snn.origin import now  # noqa: E402
from snn.run_folder import RunFolder  # noqa: E402
from snn.schema import AUTO, TrainConfig  # noqa: E402
from snn.words import key_of  # noqa: E402

TRAIN = ROOT / "train.py"
EXPERIMENTS = ROOT / "configs" / "experiment"
OWN_KEYS = ("seed", "experiment", "resume", "trainer.test_each_epoch")
POLL_SECONDS = 0.1


@dataclass
class Row:
    """A row of the table: its label as typed, the words it means, their config, and what was published."""

    label: str
    words: list[str]
    config: TrainConfig
    published: list[str]


@dataclass
class Run:
    """One seed of a row: a name to show, the words of its command, their config, and its folder."""

    name: str
    words: list[str]
    config: TrainConfig
    folder: Path

    def has(self, file: str) -> bool:
        """Return whether `file` lies in the folder."""
        return (self.folder / file).exists()

    def state(self) -> dict[str, Any]:
        """Return what the folder tells, see :func:`report.read_run`."""
        return report.read_run(self.folder, self.config.seed, self.config.trainer.epochs)


@dataclass
class Child:
    """A run in progress: its process, and what that writes to stderr."""

    run: Run
    process: subprocess.Popen[bytes]
    stderr: IO[bytes]


def main(argv: list[str] | None = None) -> int:
    """Run what the command line asks for; return the exit code: 0, 1 if a run failed, 130 if interrupted."""
    words = sys.argv[1:] if argv is None else argv
    options = parse(words)
    try:
        rows = [make_row(label, options) for label in options.rows]
        runs = [[make_run(row, seed, options.out) for seed in options.seeds] for row in rows]
        in_order = [run for of_one_seed in zip(*runs, strict=True) for run in of_one_seed]
        for run in in_order:
            require_same(run)
        if len({run.folder for run in in_order}) < len(in_order):
            raise ValueError("two rows would share a folder, or a row or a seed is given twice")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    code = 0 if options.table else run_all(in_order, options)
    command = shlex.join(["python", "scripts/reproduce.py", *(word for word in words if word != "--table")])
    table = [
        report.make_row(row.label, row.words, row.config, row.published, [run.state() for run in of_row])
        for row, of_row in zip(rows, runs, strict=True)
    ]
    report.write(options.out, {"command": command, "date": now(), "rows": table})
    return code or int(any("error" in run for row in table for run in row["runs"]))


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("reproduce.py", description=__doc__, formatter_class=raw)
    parser.add_argument(
        "rows", nargs="+", metavar="ROW", help="EXPERIMENT, or EXPERIMENT+key=value+key=value"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="S", help="default: 0")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs and of the table")
    parser.add_argument("--epochs", type=int, help="instead of the experiment's own")
    parser.add_argument("--set", nargs="+", default=[], metavar="key=value", help="overrides of all rows")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="of the whole call; default: no limit"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="runs at a time, which share the cores; default: 1"
    )
    parser.add_argument("--device", help="as in train.py")
    parser.add_argument("--table", action="store_true", help="write the table of what is there; run nothing")
    options = parser.parse_args(words)
    if not options.minutes > 0:
        parser.error(f"--minutes must be > 0, got {options.minutes}")
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {options.jobs}")
    return options


def make_row(label: str, options: argparse.Namespace) -> Row:
    """Return the row that `label` means; its own overrides win over those of all rows.

    Raises:
        ValueError: There is no such experiment, or a word has no meaning or is not the user's to set.
    """
    experiment, *own = split(label)
    common = [*options.set]
    common += [] if options.epochs is None else [f"trainer.epochs={options.epochs}"]
    common += [] if options.device is None else [f"device={options.device}"]
    overrides = {key_of(word): word for word in [*common, *own]}
    for name, word in overrides.items():
        if name in OWN_KEYS or name.startswith("hydra"):
            raise ValueError(f"{word} cannot be set in a row: reproduce.py sets {name}")
    words = [f"experiment={experiment}", "trainer.test_each_epoch=true", *overrides.values()]
    config = compose(words)
    pick_device(config.device)
    return Row(label, words, config, published((EXPERIMENTS / f"{experiment}.yaml").read_text()))


def split(label: str) -> list[str]:
    """Split `name+key=value+key=value`; a `+` within a value (crop4+flip) or before a new key stays."""
    return re.split(r"(?<!\+)\+(?=\+*[\w./@]+=)", label)


def published(text: str) -> list[str]:
    """Return the `# Published:` lines of an experiment file; a line of `#` and 4 spaces continues one."""
    lines = re.sub(r"\n#    +", " ", text).splitlines()
    return [line.split(":", 1)[1].strip() for line in lines if line.startswith("# Published:")]


def make_run(row: Row, seed: int, out: Path) -> Run:
    """Return one seed of a row."""
    folder = out.expanduser() / "runs" / re.sub(r"[^\w.+=-]", "_", row.label)[:200] / f"s{seed}"
    words = [*row.words, f"seed={seed}"]
    return Run(f"{row.label}, seed {seed}", words, replace(row.config, seed=seed), folder)


def require_same(run: Run) -> None:
    """Raise ValueError if the run's folder holds one of other settings.

    Settings that say where a run computes do not count, nor do keys that the other's config lacks and no
    word names: they are younger than it.
    """
    if not (run.has("summary.json") or run.has("last.ckpt")):
        return
    there, given = RunFolder(run.folder).config(), {key_of(word) for word in run.words}
    try:
        schema.require_same(asdict(run.config), there, run.folder, given)
    except ValueError as error:
        raise ValueError(f"{error}; take another --out") from error


def run_all(runs: list[Run], options: argparse.Namespace) -> int:
    """Run what is not finished, in order, while there is time; return 130 if the user stopped it, else 0."""
    waiting = [run for run in runs if not run.has("summary.json")]
    total, running = len(waiting), list[Child]()
    end = time.monotonic() + 60 * options.minutes
    try:
        while (waiting or running) and time.monotonic() < end:
            if waiting and len(running) < options.jobs:
                run = waiting.pop(0)
                print(f"{total - len(waiting)}/{total} {run.name}: {run.folder}", flush=True)
                running.append(start(run, options.jobs))
                continue
            time.sleep(POLL_SECONDS)
            for child in [child for child in running if child.process.poll() is not None]:
                running.remove(child)
                conclude(child)
        return 0
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    finally:
        for child in running:
            child.process.terminate()
        for child in running:  # each of them, before a word to a reader who may be gone
            conclude_stopped(child)
        for child in running:
            tell(child.run)


def start(run: Run, jobs: int) -> Child:
    """Start a run, or go on with it.

    In a session of its own, since it ends at once, unsaved, if Ctrl-C reaches it too before it is terminated.
    """
    quoted = str(run.folder).replace("'", "\\'")
    words = [*run.words, f"resume={AUTO}", f"hydra.run.dir='{quoted}'"]
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "error.txt").unlink(missing_ok=True)
    environment = dict(os.environ)
    if jobs > 1 and "OMP_NUM_THREADS" not in environment:
        environment["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // jobs))
    stderr = tempfile.TemporaryFile()
    command = [sys.executable, str(TRAIN), *words]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True
    )
    return Child(run, process, stderr)


def conclude(child: Child) -> None:
    """Say how a run has ended; the error.txt of one that failed ends with the reason."""
    with child.stderr:
        child.stderr.seek(0)
        said = child.stderr.read().decode(errors="replace").splitlines()
    if code := child.process.returncode:
        reasons = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
        with (child.run.folder / "error.txt").open("a") as file:
            file.write((reasons or [f"train.py ended with code {code}"])[-1] + "\n")
    tell(child.run)


def conclude_stopped(child: Child) -> None:
    """Wait for a run that was told to end, which writes where it stands first."""
    child.process.wait()
    child.stderr.close()
    (child.run.folder / "error.txt").unlink(missing_ok=True)  # ended at its start: no failure


def tell(run: Run) -> None:
    """Print how a run stands."""
    state = run.state()
    result = f", test accuracy {state['test/accuracy']:.4f}" if "test/accuracy" in state else ""
    print(f"    {run.name}: {state['state']}{result}", flush=True)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: no run stays behind
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup wants it
            signal.signal(number, signal.default_int_handler)
    try:
        code = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit("error: interrupted")
    except BrokenPipeError:  # whoever read the output is gone, as `head` after its lines
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    sys.exit(code)
