"""What is read from the environment, and what a child node is given of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdserve.config import environment


def test_only_our_configuration_is_seen() -> None:
    environ = {"PDSERVE_SERVER_PORT": "1", "PDSERVE_CACHE_DIR": "/c", "HOME": "/h", "XPDSERVE_A": "2"}
    assert environment.variables(environ) == {"PDSERVE_SERVER_PORT": "1"}


def test_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PDSERVE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert environment.cache_directory() == Path("/home/someone/.cache/pdserve")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert environment.cache_directory() == Path("/home/someone/.cache/pdserve")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert environment.cache_directory() == Path("/cache/pdserve")
    monkeypatch.setenv("PDSERVE_CACHE_DIR", "~/own")
    assert environment.cache_directory() == Path("/home/someone/own")


def test_watchdog_is_for_this_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "30000000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    assert environment.watchdog_interval() == 15.0
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    assert environment.watchdog_interval() == 15.0
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert environment.watchdog_interval() is None
    monkeypatch.delenv("WATCHDOG_PID")
    for nothing in ("0", "", "soon", "-1"):
        monkeypatch.setenv("WATCHDOG_USEC", nothing)
        assert environment.watchdog_interval() is None


def test_child_environment_has_neither_configuration_nor_the_service_manager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (
        "NOTIFY_SOCKET",
        "WATCHDOG_USEC",
        "WATCHDOG_PID",
        "PDSERVE_SERVER_PORT",
        "PDSERVE_CACHE_DIR",
    ):
        monkeypatch.setenv(name, "1")
    child = environment.child_environment({"PDSERVE_CLUSTER_SECRET": "s"})
    assert child["PDSERVE_CLUSTER_SECRET"] == "s"
    assert child["PDSERVE_CACHE_DIR"] == "1"
    assert not child.keys() & {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "PDSERVE_SERVER_PORT"}
