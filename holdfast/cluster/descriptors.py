"""The limit on this process's open files, which also bounds its connections."""

from __future__ import annotations

import resource

MOST = 65536  # descriptors: some programs close every possible one when they start, and containers may allow a billion


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one, or to ``MOST``; return the limit that holds then.

    The usual soft limit of 1,024 is for programs that call ``select``. A thousand idle connections would use it up.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(MOST, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
