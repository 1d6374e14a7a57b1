"""Files run no code: what a config may name, what a checkpoint or a data set may hold."""

import ast
import contextlib
import copyreg
import hashlib
import importlib
import io
import os
import pickle
import tarfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from snn.checkpoint import KEYS, MARK, ZIP_END, _sealed, load_checkpoint
from snn.config import check, compose, update
from snn.data.files import parse_cifar
from snn.schema import TrainConfig
from snn.targets import TARGETS, build, check_target, locate

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*(ROOT / "snn").rglob("*.py"), *ROOT.glob("*.py"), *(ROOT / "scripts").rglob("*.py")])

# What a hostile config would like to build: elsewhere, by detours, or ours with side effects.
FORBIDDEN = [
    "os.system",
    "builtins.eval",
    "subprocess.Popen",
    "torch.load",
    "torch.hub.load",
    "torch.utils.cpp_extension.load_inline",
    "torch.optim.lr_scheduler.LambdaLR",
    "torch.optim.swa_utils.AveragedModel",
    "torch.optim.swa_utils.update_bn",
    "torch.optim.adamw.torch.load",
    "torch.optim.AdamW.step",
    "torch.optim.AdamW.__init__.__globals__",
    "snn.run_folder.RunFolder",
    "snn.checkpoint.save_checkpoint",
    "snn.checkpoint.load_checkpoint",
    "snn.data.download.download",
    "snn.data.download.staging",
    "snn.data.loaders.Loader",
    "snn.data.sources.download_set",
    "snn.data.sources.files.read_bytes",
    "snn.data.sources.Path",
    "snn.data.events.cache.load",
    "snn.data.events.sets.frame_cache.load",
    "snn.trainer.Trainer",
    "snn.config.run",
    "snn.targets.build",
    "snn.networks.network.SRMConv2d",
    "snn.networks.count_parameters",
    "snn.losses.F.cross_entropy",
    "snn.losses:Count",
    "snn.losses.Count:__init__",
    "snn.losses.Count.__call__.__globals__",
    "snn.losses._SpikeTargets",
    "snn.losses.Count.",
    "snn.losses. Count",
    "snn.losses.Coünt",
    "scripts.reproduce.main",
    "train.main",
    "",
    None,
    ["snn.losses.Count"],
]


@pytest.mark.parametrize("name", FORBIDDEN)
def test_no_place_of_a_config_names_it(name):
    for place in (*TARGETS, "trainer", None):
        with pytest.raises(ValueError, match="_target_"):
            locate(name, place)
    with pytest.raises(ValueError, match="_target_"):
        build({"_target_": name})


@pytest.fixture(scope="module")
def nodes():
    """A legal node for each place."""
    config = compose(["head=spiking", "loss=count"])
    found = {place: getattr(config, place.split(".")[0]) for place in TARGETS}
    return {**found, "data.source": config.data["source"]}


def test_each_place_names_its_own_kind_alone(nodes):
    """What one place may name, another may not."""
    kin = [{"neuron", "surrogate"}, {"network", "head"}]  # in one module
    for place, node in nodes.items():
        assert locate(node["_target_"], place)
        for other in set(TARGETS) - {place}:
            if {place, other} not in kin:
                with pytest.raises(ValueError, match=f"{other}._target_ must name something of"):
                    locate(node["_target_"], other)


