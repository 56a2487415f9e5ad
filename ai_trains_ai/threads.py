"""One BLAS thread a process: at the size of the embedded models more threads only fight for the cores."""

from __future__ import annotations

import os
import sys

VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def single_thread() -> bool:
    """Ask for one BLAS thread, unless the user chose otherwise. False: NumPy is loaded and can't be told any more."""
    for name in VARIABLES:
        os.environ.setdefault(name, "1")
    return "numpy" not in sys.modules
