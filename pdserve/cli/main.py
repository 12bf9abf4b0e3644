"""`pdserve`: the commands, each imported only when it is asked for.

Exit status: 0 when all went well, 1 when something failed, 2 for bad usage or configuration. What goes
wrong is said in one line; only a defect of pdserve itself prints a traceback.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from pdserve import __version__
from pdserve.errors import ConfigError, PdserveError

COMMANDS = {
    "serve": "run one node",
    "up": "run a cluster of nodes on this machine",
    "doctor": "say what this machine, its network and its peers are like, and what is wrong with them",
    "trace": "show when each step and layer of a request happened",
    "config": "check a configuration and print it",
    "version": "print the version",
}
"""Each command but `version` is the module `pdserve.cli.<command>` with `add_arguments(parser)` and
`run(arguments) -> int`."""


class Parser(argparse.ArgumentParser):
    """An argument parser that refuses abbreviations and names the nearest option."""

    def __init__(self, **options: object) -> None:
        super().__init__(allow_abbrev=False, **options)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def unknown(self, words: Sequence[str]) -> NoReturn:
        word = words[0].partition("=")[0]
        known = [name for action in self._actions for name in action.option_strings]
        near = difflib.get_close_matches(word, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        self.error(f"unknown {'option' if word.startswith('-') else 'argument'} {word}{hint}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. `argv`: the words after the program's name."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(
        prog="pdserve",
        description="Serve large language models with prefill and decode on separate nodes.",
        epilog="pdserve COMMAND --help tells more.",
    )
    parser.add_argument("--version", action="version", version=f"pdserve {__version__}")
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        near = difflib.get_close_matches(words[0], COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(COMMANDS)}"
        parser.error(f"unknown command {words[0]!r}; {hint}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen: Parser | None = None
    for name, about in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
        if words and words[0] == name:
            chosen = command
            if name != "version":
                importlib.import_module(f"pdserve.cli.{name}").add_arguments(command)
    arguments, rest = parser.parse_known_args(words)
    if rest:
        (chosen or parser).unknown(rest)
    if arguments.command == "version":
        print(f"pdserve {__version__}")
        return 0
    return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    try:
        return int(importlib.import_module(f"pdserve.cli.{arguments.command}").run(arguments))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone; the interpreter must not try to flush it once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except BaseException as error:
        if isinstance(error, SystemExit | GeneratorExit):
            raise
        cause = clear_cause(error)
        if not isinstance(cause, PdserveError):
            traceback.print_exception(error)
        print(f"pdserve: error: {one_line(cause)}", file=sys.stderr)
        return 2 if isinstance(cause, ConfigError) else 1


def clear_cause(error: BaseException) -> BaseException:
    """The one error to show of a group: the first of ours, else the first that is not a cancellation."""
    leaves = list(_leaves(error))
    ours = [leaf for leaf in leaves if isinstance(leaf, PdserveError)]
    others = [leaf for leaf in leaves if isinstance(leaf, Exception)]
    return (ours or others or leaves)[0]


def one_line(error: BaseException) -> str:
    """An error as one line, with its type where it is not ours."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, PdserveError) else f"{type(error).__name__}: {text}"


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


if __name__ == "__main__":
    sys.exit(main())
