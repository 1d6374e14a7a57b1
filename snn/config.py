"""From the words a user types to a checked config and a started job: check(), build(), run().

Hydra and OmegaConf are imported here and in the two scripts: the rest sees plain Python and built objects.
"""

import argparse
import functools
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snn.command import exit_code, one_line
from snn.schema import AUTO, RESUME_KEYS, EvalConfig, TrainConfig
from snn.targets import build, check_target, is_target, locate, require_kind, require_known
from snn.words import CONFIGS, is_group, key_of, quote, quoted, shown_choices

if TYPE_CHECKING:
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from omegaconf import DictConfig
    from torch import Tensor

__all__ = [
    "build",
    "build_network",
    "check",
    "compose",
    "overridden",
    "run",
    "settle",
    "update",
    "words_of_job",
]

# Of Hydra's own keys, those that are a user's to set: its others name classes to build, modules to import,
# variables of the environment, or a sweep that was not checked.
HYDRA_KEYS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")
# These Hydra sets itself, for each command.
_HYDRA_OWN = ("hydra.runtime.", "hydra.overrides.", "hydra.job.config_name", "hydra.job.override_dirname")

Root = typing.TypeVar("Root", TrainConfig, EvalConfig)


def check(cfg: "DictConfig | dict[str, Any]", schema: type[Root]) -> Root:
    """Refuse a config with an unknown or missing key or a value of the wrong kind; return it typed.

    Args:
        cfg: The composed config; its interpolations are resolved here.
        schema: `TrainConfig` or `EvalConfig`; components are checked against the signatures of their targets.

    Raises:
        ValueError: One line that names the key, and the nearest one if it is misspelt.
    """
    from omegaconf import MissingMandatoryValue, OmegaConf

    try:
        plain = OmegaConf.to_container(OmegaConf.create(cfg), resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ValueError(f"{error.full_key} must be given: {error.full_key}=VALUE") from error
    return typing.cast(Root, _check_node("", plain, schema))


def _check_node(path: str, node: Any, schema: type[Any]) -> Any:
    if not isinstance(node, dict):
        raise ValueError(f"{path} must be a group of keys, got {node!r}")
    hints = typing.get_type_hints(schema)
    require_known(path, node, hints)
    values = {}
    for name, kind in hints.items():
        key = f"{path}.{name}" if path else name
        if name not in node:
            raise ValueError(f"{key} is missing")
        value = node[name]
        if is_dataclass(kind):
            value = _check_node(key, value, typing.cast(type[Any], kind))
        else:
            value = require_kind(key, value, kind)
            if is_target(value):
                check_target(key, value)
            elif schema is TrainConfig and kind == dict[str, Any]:
                raise ValueError(f"{key} must have a _target_: choose one, for instance {shown_choices(key)}")
        values[name] = value
    return schema(**values)


def build_network(config: TrainConfig) -> "tuple[Any, Callable[..., Tensor]]":
    """Build the network with its head, and the loss that reads it.

    Raises:
        ValueError: A constant is out of range, or the loss reads what the head does not give.
    """
    _require_fit(config)
    neuron, grad = build(config.neuron), build(config.surrogate)
    network = build(
        config.network, neuron=neuron, grad=grad, head=build(config.head, neuron=neuron, grad=grad)
    )
    return network, build(config.loss, grad=grad)


def _require_fit(config: TrainConfig) -> None:
    """Raise ValueError if the loss reads what the head does not give, or has no such gradient."""
    from snn.losses import require_time_based

    nodes = (config.head, config.loss, config.surrogate)
    head, loss, grad = (typing.cast(Any, locate(node["_target_"])) for node in nodes)
    if head.output != loss.reads:
        fitting = {"logits": "loss=cross_entropy", "spikes": "loss=count"}[head.output]
        but = f"the head gives {head.output}, but the loss {loss.__name__} reads {loss.reads}"
        raise ValueError(f"{but}: try {fitting}")
    require_time_based(loss, grad)


def run(task: Callable[["DictConfig"], None], schema: type[Root], argv: list[str] | None) -> int:
    """Run `task` on the config that the command line asks for, once or as a sweep; return the exit code.

    Every job's config is composed and checked first: a mistake ends the command before a folder is made. An
    error ends it with one line, `error: ...`, on stderr; the environment variable HYDRA_FULL_ERROR=1 shows
    the traceback above it.

    Args:
        task: Takes the composed config of one job.
        schema: Root of that config; `TrainConfig` reads configs/train.yaml, `EvalConfig` configs/eval.yaml.
        argv: Words of the command line; None reads `sys.argv`.
    """
    words = [quoted(word) for word in (sys.argv[1:] if argv is None else argv)]
    config_name = "train" if schema is TrainConfig else "eval"
    made: list[Path] = []
    failed: list[Exception] = []

    def single(cfg: "DictConfig") -> None:
        try:
            task(cfg)
        except Exception as error:  # noqa: BLE001  kept from Hydra, which would print a line of its own
            failed.append(error)

    def start() -> None:
        import hydra
        from omegaconf import OmegaConf

        OmegaConf.register_new_resolver("job_folder", _job_folder, replace=True)
        sys.argv[1:], multirun = _preflight(words, schema, config_name, made)
        decorate = hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=config_name)
        decorate(task if multirun else single)()
        for error in failed:
            raise error

    return exit_code(start, words, made)


