"""The one module that reads the environment: configuration, the service manager, the cache directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

PREFIX = "PDSERVE_"

OTHER_VARIABLES = frozenset({"PDSERVE_CACHE_DIR", "PDSERVE_PYTHON", "PDSERVE_TORCH_INDEX"})
"""Names with our prefix that are no field of the configuration: where caches live, and where `tools/setup`
looks for Python and for torch."""


def variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Everything with our prefix that sets a field of the configuration (right or wrong: `load_config`
    checks).
    """
    source = os.environ if environ is None else environ
    return {
        name: value
        for name, value in source.items()
        if name.startswith(PREFIX) and name not in OTHER_VARIABLES
    }


def cache_directory() -> Path:
    """Where converted weights and fingerprints are kept; not created here.

    `PDSERVE_CACHE_DIR`, else `pdserve` under the user's cache directory (XDG Base Directory specification).
    """
    own = os.environ.get("PDSERVE_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and os.path.isabs(base) else Path("~/.cache").expanduser()) / "pdserve"


def notify_socket() -> str | None:
    """The service manager's notification socket (`sd_notify(3)`); a leading @ means an abstract address."""
    return os.environ.get("NOTIFY_SOCKET") or None


def watchdog_interval() -> float | None:
    """Seconds between two signs of life that the service manager asks for; None if it asks for none.

    Half of `WATCHDOG_USEC`, as `sd_watchdog_enabled(3)` advises; only if `WATCHDOG_PID` is this process or
    unset.
    """
    usec, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID")
    if not usec.isdecimal() or int(usec) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 2e6


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a node that this process starts.

    Ours without configuration (the parent has resolved it) and without the service manager's variables,
    which speak to this process alone; plus `extra`.
    """
    dropped = {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", *variables()}
    return {name: value for name, value in os.environ.items() if name not in dropped} | dict(extra or {})
