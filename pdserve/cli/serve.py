"""`pdserve serve`: one node, until it is told to stop."""

from __future__ import annotations

import argparse
import sys

from pdserve.cli.flags import add_config_flags, settings
from pdserve.cli.parent import die_with_parent
from pdserve.config import load_config, variables, warnings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_flags(parser)
    parser.add_argument("--parent-pid", type=int, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; the node itself drains on them and returns."""
    if arguments.parent_pid is not None:
        die_with_parent(arguments.parent_pid)
    config = load_config(arguments.config, variables(), settings(arguments))
    for warning in warnings(config):
        print(f"pdserve: warning: {warning}", file=sys.stderr)
    # Imported late: bad usage and bad configuration are answered at once.
    import uvloop

    from pdserve.node.service import run_node

    uvloop.run(run_node(config))
    return 0