def compose(words: list[str]) -> TrainConfig:
    """Return the checked config that `python train.py WORDS` would run with.

    Raises:
        ValueError: One line that says what is wrong with a word or a key.
    """
    args = argparse.Namespace(config_dir=None, config_path=None, config_name=None)
    try:
        with _reading(args, "train"):
            return check(_compose([quoted(word) for word in words], "train")[0], TrainConfig)
    except Exception as error:
        raise ValueError(one_line(error)) from error


def words_of_job() -> list[str]:
    """Return the words of the command line of the job at hand, as typed: with their `${...}`."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    return typing.cast(list[str], OmegaConf.to_container(HydraConfig.get().overrides.task))


def overridden(cfg: "DictConfig", keys: list[str]) -> dict[str, Any]:
    """Return the values in `cfg` of those `keys` that stand on the command line of this job."""
    from omegaconf import OmegaConf

    given = map(key_of, words_of_job())
    return {key: OmegaConf.select(cfg, key) for key in given if key in keys}


def settle(cfg: "DictConfig") -> "DictConfig":
    """Let a group for which the command line chooses another file than the experiment be as that file says.

    An experiment that chooses `surrogate: time` sets `surrogate.tau_grad`, which `surrogate=atan` has not;
    one that sets `network.layers` would overrule `network=vgg`. Such a group is composed without the
    experiment; what the command line sets in it stays.

    Args:
        cfg: The composed config of the job at hand, inside Hydra.
    """
    from hydra import compose
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import open_dict

    hydra = HydraConfig.get()
    experiment, words = hydra.runtime.choices.get("experiment"), words_of_job()
    if experiment is None:
        return cfg
    name = hydra.job.config_name
    alone = compose(name, [f"experiment={quote(experiment)}"], return_hydra_config=True)
    own, chosen = alone.hydra.runtime.choices, hydra.runtime.choices.items()
    other = [group for group, choice in chosen if group in cfg and own[group] != choice]
    if other:
        of_others = [_any_key(w) for w in words if key_of(w).split("@")[0].split(".")[0] in other]
        plain = compose(name, of_others)
        with open_dict(cfg):
            for group in other:
                cfg[group] = plain[group]
    return cfg


def update(config: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the plain `config` with dotted keys set to new values."""
    from omegaconf import OmegaConf

    node = OmegaConf.create(config)
    for key, value in values.items():
        OmegaConf.update(node, key, value)
    return typing.cast(dict[str, Any], OmegaConf.to_container(node))


