"""`pdserve config check`: what a node would run with, or why it would not."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pdserve.config import load_config, render, variables, warnings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    about = "check a file together with PDSERVE_* and print the result as TOML, secrets redacted"
    check = actions.add_parser("check", help=about, description=about[0].upper() + about[1:] + ".")
    check.add_argument(
        "file", type=Path, nargs="?", metavar="FILE", help="TOML file; none: defaults and PDSERVE_*"
    )


def run(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.file, variables())
    sys.stdout.write(render(config))
    for warning in warnings(config):
        print(f"pdserve: warning: {warning}", file=sys.stderr)
    return 0
