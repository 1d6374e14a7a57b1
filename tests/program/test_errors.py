"""docs/errors.md, row by row: each user error is brought about, and ends as the table says.

To add a row, write it into the table, and its situation here under `@row("id")`: a function that prepares the
folder in which the row's command is then run. A row called `word-...` needs none: its words are the mistake.
"""

import errno
import gzip
import http.server
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torchvision import datasets

import snn.checkpoint
import train
from snn.checkpoint import load_checkpoint, save_checkpoint
from snn.data import download, sources
from snn.losses import CrossEntropy
from tests.data.events import writers
from tests.data.test_sources import NAMES, idx, write_cifar, write_idx
from tests.program.conftest import SMALL, files

TABLE = Path(__file__).parents[2] / "docs" / "errors.md"
SECONDS = 30  # at most, from the command to its error


class Row(NamedTuple):
    """One user error: the command that meets it, and how that ends."""

    command: str
    code: int
    message: str


class Situation:
    """The folder that a command is run in, and what a test may replace."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
        self.folder, self.monkeypatch, self._request = folder, monkeypatch, request

    def run(self) -> Path:
        """Put a run that was paused after its first of two epochs into `run`."""
        return Path(shutil.copytree(self._request.getfixturevalue("paused_run"), self.folder / "run"))

    def edit(self, change: Callable[[dict], None]) -> None:
        """Change what both checkpoints of that run hold."""
        for path in (self.run() / "last.ckpt", self.folder / "run" / "best.ckpt"):
            state = torch.load(path)
            change(state)
            save_checkpoint(path, state)

    def mnist(self, **changed: torch.Tensor | bytes) -> None:
        """Write a small MNIST into `sets`; `changed` replaces files, named by the start of their names."""
        folder = self.folder / "sets" / "MNIST" / "raw"
        write_idx(folder)
        for short, content in changed.items():
            (path,) = folder.glob(f"{short.replace('_', '-')}*")
            path.write_bytes(content if isinstance(content, bytes) else idx(content))

    def finally_do(self, work: Callable[[], object]) -> None:
        """Do something once the test is over."""
        self._request.addfinalizer(work)

    def config(self, content: str | bytes) -> None:
        """Write `mine/config.yaml`."""
        (self.folder / "mine").mkdir()
        path = self.folder / "mine" / "config.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


SITUATIONS: dict[str, Callable[[Situation], None]] = {}


def row(*names: str):
    """Register the situation of rows of the table."""

    def register(prepare):
        assert not set(names) & set(SITUATIONS), f"{names}: there is such a row"
        SITUATIONS.update(dict.fromkeys(names, prepare))
        return prepare

    return register


def read_table() -> dict[str, Row]:
    rows = {}
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 5 and cells[2].isdigit():
            name = cells[4].strip("`")
            assert name not in rows, f"two rows are called {name}"
            rows[name] = Row(cells[1].strip("`"), int(cells[2]), cells[3].strip("`"))
    return rows


ROWS = read_table()


@pytest.fixture(scope="module")
def paused_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("paused")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["train.py"])
        assert train.main([*SMALL, "trainer.stop_after=1", "hydra.run.dir=run"]) == 0
    return folder / "run"


def everything(folder: Path) -> tuple[set[str], dict[str, bytes]]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}, files(folder)


def test_each_row_has_its_situation_and_each_situation_its_row():
    assert set(SITUATIONS) == {name for name in ROWS if not name.startswith("word-")}
    assert len(ROWS) > 100


@pytest.mark.parametrize("name", ROWS)
def test_row(name, program, monkeypatch, request):
    def no_data(*args, **kwargs):
        raise AssertionError("data were loaded")

    monkeypatch.setattr("sklearn.datasets.load_digits", no_data)  # the default set: no row needs it
    monkeypatch.setattr(sources, "FASHION_MNIST_PACKAGE", program.folder / "not-installed")
    if not name.startswith("word-"):
        SITUATIONS[name](Situation(program.folder, monkeypatch, request))
    before = everything(program.folder)
    python, script, *words = shlex.split(ROWS[name].command)
    assert python == "python"
    start = time.monotonic()
    ended = {"train.py": program.train, "eval.py": program.evaluate}[script](*words)
    assert time.monotonic() - start < SECONDS
    assert ended.code == ROWS[name].code != 0
    place = 0
    for part in ROWS[name].message.split("..."):
        place = ended.error.find(part.strip(), place)
        assert place >= 0, f"{ended.error!r} lacks {part!r}"
    after = everything(program.folder)
    if name.startswith("run-"):  # it had begun, and leaves its folder
        assert (program.folder / "new" / "error.txt").exists()
        for path in (program.folder / "new").iterdir():
            assert not path.name.startswith("."), "half-made"
            assert path.suffix != ".ckpt" or load_checkpoint(path)
        shutil.rmtree(program.folder / "new")
        after = everything(program.folder)
    assert after == before


# Files of data sets


@row("mnist-file-missing")
def one_file_missing(it):
    it.mnist()
    (it.folder / "sets/MNIST/raw" / NAMES[3]).unlink()


@row("mnist-truncated")
def truncated(it):
    it.mnist(train_images=idx(torch.ones(6, 28, 28, dtype=torch.long))[:-3])


@row("mnist-too-long")
def too_long(it):
    it.mnist(t10k_labels=idx(torch.arange(4)) + b"\0")


@row("mnist-broken-gzip")
def broken_gzip(it):
    it.mnist()
    path = it.folder / "sets/MNIST/raw" / NAMES[0]
    Path(f"{path}.gz").write_bytes(gzip.compress(path.read_bytes())[:-40])
    path.unlink()


@row("mnist-labels-for-images")
def labels_for_images(it):
    it.mnist(train_images=torch.arange(6), train_labels=torch.ones(6, 28, 28, dtype=torch.long))


@row("mnist-test-for-train")
def swapped_parts(it):
    it.mnist()
    folder = it.folder / "sets/MNIST/raw"
    published = sources.files._MNIST
    for name in NAMES:
        it.monkeypatch.setitem(
            published, name, sources.files.hashlib.sha256((folder / name).read_bytes()).hexdigest()
        )
        it.monkeypatch.setitem(sources.files._IDX_SIZES, name, (folder / name).stat().st_size)
    for kind in ("images-idx3", "labels-idx1"):
        train_file, test_file = folder / f"train-{kind}-ubyte", folder / f"t10k-{kind}-ubyte"
        content = train_file.read_bytes()
        train_file.write_bytes(test_file.read_bytes())
        test_file.write_bytes(content)


@row("mnist-wrong-magic")
def wrong_magic(it):
    it.mnist(train_images=b"GIF89a and more")


@row("mnist-wrong-size")
def wrong_size(it):
    it.mnist(train_images=torch.ones(6, 27, 27, dtype=torch.long))


@row("mnist-wrong-count")
def wrong_count(it):
    it.mnist(t10k_labels=torch.arange(3))


@row("mnist-empty")
def empty(it):
    it.mnist(
        train_images=torch.ones(0, 28, 28, dtype=torch.long), train_labels=torch.ones(0, dtype=torch.long)
    )


@row("mnist-label-out-of-range")
def label_out_of_range(it):
    it.mnist(train_labels=torch.tensor([0, 1, 2, 3, 4, 200]))


@row("cifar-damaged")
def cifar_damaged(it):
    *_, folder = write_cifar(it.folder / "sets", it.monkeypatch, "cifar10")
    (folder / "data_batch_3").write_bytes((folder / "data_batch_3").read_bytes()[:-1])


@row("cifar-file-missing")
def cifar_file_missing(it):
    *_, folder = write_cifar(it.folder / "sets", it.monkeypatch, "cifar10")
    (folder / "test_batch").unlink()


@row("cifar-label-out-of-range")
def cifar_label_out_of_range(it):
    write_cifar(it.folder / "sets", it.monkeypatch, "cifar100")


def nmnist_file(it) -> Path:
    writers.nmnist(it.folder / "sets" / "NMNIST")
    return sorted((it.folder / "sets" / "NMNIST" / "Train" / "3").iterdir())[0]


@row("events-truncated")
def events_truncated(it):
    path = nmnist_file(it)
    path.write_bytes(path.read_bytes()[:-2])


@row("events-outside")
def events_outside(it):
    nmnist_file(it).write_bytes(writers.bin_bytes([(0, 34, 0, 1)]))


@row("events-class-missing")
def events_class_missing(it):
    shutil.rmtree(nmnist_file(it).parent)


@row("events-cache-unwritable")
def events_cache_unwritable(it):
    nmnist_file(it)
    (it.folder / "file").write_text("")


@row("events-cache-damaged")
def events_cache_damaged(it):
    from snn.data.events.sets import nmnist

    nmnist_file(it)
    nmnist(str(it.folder / "sets"), False, steps=5, framing="time", cache=None)
    (frames,) = (it.folder / "sets").glob("event_frames/*/train.u8")
    frames.write_bytes(frames.read_bytes()[:-1])


# Downloads


@row("download-without-network")
def no_network(it):
    def urlopen(*args, **kwargs):
        raise urllib.error.URLError("Name or service not known")

    it.monkeypatch.setattr(urllib.request, "urlopen", urlopen)


class Half(http.server.BaseHTTPRequestHandler):
    """Promises a file, sends half of it and hangs up."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "2000")
        self.end_headers()
        self.wfile.write(b"x" * 1000)

    def log_message(self, *args):
        pass


