"""The command line: `unity optimize …`, `unity explain …` and the others, each a module of `unity.cli.commands`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from unity.base.errors import UnityError
from unity.base.installation import VERSION
from unity.cli.commands import (
    check,
    completion,
    diff,
    explain,
    export,
    machine,
    optimize,
    profile,
    report,
    rules,
    show,
    simulate,
)
from unity.cli.help_format import HelpFormatter, UnityParser

COMMANDS: dict[str, ModuleType] = {
    "optimize": optimize,
    "explain": explain,
    "show": show,
    "diff": diff,
    "check": check,
    "simulate": simulate,
    "report": report,
    "export": export,
    "profile": profile,
    "machine": machine,
    "rules": rules,
    "completion": completion,
}
ABOUT = "Finds, proves and runs the best way to train a JAX model on many devices."
EPILOG = """\
MODULE:FUNCTION is a function of yours, in a module that Python can import from the current folder. It is called without arguments \
and returns the function to plan, its arguments (arrays or jax.ShapeDtypeStruct) and, if you like, options of unity.optimize:

    def example():
        return loss, (params, batch), {"optimizer_slots": 1}

exit status:
  0    done; the answer is yes
  1    the answer is no (plans differ, a check disagrees, a rule is not
       proved, no plan fits), or an error, which stderr explains
  2    the command line is invalid; for diff and check, whose 1 is an
       answer, also any other error
  130  interrupted
  141  the reader of a pipe closed it

Results are printed on stdout, with --json as data. Progress is shown on stderr, on a terminal or where devices are measured.

examples:
  unity optimize mymodel:example --machine dgx-h100 -o plan.json
  unity explain plan.json
  unity check plan.json mymodel:example --devices 8
"""
WRONG = 1


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    top = UnityParser(prog="unity", description=ABOUT, epilog=EPILOG, formatter_class=HelpFormatter)
    top.set_defaults(top=top)
    top.add_argument("--version", action="version", version=f"unity {VERSION}")
    commands = top.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, formatter_class=HelpFormatter)
        module.add_arguments(command)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status. Errors are printed on stderr and have a status that the command chooses."""
    options = parser().parse_args(arguments)
    try:
        return options.run(options)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout at exit, which must not fail
        return 141
    except KeyboardInterrupt:
        print("unity: interrupted; the same command goes on where this one stopped", file=sys.stderr)
        return 130
    except UnityError as problem:
        print(f"unity: {problem}", file=sys.stderr)
    except OSError as problem:
        print(f"unity: {problem.filename}: {problem.strerror} (docs: command-line#in-scripts)", file=sys.stderr)
    return getattr(options, "wrong", WRONG)
