"""From run folders to a table and a figure; `reproduce.py` is its user."""

import json
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from snn.schema import TrainConfig

MEANS = ["test/accuracy", "test/best_accuracy", "test/undecided", "test/spikes_per_image", "seconds"]
CURVE = "test/accuracy of each epoch"
COLUMNS = {
    "row": "the experiment, with the overrides that follow it",
    "seeds": "a run each",
    "test accuracy, %": "of the epoch that was best on validation, so chosen without the test set: mean +- "
    "spread over the finished seeds, then each of them",
    "best on test, %": "of the epoch that was best on the test set itself. It flatters, but it is what most "
    "papers report: compare this one with theirs",
    "published, %": "as the experiment's file cites it: for its own settings, without what a row changes in "
    "them",
    "epochs": "the horizon of the schedule",
    "minutes": "per run, mean: training, and an evaluation on validation and test after each epoch",
    "spikes per image": "of all spiking layers over all steps, mean over the test set",
    "undecided, %": "test images for which no output neuron spiked; they count as wrong",
}


def read_run(folder: Path, seed: int, epochs: int) -> dict[str, Any]:
    """Return what a run's folder tells: seed, state, starts, curve, and what its summary holds.

    `state` is `finished`, `failed: WHY` (then `error` is WHY), `unfinished: epoch 7 of 15` or `not run`. A
    folder whose files are damaged has failed.
    """
    try:
        return _read_run(folder, seed, epochs)
    except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        why = f"a file in {folder} is damaged ({type(error).__name__}: {error})"
        return {"seed": seed, "state": f"failed: {why}", "error": why, "starts": [], CURVE: []}


def _read_run(folder: Path, seed: int, epochs: int) -> dict[str, Any]:
    rows = read_rows(folder / "metrics.jsonl")
    found: dict[str, Any] = {
        "seed": seed,
        "state": f"unfinished: epoch {rows[-1]['epoch']} of {epochs}" if rows else "not run",
        "starts": read_rows(folder / "starts.jsonl"),
        CURVE: [row["test/accuracy"] for row in rows],
    }
    summary, error = folder / "summary.json", folder / "error.txt"
    if summary.exists():
        found |= {"state": "finished", **json.loads(summary.read_text())}
        assert_complete(found)
    elif error.exists():
        found["error"] = error.read_text().strip().splitlines()[-1]
        found["state"] = f"failed: {found['error']}"
    return found


def assert_complete(run: dict[str, Any]) -> None:
    """Raise an error unless a finished run holds every number that the table and the figure want."""
    for name in MEANS:
        float(run[name])
    run[CURVE][run["best_epoch"] - 1]
    for start in run["starts"]:
        describe(start)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a .jsonl file, but for a last one that is torn; none if there is no file."""
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def make_row(
    label: str, words: list[str], config: TrainConfig, published: list[str], runs: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return a row of the table, with mean and spread of what its finished runs measured.

    A spread is the sample's standard deviation (n - 1), None for a single run.
    """
    finished = [run for run in runs if run["state"] == "finished"]
    values = {name: [run[name] for run in finished] for name in MEANS if finished}
    return {
        "row": label,
        "words": words,
        "data": config.data["source"]["_target_"].split(".")[-1],
        "published": published,
        "epochs": config.trainer.epochs,
        "mean": {name: statistics.mean(v) for name, v in values.items()},
        "spread": {name: statistics.stdev(v) if len(v) > 1 else None for name, v in values.items()},
        "runs": runs,
    }


def write(out: Path, report: dict[str, Any]) -> None:
    """Write results.json, results.png and results.md into the folder `out`; print the table.

    Args:
        out: The folder.
        report: `rows` as :func:`make_row` returns them, the `command` that repeats them, and the `date`.
    """
    out = out.expanduser()
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    text = markdown(report, draw(report["rows"], out / "results.png"))
    (out / "results.md").write_text(text)
    table, _, _ = text.partition("\n\n")
    print(f"\n{table}\n\nwritten to {out}")