def test_a_name_outside_the_list_is_not_even_imported(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    for name in ("evil.thing", "evil", "snn.evil.thing", "snn.losses.evil.thing"):
        with pytest.raises(ValueError, match="_target_"):
            locate(name, "loss")


EVIL = {"_target_": "os.system", "command": "touch ran"}


@pytest.mark.parametrize(
    "value",
    [EVIL, [EVIL], [[1, EVIL]], {"a": EVIL}, {"a": {"b": [{"c": EVIL}]}}, [{"_target_": "snn.losses.Count"}]],
    ids=["node", "list", "list-in-list", "group", "deep", "one-of-ours"],
)
def test_a_node_holds_no_other_node_at_any_depth(nodes, value):
    for place, node in nodes.items():
        key = next((key for key in node if not key.startswith("_")), "extra")
        with pytest.raises(ValueError, match=f"{place}.{key} may hold no _target_|no place|unknown key"):
            check_target(place, {**node, key: value})


@pytest.mark.parametrize("mark", ["_args_", "_convert_", "_recursive_", "_mode_"])
def test_no_other_mark_is_known(nodes, mark):
    for place, node in nodes.items():
        with pytest.raises(ValueError, match=f"unknown key {place}.{mark}"):
            check_target(place, {**node, mark: ["touch ran"]})


def test_what_waits_for_arguments_is_not_the_config_s_to_say(nodes):
    for place, node in nodes.items():
        right = TARGETS[place].partial
        for wrong in (not right, "yes", 1, None):
            with pytest.raises(ValueError, match=f"{place}._partial_ must be {str(right).lower()}"):
                check_target(place, {**node, "_partial_": wrong})


def test_a_target_through_an_interpolation_is_judged_by_what_it_says(monkeypatch):
    monkeypatch.setenv("EVIL", "os.system")
    plain = vars(compose([])) | {"trainer": vars(compose([]).trainer)}
    for text in (
        "${oc.env:EVIL}",
        "${name}",
        "${oc.decode:'os.system'}",
        "${data.root}",
        "os.${oc.env:NO,system}",
    ):
        changed = update(plain, {"name": "os.system", "data.root": "os.system", "loss._target_": text})
        with pytest.raises(ValueError, match=r"loss\._target_ must name .* got 'os.system'"):
            check(changed, TrainConfig)
    node = update(plain, {"loss": {"${oc.decode:_target_}": "os.system"}})
    with pytest.raises(ValueError):
        check(node, TrainConfig)


def test_what_the_lists_open_spelled_out():
    """A new public name in a listed module is seen here."""
    opened = {place: set() for place in TARGETS}
    for place, (listed, *_) in TARGETS.items():
        for entry in listed:
            module = importlib.import_module(entry[:-1]) if entry.endswith(".") else None
            for name in [f"{entry}{name}" for name in vars(module)] if module else [entry]:
                try:
                    opened[place].add(locate(name, place).__name__)
                except ValueError:
                    continue
    optimizers = opened.pop("optimizer")
    assert {"SGD", "Adam", "AdamW"} < optimizers
    assert all(issubclass(getattr(torch.optim, name), torch.optim.Optimizer) for name in optimizers)
    events = {"nmnist", "dvs_gesture", "cifar10_dvs", "shd", "moving_digits"}
    images = {"digits", "synthetic", "fashion_mnist", "mnist", "cifar10", "cifar100"}
    assert opened == {
        "data": {"load"},
        "data.source": images | events,
        "encoding": {"Direct", "Poisson", "TTFS", "Frames"},
        "neuron": {"SRMParams"},
        "surrogate": {"SRMParams", "GradParams", "SurrogateParams", "ATan", "Sigmoid", "Rectangle"},
        "network": {
            "SRMNetwork",
            "SRMResNet",
            "SpikingHead",
        },  # the last by its `teach`; its keys fit no body
        "head": {"DecoupledHead", "SpikingHead"},
        "loss": {"CrossEntropy", "Count", "CountPlus", "CEPlus", "Kernel", "TET", "TTFS", "Timing"},
        "calibrate": {"Calibration"},
        "scheduler": {"cosine", "constant"},
    }


# Checkpoints


class Evil:
    """Touches a file wherever it is unpickled without care."""

    def __reduce__(self):
        return os.system, ("touch ran",)


STATE = {key: {"x": torch.arange(3)} for key in KEYS}


def plain_pickle(path):
    path.write_bytes(pickle.dumps(Evil()))


def pickle_after_a_dict(path):
    path.write_bytes(pickle.dumps({**STATE, "config": Evil()}))


def evil_config(path):
    torch.save({**STATE, "config": Evil()}, path)


def evil_deep_inside(path):
    torch.save({**STATE, "optimizer": {"state": [{"a": (1, [Evil()])}]}}, path)


def evil_key(path):
    torch.save({**STATE, Evil(): 1}, path)


def legacy(path):
    torch.save({**STATE, "rng": Evil()}, path, _use_new_zipfile_serialization=False)


def tar(path):
    """The oldest format of torch: a tar of pickles."""
    content = pickle.dumps(Evil())
    with tarfile.open(path, "w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def whole_module(path):
    torch.save(torch.nn.Linear(1, 1), path)


def torchscript(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), path)


def a_function(path):
    torch.save({**STATE, "config": os.system}, path)


def numpy_objects(path):
    torch.save({**STATE, "config": np.array([Evil()], dtype=object)}, path)


def by_extension_code(path):
    """Protocol 2 can name a class by a number."""
    copyreg.add_extension("posix", "system", 240)
    try:
        content = pickle.dumps({**STATE, "config": os.system}, protocol=2)
    finally:
        copyreg.remove_extension("posix", "system", 240)
    path.write_bytes(content)


HOSTILE = [
    plain_pickle, pickle_after_a_dict, evil_config, evil_deep_inside, evil_key, legacy, tar, whole_module,
    torchscript, a_function, numpy_objects, by_extension_code,
]  # fmt: skip


def seal(path):
    """Have a file end with a checksum that is right, as whoever wrote it can."""
    content = path.read_bytes()
    if content[-22:-18] == ZIP_END:
        path.write_bytes(_sealed(content))
    else:
        path.write_bytes(content + MARK + hashlib.sha256(content).hexdigest().encode())


@pytest.mark.parametrize("write", HOSTILE, ids=lambda write: write.__name__)
def test_a_hostile_checkpoint_is_refused_and_runs_nothing(tmp_path, monkeypatch, write):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "evil.ckpt")
    with pytest.raises(ValueError, match=r"evil\.ckpt is damaged, or no checkpoint"):
        load_checkpoint(tmp_path / "evil.ckpt")
    seal(tmp_path / "evil.ckpt")
    with pytest.raises(ValueError, match=r"evil\.ckpt is no checkpoint of this project"):
        load_checkpoint(tmp_path / "evil.ckpt")
    assert not (tmp_path / "ran").exists()


