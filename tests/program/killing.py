"""Run `train.py` many times, quickly: a process that has imported all forks one for each run.

It reads a JSON line `[words, moment, at]` and writes the pid of the run, then, when that has ended, how. A
run with a `moment` kills itself, by SIGKILL, just before it touches a file of its folder for the moment-th
time; one with an `at` begins at that time.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOUCHES = ("open", "os.rename", "os.remove", "os.truncate")  # events of the interpreter's audit


class Zygote:
    """Starts runs in `folder`, on one thread each."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, *words: str, moment: int | None = None, at: float = 0) -> int:
        """Start a run; return its pid."""
        print(json.dumps([words, moment, at]), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def wait(self) -> int:
        """Wait for the run that was started last; return its exit code, or minus the signal that ended it."""
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def serve() -> None:
    import hydra  # noqa: F401
    import numba  # noqa: F401

    import snn.config  # noqa: F401
    import snn.data.sources  # noqa: F401
    import snn.networks  # noqa: F401
    import snn.trainer  # noqa: F401
    import train

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.dup2(1, 2)
    for line in sys.stdin:
        words, moment, at = json.loads(line)
        pid = os.fork()
        if pid == 0:
            if moment is not None:
                (folder,) = (word.split("=")[1] for word in words if word.startswith("hydra.run.dir="))
                sys.addaudithook(Killer(os.path.abspath(folder), moment))
            while time.time() < at:
                pass
            sys.argv = ["train.py"]
            os._exit(train.main(words))
        print(pid, file=answers, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)


class Killer:
    def __init__(self, folder: str, moment: int) -> None:
        self.folder, self.left = folder, moment

    def __call__(self, event: str, args: tuple) -> None:
        if event in TOUCHES and os.path.abspath(str(args[0])).startswith(self.folder):
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    serve()
