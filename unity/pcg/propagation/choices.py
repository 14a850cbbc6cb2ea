"""The legal parallelizations of an operator along one axis, derived from its body."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from unity.pcg.ir.program import Atom, Body, Equation
from unity.pcg.propagation.agreements import handed_on, nested_agreements
from unity.pcg.propagation.halos import Edge, edges
from unity.pcg.propagation.placement import along_axis, with_unused
from unity.pcg.propagation.solver import Solution, Unmatched, nested_body, replicable, solve_either, spec_of
from unity.pcg.types.factors import Match, Slot
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, State, partitioned

AGREED = "agreed"  # inside of control flow, where no gradient flows


@dataclass(frozen=True)
class Reduced:
    """A partial value that is reduced inside a body, or one that is replicated there. `split[c]` is kept by `Choice.partitions`."""

    variable: int | tuple[int, ...]  # one of the body, or the way to one of a program inside
    nbytes: int  # of the whole tensor
    dtype: Any  # in whose accumulator sums of it, and of its cotangents, are made
    kind: str  # "sum", "max", ...; AGREED; nothing of what is the same on every device and only replicated there
    users: tuple[int, ...] = ()  # that find it replicated for use (`Solution.users`): its cotangents are added up


@dataclass(frozen=True, eq=False)
class Choice:
    """One legal way for an operator to use one axis."""

    name: str
    operands: tuple[State, ...]
    results: tuple[State, ...]
    size: int  # the product of degrees on this choice must divide it; 0: any
    divided: float  # fraction of the operator's FLOPs that the devices share
    reduced: tuple[Reduced, ...] = ()
    partitions: frozenset[int] = frozenset()  # variables of the body that are partitioned
    halos: tuple[Edge, ...] = ()  # for which neighbours along the axis exchange the edges of their slices

    @property
    def states(self) -> tuple[State, ...]:
        return self.operands + self.results


Part = TypeVar("Part", float, np.ndarray)


def part_of_work(divided: Part, size: Part) -> Part:
    """The part of an operator's work that each of `size` devices does, where they share `divided` of it and repeat the rest."""
    return 1 - divided + divided / size


def unused(body: Body) -> Choice:
    """The choice that is always there: every device along the axis does the same."""
    return Choice("unused", (UNUSED,) * len(body.inputs), (UNUSED,) * len(body.outputs), 0, 0.0)


INVARIANT = frozenset({"regularized_incomplete_beta"})  # JAX cannot run these on operands that differ between devices


Seed = tuple[int, State]  # position (operands, then results) and the state wanted there


def choices(body: Body, seeds: Iterable[Seed] = ()) -> tuple[Choice, ...]:
    """All choices of an operator: unused, replicated, each factor, each way to let a partial sum through.

    `seeds` are further states that neighbours could use (inner digits); choices that have them are added.
    """
    return _choices(body, tuple(sorted(set(seeds))))


@lru_cache(maxsize=8192)
def _choices(body: Body, seeds: tuple[Seed, ...]) -> tuple[Choice, ...]:
    replicated = Choice("replicated", (REPLICATED,) * len(body.inputs), (REPLICATED,) * len(body.outputs), 0, 0.0)
    found = {c.states: c for c in (unused(body), replicated)}
    if not body.inputs or not replicable(body):
        found.pop(replicated.states, None)
    solutions: list[Solution] = []
    for solution in _solutions(body, seeds):
        solutions.append(solution)
        if _useful(solution):
            choice = choice_of(body, solution)
            found.setdefault(choice.states, choice)
    for solution in filter(None, [with_unused(body, s) for s in solutions if _useful(s)]):
        solutions.append(solution)
        choice = choice_of(body, solution)
        found.setdefault(choice.states, choice)
    return _with_partitions(
        list(found.values()), {c: s for s in solutions for c in found.values() if c.states == s.operands + s.results}
    )


def operand_states(body: Body) -> Iterator[tuple[State, ...]]:
    """The states of the operands in every choice that has some partitioned, as they are found: to whom some are enough, the rest
    is spared."""
    return (s.operands for s in _solutions(body, ()) if _useful(s))


