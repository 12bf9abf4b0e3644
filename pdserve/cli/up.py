"""`pdserve up`: a cluster of nodes on this machine, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pdserve
from pdserve.cli.cluster import NodePlan, count_nodes, plan_cluster
from pdserve.cli.flags import add_config_flags, settings
from pdserve.cli.parent import die_with_parent
from pdserve.cli.supervisor import Child, Command, Stop, supervise
from pdserve.config import NodeConfig, render, resolve, secret_variables, variables, warnings
from pdserve.config.environment import child_environment
from pdserve.errors import ConfigError, PdserveError

if TYPE_CHECKING:
    import aiohttp

_HEALTH_INTERVAL_S = 0.1
_HEALTH_TIMEOUT_S = 5.0


class StartTimeout(PdserveError):
    """A node did not become ready in time."""

    code = "start_timeout"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    count = "NUMBER"
    parser.add_argument("--prefill", type=_count, metavar=count, help="prefill nodes (default: 1)")
    parser.add_argument("--decode", type=_count, metavar=count, help="decode nodes (default: 1)")
    parser.add_argument(
        "--both",
        type=_count,
        metavar=count,
        nargs="?",
        const=1,
        default=0,
        help="nodes that do all by themselves (default: 0; alone: 1, and no others)",
    )
    parser.add_argument("--json", action="store_true", help="once ready, print a line of JSON")
    parser.add_argument("--ready-file", type=Path, metavar="FILE", help="once ready, write that JSON to FILE")
    parser.add_argument(
        "--start-timeout",
        type=float,
        default=900.0,
        metavar="SECONDS",
        help="how long the nodes may take to become ready (default: 900)",
    )
    parser.epilog = (
        "--port is the first node's port, the others follow; without it free ports are taken. "
        "--config defaults to conf/local.toml of the source tree."
    )
    add_config_flags(parser, without=("engine.role", "cluster.prefill_peers"))
    parser.add_argument("--parent-pid", type=int, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Start the nodes, say where they are, and wait for a signal: the first asks them to end, the second
    kills.
    """
    if arguments.parent_pid is not None:
        die_with_parent(arguments.parent_pid)
    config, sources = resolve(arguments.config or _default_file(), variables(), settings(arguments))
    if config.cluster.prefill_peers or config.engine.role != "both":
        raise ConfigError("engine.role and cluster.prefill_peers have no place here: up decides them itself")
    counts = count_nodes(arguments.prefill, arguments.decode, arguments.both)
    plans = plan_cluster(
        config,
        counts,
        ports=_ports(config.server.host, counts.total, config.server.port if "server.port" in sources else 0),
        cpus=sorted(os.sched_getaffinity(0)),
        secret=secrets.token_hex(32),
        fixed=frozenset(sources),
    )
    for warning in warnings(plans[0].config):
        _say(f"warning: {warning}")
    import uvloop

    with _files(plans) as files:
        return uvloop.run(_run(arguments, plans, files))


async def _run(arguments: argparse.Namespace, plans: Sequence[NodePlan], files: dict[str, Path]) -> int:
    stop = Stop()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)

    async def started(children: Sequence[Child]) -> None:
        await _until_healthy(plans, arguments.start_timeout)
        report = await _report(plans, children)
        if arguments.ready_file is not None:
            await loop.run_in_executor(None, _write_whole, arguments.ready_file, json.dumps(report) + "\n")
        _announce(report, plans[0].config, as_json=arguments.json)

    try:
        await supervise(
            [_command(plan, files[plan.name]) for plan in plans],
            stop=stop,
            shutdown_timeout=plans[0].config.server.shutdown_timeout + 5.0,
            write=lambda name, line: _say(line, name),
            started=started,
        )
    finally:
        if arguments.ready_file is not None:
            arguments.ready_file.unlink(missing_ok=True)
    return 130 if stop.now.is_set() else 0


def _count(text: str) -> int:
    number = int(text)
    if not 0 <= number <= 64:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 64")
    return number


def _default_file() -> Path | None:
    """conf/local.toml of the source tree that this package runs from; None where there is none (a wheel)."""
    file = Path(pdserve.__file__).parents[1] / "conf" / "local.toml"
    return file if file.is_file() else None


