"""The MODULE:FUNCTION argument of commands: a user's function that returns the function to plan and its arguments."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unity.base.formatting import with_article
from unity.cli.errors import CommandError, user_code_error
from unity.optimize import OPTION_NAMES
from unity.plan.face.former_names import present_options
from unity.plan.files.plan_file import load
from unity.plan.plan import Plan

FORM = "expected MODULE:FUNCTION, a function that gives (fn, args) or (fn, args, options of unity.optimize)"
METAVAR = "MODULE:FUNCTION"


@dataclass(frozen=True)
class Model:
    """A function, its arguments, and options of `unity.optimize`."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    options: Mapping[str, Any]

    def plan(self, path: Path) -> Plan:
        """Return the plan in a file, which must be of this model.

        Raises:
            PlanError: the plan is of another model.
        """
        # argnums= is not passed, since `unity optimize` may have been called with another --argnums, or with --forward
        return load(path, self.fn, *self.args, rules=self.options.get("rules"))


def add_model(command: argparse.ArgumentParser, purpose: str) -> None:
    """Add MODULE:FUNCTION, with the purpose of the model in its help."""
    command.add_argument("model", metavar=METAVAR, help=f"{purpose}: a function that gives (fn, args) or (fn, args, options)")


def add_plan(command: argparse.ArgumentParser) -> None:
    """Add a saved plan and the model that it was made for."""
    command.add_argument("path", type=Path, metavar="FILE", help="a plan (plan.files.save, unity optimize -o)")
    add_model(command, "the model that it was made for")


def model_of(which: str) -> Model:
    """Return the model that the function on the command line returns.

    Raises:
        CommandError: the function does not exist, raises an exception, or returns something else.
    """
    result = result_of(which, FORM)
    if (
        not isinstance(result, tuple)
        or len(result) not in (2, 3)
        or not callable(result[0])
        or not isinstance(result[1], tuple | list)
    ):
        raise CommandError(f"{which}() gives {with_article(type(result).__name__)}; {FORM}")
    options = result[2] if len(result) == 3 else {}
    if not isinstance(options, Mapping):
        raise CommandError(f"{which}() gives options that are {with_article(type(options).__name__)}; {FORM}")
    options = present_options(options)
    unknown = set(options) - OPTION_NAMES
    if unknown:
        raise CommandError(f"{which}() gives the option {min(map(str, unknown))}, which unity.optimize has not; {FORM}")
    return Model(result[0], tuple(result[1]), options)


def result_of(which: str, form: str) -> Any:
    """Return the result of the function MODULE:FUNCTION, called without arguments. The current folder is searched for modules too.

    Args:
        which: MODULE:FUNCTION.
        form: the text for error messages that says what is expected.

    Raises:
        CommandError: the function does not exist, or raises an exception.
    """
    module, colon, name = which.partition(":")
    if module.endswith(".py"):
        raise CommandError(f"{which}: {form}; a module is named without .py, as in {module.removesuffix('.py')}:{name}")
    if not (module and colon and name):
        raise CommandError(f"{which}: {form}")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as problem:
        raise CommandError(f"{which}: {problem}; {form}") from None
    except Exception as problem:
        raise user_code_error(f"importing {module}", problem, _folder(module)) from problem
    if not callable(function):
        raise CommandError(f"{which} is {with_article(type(function).__name__)}; {form}")
    try:
        return function()
    except Exception as problem:
        raise user_code_error(f"{which}()", problem, _folder(module)) from problem


def _folder(module: str) -> str:
    """Return the folder of a user's module. Exceptions raised in files below it are the user's."""
    spec = importlib.util.find_spec(module)
    return str(Path(spec.origin).parent) if spec is not None and spec.origin else "."
