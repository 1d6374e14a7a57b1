"""The words of a command line as Hydra's grammar has them, and the files of configs/ that they choose."""

import re
from pathlib import Path

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def key_of(word: str) -> str:
    """Return the key that a word sets, adds or deletes."""
    return word.split("=", 1)[0].lstrip("+~")


def is_group(key: str) -> bool:
    """Whether a key chooses a file, of ours or of Hydra's own, instead of setting a value."""
    return key.startswith("hydra") or (key != "" and (CONFIGS / key.split("@")[0]).is_dir())


def choices(group: str) -> list[str]:
    """Return the files of a group, by the words that choose them."""
    return sorted(file.stem for file in (CONFIGS / group).glob("[!_]*.yaml"))


def shown_choices(group: str) -> str:
    """Return the words that choose a file of a group, for a message."""
    return " or ".join(f"{group}={choice}" for choice in choices(group))


def quote(text: object) -> str:
    """Return a value that Hydra reads as this text, whatever signs are in it."""
    escaped = str(text).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def quoted(word: str) -> str:
    """Quote a value that Hydra's grammar has no room for: a path to a run, a `~`, other than ASCII."""
    key, equals, value = word.partition("=")
    is_run = key in ("checkpoint", "resume") and value[:1] not in ("'", '"', "") and value != "null"
    unusual = value.startswith("~") or not value.isascii()
    if equals and (is_run or (unusual and not re.search(r"""['"\[\]{}(),]""", value))):
        return f"{key}={quote(value)}"
    return word
