"""Whether a data set that lies on disk is whole and can be read."""

from pathlib import Path

from snn.data.events import layouts
from snn.data.events.framing import require_inside
from snn.data.events.layouts import Part, naming
from snn.data.events.releases import RELEASES, verify_archives
from snn.data.events.sets import SENSORS


def check(name: str, root: Path) -> str:
    """Read every recording of a set of `RELEASES` once; return a line that says what is there.

    Raises:
        FileNotFoundError: A file is missing; the message says how to get it.
        ValueError: A file is damaged, or there are more or fewer recordings than were published.
    """
    verify_archives(name, root)
    if name == "cifar10_dvs":  # without a split of its own
        folder, recordings, reader = layouts.cifar10_dvs(root)
        parts = [layouts.make_part(recordings, reader)]
        legal: list[tuple[int, ...]] = [(sum(counts),) for counts in RELEASES[name].counts]
    else:
        folder, *parts = {"nmnist": layouts.nmnist, "dvs_gesture": layouts.dvs_gesture}[name](root)
        legal = list(RELEASES[name].counts)
    counts = tuple(_count(name, part) for part in parts)
    words = " + ".join(map(str, counts))
    if counts not in legal:
        published = " or ".join(" + ".join(map(str, numbers)) for numbers in legal)
        raise ValueError(f"{folder} holds {words} recordings, but {published} were published")
    return f"{name}: {folder} is complete, {words} recordings, and each can be read"


def _count(name: str, part: Part) -> int:
    count = 0
    for path, _, events in part.read():
        with naming(path):
            require_inside(events, SENSORS[name])
        count += 1
    return count
