"""`pdserve doctor`: what this machine, its network and its peers are like, and what is wrong with them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pdserve.cli.flags import FLAGS, add_config_flags, settings
from pdserve.config import load_config, variables
from pdserve.errors import ConfigError, PdserveError

_NOT_HERE = tuple(key for key in FLAGS if not key.startswith("fabric.") or key == "fabric.self_test")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exit status: 0 when all is well, 1 with one sentence a problem, 2 for bad usage."
    add_config_flags(parser, without=_NOT_HERE)
    parser.add_argument(
        "--prefill-peer",
        action="append",
        default=[],
        metavar="URL",
        help="ask this prefill node too, beside those of the configuration (repeatable)",
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="place N ranks (default: one a GPU, or one)")
    parser.add_argument("--no-measure", action="store_true", help="measure nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as one JSON object too")
    parser.add_argument(
        "--sysfs", type=Path, default=Path("/sys"), metavar="DIR", help="where sysfs is (default: /sys)"
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.ranks is not None and not 1 <= arguments.ranks <= 4096:
        raise ConfigError(f"--ranks = {arguments.ranks}: expected an integer from 1 to 4096", param="ranks")
    for url in arguments.prefill_peer:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--prefill-peer = {url!r}: expected http://HOST:PORT", param="prefill_peer")
    config = load_config(arguments.config, variables(), settings(arguments))
    urls = dict.fromkeys(
        [*config.cluster.prefill_peers, *(url.rstrip("/") for url in arguments.prefill_peer)]
    )
    # Imported late: bad usage and bad configuration are answered at once.
    import uvloop

    from pdserve.node.doctor.facts import fabric_options, look, probe
    from pdserve.node.doctor.findings import problems
    from pdserve.node.doctor.report import as_json, as_lines

    fabric_options(config)
    facts = look(config, arguments.ranks, arguments.sysfs)
    facts = uvloop.run(probe(facts, list(urls), seconds=0.0 if arguments.no_measure else 0.3))
    print("\n".join(as_lines(facts)))
    if arguments.json is not None:
        try:
            arguments.json.write_text(json.dumps(as_json(facts), indent=2) + "\n")
        except OSError as error:
            raise PdserveError(f"--json = {arguments.json}: cannot be written: {error.strerror}") from error
    return 1 if problems(facts) else 0
