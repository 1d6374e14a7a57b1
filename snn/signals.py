"""What the outside asks of a run: to end (SIGTERM, SIGINT) or to save (SIGUSR1, as SLURM warns)."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

ENDING = (signal.SIGTERM, signal.SIGINT)


class Terminated(SystemExit):
    """SIGTERM came where nothing could be saved."""


class Signals:
    """Notes signals while it is entered, so that whoever runs can heed them at a good moment.

    A second SIGTERM or SIGINT is not noted but acts at once, as if this were not entered.

    Attributes:
        ending: The signal that asked to end, or None.
        saving: Whether SIGUSR1 asked to save; whoever has saved sets it back.
    """

    def __init__(self) -> None:
        self.ending: signal.Signals | None = None
        self.saving = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            for number in (*ENDING, signal.SIGUSR1):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _restore(self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.saving = True
            return
        self.ending = signal.Signals(number)
        _restore({ending: self._before[ending] for ending in ENDING})


@contextmanager
def raising() -> Iterator[None]:
    """Have SIGTERM raise `Terminated`, so that what is half-made is removed, and SIGUSR1 do nothing."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number, handler in ((signal.SIGTERM, _terminate), (signal.SIGUSR1, signal.SIG_IGN)):
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        _restore(before)


def ignore_all(worker: int) -> None:
    """Let a data worker ignore what is meant for the run, which ends it in its own time."""
    for number in (*ENDING, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def _restore(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set from Python


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated(128 + number)
