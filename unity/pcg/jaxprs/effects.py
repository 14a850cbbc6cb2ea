"""Side effects of traced programs: equations that run for their effect alone, such as those of `jax.debug.print`.

A plan runs such an effect once, after the program, on values that the program returns (`unity.pcg.capture.observations`). Where a
program cannot return them, the effect is dropped. An effect whose results are used is refused, since every device would repeat it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
from jax.extend import core

from unity.base.errors import CaptureError
from unity.base.formatting import with_article
from unity.base.user_warnings import warn_user
from unity.pcg.jaxprs.jaxprs import RULED, Program, each, is_reference, with_programs
from unity.pcg.jaxprs.source_lines import Place, place_of

INSPECT = "inspect_sharding"
TITLES: Mapping[str, str] = {  # primitives whose effect can run after the program, and the functions that users call
    "debug_print": "jax.debug.print",
    "debug_callback": "jax.debug.callback",
    "io_callback": "jax.experimental.io_callback",
    "check": "checkify.check",
    INSPECT: "jax.debug.inspect_array_sharding",
}


@dataclass(frozen=True)
class Notice:
    """A warning about an effect that a plan drops, or runs otherwise than the function does.

    Attributes:
        line: the user's line, "file:line (function)".
        text: the effect, and what happens to it.
    """

    line: str
    text: str


def warn(notices: Iterable[Notice]) -> None:
    """Issue a `UserWarning` at the user's line for each notice, once for equal ones."""
    for notice in dict.fromkeys(notices):
        file, _, number = notice.line.rpartition(" (")[0].rpartition(":")
        place = (file, int(number)) if number.isdigit() else ("unity", 1)
        warn_user(f"{notice.line}: {notice.text} (docs: capture#effects)", place)


def dropped(name: str, line: str, reason: str) -> Notice:
    """Return the notice that the effect of a primitive is not part of the plan."""
    return Notice(line or "the function", f"{TITLES.get(name, name)} is dropped from the plan: {reason}")


def is_effect(eqn: core.JaxprEqn) -> bool:
    """Return whether an equation runs for its effect alone, not as a program of others, nor to change a `jax.Ref`."""
    nests = any(isinstance(p, Program) for p in each(eqn.params))
    return bool(eqn.effects) and not nests and not any(is_reference(v.aval) for v in (*eqn.invars, *eqn.outvars))


def is_ordered(primitive: core.Primitive, params: Mapping[str, Any]) -> bool:
    """Return whether an effect runs in the order of others."""
    return bool(params.get("ordered")) or (primitive.name == "debug_callback" and params["effect"] is not _unordered())


def free(primitive: core.Primitive, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return an effect's parameters for a run on several devices, where JAX has no order of effects and no unchecked errors.

    A `checkify.check` runs where the user's `checkify.checkify` is around the plan, and is nothing elsewhere.
    """
    changes = {"ordered": False, "debug": True, "effect": _unordered() if primitive.name == "debug_callback" else None}
    return {name: changes.get(name, value) for name, value in params.items()}


@cache
def _unordered() -> Any:
    """Return JAX's object for the effect of a callback without order."""
    return jax.make_jaxpr(lambda: jax.debug.callback(lambda: None))().eqns[0].params["effect"]


def pruned(
    program: core.ClosedJaxpr, entered: Collection[str] = (), reason: str = "it is in a derivative rule"
) -> tuple[core.ClosedJaxpr, list[Notice]]:
    """Drop the effects of a program, but for those that can run after it.

    Args:
        program: the traced program.
        entered: the primitives whose programs may return the values of the effects in them; an empty collection drops every effect.
        reason: the reason why no effect is kept.

    Returns:
        The program, its remaining effects without results; and a notice for every effect that is dropped.

    Raises:
        CaptureError: the results of an effect are used.
    """
    pruning = _Pruning(frozenset(entered))
    return pruning.program(program, bool(entered), Place(), reason), pruning.notices


@dataclass
class _Pruning:
    """A walk through a program and those nested in it that drops effects."""

    entered: frozenset[str]
    notices: list[Notice] = field(default_factory=list)

    def program(self, value: Any, keep: bool, call: Place, reason: str) -> Any:
        """Return a program without the effects that are dropped: all of them, for this reason, unless `keep` is true."""
        if not isinstance(value, core.Jaxpr):  # closed, before JAX 0.12
            inside = self.program(value.jaxpr, keep, call, reason)
            return value if inside is value.jaxpr else value.replace(jaxpr=inside)
        if not value.effects or any(is_reference(v.aval) for v in value.invars):  # a kernel's program changes references
            return value
        read = _read(value)
        eqns = [new for e in value.eqns if (new := self.equation(e, keep, call, reason, read)) is not None]
        return value.replace(eqns=eqns, effects=value.effects - (_effects(value.eqns) - _effects(eqns)))

    def equation(
        self, eqn: core.JaxprEqn, keep: bool, call: Place, reason: str, read: Collection[core.Var]
    ) -> core.JaxprEqn | None:
        """Return an equation, or None if it is an effect that is dropped."""
        if not eqn.effects:
            return eqn
        place = place_of(eqn.source_info, call, str(eqn.params.get("name", "")))
        if not is_effect(eqn):
            return self.nested(eqn, keep, place, reason)
        name = eqn.primitive.name
        if any(v in read for v in eqn.outvars):
            raise CaptureError(
                f"{place.line or 'the function'}: the result of {TITLES.get(name, name)} is used, but every device of a plan would"
                " run its side effect.\n    Use jax.pure_callback if the result depends on its operands alone; otherwise compute it"
                " outside and pass it as an argument. (docs: capture#effects)"
            )
        if keep and name in TITLES:
            return eqn.replace(outvars=[])
        self.notices.append(dropped(name, place.line, reason if name in TITLES else "every device would run it"))
        return None

    def nested(self, eqn: core.JaxprEqn, keep: bool, place: Place, reason: str) -> core.JaxprEqn:
        """Return an equation with effects dropped from its programs."""
        name = eqn.primitive.name
        if keep and name not in self.entered:
            reason = (
                "it is in a function with a derivative rule of its own"
                if name in RULED
                else f"{with_article(name)} cannot return its values"
            )
        keeps = keep and name in self.entered
        params = {k: with_programs(p, lambda p: self.program(p, keeps, place, reason)) for k, p in eqn.params.items()}
        gone = _effects_inside(eqn.params) - _effects_inside(params)
        return eqn.replace(params=params, effects=eqn.effects - gone)


def _read(program: core.Jaxpr) -> set[core.Var]:
    """Return the variables on which a program's results and effects depend."""
    read = {v for v in program.outvars if isinstance(v, core.Var)}
    for eqn in reversed(program.eqns):
        if eqn.effects or not read.isdisjoint(eqn.outvars):
            read.update(v for v in eqn.invars if isinstance(v, core.Var))
    return read


def _effects(eqns: Sequence[core.JaxprEqn]) -> frozenset[Any]:
    return frozenset().union(*(e.effects for e in eqns))


def _effects_inside(params: Mapping[str, Any]) -> frozenset[Any]:
    return frozenset().union(*(p.effects for p in each(params) if isinstance(p, Program)))