def test_the_traps_are_live(tmp_path, monkeypatch):
    """Each of these files does run code where it is loaded without care."""
    monkeypatch.chdir(tmp_path)
    for write in (plain_pickle, pickle_after_a_dict, evil_config, evil_deep_inside, evil_key, legacy):
        write(tmp_path / "evil.ckpt")
        try:
            torch.load(tmp_path / "evil.ckpt", weights_only=False)
        except Exception:  # noqa: BLE001  what it ends with does not matter
            with contextlib.suppress(Exception):
                pickle.loads((tmp_path / "evil.ckpt").read_bytes())
        assert (tmp_path / "ran").exists(), write.__name__
        (tmp_path / "ran").unlink()


def test_the_switch_in_the_environment_is_no_way_round(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    evil_config(tmp_path / "evil.ckpt")
    seal(tmp_path / "evil.ckpt")
    with pytest.raises(ValueError, match="is no checkpoint of this project"):
        load_checkpoint(tmp_path / "evil.ckpt")
    assert not (tmp_path / "ran").exists()


# Data sets


def cifar_batch(entry, protocol=4):
    return pickle.dumps(entry, protocol)


GOOD = {"data": np.arange(2 * 3072, dtype=np.int64).astype(np.uint8).reshape(2, 3072), "labels": [3, 9]}


@pytest.mark.parametrize("protocol", [3, 4])
def test_a_cifar_file_is_read_without_numpy_or_any_class(protocol):
    images, labels = parse_cifar(cifar_batch(GOOD, protocol), Path("data_batch_1"))
    assert images.shape == (2, 3, 32, 32) and labels.tolist() == [3, 9]
    assert images.flatten().tolist() == GOOD["data"].flatten().tolist()


def test_a_cifar_file_as_published_by_python_2_is_read():
    """Written by hand, opcode by opcode, as Python 2 and its numpy wrote it."""
    raw = bytes(range(256)) * 12  # one image
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntU\x01bt" + b"R"
        b"(I1\n(I1\nI3072\ntcnumpy\ndtype\n(U\x02u1I0\nI1\ntR(I3\nU\x01|NNNI-1\nI-1\nI0\ntbI00\n"
        + b"T"
        + len(raw).to_bytes(4, "little")
        + raw
        + b"tb"
    )
    content = b"\x80\x02}(U\x04data" + array + b"U\x0bfine_labels](K\x07eu."
    images, labels = parse_cifar(content, Path("train"))
    assert images.flatten().tolist() == list(raw) and labels.tolist() == [7]


