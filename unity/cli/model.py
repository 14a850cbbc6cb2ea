"""MODULE:FUNCTION, as every command takes it: a function of the user's that gives what to plan, and its arguments."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unity.cli.errors import CommandError, blamed

if TYPE_CHECKING:
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
        """The plan of this model that a file holds. Raises PlanError if it is of another one."""
        import unity

        options = {name: self.options[name] for name in ("argnums", "rules") if name in self.options}
        return unity.load(path, self.fn, *self.args, **options)


def add_model(command: argparse.ArgumentParser, what: str) -> None:
    """Adds MODULE:FUNCTION. `what` says what is done with it."""
    command.add_argument("model", metavar=METAVAR, help=f"{what}: a function that gives (fn, args) or (fn, args, options)")


def add_plan(command: argparse.ArgumentParser) -> None:
    """Adds a saved plan and the model that it was made for."""
    command.add_argument("path", type=Path, metavar="FILE", help="a plan (plan.save, unity optimize -o)")
    add_model(command, "the model that it was made for")


def model_of(which: str) -> Model:
    """Calls the function that the command line names. Raises CommandError where there is none, or it gives something else."""
    given = called(which, FORM)
    if not isinstance(given, tuple) or len(given) not in (2, 3) or not callable(given[0]) or not isinstance(given[1], tuple | list):
        raise CommandError(f"{which}() gives a {type(given).__name__}; {FORM}")
    options = given[2] if len(given) == 3 else {}
    if not isinstance(options, Mapping):
        raise CommandError(f"{which}() gives options that are a {type(options).__name__}; {FORM}")
    unknown = set(options) - _known()
    if unknown:
        raise CommandError(f"{which}() gives the option {min(map(str, unknown))}, which unity.optimize has not; {FORM}")
    return Model(given[0], tuple(given[1]), options)


def _known() -> set[str]:
    from unity.optimize import optimize

    return {name for name, p in inspect.signature(optimize).parameters.items() if p.kind is p.KEYWORD_ONLY}


def called(which: str, form: str) -> Any:
    """What the function MODULE:FUNCTION gives, called without arguments. Modules are found in the current folder too."""
    module, colon, name = which.partition(":")
    if not (module and colon and name):
        raise CommandError(f"{which}: {form}")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as problem:
        raise CommandError(f"{which}: {problem}; {form}") from None
    except Exception as problem:
        raise blamed(f"importing {module}", problem, _folder(module)) from problem
    if not callable(found):
        raise CommandError(f"{which} is a {type(found).__name__}; {form}")
    try:
        return found()
    except Exception as problem:
        raise blamed(f"{which}()", problem, _folder(module)) from problem


def _folder(module: str) -> str:
    """Where a module of the user's lies: what goes wrong below it is theirs."""
    spec = importlib.util.find_spec(module)
    return str(Path(spec.origin).parent) if spec is not None and spec.origin else "."
