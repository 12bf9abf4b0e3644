"""The demo: one chat through a prefill node and a decode node, its figures, and the same chat on a single
node.

Started by `tools/demo`. Exit status 0 only if both answers were had, are equal, and every figure is known.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from pdserve.cli.up import curl_line
from pdserve.observe.trace import summarise

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache"

PROMPT = """\
Here is how a lighthouse of the nineteenth century worked. At the top of the tower a lamp burned oil, and \
around the lamp stood a lens taller than a man. The lens was not one piece of glass but hundreds of prisms \
in a brass frame, each cut to bend the light of the lamp into one flat beam. A clockwork turned the lens, \
so that a sailor far out saw a flash, then darkness, then a flash again, and the time between two flashes \
told him which lighthouse it was. The clockwork was driven by a weight that sank down the middle of the \
tower, and every few hours the keeper wound it up again. He trimmed the wick, carried up the oil, polished \
the glass, and wrote down the weather. When fog hid the beam he fired a cannon or rang a bell instead. \
Ships carried a book that listed every light along the coast: its place, its height above the sea, its \
colour, and the seconds from one flash to the next, so that a watchman with a pocket clock could look up \
what he saw. Most keepers lived in the tower with their families, and some of them did not set foot on the \
mainland for months.

Why did each lighthouse flash in a rhythm of its own? Answer in two sentences."""

FIGURES = (
    ("prompt tokens", "prompt_tokens", "{:,}"),
    ("output tokens", "output_tokens", "{:,}"),
    ("time to first token", "ttft_ms", "{:,.0f} ms"),
    ("time between tokens", "itl_ms", "{:,.1f} ms"),
    ("KV cache moved", "kv_bytes", "{:,} bytes"),
    ("pages moved", "kv_pages", "{:,}"),
    ("transfer", "transfer_gbps", "{:.3f} GB/s"),
    ("hidden behind compute", "hidden_share", "{:.0%} of the transfer"),
)


class DemoError(Exception):
    """The demo cannot show what it is for; one line says why."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A streamed chat. `id` is the key of its trace."""

    id: str
    text: str
    finish_reason: str | None


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/demo", description=__doc__)
    parser.add_argument("--prompt", default=PROMPT, help="what to ask (default: a page about lighthouses)")
    parser.add_argument(
        "--max-tokens", type=int, default=80, help="length of the answer at most (default: 80)"
    )
    parser.add_argument(
        "--model", default="default", help="a model directory (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--keep", action="store_true", help="go on serving until Ctrl-C")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    arguments = parser.parse_args(words)
    if arguments.max_tokens < 1:
        parser.error(f"--max-tokens {arguments.max_tokens}: expected at least 1")
    return arguments


