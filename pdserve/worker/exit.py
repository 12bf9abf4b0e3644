"""How a worker process ended, in words."""

from __future__ import annotations

import signal

from pdserve.errors import WorkerError
from pdserve.worker.protocol import Fatal

_MESSAGE_LINES = 3


class WorkerExited(WorkerError):
    """A worker process ended without being asked to. The message says how; the rest is for logs.

    `returncode` as subprocess has it (negative: the signal), `fatal` the worker's own last word if it had
    one (`code` is its code then), `stderr` its last lines.
    """

    def __init__(
        self, who: str, returncode: int, *, cause: str | None, fatal: Fatal | None, stderr: tuple[str, ...]
    ) -> None:
        """`cause`: why the node ended it, None where it ended by itself."""
        super().__init__(
            _text(who, returncode, cause, fatal, stderr), code=None if fatal is None else fatal.code
        )
        self.returncode = returncode
        self.fatal = fatal
        self.stderr = stderr


def _text(who: str, returncode: int, cause: str | None, fatal: Fatal | None, stderr: tuple[str, ...]) -> str:
    if fatal is not None:
        return f"{who}: {fatal.message}"
    if cause is not None:
        text = f"{who} was ended: {cause}"
    elif returncode < 0:
        text = f"{who} was killed by {_signal_name(-returncode)}"
    else:
        text = f"{who} exited with status {returncode}"
    if stderr:
        text += "; its last words: " + " | ".join(stderr[-_MESSAGE_LINES:])
    return text


def _signal_name(number: int) -> str:
    try:
        return str(signal.Signals(number).name)
    except ValueError:
        return f"signal {number}"
