"""`_target_` nodes: what a config may name, whether its keys fit, and the object it describes.

A node is a plain mapping: `_target_` names a class or function, the other keys are its keyword arguments, and
`_partial_: true` asks for a callable that waits for the rest. `TARGETS` lists where in a config a node may
stand and what it may name there. Whatever a config or a checkpoint says, nothing else is imported or called.
"""

import difflib
import functools
import inspect
import pkgutil
import re
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Place(NamedTuple):
    """What a node at one place of a config may name.

    Attributes:
        listed: Dotted names; one with a dot at its end stands for what is defined in that module or package.
        takes: It is a function with these parameters; empty: it is a class.
        has: An attribute that tells such classes from others.
        partial: Whether it is built by whoever gets it, `_partial_: true`.
    """

    listed: tuple[str, ...]
    takes: tuple[str, ...] = ()
    has: str = "__init__"
    partial: bool = False


TARGETS = {
    "data": Place(("snn.data.load",), takes=("source",)),
    "data.source": Place(
        ("snn.data.sources.", "snn.data.moving_digits.", "snn.data.events.sets."),
        takes=("root", "download"),
        partial=True,
    ),
    "encoding": Place(("snn.encoding.",)),
    "neuron": Place(("snn.neuron.SRMParams",)),
    "surrogate": Place(("snn.neuron.",)),
    "network": Place(("snn.networks.",), has="teach"),
    "head": Place(("snn.networks.",), has="output", partial=True),
    "loss": Place(("snn.losses.",), has="reads"),
    "calibrate": Place(("snn.calibrate.Calibration",)),
    "optimizer": Place(("torch.optim.",), has="add_param_group"),
    "scheduler": Place(("snn.schedules.",), takes=("optimizer", "total_steps")),
}
MARKS = ("_target_", "_partial_")
OFFERED = {  # by those who build or call a target, never by a config
    *("params", "optimizer", "total_steps", "batch_size", "seed"),
    *("neuron", "grad", "head", "shape", "root", "download"),
}
PLAIN = (bool, int, float, str, dict, type(None))


def build(node: dict[str, Any], **offered: Any) -> Any:
    """Make the object that `node` describes: the only way from a config to code.

    Args:
        node: As above; nested nodes are built first.
        offered: Objects that no config can hold; the target gets those that its signature names.

    Raises:
        ValueError: A target is not allowed, or refuses its arguments.
    """
    target = locate(node.get("_target_"))
    signature = inspect.signature(target)
    arguments = {
        key: build(value) if is_target(value) else value for key, value in node.items() if key not in MARKS
    }
    arguments |= {key: value for key, value in offered.items() if key in signature.parameters}
    try:
        if node.get("_partial_"):
            signature.bind_partial(**arguments)
            return functools.partial(target, **arguments)
        signature.bind(**arguments)
    except TypeError as error:
        raise ValueError(f"{node['_target_']}: {error}") from error
    try:
        return target(**arguments)
    except (ValueError, TypeError, RuntimeError) as error:
        if target.__module__.startswith("snn."):  # ours name the key
            raise
        given = ", ".join(f"{key}={value}" for key, value in node.items() if key not in MARKS)
        raise ValueError(f"{node['_target_']}: {error} (of {given})") from error


def check_target(path: str, node: dict[str, Any]) -> None:
    """Refuse a node with a forbidden target, an unknown or missing key, or a wrong kind of value.

    Nodes within are checked too. A number where text is wanted is made text, in place.

    Args:
        path: Where the node stands in the config.
        node: As above.

    Raises:
        ValueError: One line that names the key, and the nearest one if it is misspelt.
    """
    target = locate(node["_target_"], path)
    parameters = inspect.signature(target).parameters
    require_known(path, node, [*parameters, *MARKS])
    hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    for key, value in node.items():
        if is_target(value):
            check_target(f"{path}.{key}", value)
        elif holds_target(value):
            raise ValueError(f"{path}.{key} may hold no _target_ at any depth, got {value!r}")
        elif key in hints:
            node[key] = require_kind(f"{path}.{key}", value, hints[key])
    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and key not in node and key not in OFFERED:
            raise ValueError(f"{path}.{key} is missing")
    partial, rule = node.get("_partial_", False), TARGETS[path].partial
    if partial is not rule:
        raise ValueError(f"{path}._partial_ must be {str(rule).lower()}, got {partial!r}")


