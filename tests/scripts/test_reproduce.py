"""The table of runs: what is run, what is left alone, and what is written about it."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import train

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import report  # noqa: E402
import reproduce  # noqa: E402

sys.path.remove(str(ROOT / "scripts"))
NAME = "fashion_mnist_small"
TINY = ("data=synthetic", "network.layers=8", "trainer.batch_size=16", "optimizer.lr=0.01")
# A train.py of no time at all: how it ends is told by clip_norm, the words are the config.
FAKE = """
import json, os, sys, time
from pathlib import Path
import yaml
words = dict(word.split("=", 1) for word in sys.argv[1:])
assert words.pop("resume") == "auto"
folder = Path(words.pop("hydra.run.dir").strip("'"))
folder.mkdir(parents=True, exist_ok=True)
with (folder / "starts.jsonl").open("a") as file:
    threads = int(os.environ.get("OMP_NUM_THREADS", 1))
    facts = {"date": "x", "cpu": "x", "cores": 8, "threads": threads, "python": "3", "torch": "2"}
    file.write(json.dumps(facts) + "\\n")
resumed = (folder / "last.ckpt").exists()
if resumed:
    config = yaml.safe_load((folder / "config.yaml").read_text())
    rows = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(rows[: rows.rindex("\\n") + 1])
else:
    config = {}
    for key, value in words.items():
        if key == "experiment":
            continue
        node = config
        *path, last = key.split(".")
        for part in path:
            node = node.setdefault(part, {})
        node[last] = yaml.safe_load(value)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
