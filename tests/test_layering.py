"""Imports point one way: read with `ast`, and seen in a fresh interpreter."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*(ROOT / "snn").rglob("*.py"), *ROOT.glob("*.py"), *(ROOT / "scripts").rglob("*.py")])
NAMES = [path.relative_to(ROOT).as_posix() for path in SOURCES]
CONFIG_READERS = {"snn/config.py", "train.py", "eval.py"}
# who may import what of snn; a package may import itself
ALLOWED = {
    "snn/neuron.py": set(),
    "snn/ops/": {"neuron", "ops"},
    "snn/layers.py": {"neuron", "ops"},
    "snn/networks/": {"neuron", "ops", "layers", "networks"},
}
KNOWS_NO_NETWORK = (
    "snn/losses.py",
    "snn/metrics.py",
    "snn/data/",
    "snn/monitor.py",
    "snn/trainer.py",
    "snn/encoding.py",
)


def imported(path):
    """Every module a file names, at the top or inside a function, as absolute dotted names."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def roots(path):
    return {name.split(".")[0] for name in imported(path)}


def parts_of_snn(path):
    return {name.split(".")[1] for name in imported(path) if name.startswith("snn.")}


def test_the_sources_are_found():
    assert {"snn/neuron.py", "snn/layers.py", "snn/ops/srm/op.py", "snn/networks/heads.py"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_hydra_and_omegaconf_stand_in_three_files(name):
    if name not in CONFIG_READERS:
        assert not roots(ROOT / name) & {"hydra", "omegaconf"}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_imports_scripts(name):
    if not name.startswith("scripts/"):
        assert not roots(ROOT / name) & {"scripts", "train", "eval", "tests"}


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(tuple(ALLOWED))])
def test_neuron_ops_layers_networks_point_one_way(name):
    allowed = next(parts for prefix, parts in ALLOWED.items() if name.startswith(prefix))
    assert parts_of_snn(ROOT / name) <= allowed
    assert "snn" not in imported(ROOT / name)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(("snn/neuron.py", "snn/ops/"))])
def test_ops_need_torch_and_kernel_compilers(name):
    compilers = {"numba", "llvmlite", "numpy", "triton"} if name.startswith("snn/ops/") else set()
    assert roots(ROOT / name) - set(sys.stdlib_module_names) <= {"torch", "snn"} | compilers


def test_triton_is_named_in_one_file():
    """It is not everywhere: whoever has no CUDA GPU must never meet it."""
    assert [name for name in NAMES if "triton" in roots(ROOT / name)] == ["snn/ops/srm/gpu.py"]
    code = "import sys, snn.layers; print('snn.ops.srm.gpu' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(KNOWS_NO_NETWORK)])
def test_these_know_no_network(name):
    assert "networks" not in parts_of_snn(ROOT / name)


def test_importing_the_ops_loads_no_program():
    unwanted = {"hydra", "omegaconf", "tensorboard", "snn.layers", "snn.networks"}
    code = f"import sys, snn.ops; print(*({unwanted} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
