"""Stands in for `pdserve serve` where only `pdserve up` is under test: the same arguments, two routes, no
model.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from aiohttp import web

from pdserve.cli.parent import die_with_parent
from pdserve.config import load_config, variables


async def models(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "fake"}]})


async def health(request: web.Request) -> web.Response:
    ready = "never-ready" not in os.environ.get("FAKE_NODE", "")
    return web.Response(status=200 if ready else 503, text="" if ready else "loading weights")


async def main(arguments: list[str]) -> None:
    config = load_config(Path(arguments[arguments.index("--config") + 1]), variables())
    name = config.cluster.node_id
    sys.stdout.write(f"secret {config.cluster.secret}\n")
    if f"die:{name}" in os.environ.get("FAKE_NODE", ""):
        sys.exit(7)
    app = web.Application()
    app.add_routes([web.get("/health", health), web.get("/v1/models", models)])
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, config.server.host, config.server.port).start()
    await stop.wait()
    await runner.cleanup()
    sys.stdout.write("drained\n")


if __name__ == "__main__":
    die_with_parent(int(sys.argv[sys.argv.index("--parent-pid") + 1]))
    asyncio.run(main(sys.argv[1:]))
