"""Cores, threads and memory of this process, for the embedded models' small matrices."""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def single_thread() -> bool:
    """Ask for one BLAS thread a process, unless the user chose otherwise: more only fight for the cores at this size.

    Returns:
        False when NumPy is loaded already and can't be told any more.
    """
    asked = any(name in os.environ for name in VARIABLES)
    for name in VARIABLES:
        os.environ.setdefault(name, "1")
    return asked or "numpy" not in sys.modules


def keep_memory() -> None:
    """Let glibc keep freed memory for the next training step instead of giving it back to the kernel.

    The kernel clears every page that it hands out again: a fifth of the CPU time of a step, measured. For a process of
    our own only (the command line), since it holds for the whole process.
    """
    try:
        libc = ctypes.CDLL(None)
        for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            libc.mallopt(option, 1 << 30)
    except (OSError, AttributeError):
        pass  # not glibc
