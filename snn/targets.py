"""`_target_` nodes: what a config may name, whether its keys fit, and the object it describes.

A node is a plain mapping: `_target_` names a class or function of this project or of torch.optim, the other
keys are its keyword arguments, and `_partial_: true` asks for a callable that waits for the rest. Whatever a
config or a checkpoint says, nothing else is ever imported or called.
"""

import difflib
import functools
import inspect
import pkgutil
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

ALLOWED = ("snn.", "torch.optim.")
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
        path: Where the node stands in the config, for the message.
        node: As above.

    Raises:
        ValueError: One line that names the key, and the nearest one if it is misspelt.
    """
    try:
        target = locate(node["_target_"])
    except ValueError as error:
        raise ValueError(f"{path}.{error}") from error
    parameters = inspect.signature(target).parameters
    require_known(path, node, [*parameters, *MARKS])
    hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    for key, value in node.items():
        if is_target(value):
            check_target(f"{path}.{key}", value)
        elif key in hints:
            node[key] = require_kind(f"{path}.{key}", value, hints[key])
    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and key not in node and key not in OFFERED:
            raise ValueError(f"{path}.{key} is missing")
    if not isinstance(node.get("_partial_", False), bool):
        raise ValueError(f"{path}._partial_ must be bool, got {node['_partial_']!r}")


def is_target(node: Any) -> bool:
    """Whether a plain value is a `_target_` node."""
    return isinstance(node, dict) and "_target_" in node


def locate(name: Any) -> Callable[..., Any]:
    """Return the class or function that `name` stands for.

    Raises:
        ValueError: It is not defined in one of `ALLOWED`, or nowhere at all.
    """
    rule = f"_target_ must name a class or function of {' or '.join(ALLOWED)}, got {name!r}"
    if not isinstance(name, str) or not name.startswith(ALLOWED):
        raise ValueError(rule)
    if any(part.startswith("_") for part in name.split(".")):
        raise ValueError(rule)
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"_target_ names nothing that exists: {name!r}") from error
    # a name may lead through an allowed module to something imported there: where it was defined counts
    if not (inspect.isclass(found) or inspect.isfunction(found)):
        raise ValueError(rule)
    if not f"{found.__module__}.".startswith(ALLOWED):
        raise ValueError(rule)
    return typing.cast(Callable[..., Any], found)


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
