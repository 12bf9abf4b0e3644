"""`pdserve up` as a program: signals, exit status, what it tells people and programs, what it leaves
(nothing).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdserve.cli.main import main
from pdserve.cli.up import _default_file
from pdserve.config import load_config

ROOT = Path(__file__).parents[2]
FAKE_NODE = str(ROOT / "tests" / "cli" / "fake_node.py")

DRIVER = f"""
import dataclasses, sys
import pdserve.cli.up as up
from pdserve.cli.main import main
real = up._command
def command(plan, file):
    made = real(plan, file)
    return dataclasses.replace(made, argv=[made.argv[0], {FAKE_NODE!r}, *made.argv[4:]])
up._command = command
sys.exit(main(["up", *sys.argv[1:]]))
"""


@contextmanager
def up(*arguments: str, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def report(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    return dict(json.loads(line))


def test_a_cluster_starts_says_where_it_is_and_ends_on_sigterm(tmp_path: Path) -> None:
    file = tmp_path / "ready.json"
    with up("--prefill", "2", "--decode", "1", "--both", "1", "--json", "--ready-file", str(file)) as process:
        ready = report(process)
        assert json.loads(file.read_text()) == ready
        assert [node["name"] for node in ready["nodes"]] == ["decode-0", "both-0", "prefill-0", "prefill-1"]
        assert (len(ready["prefill"]), len(ready["decode"]), len(ready["both"])) == (2, 1, 1)
        assert ready["model"] == "fake"
        process.send_signal(signal.SIGTERM)
        out, error = process.communicate()
    assert process.returncode == 0, error
    assert out == ""
    assert f"curl -N {ready['decode'][0]}/v1/chat/completions" in error
    assert error.count("drained") == 4
    assert error.rindex("[decode-0] drained") < error.index("[prefill-0] drained")
    assert not file.exists()
    assert not any(psutil.pid_exists(node["pid"]) for node in ready["nodes"])


def test_the_secret_is_shared_by_all_and_not_in_arguments() -> None:
    with up("--json") as process:
        ready = report(process)
        arguments = [psutil.Process(node["pid"]).cmdline() for node in ready["nodes"]]
        process.send_signal(signal.SIGINT)
        error = process.communicate()[1]
    assert process.returncode == 0, error
    secrets = {line.split()[-1] for line in error.splitlines() if " secret " in line}
    assert [len(secret) for secret in secrets] == [64]
    assert not any(word in secrets for words in arguments for word in words)


def test_a_node_that_dies_ends_all_with_one_cause() -> None:
    with up("--prefill", "1", "--decode", "2", env={"FAKE_NODE": "die:decode-1"}) as process:
        error = process.communicate()[1]
    assert process.returncode == 1
    assert error.splitlines()[-1] == "pdserve: error: decode-1 ended with exit status 7"


def test_nodes_that_never_become_ready_are_named() -> None:
    with up("--both", "--start-timeout", "1", env={"FAKE_NODE": "never-ready"}) as process:
        error = process.communicate()[1]
    assert process.returncode == 1
    assert error.splitlines()[-1].startswith("pdserve: error: not ready after 1 s: both-0: ")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--prefill 0 --decode 1", "each needs at least one of the other"),
        ("--prefill x", "argument --prefill"),
        ("--decode 65", "not from 0 to 64"),
        ("--role both", "unknown option --role"),
        ("--port 65535", "port 65536"),
        ("--page-size 0", "--page-size = '0': expected an integer from 1 to 1024"),
        ("--config none.toml", "cannot be read"),
    ],
)
def test_bad_usage_is_answered_in_a_line_before_anything_starts(
    words: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["up", *words.split()])
    except SystemExit as end:
        status = int(str(end.code))
    error = capsys.readouterr().err
    assert status == 2
    assert expected in error
    assert len(error.splitlines()) == 1


def test_the_configuration_of_the_source_tree_loads() -> None:
    assert _default_file() == ROOT / "conf" / "local.toml"
    load_config(_default_file())