def is_target(node: Any) -> bool:
    """Whether a plain value is a `_target_` node."""
    return isinstance(node, dict) and "_target_" in node


def holds_target(value: Any) -> bool:
    """Whether a plain value is a `_target_` node or holds one at any depth."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return is_target(value) or any(map(holds_target, inner))


def locate(name: Any, path: str | None = None) -> Callable[..., Any]:
    """Return the class or function that `name` stands for.

    Args:
        name: Dotted name.
        path: Where in a config it stands; None: wherever it may.

    Raises:
        ValueError: It is not listed there in `TARGETS`, or there is no such thing.
    """
    prefix = f"{path}." if path else ""
    if path is not None and path not in TARGETS:
        raise ValueError(f"{prefix}_target_ has no place there: {path} describes no object, got {name!r}")
    places = list(TARGETS.values()) if path is None else [TARGETS[path]]
    listed = dict.fromkeys(entry for place in places for entry in place.listed)
    rule = f"{prefix}_target_ must name something of {' or '.join(listed)}, got {name!r}"
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z]\w*(\.[A-Za-z]\w*)+", name, re.ASCII):
        raise ValueError(rule)
    if not any(_is_under(name, entry) for entry in listed):
        raise ValueError(rule)
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{prefix}_target_ names nothing that exists: {name!r}") from error
    if not any(_is_meant(found, name, place) for place in places):
        raise ValueError(rule)
    return typing.cast(Callable[..., Any], found)


def _is_under(name: str, entry: str) -> bool:
    return name.startswith(entry) if entry.endswith(".") else name == entry


def _is_meant(found: Any, name: str, place: Place) -> bool:
    """Whether an object that a name led to is one that a place may name.

    A name may lead through a listed module to something imported there: where it was defined counts.
    """
    if place.takes:
        if not inspect.isfunction(found) or not {*place.takes} <= {*inspect.signature(found).parameters}:
            return False
    elif not inspect.isclass(found) or not hasattr(found, place.has):
        return False
    home = f"{found.__module__}."
    return any(_is_under(name, e) and (e == name or home.startswith(e)) for e in place.listed)


def require_known(path: str, node: dict[str, Any], known: Iterable[str]) -> None:
    """Raise ValueError for the first key of `node` that is not `known`, and name the nearest that is."""
    names = list(known)
    prefix = f"{path}." if path else ""
    for key in node:
        if key not in names:
            near = difflib.get_close_matches(str(key), [n for n in names if n not in MARKS], n=1, cutoff=0)
            raise ValueError(
                f"unknown key {prefix}{key}" + (f"; did you mean {prefix}{near[0]}?" if near else "")
            )


def require_kind(path: str, value: Any, kind: Any) -> Any:
    """Return a plain value that fits the annotation `kind`: `value`, or a number as the text that is wanted.

    Raises:
        ValueError: It fits neither way.
    """
    if is_kind(value, kind):
        return value
    if type(value) in (int, float) and is_kind("", kind):
        return str(value)
    raise ValueError(f"{path} must be {_words(kind)}, got {value!r}")


def _words(kind: Any) -> str:
    """Say an annotation in words; of a union, what a config can hold."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        plain = [arg for arg in typing.get_args(kind) if arg in PLAIN or typing.get_args(arg)]
        return " or ".join(map(_words, plain or typing.get_args(kind)))
    if kind is type(None):
        return "null"
    if typing.get_origin(kind) is dict:
        return "a group of keys"
    return kind.__name__ if inspect.isclass(kind) and not typing.get_args(kind) else str(kind)


def is_kind(value: Any, kind: Any) -> bool:
    """Whether a plain value fits an annotation; none fits one that no config can hold, such as a tensor."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(is_kind(value, arg) for arg in args)
    if origin is list:
        return isinstance(value, list) and all(is_kind(v, args[0]) for v in value)
    if origin is tuple:  # a config has lists alone
        return isinstance(value, list) and len(value) == len(args) and all(map(is_kind, value, args))
    if origin is dict:
        return isinstance(value, dict)
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return inspect.isclass(kind) and isinstance(value, kind)
