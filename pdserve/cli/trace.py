"""`pdserve trace`: when each of the nine steps of a request happened, and each layer of its cache."""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from pdserve.config import variables
from pdserve.errors import NotFound, PdserveError
from pdserve.observe.trace import summarise

_TIMEOUT_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request_id", metavar="REQUEST_ID", help="the id that the answer had")
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="the node that the request was sent to (default: http://127.0.0.1:8000)",
    )
    parser.add_argument("--api-key", help="where the node asks for one (default: PDSERVE_SERVER_API_KEY)")
    parser.add_argument("--json", action="store_true", help="the whole trace as JSON")


def run(arguments: argparse.Namespace) -> int:
    key = arguments.api_key or variables().get("PDSERVE_SERVER_API_KEY")
    trace = fetch(arguments.url, arguments.request_id, key)
    if arguments.json:
        json.dump(trace, sys.stdout, indent=2)
        print()
    else:
        print("\n".join(lines(trace)))
    return 0


def fetch(url: str, request_id: str, api_key: str | None = None) -> dict[str, Any]:
    """The trace from a node. Raises `NotFound` if it knows no such request, `PdserveError` if it cannot be
    asked.
    """
    if not url.startswith(("http://", "https://")):
        raise PdserveError(f"--url = {url!r}: expected http://HOST:PORT")
    where = f"{url.rstrip('/')}/pd/v1/trace/{urllib.parse.quote(request_id, safe='')}"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        request = urllib.request.Request(where, headers=headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            return dict(json.load(response))
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404:
                raise NotFound(f"{url} knows no request {request_id} (any more)") from error
            hint = "; it asks for --api-key" if error.code == 401 else ""
            raise PdserveError(f"{where} answered {error.code}{hint}") from error
    except (OSError, ValueError) as error:
        raise PdserveError(f"{where}: {getattr(error, 'reason', None) or error}") from error


def lines(trace: Mapping[str, Any]) -> list[str]:
    """A trace for people: steps and marks in the order of time, the layers of each chunk in short, the
    sums.
    """
    times = {**trace.get("steps", {}), **trace.get("marks", {})}
    known = {name: at for name, at in times.items() if at is not None}
    start = min(known.values(), default=0.0)
    out = [f"request {trace.get('request_id')} on {trace.get('node')} ({trace.get('role')})"]
    if trace.get("peer"):
        out.append(f"prefilled by {trace['peer']}")
    for name, at in sorted(known.items(), key=lambda item: item[1]):
        out.append(f"  {(at - start) * 1e3:10.2f} ms  {name}")
    chunks: dict[int, list[Mapping[str, Any]]] = {}
    for row in trace.get("layers", ()):
        chunks.setdefault(row["chunk"], []).append(row)
    for chunk, rows in sorted(chunks.items()):
        spans = "".join(_span(rows, what, start) for what in ("ready", "posted", "counted"))
        out.append(f"chunk {chunk}: {len(rows)} layers{spans}")
    out += [f"  {name} = {value:.4g}" for name, value in summarise(trace).items() if value is not None]
    return out


def _span(rows: list[Mapping[str, Any]], what: str, start: float) -> str:
    at = [row[what] for row in rows if row.get(what) is not None]
    if not at:
        return ""
    return f", {what} {(min(at) - start) * 1e3:.2f} to {(max(at) - start) * 1e3:.2f} ms"