def _useful(solution: Solution) -> bool:
    """Whether a solution is a choice: where it only reduces an operand, the neighbour's Reduce before does the same on less. Not so
    where that is added to what is summed here, and something else is reduced."""
    if not solution.reduced or PARTIAL not in solution.operands:
        return True
    return PARTIAL in solution.results and any(s.kind == "P" for s in solution.operands)


def _solutions(body: Body, seeds: tuple[Seed, ...]) -> Iterator[Solution]:
    """What follows from every state that an equation of the body could have, or a neighbour wants, none twice."""
    if any(e.name in INVARIANT for e in body.equations):
        return
    found: list[Solution] = []

    def settled(known: Mapping[int, State]) -> Iterator[Solution]:
        """The solution with these states, if there is a new one, and those that differ where nothing said what."""
        waiting = [known]
        while waiting:
            known = waiting.pop()
            if any(all(s.states.get(v) == state for v, state in known.items()) for s in found):
                continue
            try:
                first = solve_either(body, known)
            except Unmatched:
                continue
            waiting += [{**known, **other} for other in first.open if all(known.get(v, s) == s for v, s in other.items())]
            yield from ending(first.operands, first.results)

    def ending(operands: tuple[State, ...], results: tuple[State, ...]) -> Iterator[Solution]:
        """The solution with these ends: what will run is found from them."""
        try:
            solution = along_axis(body, operands, results)
        except Unmatched:
            return
        if solution is None or not solution.matches:  # it is unused or replicated after all
            return
        if all((s.operands, s.results) != (solution.operands, solution.results) for s in found):
            found.append(solution)
            yield solution

    for known in _seeds(body, seeds):
        yield from settled(known)
    for one in tuple(found):
        for results in _summed(body, one):
            yield from ending(one.operands, results)
    for one, other in _pairs(found):
        both = zip(body.inputs, _joined(one, other), strict=True)
        yield from settled({v: s for v, s in both if s.kind == "P"})


def _summed(body: Body, solution: Solution) -> Iterator[tuple[State, ...]]:
    """Results of which one, or all, are partial sums, for a solution that reduces something and has them whole."""
    whole = [k for k, s in enumerate(solution.results) if s.kind in "UR" and isinstance(body.outputs[k], int)]
    whole = [k for k in whole if "sum" in solution.reduced.values() and body.tensor(body.outputs[k]).floating]
    for some in dict.fromkeys([*((k,) for k in whole), tuple(whole)] if whole else ()):
        yield tuple(PARTIAL if k in some else s for k, s in enumerate(solution.results))


def _pairs(found: list[Solution]) -> Iterator[tuple[Solution, Solution]]:
    """Solutions that may be one: each has something partitioned that the other repeats. Also of those found meanwhile."""
    k = 0
    while k < len(found):
        for j in range(k):
            both = _joined(found[j], found[k])
            if any(s.kind == "P" for s in both) and all(s.operands != both for s in found):
                yield found[j], found[k]
        k += 1


def _joined(one: Solution, other: Solution) -> tuple[State, ...]:
    """The operands of both together; nothing if they contradict each other."""
    both = tuple(zip(one.operands, other.operands, strict=True))
    agree = all(s == t or REPLICATED in (s, t) for s, t in both)
    return tuple(t if s == REPLICATED else s for s, t in both) if agree else ()


def _seeds(body: Body, seeds: tuple[Seed, ...]) -> Iterator[Mapping[int, State]]:
    for equation in body.equations:
        yield from _factor_seeds(body, equation)
    for v in body.inputs:
        if jnp.issubdtype(body.tensors[v].dtype, np.number):  # truth values and keys have no sum
            yield {v: PARTIAL}
    ends = (*body.inputs, *body.outputs)
    for position, state in seeds:
        atom = ends[position]
        if isinstance(atom, int):
            yield {atom: state}