how = config["trainer"].get("clip_norm")
with (folder / "calls").open("a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
if how == 1:
    print("something else\\nerror: it is broken\\nlast words", file=sys.stderr)
    sys.exit(1)
if how == 2:
    sys.exit(3)
with (folder / "metrics.jsonl").open("a") as file:
    for epoch in range(2 if resumed else 1, 3):
        file.write(json.dumps({"epoch": epoch, "test/accuracy": 0.4 + 0.1 * epoch}) + "\\n")
        file.flush()
        (folder / "last.ckpt").write_text("")
        if how == 3 and not resumed:
            file.write('{"epoch": 2, "te')
            file.flush()
            (folder / "error.txt").write_text("KeyboardInterrupt")
            (folder / "sleeps").write_text("")
            time.sleep(60)
seed = config["seed"]
summary = {"test/accuracy": 0.5 + 0.01 * seed, "test/best_accuracy": 0.6, "test/undecided": 0.002,
           "test/spikes_per_image": 100 + seed, "seconds": 90, "best_epoch": 1, "epochs": 2}
(folder / "summary.json").write_text(json.dumps(summary))
"""
compose = functools.cache(lambda words, compose=reproduce.compose: compose(list(words)))


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Call the script in a folder of its own, with a train.py that takes no time, and no figure."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(FAKE)
    monkeypatch.setattr(reproduce, "TRAIN", tmp_path / "train.py")
    monkeypatch.setattr(reproduce, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(reproduce, "compose", lambda words: compose(tuple(words)))
    monkeypatch.setattr(report, "draw", lambda rows, path: False)

    def call(*words):
        capsys.readouterr()
        code = reproduce.main([*words, "--out", "out"])
        return SimpleNamespace(code=code, out=(said := capsys.readouterr()).out, err=said.err)

    return call


def calls(row, seed):
    """The commands that the run has had."""
    file = Path("out/runs") / row / f"s{seed}" / "calls"
    return file.read_text().splitlines() if file.exists() else []


def result(out="out"):
    return json.loads(Path(out, "results.json").read_text())


def line(row):
    """The cells of a row of results.md."""
    (found,) = [
        text for text in Path("out/results.md").read_text().splitlines() if text.startswith(f"| `{row}` |")
    ]
    return [cell.strip() for cell in found.split("|")[1:-1]]


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("a", ["a"]),
        ("a+surrogate=atan+head=decoupled", ["a", "surrogate=atan", "head=decoupled"]),
        ("a+data.augment=crop4+flip+head=spiking", ["a", "data.augment=crop4+flip", "head=spiking"]),
        ("a++optimizer.nesterov=true+b=1", ["a", "+optimizer.nesterov=true", "b=1"]),
        ("a+optimizer.lr=1e+3", ["a", "optimizer.lr=1e+3"]),
    ],
)
def test_a_label_is_split_before_a_key(label, words):
    assert reproduce.split(label) == words


def test_the_header_of_an_experiment_is_read():
    text = """# @package _global_
# Paper:     somebody, 2020
#            and a second line
# Published: 99.50 +- 0.02 (TSSL 2020,
#            Table 2; best 99.53)
# Published: 99.4 (from memory)
# Measured:  see results
#            90.1
name: x
# Published: none
"""
    published = ["99.50 +- 0.02 (TSSL 2020, Table 2; best 99.53)", "99.4 (from memory)", "none"]
    assert reproduce.published(text) == published
    assert reproduce.published("name: x\n") == []
    assert report.first_number(published) == 99.5
    assert report.first_number(["none", "92.83 (best)"]) == 92.83
    assert report.first_number(["none", "see Table 2"]) is None


def test_mean_and_spread_by_hand():
    numbers = {
        "test/accuracy": [0.9, 0.92, 0.97],  # mean 0.93; deviations -.03 -.01 .04: 26e-4 / 2
        "test/best_accuracy": [0.95, 0.97, 0.99],
        "test/undecided": [0.0, 0.001, 0.002],
        "test/spikes_per_image": [100.0, 110.0, 120.6],
        "seconds": [60.0, 120.0, 360.0],
    }
    runs = [{"state": "finished", "seed": n, **{k: v[n] for k, v in numbers.items()}} for n in range(3)]
    config = reproduce.compose([f"experiment={NAME}", "trainer.epochs=7"])
    row = report.make_row(
        "x+b=1|2",
        ["b=1|2"],
        config,
        ["92.69 +- 0.09 (A)", "93 (B)"],
        [*runs, {"state": "not run", "seed": 9}],
    )
    assert row["data"] == "fashion_mnist" and row["epochs"] == 7
    assert row["mean"]["test/accuracy"] == pytest.approx(0.93)
    assert row["spread"]["test/accuracy"] == pytest.approx(0.0013**0.5)
    assert row["spread"]["test/best_accuracy"] == pytest.approx(0.02)
    assert list(report.cells(row)) == [
        "`x+b=1|2`",
        "0, 1, 2, 9 (not run)",
        "**93.00 +- 3.61** (90.00, 92.00, 97.00)",
        "**97.00 +- 2.00** (95.00, 97.00, 99.00)",
        "92.69 +- 0.09 (A)<br>93 (B)",
        "7",
        "3.0",
        "110",
        "0.10",
    ]
    one = report.make_row("x", [], config, [], runs[:1])
    assert one["spread"]["test/accuracy"] is None and list(report.cells(one))[2] == "**90.00**"
    none = report.make_row("x", [], config, [], [])
    assert none["mean"] == {} and list(report.cells(none)) == ["`x`", "", "", "", "none", "7", "", "", ""]


def test_runs_go_by_seed_and_are_written_down(call):
    other = f"{NAME}+trainer.batch_size=20"
    ended = call(
        NAME, other, "--seeds", "0", "2", "--epochs", "2", "--set", "trainer.batch_size=30", "--device", "cpu"
    )
    assert ended.code == 0, ended.err
    started = [text.split(": ")[1] for text in ended.out.splitlines() if "/4 " in text]
    assert started == [f"out/runs/{row}/s{seed}" for seed in (0, 2) for row in (NAME, other)]
    words = (
        f"experiment={NAME} trainer.test_each_epoch=true trainer.batch_size=20 trainer.epochs=2 device=cpu"
    )
    assert calls(other, 2) == [f"{words} seed=2 resume=auto hydra.run.dir='out/runs/{other}/s2'"]
    assert line(NAME)[:4] == [
        f"`{NAME}`",
        "0, 2",
        "**51.00 +- 1.41** (50.00, 52.00)",
        "**60.00 +- 0.00** (60.00, 60.00)",
    ]
    assert line(NAME)[5:] == ["2", "1.5", "101", "0.20"]
    row = result()["rows"][1]
    assert row["row"] == other and row["runs"][1]["test/accuracy of each epoch"] == [0.5, 0.6000000000000001]
    (facts,) = row["runs"][1]["starts"]
    assert {"date", "cpu", "cores", "threads", "python", "torch"} <= set(facts)
    text = Path("out/results.md").read_text()
    assert f"    {result()['command']}\n" in text and "--seeds 0 2 --epochs 2" in text
    assert text.count("Run on ") == 1 and "most papers report" in text
    assert "| `" in ended.out and "written to out" in ended.out


def test_what_is_finished_is_not_run_again_and_what_is_new_is(call):
    assert call(NAME, "--epochs", "2").code == 0
    ended = call(NAME, "--epochs", "2", "--seeds", "0", "1")
    assert ended.code == 0 and "1/1" in ended.out
    assert len(calls(NAME, 0)) == len(calls(NAME, 1)) == 1
    Path("out/results.md").unlink()
    ended = call(NAME, "--epochs", "2", "--seeds", "0", "1", "5", "--table")
    assert ended.code == 0 and line(NAME)[1] == "0, 1, 5 (not run)" and not calls(NAME, 5)
    assert "--table" not in result()["command"]


def test_a_run_that_fails_is_told_and_the_others_go_on(call):
    broken, killed = f"{NAME}+trainer.clip_norm=1", f"{NAME}+trainer.clip_norm=2"
    ended = call(broken, killed, NAME, "--epochs", "2")
    assert ended.code == 1
    assert line(broken)[1] == "0 (failed: it is broken)" and line(broken)[2] == ""
    assert line(killed)[1] == "0 (failed: train.py ended with code 3)"
    assert line(NAME)[2] == "**50.00**"
    assert call(broken, killed, NAME, "--epochs", "2", "--table").code == 1
    assert call(broken, NAME, "--epochs", "2").code == 1
    assert (len(calls(broken, 0)), len(calls(killed, 0)), len(calls(NAME, 0))) == (2, 1, 1)


def test_when_time_is_over_a_run_is_left_to_go_on(call, monkeypatch):
    slow, sleeps = f"{NAME}+trainer.clip_norm=3", Path(f"out/runs/{NAME}+trainer.clip_norm=3/s0/sleeps")
    clock = SimpleNamespace(sleep=time.sleep, monotonic=lambda: 301 if sleeps.exists() else 0)
    monkeypatch.setattr(reproduce, "time", clock)
    ended = call(slow, NAME, "--epochs", "2", "--minutes", "5")
    assert ended.code == 0
    monkeypatch.setattr(reproduce, "time", time)
    assert line(slow)[1] == "0 (unfinished: epoch 1 of 2)" and line(NAME)[1] == "0 (not run)"
    assert call(slow, NAME, "--epochs", "2").code == 0
    assert calls(slow, 0)[0] == calls(slow, 0)[1], "the same command goes on"
    assert line(slow)[1] == line(NAME)[1] == "0"
    assert len(result()["rows"][0]["runs"][0]["starts"]) == 2


def test_an_interrupt_stops_what_runs_and_writes_what_there_is(call, monkeypatch):
    slow, sleeps = f"{NAME}+trainer.clip_norm=3", Path(f"out/runs/{NAME}+trainer.clip_norm=3/s0/sleeps")

    def interrupted(seconds):
        if sleeps.exists():
            raise KeyboardInterrupt
        time.sleep(seconds)

    clock = SimpleNamespace(sleep=interrupted, monotonic=time.monotonic)
    monkeypatch.setattr(reproduce, "time", clock)
    start = time.monotonic()
    ended = call(NAME, slow, "--epochs", "2", "--seeds", "0", "1")
    assert ended.code == 130 and time.monotonic() - start < 30, "the child that sleeps was ended"
    assert ended.err == "interrupted; the same command goes on from here\n"
    assert line(NAME)[1] == "0, 1 (not run)" and line(slow)[1] == "0 (unfinished: epoch 1 of 2), 1 (not run)"


def test_jobs_share_the_cores(call, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(reproduce.torch, "get_num_threads", lambda: 5)
    assert call(NAME, "--epochs", "2", "--seeds", "0", "1", "2", "--jobs", "2").code == 0
    assert [run["starts"][0]["threads"] for run in result()["rows"][0]["runs"]] == [2, 2, 2]
    assert "8 cores, 2 threads per run" in Path("out/results.md").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["fashion_mnist_smal"],
            "experiment=fashion_mnist_smal is no choice; did you mean experiment=fashion_mnist_small?",
        ),
        ([NAME, "--set", "optimizer.lr=abc"], "optimizer.lr"),
        ([f"{NAME}+seed=3"], "seed=3 cannot be set in a row"),
        ([NAME, "--set", "hydra.run.dir=x"], "hydra.run.dir=x cannot be set"),
        ([NAME, "--seeds", "-1"], "seed must lie in"),
        ([NAME, "--epochs", "0"], "trainer.epochs must be at least 1, got 0"),
        ([NAME, "--device", "tpu"], "device must be"),
        ([NAME, NAME], "two rows would share a folder"),
    ],
)
def test_mistakes_end_with_one_line_before_anything_runs(call, words, message):
    ended = call(NAME, *words) if words[0].startswith("-") else call(*words)
    assert ended.code == 1 and ended.out == ""
    assert ended.err.startswith("error: ") and ended.err.count("\n") == 1 and message in ended.err
    assert not Path("out").exists()


def test_jobs_below_one_are_refused(call):
    with pytest.raises(SystemExit):
        call(NAME, "--jobs", "0")


def test_a_run_of_other_settings_is_not_touched(call):
    assert call(NAME, "--epochs", "2").code == 0
    before = {path: path.stat().st_mtime_ns for path in Path("out").rglob("*")}
    ended = call(NAME, "--epochs", "3", "--seeds", "1", "0")
    said = f"error: out/runs/{NAME}/s0 holds a run with other settings: trainer.epochs is 2 there, 3 here; "
    assert ended.code == 1 and ended.err == said + "take another --out\n"
    assert {path: path.stat().st_mtime_ns for path in Path("out").rglob("*")} == before


def test_what_counts_as_other_settings(tmp_path):
    config = reproduce.compose([f"experiment={NAME}"])
    run = reproduce.Run("x", ["data.root=here", "optimizer.lr=5e-4"], config, tmp_path)
    there = yaml.safe_load(yaml.safe_dump(reproduce.asdict(config)))

    def differs(key, value):
        changed = json.loads(json.dumps(there))
        group, name = key.split(".")
        if value is None:
            del changed[group][name]
        else:
            changed[group][name] = value
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(changed))
        try:
            reproduce.require_same(run)
        except ValueError as error:
            assert f"{key} is {value!r} there" in str(error)
            return True
        return False

    assert not differs("neuron.tau_m", 5.0), "there is nothing yet that could be lost"
    (tmp_path / "last.ckpt").touch()
    assert differs("neuron.tau_m", 4.5)
    assert differs("calibrate.fraction", 0.5), "a key that is gone"
    assert differs("optimizer.lr", None), "a key that a word names"
    assert not differs("calibrate.spikes", None), "a key younger than the run"
    assert not differs("data.root", "elsewhere")
    assert not differs("trainer.stop_after", 1)


def test_a_torn_row_is_left_out(tmp_path):
    (tmp_path / "rows").write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert report.read_rows(tmp_path / "rows") == [{"a": 1}, {"a": 2}]
    (tmp_path / "rows").write_text("")
    assert report.read_rows(tmp_path / "rows") == report.read_rows(tmp_path / "none") == []


ROWS = [
    {
        "row": "m",
        "data": "mnist",
        "published": ["99.5"],
        "runs": [{report.CURVE: [0.2, 0.98, 0.99], "best_epoch": 3}],
    },
    {
        "row": "f",
        "data": "fashion",
        "published": ["92.69"],
        "runs": [{report.CURVE: [0.8, 0.9]}, {report.CURVE: []}],
    },
    {"row": "f+b=1", "data": "fashion", "published": ["92.69"], "runs": [{report.CURVE: [0.85, 0.91]}]},
    {"row": "none", "data": "digits", "published": [], "runs": [{report.CURVE: []}]},
]


def test_the_figure(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **kwargs: figures.append(self))
    assert report.draw(ROWS, tmp_path / "x.png")
    mnist, fashion = figures[0].axes
    assert (mnist.get_title(), fashion.get_title()) == ("mnist", "fashion")
    labels = [text.get_text() for text in fashion.get_legend().get_texts()]
    assert labels == ["f", "f+b=1", "published, f: 92.69"]
    curves = [line for line in fashion.lines if len(line.get_xdata()) == 2 and line.get_linestyle() == "-"]
    assert [list(line.get_ydata()) for line in curves] == [[80, 90], [85, 91]]
    assert curves[0].get_color() != curves[1].get_color()
    (dot,) = [line for line in mnist.lines if line.get_marker() == "o"]
    assert (list(dot.get_xdata()), list(dot.get_ydata())) == ([3], [99])
    low, high = mnist.get_ylim()
    assert 97 < low < 98 and 99.5 < high < 100, "the first epoch does not flatten the others"


def test_no_figure_without_curves_or_matplotlib(tmp_path, monkeypatch, capsys):
    assert not report.draw(ROWS[3:], tmp_path / "x.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not report.draw(ROWS, tmp_path / "x.png")
    assert capsys.readouterr().err.endswith('for want of matplotlib: pip install -e ".[report]"\n')
    report.write(tmp_path, {"command": "c", "date": "d", "rows": []})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json", "results.md"]
    assert "results.png" not in (tmp_path / "results.md").read_text()


class InThisProcess:
    """Stands for a subprocess: train.py, run here and now."""

    returncode: int

    def __init__(self, command, **options):
        self.returncode = train.main(command[2:])

    def poll(self):
        return self.returncode


def test_real_runs_are_resumed_and_tabulated(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    patched = SimpleNamespace(**{**vars(subprocess), "Popen": InThisProcess})
    monkeypatch.setattr(reproduce, "subprocess", patched)
    monkeypatch.setattr(reproduce, "POLL_SECONDS", 0)
    out = "res ults/it's"
    words = [f"{NAME}+data.augment=crop4+flip", "--epochs", "2", "--out", out, "--set", *TINY]
    assert reproduce.main([*words, "trainer.stop_after=1"]) == 0
    assert result(out)["rows"][0]["runs"][0]["state"] == "unfinished: epoch 1 of 2"
    words += ["--seeds", "0", "1"]
    assert reproduce.main(words) == 0, capsys.readouterr().err
    (row,) = result(out)["rows"]
    for seed, run in enumerate(row["runs"]):
        folder = Path(out, "runs", row["row"], f"s{seed}")
        summary = json.loads((folder / "summary.json").read_text())
        assert run["state"] == "finished" and len(run[report.CURVE]) == 2
        assert run["test/accuracy"] == summary["test/accuracy"] == run[report.CURVE][run["best_epoch"] - 1]
        assert run["test/best_accuracy"] == max(run[report.CURVE])
        assert yaml.safe_load((folder / "config.yaml").read_text())["seed"] == seed
    assert Path(out, "results.png").read_bytes().startswith(b"\x89PNG")
    assert "(results.png)" in Path(out, "results.md").read_text()
    before = {path: path.stat().st_mtime_ns for path in Path(out, "runs").rglob("*")}
    capsys.readouterr()
    assert reproduce.main(words) == 0
    assert {path: path.stat().st_mtime_ns for path in Path(out, "runs").rglob("*")} == before


def ctrl_c(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("end_it", [subprocess.Popen.terminate, ctrl_c], ids=["kill", "ctrl_c"])
def test_the_script_itself_and_a_kill(tmp_path, end_it):
    script = [sys.executable, str(ROOT / "scripts" / "reproduce.py"), NAME, "--out", "out", "--set", *TINY]
    heeds = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's `&` has it ignored
    process = subprocess.Popen(
        [*script, "--epochs", "100000"], cwd=tmp_path, start_new_session=True, preexec_fn=heeds
    )
    run = tmp_path / "out" / "runs" / NAME / "s0"
    end = time.monotonic() + 100
    while not (run / "last.ckpt").exists() and time.monotonic() < end:
        time.sleep(0.1)
    end_it(process)
    assert process.wait(timeout=30) == 130
    assert "SIGTERM: stopped at step" in (run / "train.log").read_text(), "it saved where it stood"
    assert "unfinished: epoch" in (tmp_path / "out" / "results.md").read_text()
    rows = (run / "metrics.jsonl").read_bytes()
    time.sleep(1)
    assert (run / "metrics.jsonl").read_bytes() == rows, "the run was ended as well"


def test_what_is_committed_of_results():
    """Checkpoints and TensorBoard's files are not; all else of a run is."""
    run = "results/some/runs/row+a=b/s0"
    kept = [
        f"{run}/{name}"
        for name in ("config.yaml", "metrics.jsonl", "summary.json", "train.log", "starts.jsonl")
    ]
    kept += [f"results/some/results.{kind}" for kind in ("md", "json", "png")]
    ignored = [f"{run}/last.ckpt", f"{run}/.last.ckpt.123", f"{run}/tb/events.1"]
    found = subprocess.run(["git", "check-ignore", *kept, *ignored], cwd=ROOT, capture_output=True, text=True)
    if found.returncode == 128:
        pytest.skip("no git repository")
    assert found.stdout.splitlines() == ignored


def test_a_reader_that_is_gone_ends_it_quietly(tmp_path):
    """As `| head` does; the output is written when Python ends, unless it is told to write at once."""
    words = [str(ROOT / "scripts" / "reproduce.py"), NAME, "--out", "out", "--table"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [sys.executable, *words],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")
    assert (tmp_path / "out" / "results.md").exists()
