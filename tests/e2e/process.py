"""A node as a process of its own, which a test may stop, continue and kill."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from pdserve.node.node import Node
from tests.e2e.cluster import SECRET
from tests.e2e.seams import until

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class NodeProcess:
    """`pdserve serve`. A context manager; in the end the process is gone, whatever state it was in."""

    def __init__(self, role: str, model: Path, port: int, log: Path, *peers: str, **flags: Any) -> None:
        """`flags`: of the command line, with underscores. What the node says goes to `log`."""
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        words = [f"--prefill-peer={peer}" for peer in peers]
        for name, value in {"served_model_name": "m", "page_size": 16, **flags}.items():
            words += [f"--{name.replace('_', '-')}", str(value)]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "pdserve.cli.main", "serve", "--enable-batch-invariant"),
                    *("--role", role, "--model", str(model), "--port", str(port)),
                    *("--parent-pid", str(os.getpid())),
                    *words,
                ],
                cwd=ROOT,
                env={**os.environ, "PDSERVE_CLUSTER_SECRET": SECRET},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    async def answers(self, http: aiohttp.ClientSession, beside: Node) -> None:
        """Wait until it serves. `beside`: a node of this process, to wait with."""
        while True:
            assert self.process.poll() is None, self.log.read_text()
            try:
                async with http.get(self.url + "/live") as response:
                    if response.status == 200 and b'"ready":true' in await response.read():
                        return
            except aiohttp.ClientError:
                pass
            await beside.changed()

    @property
    def worker(self) -> psutil.Process:
        """Its rank's process."""
        (worker,) = [
            child
            for child in psutil.Process(self.process.pid).children()
            if "pdserve.worker" in child.cmdline()
        ]
        return worker

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def ended(self, beside: Node) -> int:
        """Wait for its end; the exit status."""
        await until(lambda: self.process.poll() is not None, beside)
        return self.process.wait()

    def __enter__(self) -> NodeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