def _factor_seeds(body: Body, equation: Equation) -> Iterator[Mapping[int, State]]:
    spec = spec_of(body, equation)
    if spec is None:
        yield from _nested_seeds(body, equation)
        return
    for factor in spec.factors:
        operands, results = factor.states()
        places = zip((*equation.operands, *equation.results), factor.operands + factor.results, operands + results, strict=True)
        known = {a: s for a, place, s in places if isinstance(a, int) and isinstance(place, Slot)}
        if known:
            yield known


def _nested_seeds(body: Body, equation: Equation) -> Iterator[Mapping[int, State]]:
    if equation.name in ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "remat2", "checkpoint"):
        inner = nested_body(equation)
        for choice in choices(inner):
            states = zip((*equation.operands, *equation.results), choice.states, strict=True)
            known = {a: s for a, s in states if isinstance(a, int) and s.kind == "P"}
            if known:
                yield known
        passed = dict(zip(inner.inputs, equation.operands, strict=True))
        yield from _handed_seeds(body, [passed[v] for v in handed_on(inner)])
    else:  # control flow: every dimension of every operand is tried
        for a in equation.operands:
            if isinstance(a, int):
                for dim in range(body.tensors[a].ndim):
                    yield {a: partitioned(dim)}
        if equation.name == "cond":  # it may hand on what has nothing to do with each other, as checks for errors do
            yield from _together(body, equation.operands)


def _handed_seeds(body: Body, operands: Sequence[Atom]) -> Iterator[Mapping[int, State]]:
    """Every dimension of what a call hands on as it is, which none of its equations divides: of each alone, of all that have it."""
    for together in _together(body, operands):
        yield from ({a: state} for a, state in together.items())
        yield together


def _together(body: Body, operands: Sequence[Atom]) -> Iterator[Mapping[int, State]]:
    """Every dimension that some operands have, of all that have it."""
    given = [a for a in operands if isinstance(a, int)]
    for dim in range(max((body.tensors[a].ndim for a in given), default=0)):
        yield {a: partitioned(dim) for a in given if body.tensors[a].ndim > dim}


def choice_of(body: Body, solution: Solution) -> Choice:
    """A solution as a choice."""
    size, names = 0, []
    for match in solution.matches:
        size = gcd(size, match.size)
        names += [match.name] if match.divided else []
    used = solution.users(body)
    inside = ((v, solution.reduced.get(v, ""), users) for v, users in used.items() if v in solution.reduced or users)
    reduced = tuple(Reduced(v, body.tensors[v].nbytes, body.tensors[v].dtype, kind, users) for v, kind, users in inside)
    reduced += tuple(Reduced(a.where, a.itemsize, np.dtype(bool), AGREED) for a in nested_agreements(solution))
    name = names[0] if len(body.equations) == 1 and names else _name(solution)
    divided = divided_by(body, zip(body.equations, solution.matches, strict=True))
    return Choice(name, solution.operands, solution.results, size, divided, reduced, halos=edges(body, solution))


def divided_by(body: Body, matched: Iterable[tuple[Equation, Match]]) -> float:
    """The fraction of the FLOPs of a body's equations that devices share along an axis, given how each uses it."""
    work, shared = 0.0, 0.0
    for equation, match in matched:
        spec = spec_of(body, equation)
        flops = 1.0 + (spec.flops if spec else 0.0)
        work, shared = work + flops, shared + flops * match.divided
    return shared / work if work else 0.0


def _name(solution: Solution) -> str:
    return ",".join(str(s) for s in solution.operands) + "→" + ",".join(str(s) for s in solution.results)


def _with_partitions(found: list[Choice], solutions: Mapping[Choice, Solution]) -> tuple[Choice, ...]:
    """Notes which values each choice partitions: a Reduce of one is smaller then, and keeping one takes less."""
    split = {c: frozenset(v for v, s in solutions[c].states.items() if s.kind == "P") for c in found if c in solutions}
    return tuple(replace(c, partitions=split[c]) if split.get(c) else c for c in found)