def _preflight(
    words: list[str], schema: type[Root], config_name: str, made: list[Path]
) -> tuple[list[str], bool]:
    """Check every job of the command; return the words for Hydra, and whether they are a sweep."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra._internal.utils import get_args_parser
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    args: argparse.Namespace = parser.parse_intermixed_args(words)
    if args.experimental_rerun is not None:
        raise ValueError("--experimental-rerun runs what a pickle says; --config-path FOLDER repeats a run")
    flags: list[str] = [word for word in words if word not in args.overrides]
    quiet: list[str] = ["hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
    command: list[str] = [*args.overrides, *quiet, *flags]  # in this order: --info would swallow a word
    if args.config_path:
        args.config_path = str(Path(args.config_path).resolve())
        command += ["--config-path", args.config_path]
    config_name = args.config_name or config_name
    with _reading(args, config_name) as loader:
        if args.shell_completion:
            return command, False
        if args.help or args.hydra_help or args.cfg or args.info:
            cfg, _ = _compose(args.overrides, config_name)
            whole = args.cfg == "job" and not args.package
            if whole and any(key_of(word) == "experiment" for word in args.overrides):
                check(cfg, schema)  # shown here: Hydra would show it as it was before `settle`
                print(OmegaConf.to_yaml(cfg, resolve=args.resolve), end="")  # noqa: T201
                raise SystemExit(0)
            return command, False
        overrides = OverridesParser.create(loader).parse_overrides(args.overrides)
        if not args.multirun:
            jobs = [args.overrides]
        elif schema is EvalConfig:
            raise ValueError("eval.py evaluates one checkpoint: call it without -m")
        else:
            jobs = BasicSweeper.split_arguments(overrides, None)[0]
            if not jobs:
                raise ValueError(f"nothing matches a glob of the sweep: {' '.join(args.overrides)}")
            fixed_words = zip(args.overrides, overrides, strict=True)
            _compose([word for word, o in fixed_words if not o.is_sweep_override()], config_name)
        composed = [_compose(job, config_name) for job in jobs]
        checked = [check(cfg, schema) for cfg, _ in composed]

    first = checked[0]
    for config in checked:
        if isinstance(config, TrainConfig):
            _require_fit(config)
    given, hydra_keys = {key_of(word) for word in args.overrides}, composed[0][1]
    if isinstance(first, EvalConfig):
        if hydra_keys:
            raise ValueError(f"eval.py writes no folder and takes no {hydra_keys[0]}")
        return ["hydra.run.dir=.", *command], False
    stamp = f"{datetime.now():%Y-%m-%d_%H-%M-%S-%f}"
    folder = Path("runs") / first.name / f"{stamp}-s{first.seed}-{os.getpid()}"
    if first.resume == AUTO:
        where = "hydra.sweep.dir" if args.multirun else "hydra.run.dir"
        if where not in given:
            raise ValueError(f"resume={AUTO} needs the folder of the run: {where}=PATH")
    elif first.resume is not None:
        from snn.checkpoint import find_checkpoint

        if args.multirun:
            raise ValueError(f"resume continues one run: call it without -m, or with resume={AUTO}")
        if unknown := given - {*RESUME_KEYS, "resume"}:
            rule = f"resume takes its config from the checkpoint; only {', '.join(RESUME_KEYS)} may be given"
            raise ValueError(f"{rule}, got {', '.join(sorted(unknown))}")
        path = Path(first.resume).expanduser()
        folder = path if path.is_dir() else find_checkpoint(first.resume).parent
    if not args.multirun:
        words_of = {key_of(word): word.partition("=")[2].strip("'\"") for word in args.overrides}
        own: Path = Path(words_of.get("hydra.run.dir", folder))
        made += [path for path in (own, *own.parents) if not path.exists()]
    fixed = [quote(key_of(o.get_key_element())) for o in overrides if not o.is_sweep_override()]
    folders = {
        "hydra.run.dir": folder,
        "hydra.sweep.dir": folder.parent / f"{stamp}-{os.getpid()}-sweep",
        "hydra.sweep.subdir": "${job_folder:${hydra.job.num},${hydra.job.override_dirname}}",
    }
    resumed = first.resume is not None  # where the run lies
    settings: list[str] = [
        f"{key}={quote(it)}" for key, it in folders.items() if resumed or key not in hydra_keys
    ]
    settings.append(f"hydra.job.config.override_dirname.exclude_keys=[{','.join(fixed)}]")
    return [*settings, *command], args.multirun


@contextmanager
def _reading(args: argparse.Namespace, config_name: str) -> "Iterator[ConfigLoaderImpl]":
    """Let Hydra read configs from the folders that a command names, as its own start would.

    Raises:
        ValueError: The config that the command starts from is none, or names other folders or modules.
    """
    from hydra import initialize_config_dir
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.config_search_path import SearchPathQuery
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import DictConfig, OmegaConf

    with initialize_config_dir(version_base="1.3", config_dir=args.config_path or str(CONFIGS)):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        if args.config_dir:
            path, folder = hydra.config_loader.get_search_path(), Path(args.config_dir).resolve()
            if not folder.is_dir():
                raise FileNotFoundError(f"--config-dir: there is no folder {folder}")
            path.prepend("command-line", f"file://{folder}", SearchPathQuery(provider="schema"))
            hydra.config_loader = ConfigLoaderImpl(path)
        loader = typing.cast(ConfigLoaderImpl, hydra.config_loader)
        try:
            primary = loader.repository.load_config(config_name)
        except Exception as error:
            raise ValueError(f"--config-name: {config_name} cannot be read as YAML: {error}") from error
        if primary is not None:
            if not isinstance(primary.config, DictConfig) or not (primary.config or primary.defaults_list):
                raise ValueError(
                    f"--config-name: {config_name} must hold keys and values, got {primary.config}"
                )
            if OmegaConf.select(primary.config, "hydra.searchpath") is not None:
                raise _hydra_error("hydra.searchpath")
        yield loader


def _compose(job: list[str], config_name: str) -> "tuple[DictConfig, list[str]]":
    """Compose one job's config with every key allowed, so that `check` is what judges the keys.

    Returns:
        The config without Hydra's own node, and which keys of that were set.

    Raises:
        ValueError: A word or a file sets a key of Hydra other than `HYDRA_KEYS`.
    """
    from hydra import compose
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import open_dict

    for key in map(key_of, job):
        if re.match(r"hydra\b", key) and key not in HYDRA_KEYS:
            raise _hydra_error(key)
    cfg = compose(config_name, [_any_key(word) for word in job], return_hydra_config=True)
    words, found, own = cfg.hydra.overrides, dict(_leaves("hydra", cfg.hydra)), _hydra_defaults()
    changed = {key for key in found | own if key not in found or key not in own or found[key] != own[key]}
    hydra_keys = sorted(key for key in changed if not key.startswith(_HYDRA_OWN))
    if len(words.task) + len(words.hydra) != len(job):  # Hydra adds the command's to those in a file
        hydra_keys.append("hydra.overrides")
    if foreign := [key for key in hydra_keys if key not in HYDRA_KEYS]:
        raise _hydra_error(foreign[0])
    HydraConfig.instance().set_config(cfg)  # for ${hydra:...} in the config
    if "experiment" in cfg.hydra.runtime.choices:
        cfg = settle(cfg)
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg, hydra_keys


@functools.cache
def _hydra_defaults() -> dict[str, Any]:
    """Return Hydra's own node as it is if nobody sets anything, as `_leaves` does."""
    from hydra import compose

    return dict(_leaves("hydra", compose(return_hydra_config=True).hydra))


