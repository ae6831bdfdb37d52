"""Keeps memory that a step frees for the next step."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # numbers of glibc's settings, from its malloc.h
KEEP_BYTES = 2**30  # of freed memory at most: more than a step on a CPU usually needs
LARGEST_KEPT_BYTES = 32 * 2**20  # larger allocations are always given back: glibc accepts no higher limit


def keep_freed_memory() -> bool:
    """Tell the C library not to give freed memory back to the kernel; return whether it accepted that.

    A step needs memory for the same activations and gradients as the one before. If that is given back in between, each
    step begins with thousands of page faults: 5 ms of a 115 ms step where this was measured.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, KEEP_BYTES) and mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES))