@pytest.mark.parametrize(
    "entry",
    [
        Evil(),
        {**GOOD, "labels": Evil()},
        {**GOOD, "extra": [Evil()]},
        {**GOOD, "data": np.array([Evil(), Evil()], dtype=object)},
        {**GOOD, "extra": os.system},
        {**GOOD, "extra": Path("x")},
        {**GOOD, "labels": [0]},
        {**GOOD, "labels": ["a", "b"]},
        {**GOOD, "data": GOOD["data"][:, :-1]},
        {**GOOD, "data": GOOD["data"].astype(np.int16)},
        {**GOOD, "data": "text"},
        {**GOOD, "data": [1, 2]},
        {"data": GOOD["data"]},
        {"labels": [1]},
        [1, 2],
        None,
    ],
)
def test_a_hostile_or_odd_cifar_file_is_named_and_runs_nothing(tmp_path, monkeypatch, entry):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="^data_batch_1 .*(damaged|labels)") as caught:
        parse_cifar(cifar_batch(entry), Path("data_batch_1"))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("cut", [0, 1, 50, -1])
def test_a_cut_cifar_file_is_named(cut):
    with pytest.raises(ValueError, match="^data_batch_1 is damaged"):
        parse_cifar(cifar_batch(GOOD)[:cut], Path("data_batch_1"))


# The sources


def risky(tree):
    """Every call or import in a file by which data become code, as `line: what`."""
    for node in ast.walk(tree):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in getattr(node, "keywords", [])}
        last = name.split(".")[-1]
        bad = (
            name in ("eval", "exec", "compile", "__import__", "getattr_static", "os.system", "os.popen")
            or name.startswith(("os.exec", "os.spawn"))
            or (last in ("load", "loads", "Unpickler") and name.split(".")[0] in ("pickle", "dill", "joblib"))
            or (name in ("torch.load", "load") and given.get("weights_only") != "True")
            or (name in ("np.load", "numpy.load") and given.get("allow_pickle", "False") != "False")
            or (last in ("load", "load_all", "unsafe_load", "full_load") and name.startswith("yaml."))
            or given.get("shell", "False") != "False"
            or given.get("filter") == "'fully_trusted'"
            or (last == "extractall" and given.get("filter") != "'data'")
            or last in ("import_module", "load_inline", "instantiate", "get_method", "get_class")
            or (last == "call" and name != "builder.call")  # that one writes LLVM code of ours
            or name.startswith(
                ("torch.hub.", "torch.jit.load", "runpy.", "code.", "dill.", "shelve.", "marshal.")
            )
            or last in ("CIFAR10", "CIFAR100")  # torchvision's unpickle what they read
        )
        if bad:
            yield f"{node.lineno}: {name}"
        if isinstance(node, ast.ImportFrom) and node.module in (
            "pickle",
            "torch.hub",
            "hydra.utils",
            "runpy",
        ):
            yield f"{node.lineno}: from {node.module}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_source_turns_data_into_code(path):
    assert list(risky(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    "code",
    [
        "torch.load(p)",
        "torch.load(p, weights_only=False)",
        "torch.load(p, weights_only=flag)",
        "np.load(p, allow_pickle=True)",
        "pickle.load(f)",
        "pickle.loads(b)",
        "pickle.Unpickler(f)",
        "from pickle import loads",
        "eval(x)",
        "exec(x)",
        "os.system(x)",
        "subprocess.run(x, shell=True)",
        "yaml.load(f)",
        "yaml.load(f, Loader=yaml.Loader)",
        "yaml.unsafe_load(f)",
        "__import__(x)",
        "importlib.import_module(x)",
        "hydra.utils.instantiate(x)",
        "archive.extractall(p)",
        "datasets.CIFAR10(p)",
    ],
)
def test_the_search_finds_it(code):
    assert list(risky(ast.parse(code)))