def serve(it, handler) -> str:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    it._request.addfinalizer(server.server_close)
    it._request.addfinalizer(server.shutdown)
    return f"http://127.0.0.1:{server.server_port}/"


@row("download-cut")
def download_cut(it):
    it.monkeypatch.setattr(datasets.MNIST, "mirrors", [serve(it, Half)])


@row("download-cut-beside-good-files")
def download_cut_beside_good_files(it):
    it.mnist()
    (it.folder / "sets/MNIST/raw" / NAMES[0]).unlink()
    it.monkeypatch.setattr(datasets.MNIST, "mirrors", [serve(it, Half)])


@row("download-cut-archive")
def download_cut_archive(it):
    it.monkeypatch.setattr(datasets.CIFAR10, "url", f"{serve(it, Half)}cifar-10-python.tar.gz")


@row("download-cut-shd")
def download_cut_shd(it):
    it.monkeypatch.setattr(download, "SHD_ADDRESS", serve(it, Half))


class Silent(http.server.BaseHTTPRequestHandler):
    """Never answers."""

    def do_GET(self):
        time.sleep(5)


@row("download-stalls")
def download_stalls(it):
    it.monkeypatch.setattr(download, "STALL_SECONDS", 0.5)
    it.monkeypatch.setattr(datasets.MNIST, "mirrors", [serve(it, Silent)])


