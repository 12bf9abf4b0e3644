"""A node that another process of ours started does not outlive it."""

from __future__ import annotations

import ctypes
import os
import signal

from pdserve.errors import PdserveError

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, however it ends.

    `parent`: the pid that must be our parent. If it is not, it ended before the kernel was told, and this
    raises `PdserveError`. See `PR_SET_PDEATHSIG` in prctl(2); set here and not between fork and exec, where
    no Python may run. SIGKILL, because only a parent that was itself killed leaves its children to this:
    otherwise it has stopped them in good order.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise PdserveError(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        raise PdserveError(f"the process that started this node ({parent}) has ended")
