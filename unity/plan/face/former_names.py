"""Former names of attributes, and former options of `unity.optimize`: they work as before, with a DeprecationWarning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

from unity.constraints import Constraint, keep_shardings
from unity.plan.further_options import PipelineShape
from unity.plan.stream import Stream

P = ParamSpec("P")
T = TypeVar("T")

NAMESPACES = {
    "program": (
        "applications", "branching", "check_derivation", "check_parallelization", "joining", "original", "packing",
        "parallelization", "pcg", "pipelining", "recomputing", "rewriting", "serial", "transformations",
    ),
    "inspect": (
        "abstract_mesh", "bound", "compiler_options", "diff", "gap", "machine", "memory_timeline", "mesh", "search_seconds",
        "simulate", "spec_rules", "to_json", "tried",
    ),
    "files": ("export", "report", "save"),
    "shard": ("placement", "placement_on"),
}  # fmt: skip
MEMBERS = {name: f"{space}.{name}" for space, names in NAMESPACES.items() for name in names} | {
    "shard_local": "shard.local",
    "shard_state": "shard.state",
    "shardings_like": "shard.shardings",
    "unshard": "shard.unpack",
}
FORMER = {  # by the word for the owner in a warning
    "unity": {"Flight": "plan.stream.Flight", "Stream": "plan.stream.Stream"},
    "unity.explain": {"blocked": "tables.blocked"},
    "plan": MEMBERS,
    "step": {"place": "shard"},
}


def former_member(owner: Any, word: str, name: str) -> Any:
    """Return the attribute that replaces one of a former name. Raises AttributeError if the owner never had such an attribute.

    Args:
        owner: a package, a plan or a training step.
        word: the word for the owner, a key of `FORMER`.
        name: the former name.
    """
    if (word, name) == ("plan", "stream"):
        _warn("plan.stream", "unity.plan.stream.Stream(plan)", stacklevel=3)
        return vars(owner).setdefault(name, Stream(owner))  # its step is compiled once
    if name not in FORMER[word]:
        return object.__getattribute__(owner, name)  # raises the error that led here
    present = FORMER[word][name]
    _warn(f"{word}.{name}", f"{word}.{present}", stacklevel=3)
    return attrgetter(present)(owner)


def accepting_former_options(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function that takes the options of `unity.optimize` take their former forms, too."""

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        return function(*args, **present_options(options, stacklevel=3))  # pyright: ignore[reportCallIssue]

    return call


def present_options(options: Mapping[str, Any], stacklevel: int = 2) -> dict[str, Any]:
    """Return options of `unity.optimize` with those of former forms replaced. `stacklevel`: as for `warnings.warn`."""
    present = dict(options)
    for former, name, value in _replacements(options):
        _warn(f"{former}={present.pop(former)!r}", f"{name}={value!r}", stacklevel)
        present[name] = value
    return present


def _replacements(options: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield the options of former forms: their names, and the names and values of the options that do the same now."""
    if isinstance(shape := options.get("pipelines"), tuple) and len(shape) in (2, 3):
        yield "pipelines", "pipeline", PipelineShape(*shape)
    if isinstance(groups := options.get("branches"), int) and not isinstance(groups, bool):
        yield "branches", "branch_groups", groups
    if isinstance(seconds := options.get("budget"), float):
        yield "budget", "seconds", seconds
    if (shardings := options.get("shardings")) in ("keep", "free"):
        constraints = options.get("constraints", ())
        stated = (constraints,) if isinstance(constraints, Constraint) else tuple(constraints)
        yield "shardings", "constraints", (*stated, *([keep_shardings()] if shardings == "keep" else []))


def _warn(former: str, present: str, stacklevel: int) -> None:
    """Warn as `warnings.warn` does when it is called in the place of this function."""
    warnings.warn(f"{former} is {present} now (docs: plan#former-names)", DeprecationWarning, stacklevel=stacklevel + 1)