@row("download-into-a-file")
def download_into_a_file(it):
    (it.folder / "file").write_text("")


# The machine


@row("no-gpu")
def no_gpu(it):
    it.monkeypatch.setattr("torch.cuda.device_count", lambda: 0)


@row("gpu-index")
def gpu_index(it):
    it.monkeypatch.setattr("torch.cuda.device_count", lambda: 1)


@row("folder-below-a-file", "folder-is-a-file", "sweep-below-a-file")
def a_file(it):
    (it.folder / "file").write_text("kept")


@row("runs-is-a-file")
def runs_is_a_file(it):
    (it.folder / "runs").write_text("kept")


@row("folder-of-the-system")
def of_the_system(it):
    if not Path("/proc/self").exists():
        pytest.skip("there is no /proc")


@row("folder-read-only")
def read_only(it):
    (it.folder / "locked").mkdir(mode=0o555)
    probe = it.folder / "locked" / "probe"
    try:
        probe.touch()
    except PermissionError:
        return
    probe.unlink()
    pytest.skip("permission bits do not bind this user")


# Runs and checkpoints


@row(
    *(
        "folder-holds-a-run",
        "resume-swept",
        "resume-another-config",
        "eval-several",
        "eval-seed",
        "eval-network",
    ),
    *(
        "eval-trainer",
        "eval-classes",
        "eval-key",
        "eval-split",
        "eval-steps",
        "eval-batch-size",
        "eval-device",
    ),
    "eval-folder",
)
def a_run(it):
    it.run()


@row("eval-folder-without", "resume-folder-without")
def folder_without(it):
    (it.folder / "empty").mkdir()


@row("resume-without-best")
def without_best(it):
    (it.run() / "best.ckpt").unlink()


@row("eval-damaged", "resume-damaged")
def damaged(it):
    for path in (it.run() / "best.ckpt", it.folder / "run/last.ckpt"):
        path.write_bytes(path.read_bytes()[:-500])


@row("resume-best-damaged")
def best_damaged(it):
    (it.run() / "best.ckpt").write_bytes(b"half")


@row("resume-auto-other-settings")
def paused(it):
    it.run()


@row("resume-auto-finished-other-settings")
def finished_and_thinned_out(it):
    run = it.run()
    (run / "summary.json").write_text("{}")
    for path in run.glob("*.ckpt"):
        path.unlink()


@row("resume-auto-finished-damaged-config")
def finished_with_a_damaged_config(it):
    finished_and_thinned_out(it)
    (it.folder / "run" / "config.yaml").write_text("- 1")


@row("resume-in-use")
def in_use(it):
    it.run()
    code = "from snn.run_folder import RunFolder\nwith RunFolder('run').locked(): print(flush=True); input()"
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    other = subprocess.Popen(
        [sys.executable, "-c", code], cwd=it.folder, env={"PYTHONPATH": str(TABLE.parents[1])}, **piped
    )
    other.stdout.readline()
    it.finally_do(other.communicate)