class Clusters:
    """The `pdserve up` processes of this demo. Each leads a session of its own, so that Ctrl-C reaches only
    us.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._running: list[asyncio.subprocess.Process] = []

    def hurry(self) -> None:
        """A second SIGTERM makes `up` kill its nodes."""
        for process in self._running:
            process.terminate()

    @asynccontextmanager
    async def up(self, title: str, name: str, *shape: str) -> AsyncIterator[dict[str, Any]]:
        """What `up` reports once all its nodes are ready. On exit it has ended, with its nodes.

        The nodes compute batch-invariantly with one thread each: then equal texts are no luck.
        """
        say(f"starting {title} ...")
        began = time.monotonic()
        log = CACHE / f"demo-{name}.log"
        process = await self._start(log, shape)
        try:
            assert process.stdout is not None
            line = await process.stdout.readline()
            if not line:
                raise DemoError(f"{title} did not start")
            say(f"{title} ready after {time.monotonic() - began:.1f} s")
            yield json.loads(line)
        except (DemoError, aiohttp.ClientError) as error:
            raise DemoError(f"{error or type(error).__name__}\n{log} ends with:\n{tail(log)}") from error
        finally:
            if process.returncode is None:
                process.terminate()
            status = await process.wait()
            self._running.remove(process)
        if status != 0:
            raise DemoError(f"{title} ended with status {status}\n{log} ends with:\n{tail(log)}")

    async def _start(self, log: Path, shape: Sequence[str]) -> asyncio.subprocess.Process:
        words = ("up", *shape, "--json", "--model", self._model, "--enable-batch-invariant", "--threads", "1")
        with log.open("w") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "pdserve.cli.main", *words, "--parent-pid", str(os.getpid())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )
        self._running.append(process)
        return process


async def ask(
    session: aiohttp.ClientSession, url: str, model: str, options: argparse.Namespace, show: bool
) -> Answer:
    """Stream one greedy chat from a node; `show` prints it as it comes."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": options.prompt}],
        "max_tokens": options.max_tokens,
        "temperature": 0,
        "stream": True,
    }
    parts: list[str] = []
    identity, finish = "", None
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise DemoError(f"{url} answered {response.status}: {(await response.text())[:500]}")
        async for event in events(response):
            if "error" in event:
                raise DemoError(f"{url} broke off: {event['error'].get('message')}")
            identity = event["id"]
            for choice in event["choices"]:
                text = choice["delta"].get("content") or ""
                finish = choice["finish_reason"] or finish
                parts.append(text)
                if show:
                    print(text, end="", flush=True)
    if show:
        print("\n")
    if finish is None:
        raise DemoError(f"{url} ended the stream without a finish reason")
    return Answer(identity, "".join(parts), finish)


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each server-sent event up to [DONE]."""
    async for raw in response.content:
        line = raw.strip()
        if line == b"data: [DONE]":
            return
        if line.startswith(b"data: "):
            yield json.loads(line[6:])
    raise DemoError("the stream ended without [DONE]")


async def figures(session: aiohttp.ClientSession, url: str, answer: Answer) -> dict[str, Any]:
    """The figures of a request, from the trace that its decode node recorded."""
    async with session.get(f"{url}/pd/v1/trace/{answer.id}") as response:
        if response.status != 200:
            raise DemoError(f"no trace of {answer.id}: {response.status} {(await response.text())[:500]}")
        numbers: dict[str, Any] = dict(summarise(await response.json()))
    missing = [key for _, key, _ in FIGURES if numbers.get(key) is None]
    if missing:
        raise DemoError(f"the trace of {answer.id} does not tell {', '.join(missing)}")
    async with session.get(f"{url}/health") as response:
        numbers["provider"] = (await response.json()).get("detail", {}).get("provider")
    if numbers["provider"] is None:
        raise DemoError(f"{url}/health does not tell the fabric's provider")
    return {key: numbers[key] for key in (*(key for _, key, _ in FIGURES), "provider")}


def table(numbers: dict[str, Any], single: dict[str, Any]) -> str:
    """The figures beside those of the single node, for people. It moves nothing, so it has fewer."""
    rows = [("", "prefill + decode", "single node")]
    for title, key, form in FIGURES:
        alone = form.format(single[key]) if key in single else "-"
        rows.append((title, form.format(numbers[key]), alone))
    rows.append(("provider", f"libfabric {numbers['provider']}", "-"))
    rows.append(("same text", "yes" if numbers["equal_to_single"] else "NO", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(f"  {a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}".rstrip() for a, b, c in rows)


async def single_figures(session: aiohttp.ClientSession, url: str, answer: Answer) -> dict[str, Any]:
    async with session.get(f"{url}/pd/v1/trace/{answer.id}") as response:
        if response.status != 200:
            return {}
        numbers = summarise(await response.json())
    keys = ("prompt_tokens", "output_tokens", "ttft_ms", "itl_ms")
    return {key: numbers[key] for key in keys if numbers.get(key) is not None}


class Demo:
    """One run. `interrupt` is for signals, `run` for everything else."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.clusters = Clusters(options.model)
        self._serving = False
        self._interrupted = asyncio.Event()
        self._work: asyncio.Task[Any] | None = None

    def interrupt(self) -> None:
        """The first signal ends the serving of --keep, or cancels what is under way; the second makes
        haste.
        """
        if self._interrupted.is_set():
            self.clusters.hurry()
        elif not self._serving and self._work is not None:
            self._work.cancel()
        self._interrupted.set()

    async def run(self) -> bool:
        """Whether everything worked and the texts are equal."""
        self._work = asyncio.current_task()
        options = self.options
        async with AsyncExitStack() as stack:
            limit = aiohttp.ClientTimeout(total=600, sock_read=300)
            session = await stack.enter_async_context(aiohttp.ClientSession(timeout=limit))
            split = await stack.enter_async_context(
                self.clusters.up(
                    "a prefill node and a decode node", "split", "--prefill", "1", "--decode", "1"
                )
            )
            url, model = split["decode"][0], split["model"]
            say(f"asking {model} on {url}:\n")
            answer = await ask(session, url, model, options, show=True)
            numbers = await figures(session, url, answer)
            async with self.clusters.up("a single node, to compare", "single", "--both", "1") as alone:
                reference = await ask(session, alone["both"][0], alone["model"], options, show=False)
                single = await single_figures(session, alone["both"][0], reference)
            equal = (answer.text, answer.finish_reason) == (reference.text, reference.finish_reason)
            numbers["equal_to_single"] = equal
            print("\n" + table(numbers, single) + "\n")
            if options.json is not None:
                options.json.write_text(json.dumps(numbers, indent=2) + "\n")
            if not equal:
                say(f"the single node said instead:\n{reference.text}")
            if options.keep:
                say(f"serving; try:\n\n{curl_line(url, model)}\n\nCtrl-C ends it")
                self._serving = True
                await self._interrupted.wait()
            return equal


async def until_signalled(options: argparse.Namespace) -> int:
    """The demo's exit status."""
    demo = Demo(options)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, demo.interrupt)
    try:
        return 0 if await demo.run() else 1
    except asyncio.CancelledError:
        say("stopped")
        return 130


def tail(file: Path, lines: int = 12) -> str:
    return "\n".join("  | " + line for line in file.read_text(errors="replace").splitlines()[-lines:])


def say(text: str) -> None:
    print(f"demo: {text}", file=sys.stderr, flush=True)


def main() -> int:
    options = parse(sys.argv[1:])
    CACHE.mkdir(exist_ok=True)
    try:
        return asyncio.run(until_signalled(options))
    except (DemoError, aiohttp.ClientError, TimeoutError) as error:
        say(f"failed: {error or type(error).__name__}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