def markdown(report: dict[str, Any], drawn: bool) -> str:
    """Return the table, and what it takes to read and to repeat it."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for row in report["rows"]:
        whole = [cell.replace("|", "\\|") for cell in cells(row)]
        lines.append(f"| {' | '.join(whole)} |")
    lines += ["", *(f"- *{name}*: {meaning}." for name, meaning in COLUMNS.items())]
    lines += ["- A spread is the sample's standard deviation; a single seed has none.", ""]
    if drawn:
        lines += ["![test accuracy of each epoch](results.png)", ""]
        lines += ["A line per seed; the dot is the epoch that was best on validation.", ""]
    starts = [start for row in report["rows"] for run in row["runs"] for start in run["starts"]]
    lines += [f"Run on {place}.\n" for place in dict.fromkeys(map(describe, starts))]
    return "\n".join([*lines, f"Written {report['date']}; again:", "", f"    {report['command']}", ""])


def cells(row: dict[str, Any]) -> Iterator[str]:
    """Write the cells of a row, in the order of `COLUMNS`."""
    states = [(run["seed"], run["state"]) for run in row["runs"]]
    mean = row["mean"]
    yield f"`{row['row']}`"
    yield ", ".join(str(seed) if state == "finished" else f"{seed} ({state})" for seed, state in states)
    yield accuracies(row, "test/accuracy")
    yield accuracies(row, "test/best_accuracy")
    yield "<br>".join(row["published"]) or "none"
    yield str(row["epochs"])
    yield f"{mean['seconds'] / 60:.1f}" if mean else ""
    yield f"{mean['test/spikes_per_image']:.0f}" if mean else ""
    yield f"{100 * mean['test/undecided']:.2f}" if mean else ""


def accuracies(row: dict[str, Any], name: str) -> str:
    """Write mean, spread and each finished seed, in percent."""
    each = [f"{100 * run[name]:.2f}" for run in row["runs"] if run["state"] == "finished"]
    if len(each) < 2:
        return f"**{each[0]}**" if each else ""
    return f"**{100 * row['mean'][name]:.2f} +- {100 * row['spread'][name]:.2f}** ({', '.join(each)})"


def describe(start: dict[str, Any]) -> str:
    """Write where a run was started, and with what code, in a line."""
    parts = [start["cpu"], f"{start['cores']} cores", f"{start['threads']} threads per run"]
    parts += [start["gpu"]] if "gpu" in start else []
    parts += [f"{name} {start[name]}" for name in ("python", "torch", "numba", "triton") if name in start]
    if "commit" in start:
        parts.append(f"commit {start['commit'][:10]}{' and changes' if start['changed'] else ''}")
    return ", ".join(parts)


def draw(rows: list[dict[str, Any]], path: Path) -> bool:
    """Draw the test accuracy of each epoch, a panel per data set; return whether that was possible."""
    rows = [row for row in rows if any(run[CURVE] for run in row["runs"])]
    if not rows:
        return False
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f'{path} is left out, for want of matplotlib: pip install -e ".[report]"', file=sys.stderr)
        return False
    sets = list(dict.fromkeys(row["data"] for row in rows))
    figure = Figure(figsize=(6 * len(sets), 4.5), dpi=120)
    for name, axes in zip(sets, figure.subplots(1, len(sets), squeeze=False)[0], strict=True):
        draw_panel(axes, name, [row for row in rows if row["data"] == name])
    figure.savefig(path, bbox_inches="tight")
    return True


def draw_panel(axes: Any, title: str, rows: list[dict[str, Any]]) -> None:
    """Draw a colour per row, a line per seed, a dot where validation was best; dashed what was published."""
    curves: list[list[float]] = []
    cited: dict[float, tuple[str, list[str]]] = {}  # the colour of the first row, the experiments
    for number, row in enumerate(rows):
        colour = f"C{number % 10}"
        axes.plot([], [], color=colour, label=row["row"])
        for run in row["runs"]:
            curve = [100 * value for value in run[CURVE]]
            axes.plot(range(1, len(curve) + 1), curve, color=colour, linewidth=1.2)
            if "best_epoch" in run:
                axes.plot(run["best_epoch"], curve[run["best_epoch"] - 1], "o", color=colour, markersize=5)
            curves += [curve] if curve else []
        if (value := first_number(row["published"])) is not None:
            cited.setdefault(value, (colour, []))[1].append(row["row"].split("+")[0])
    for value, (colour, names) in cited.items():
        label = f"published, {', '.join(dict.fromkeys(names))}: {value:.2f}"
        axes.axhline(value, color=colour, linestyle="--", linewidth=1, label=label)
    low, top = min(map(statistics.median, curves)), max(*map(max, curves), *cited, 0.0)
    room = max(top - low, 0.2)
    axes.set_ylim(max(0, low - room / 2), min(100, top + room / 4))  # first epochs may lie below
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(title=title, xlabel="epoch", ylabel="test accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False, fontsize="small")


def first_number(texts: list[str]) -> float | None:
    """Return the number that one of the texts starts with, if any does."""
    numbers = (re.match(r"\d+(\.\d+)?", text) for text in texts)
    return next((float(match[0]) for match in numbers if match), None)
