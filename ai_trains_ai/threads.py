"""Cores and threads. At the size of the embedded models more BLAS threads a process only fight for the cores."""

from __future__ import annotations

import os
import sys

VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def single_thread() -> bool:
    """Ask for one BLAS thread, unless the user chose otherwise. False: NumPy is loaded and can't be told any more."""
    for name in VARIABLES:
        os.environ.setdefault(name, "1")
    return "numpy" not in sys.modules