# While a run is on


@row("run-not-finite")
def not_finite(it):
    pass


@row("run-never-finite")
def never_finite(it):
    it.monkeypatch.setattr(CrossEntropy, "__call__", lambda self, logits, labels: logits.sum() * math.nan)


@row("run-out-of-memory")
def out_of_memory(it):
    it.monkeypatch.setattr(CrossEntropy, "__call__", lambda self, *_: torch.empty(2**60))


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@row("run-disk-full")
def disk_full(it):
    it.monkeypatch.setattr(snn.checkpoint.os, "fsync", full)


@row("run-disk-full-for-rows")
def disk_full_for_rows(it):
    real = Path.open

    def open_(path, *args, **kwargs):
        return full() if path.name == "metrics.jsonl" else real(path, *args, **kwargs)

    it.monkeypatch.setattr(Path, "open", open_)


@row("run-not-deterministic")
def not_deterministic(it):
    it.finally_do(lambda: torch.use_deterministic_algorithms(False))

    def loss(self, logits, labels):
        logits.detach().clone().put_(torch.tensor([0]), torch.zeros(1))  # which has none on any device
        return torch.nn.functional.cross_entropy(logits, labels)

    it.monkeypatch.setattr(CrossEntropy, "__call__", loss)


@row("eval-no-checkpoint-file")
def no_checkpoint_file(it):
    (it.folder / "notes.txt").write_text("hello")


@row("eval-of-another-project")
def of_another_project(it):
    torch.save({"model": torch.ones(2)}, it.folder / "other.ckpt")


@row("eval-other-shape", "resume-other-shape")
def other_shape(it):
    def change(state):
        state["network"]["head.linear.weight"] = torch.ones(4, 17)

    it.edit(change)


@row("eval-config-disagrees", "resume-config-disagrees")
def config_disagrees(it):
    def change(state):
        state["config"]["data"]["num_classes"] = 5
        state["config"]["data"]["source"]["num_classes"] = 5
        state["config"]["head"]["num_classes"] = 5

    it.edit(change)


@row("eval-tensor-missing", "resume-tensor-missing")
def tensor_missing(it):
    it.edit(lambda state: state["network"].pop("layers.0_8C3.threshold"))


@row("eval-tensor-foreign")
def tensor_foreign(it):
    it.edit(lambda state: state["network"].update(extra=torch.ones(3)))


@row("eval-part-of-another-kind")
def part_of_another_kind(it):
    it.edit(lambda state: state.update(config=["a"]))


@row("eval-config-incomplete")
def config_incomplete(it):
    it.edit(lambda state: state["config"].pop("loss"))


@row("eval-config-of-another-version")
def config_of_another_version(it):
    it.edit(lambda state: state["config"]["trainer"].update(warmup=3))


# Configs that are fed


@row("config-no-yaml")
def no_yaml(it):
    it.config("seed: [1, 2\nname: x: y\n")


@row("config-list")
def a_list(it):
    it.config("- seed\n- name\n")


@row("config-text")
def a_text(it):
    it.config("seed\n")


@row("config-empty")
def empty_config(it):
    it.config("")


@row("config-binary")
def binary(it):
    it.config(bytes(range(256)))


@row("config-incomplete")
def incomplete(it):
    it.config("seed: 3\n")


@row("config-twice-a-key")
def twice_a_key(it):
    it.config("seed: 3\nseed: 4\n")


@row("config-interpolation")
def interpolation(it):
    it.config("seed: ${nowhere}\n")


@row("config-code")
def code(it):
    it.config("seed: !!python/object/apply:os.system [ls]\n")


@row("config-sets-hydra")
def sets_hydra(it):
    it.config("hydra: {job: {env_set: {A: b}}}\nseed: 1\n")


def experiment(it, text):
    (it.folder / "mine" / "experiment").mkdir(parents=True)
    (it.folder / "mine" / "experiment" / "my.yaml").write_text(f"# @package _global_\n{text}\n")


@row("experiment-key")
def experiment_key(it):
    experiment(it, "trainer: {epohs: 3}")


@row("experiment-component-key")
def experiment_component_key(it):
    experiment(it, "optimizer: {lrr: 3}")


@row("experiment-group")
def experiment_group(it):
    experiment(it, "trainr: {epochs: 3}")


@row("experiment-kind")
def experiment_kind(it):
    experiment(it, "optimizer: {lr: fast}")


@row("experiment-no-yaml")
def experiment_no_yaml(it):
    experiment(it, "trainer: {epochs: 3")