def _leaves(path: str, node: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over the dotted keys in a node of a config and their values, interpolations as written."""
    from omegaconf import DictConfig, OmegaConf

    plain = OmegaConf.to_container(node) if isinstance(node, DictConfig) else node
    if not isinstance(plain, dict) or not plain:
        yield path, plain
        return
    for key, value in plain.items():
        yield from _leaves(f"{path}.{key!s}", value)


def _hydra_error(key: str) -> ValueError:
    return ValueError(f"{key} is not to be set; of Hydra's own keys only {', '.join(HYDRA_KEYS)} are")


def _any_key(word: str) -> str:
    """Return a word of the command line as one that Hydra takes for a key that there is not, too.

    Raises:
        ValueError: It gives a group something else than one of its files.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    key = key_of(word)
    if not is_group(key):
        return word if word[:1] in ("+", "~") else f"++{word}"
    if not key.startswith("hydra") and not word.startswith("~"):
        (override,) = OverridesParser.create().parse_overrides([word])
        value, group = override.value(), key.split("@")[0]
        if value is None or isinstance(value, int | float | list) or "${" in str(value):
            raise ValueError(
                f"{key} must name a file of configs/{group}, got {value}: {shown_choices(group)}"
            )
    return word


def _job_folder(number: int, overrides: str) -> str:
    """Name a job of a sweep by its number and what was swept, as one folder that every file system takes."""
    return f"{number}_{overrides}".replace("/", "_")[:150]


def _refuse(message: str) -> typing.NoReturn:
    raise ValueError(f"{message} (overrides read key=value; see --help)")
