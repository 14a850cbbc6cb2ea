"""The command line: `unity diff …`, `unity show …`, `unity rules …`, `unity profile …`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from unity.cli import diff, profile, rules, show
from unity.pcg.errors import UnityError


def parser() -> argparse.ArgumentParser:
    """All commands."""
    about = "Finds, proves and runs the best way to train a JAX model on many devices."
    top = argparse.ArgumentParser(prog="unity", description=about)
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    diff.add_arguments(commands.add_parser("diff", help="say what is different between two saved plans, or two graphs"))
    show.add_arguments(commands.add_parser("show", help="print the graph of a saved plan, or a graph"))
    rules.add_commands(commands.add_parser("rules", help="generate, verify, show and import substitution rules"))
    profile.add_arguments(commands.add_parser("profile", help="measure a model's operators on the devices that are here"))
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. The exit status: 0, or 1 where something is wrong, which is said on stderr."""
    options = parser().parse_args(arguments)
    try:
        return options.run(options)
    except UnityError as problem:
        print(f"unity: {problem}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that nothing fails where Python flushes at its end
        return 141
    except KeyboardInterrupt:
        print("unity: interrupted; the same command goes on where this one stopped", file=sys.stderr)
        return 130
