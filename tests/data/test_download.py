import hashlib
import socket
import struct
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest
import torch
from torchvision import datasets

from snn.data import download as download_module
from snn.data import files, sources


def idx(values):
    header = struct.pack(f">I{values.dim()}I", 0x800 + values.dim(), *values.shape)
    return header + bytes(values.flatten().tolist())


CONTENTS = {
    "train-images-idx3-ubyte": idx(torch.arange(4 * 9).reshape(4, 3, 3)),
    "train-labels-idx1-ubyte": idx(torch.arange(4)),
    "t10k-images-idx3-ubyte": idx(torch.arange(2 * 9).reshape(2, 3, 3)),
    "t10k-labels-idx1-ubyte": idx(torch.arange(2)),
}


@pytest.fixture(autouse=True)
def published(monkeypatch):
    for name, content in CONTENTS.items():
        monkeypatch.setitem(files._IDX_SIZES, name, len(content))
        monkeypatch.setitem(files._MNIST, name, hashlib.sha256(content).hexdigest())


@pytest.fixture
def server(monkeypatch):
    """Let torchvision's MNIST write files in place of a download; a test may spoil `contents`."""

    class Server:
        contents = dict(CONTENTS)
        asked = 0

    def fake(reader):
        Server.asked += 1
        sys.stdout.write("torchvision prints while it downloads")
        folder = reader.root / "MNIST/raw"
        folder.mkdir(parents=True)
        for name, content in Server.contents.items():
            (folder / name).write_bytes(content)
            (folder / f"{name}.gz").write_bytes(b"packed")

    monkeypatch.setattr(datasets.MNIST, "download", fake)
    return Server


def failing(monkeypatch, error):
    def urlopen(*args, **kwargs):
        raise error

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10", "cifar100"])
def test_without_a_network_one_line_says_so_and_nothing_stays(tmp_path, monkeypatch, name):
    failing(monkeypatch, urllib.error.URLError("Name or service\nnot known"))
    monkeypatch.setattr(sources, "FASHION_MNIST_PACKAGE", tmp_path / "not-installed")
    root = tmp_path / "some" / "data"
    with pytest.raises(OSError) as caught:
        getattr(sources, name)(str(root), True)
    message = str(caught.value)
    assert message.startswith(f"could not download {name} into data.root={root} (data.download=true): ")
    assert "Name or service not known" in message
    assert "\n" not in message
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_was_there_stays_as_it_was(tmp_path, monkeypatch):
    failing(monkeypatch, TimeoutError("timed out"))
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(OSError, match="could not download cifar10 .*timed out"):
        sources.cifar10(str(tmp_path), True)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_download_that_stalls_is_given_up(tmp_path, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(datasets.CIFAR10, "download", lambda reader: release.wait(10))
    monkeypatch.setattr(download_module, "STALL_SECONDS", 0.2)
    start = time.monotonic()
    with pytest.raises(OSError, match="nothing came for 0.2 s"):
        sources.cifar10(str(tmp_path / "data"), True)
    release.set()
    assert time.monotonic() - start < 5
    assert not (tmp_path / "data").exists()


def test_giving_up_leaves_time_within_half_a_minute():
    assert download_module.STALL_SECONDS < 25


def test_a_download_moves_into_place_whole(tmp_path, server, capsys):
    root = tmp_path / "data"
    train, test = sources.mnist(str(root), True)
    assert (len(train.images), len(test.images)) == (4, 2)
    assert {path.name for path in root.iterdir()} == {"MNIST"}
    assert {path.name: path.read_bytes() for path in (root / "MNIST/raw").iterdir()} == CONTENTS
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("below", ["MNIST/raw", "."])
def test_what_is_there_is_not_downloaded(tmp_path, server, below):
    (tmp_path / below).mkdir(parents=True, exist_ok=True)
    for name, content in CONTENTS.items():
        (tmp_path / below / name).write_bytes(content)
    sources.mnist(str(tmp_path), True)
    assert server.asked == 0


def test_only_what_is_missing_is_put_in_place(tmp_path, server):
    folder = tmp_path / "MNIST/raw"
    folder.mkdir(parents=True)
    own = bytearray(CONTENTS["train-images-idx3-ubyte"])
    own[-1] ^= 1
    (folder / "train-images-idx3-ubyte").write_bytes(own)
    sources.mnist(str(tmp_path), True)
    assert (folder / "train-images-idx3-ubyte").read_bytes() == own
    assert len(list(folder.iterdir())) == 4


@pytest.mark.parametrize("spoil", ["damaged", "missing"])
def test_a_bad_download_leaves_nothing(tmp_path, server, spoil):
    name = "t10k-labels-idx1-ubyte"
    if spoil == "damaged":
        server.contents = {**CONTENTS, name: CONTENTS[name][:-1] + b"\7"}
    else:
        server.contents = {key: value for key, value in CONTENTS.items() if key != name}
    with pytest.raises(OSError, match=f"could not download mnist .*data.root=.*{name}") as caught:
        sources.mnist(str(tmp_path / "data"), True)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "data").exists()


def test_the_timeout_and_stdout_are_put_back(tmp_path, monkeypatch):
    failing(monkeypatch, urllib.error.URLError("no"))
    out = sys.stdout
    with pytest.raises(OSError):
        sources.cifar10(str(tmp_path), True)
    assert socket.getdefaulttimeout() is None
    assert sys.stdout is out


def test_a_root_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="could not download mnist into data.root=.*file/data") as caught:
        sources.mnist(str(tmp_path / "file" / "data"), True)
    assert "\n" not in str(caught.value)


def test_an_error_of_any_kind_reaches_the_caller(tmp_path, monkeypatch):
    def fail(reader):
        raise LookupError("no such mirror")

    monkeypatch.setattr(datasets.CIFAR10, "download", fail)
    with pytest.raises(LookupError, match="no such mirror"):
        sources.cifar10(str(tmp_path / "data"), True)
    assert not (tmp_path / "data").exists()


def test_a_download_unpickles_nothing(tmp_path, monkeypatch):
    """The archive's files are checked by their digests and moved; what they hold is not looked at."""

    def come(reader):
        folder = reader.root / "cifar-10-batches-py"
        folder.mkdir()
        for name in files.layout("cifar10").files:
            (folder / name).write_bytes(b"no pickle at all")

    published = files.layout("cifar10")
    digest = hashlib.md5(b"no pickle at all", usedforsecurity=False).hexdigest()
    facts = {name: files.Published("md5", digest, None) for name in published.files}
    monkeypatch.setattr(files, "layout", lambda name: files.Layout(published.folder, facts))
    monkeypatch.setattr(download_module, "layout", files.layout)
    monkeypatch.setattr(datasets.CIFAR10, "download", come)
    with pytest.raises(ValueError, match="data_batch_1 is damaged, or no file of CIFAR"):
        sources.cifar10(str(tmp_path), True)
    assert len(list((tmp_path / "cifar-10-batches-py").iterdir())) == 7
