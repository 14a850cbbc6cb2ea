"""Former names of a plan's members, and former options of `unity.optimize`: they work as before, with a DeprecationWarning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from unity.constraints import Constraint, keep_shardings
from unity.plan.further_options import PipelineShape
from unity.plan.stream import Stream

if TYPE_CHECKING:
    from unity.plan.plan import Plan

P = ParamSpec("P")
T = TypeVar("T")

NAMESPACES = {
    "program": (
        "applications", "branching", "check_derivation", "check_parallelization", "joining", "original", "packing",
        "parallelization", "pcg", "pipelining", "recomputing", "rewriting", "serial", "transformations",
    ),
    "inspect": (
        "abstract_mesh", "bound", "diff", "gap", "machine", "memory_timeline", "mesh", "search_seconds", "simulate", "spec_rules",
        "to_json", "tried",
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


def former_member(plan: Plan, name: str) -> Any:
    """Return what a plan's attribute of a former name is now. Raises AttributeError if no plan ever had it."""
    if name == "stream":
        _warn("plan.stream", "unity.plan.stream.Stream(plan)", depth=3)
        return vars(plan).setdefault(name, Stream(plan))  # its step is compiled once
    if name not in MEMBERS:
        return object.__getattribute__(plan, name)  # raises the error that led here
    _warn(f"plan.{name}", f"plan.{MEMBERS[name]}", depth=3)
    return attrgetter(MEMBERS[name])(plan)


def accepting_former_options(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function that takes the options of `unity.optimize` take their former forms, too."""

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        present: dict[str, Any] = dict(options)
        for former, name, value in _replacements(options):
            _warn(f"{former}={present.pop(former)!r}", f"{name}={value!r}", depth=2)
            present[name] = value
        return function(*args, **present)  # pyright: ignore[reportCallIssue]

    return call


def _replacements(options: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield the options of former forms: their names, and the names and values of the options that do the same now."""
    if isinstance(shape := options.get("pipelines"), tuple):
        yield "pipelines", "pipeline", PipelineShape(*shape)
    if isinstance(groups := options.get("branches"), int) and not isinstance(groups, bool):
        yield "branches", "branch_groups", groups
    if isinstance(seconds := options.get("budget"), float):
        yield "budget", "seconds", seconds
    if (shardings := options.get("shardings")) in ("keep", "free"):
        constraints = options.get("constraints", ())
        stated = (constraints,) if isinstance(constraints, Constraint) else tuple(constraints)
        yield "shardings", "constraints", (*stated, *([keep_shardings()] if shardings == "keep" else []))


def _warn(former: str, present: str, depth: int) -> None:
    """Warn at the line that is `depth` calls above the caller of this function."""
    warnings.warn(f"{former} is {present} now (docs: plan#former-names)", DeprecationWarning, stacklevel=depth + 1)
