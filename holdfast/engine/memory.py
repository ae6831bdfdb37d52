"""Keeps memory that a step frees for the next step."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
KEEP_BYTES = 2**30
LARGEST_KEPT = 32 * 2**20  # glibc accepts no more


def keep_freed_memory() -> bool:
    """Tells the C library not to give freed memory back to the kernel; false where that is not known.

    A step asks for the same activations and gradients as the one before. Given back in between, they
    come as thousands of page faults: 5 ms of a 115 ms step where this was measured.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, KEEP_BYTES) and mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT))
