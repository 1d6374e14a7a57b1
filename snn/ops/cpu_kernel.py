"""How the CPU kernels are compiled (by numba, at the first call) and called (on torch's threads)."""

import logging
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import numba
import torch

log = logging.getLogger(__name__)

MOST_THREADS: int = vars(numba.config)["NUMBA_NUM_THREADS"]
MOST_PARTS = 8  # functions of which a kernel is made, each kept on its own

Array = Any  # what a kernel sees of a tensor: a numpy array

_one_at_a_time = threading.Lock()  # not every threading layer of numba bears two callers


def cpu_kernel(function: Callable[..., Any]) -> Any:
    """Compile `function` at its first call, for the types it is called with: a part of a parallel kernel.

    The machine code is kept on disk, beside the source file or where `NUMBA_CACHE_DIR` says; without a
    writable place it is compiled again in each process. No operation is fused or reordered, so that a kernel
    rounds as torch does.

    Args:
        function: In numba's subset of Python. The cache looks at its file alone: whatever else it calls
            stands there too, or stays as it is.
    """
    return _compile(function, parallel=False)


def parallel_kernel(function: Callable[..., Any]) -> Any:
    """:func:`cpu_kernel` for a function with a `prange` loop, for :func:`launch` to call."""
    return _compile(function, parallel=True)


def _compile(function: Callable[..., Any], parallel: bool) -> Any:
    try:
        return numba.njit(cache=True, parallel=parallel, error_model="numpy")(function)
    except RuntimeError:  # numba finds no place for its cache
        return numba.njit(parallel=parallel, error_model="numpy")(function)


def launch(kernel: Any, *arguments: Any) -> Any:
    """Call a kernel on arrays, which it may write to, and plain values; return what it returns.

    The time of a first call that had to compile is told in the log.
    """
    threads = torch.get_num_threads()
    with _one_at_a_time:
        numba.set_num_threads(min(threads, MOST_THREADS))
        known, start = len(kernel.overloads), time.perf_counter()
        try:
            result = _call(kernel, arguments)
        except (EOFError, pickle.UnpicklingError) as error:
            place = kernel.stats.cache_path
            raise RuntimeError(
                f"compiled kernels in {place} are damaged: delete *.nbi and *.nbc there"
            ) from error
        if len(kernel.overloads) > known and kernel.stats.cache_misses.get(kernel.signatures[-1]):
            name, seconds = kernel.py_func.__qualname__.strip("_"), time.perf_counter() - start
            log.info("compiled the CPU kernel %s in %.1f s", name, seconds)
    if torch.get_num_threads() != threads:  # numba starts its own through the OpenMP that both share
        torch.set_num_threads(threads)
    return result


def _call(kernel: Any, arguments: tuple[Any, ...]) -> Any:
    """Call a kernel; a disk too full to keep what is compiled ends nothing, since that is then in memory."""
    for _ in range(MOST_PARTS):
        try:
            return kernel(*arguments)
        except OSError as error:
            log.warning("warning: compiled kernels cannot be kept on the disk: %s", error)
    return kernel(*arguments)