def _ports(host: str, count: int, first: int) -> list[int]:
    """`count` ports nobody listens on: from `first` on, or where it is 0, as the kernel gives them.

    Between here and the node's own bind another process may take one; that node then says so and ends.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as held:
        ports = []
        for index in range(count):
            listener = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            port = first + index if first else 0
            try:
                listener.bind((host, port))
            except (OSError, OverflowError) as error:
                reason = getattr(error, "strerror", None) or error
                message = f"port {port} of {host} cannot be had: {reason}"
                raise ConfigError(message, param="server.port") from error
            ports.append(int(listener.getsockname()[1]))
        return ports


@contextlib.contextmanager
def _files(plans: Sequence[NodePlan]) -> Iterator[dict[str, Path]]:
    """Each node's configuration as a file, without secrets, in a directory that goes when we do."""
    with tempfile.TemporaryDirectory(prefix="pdserve-up-") as directory:
        files = {plan.name: Path(directory) / f"{plan.name}.toml" for plan in plans}
        for plan in plans:
            files[plan.name].write_text(render(plan.config, for_child=True))
        yield files


def _command(plan: NodePlan, file: Path) -> Command:
    """A prefill node stops last: requests that decode nodes finish while they drain may still need it."""
    module = [sys.executable, "-m", "pdserve.cli.main"]
    return Command(
        name=plan.name,
        argv=[*module, "serve", "--config", str(file), "--parent-pid", str(os.getpid())],
        env=child_environment({"PYTHONUNBUFFERED": "1", **secret_variables(plan.config)}),
        stage=1 if plan.role == "prefill" else 0,
    )


async def _until_healthy(plans: Sequence[NodePlan], timeout: float) -> None:
    """Returns when every node's /health has said 200. Raises `StartTimeout` with each laggard's own words."""
    import aiohttp

    waiting = {plan.name: "no answer yet" for plan in plans}

    async def wait_for(plan: NodePlan, session: aiohttp.ClientSession) -> None:
        while True:
            waiting[plan.name] = await _health(session, plan.url)
            if not waiting[plan.name]:
                del waiting[plan.name]
                return
            await asyncio.sleep(_HEALTH_INTERVAL_S)

    limit = aiohttp.ClientTimeout(total=_HEALTH_TIMEOUT_S)
    try:
        async with (
            asyncio.timeout(timeout),
            aiohttp.ClientSession(timeout=limit) as session,
            asyncio.TaskGroup() as group,
        ):
            for plan in plans:
                group.create_task(wait_for(plan, session), name=f"{plan.name} health")
    except TimeoutError:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in waiting.items())
        raise StartTimeout(f"not ready after {timeout:g} s: {reasons}") from None


async def _health(session: aiohttp.ClientSession, url: str) -> str:
    """Empty if the node is ready, else why not."""
    import aiohttp

    try:
        async with session.get(f"{url}/health") as response:
            if response.status == 200:
                return ""
            text = await response.text()
            with contextlib.suppress(ValueError, KeyError, TypeError):
                text = str(json.loads(text)["reason"])
            return f"/health says {response.status} {text[:500]}"
    except TimeoutError:
        return "/health does not answer"
    except aiohttp.ClientError as error:
        return str(error)


async def _report(plans: Sequence[NodePlan], children: Sequence[Child]) -> dict[str, Any]:
    """What a program wants to know: urls by role, processes, and the name clients ask for."""
    report: dict[str, Any] = {
        "pid": os.getpid(),
        "nodes": [
            {"name": plan.name, "role": plan.role, "url": plan.url, "pid": child.pid}
            for plan, child in zip(plans, children, strict=True)
        ],
        "model": await _served_name(plans[0]),
    }
    for role in ("prefill", "decode", "both"):
        report[role] = [plan.url for plan in plans if plan.role == role]
    return report


async def _served_name(plan: NodePlan) -> str:
    import aiohttp

    key = plan.config.server.api_key
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limit = aiohttp.ClientTimeout(total=_HEALTH_TIMEOUT_S)
    async with (
        aiohttp.ClientSession(timeout=limit, headers=headers) as session,
        session.get(f"{plan.url}/v1/models") as response,
    ):
        response.raise_for_status()
        return str((await response.json())["data"][0]["id"])


def _announce(report: dict[str, Any], config: NodeConfig, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report), flush=True)
    for node in report["nodes"]:
        _say(f"{node['name']:<12} {node['url']}  (pid {node['pid']})")
    _say("ready; try:")
    _say(curl_line(report["nodes"][0]["url"], report["model"], config.server.api_key is not None))
    _say("Ctrl-C ends all nodes")


def curl_line(url: str, model: str, with_key: bool = False) -> str:
    """A command that streams a chat from `url`."""
    key = " -H 'Authorization: Bearer '\"$KEY\"" if with_key else ""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}], "stream": True})
    return f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"


def _say(line: str, name: str = "up") -> None:
    """People read standard error; standard output is for programs."""
    print(f"[{name}] {line}", file=sys.stderr, flush=True)


def _write_whole(path: Path, text: str) -> None:
    """Appear at once: who waits for the file never reads half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)
