"""How a command of this project lives and ends: its log on stdout, one line of error, its exit code."""

import difflib
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from snn.signals import Terminated, raising
from snn.words import choices


def exit_code(start: Callable[[], None], words: list[str], made: list[Path]) -> int:
    """Call `start` as the command with these `words`; return its exit code.

    An error ends it with one line, `error: ...`, on stderr; the environment variable HYDRA_FULL_ERROR=1 shows
    the traceback above it.

    Args:
        start: Takes what it needs from `sys.argv`, as Hydra does.
        words: Words of the command line.
        made: Folders that the command makes, the deepest first; filled by `start`. An error removes those
            that are empty.
    """
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    with _console(), _as_command(words), raising():
        try:
            start()
            return 0
        except SystemExit as stop:
            _remove_empty(made)
            if isinstance(stop, Terminated):
                print("error: terminated", file=sys.stderr)  # noqa: T201
            return stop.code if isinstance(stop.code, int) else 1
        except KeyboardInterrupt:
            _remove_empty(made)
            print("error: interrupted", file=sys.stderr)  # noqa: T201
            return 130
        except Exception as error:  # noqa: BLE001  the outermost handler: every error becomes one line
            _remove_empty(made)
            if wants_traceback:
                traceback.print_exc()
            expected = isinstance(error, ValueError | OSError | ArithmeticError)
            hydra_said = type(error).__module__.startswith(("hydra.", "omegaconf."))
            kind = "" if expected or hydra_said or _is_memory(error) else f"{type(error).__name__}: "
            print(f"error: {kind}{one_line(error)}", file=sys.stderr)  # noqa: T201
            return 1


def _is_memory(error: BaseException) -> bool:
    """Whether there was not enough memory; torch says so in several ways."""
    kinds = ("MemoryError", "OutOfMemoryError")
    return type(error).__name__ in kinds or "can't allocate memory" in str(error)


def one_line(error: BaseException) -> str:
    """Make one line of a message, and help with the two mistakes that Hydra words at length."""
    text = str(error).split("Config search path")[0]
    if _is_memory(error):
        text = f"out of memory: lower trainer.batch_size, encoding.steps or the network's size ({text})"
    if missing := re.search(r"Could not find '(\w+)/(\w+)'", text):
        group, word = missing.groups()
        if there := choices(group):
            near = difflib.get_close_matches(word, there, n=1, cutoff=0)[0]
            return f"{group}={word} is no choice; did you mean {group}={near}? ({', '.join(there)})"
    if "LexerNoViableAlt" in text:
        return f"cannot read {text.split()[1]}; a value with unusual signs is quoted: \"key='value'\""
    if word := getattr(error, "override", None):  # Hydra cannot parse it
        text = f"cannot read {str(word).removeprefix('++')!r}: {text.split('See https://hydra.cc')[0]}"
    text = re.sub(r"\s*object_type=\S*", "", text.replace("'++", "'"))
    return " ".join(text.split()) or type(error).__name__


def _remove_empty(folders: list[Path]) -> None:
    """Remove the folders that a command made before it was refused, the deepest first."""
    for path in folders:
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


@contextmanager
def _as_command(words: list[str]) -> Iterator[None]:
    """Let Hydra read `words` as the command line and raise its errors instead of printing them."""
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = [argv[0], *words], "1"
    try:
        yield
    finally:
        sys.argv = argv
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


@contextmanager
def _console() -> Iterator[None]:
    """Show this project's log on stdout, as plain lines."""
    handler = logging.StreamHandler(sys.stdout)
    handler.handleError = lambda record: None  # type: ignore[method-assign]  # a closed pipe ends no run
    logger = logging.getLogger("snn")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
