"""A choice: a legal use of one mesh axis by an operator, and what devices along the axis reduce, move and share with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd
from typing import Any, TypeVar

import numpy as np

from unity.pcg.ir.program import Body, Equation
from unity.pcg.propagation.halos import HaloEdge, halo_edges
from unity.pcg.propagation.nested.agreements import CallArray, call_arrays, nested_agreements
from unity.pcg.propagation.propagation import Solution, contribution_operands
from unity.pcg.propagation.specifications import spec_of
from unity.pcg.types.factors import Match
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, State

AGREED = "agreed"  # the kind of a reduction inside control flow, where no gradient flows


@dataclass(frozen=True)
class Reduced:
    """A partial value that is reduced inside a body, or an unused value that is replicated for use there.

    Attributes:
        variable: a variable of the body, or the path to one of a nested program.
        nbytes: bytes of the whole tensor.
        dtype: its accumulator is the type of sums of the value, and of sums of its cotangents.
        kind: "sum", "max", ... or AGREED; empty for a value that is only replicated.
        users: the users for which it is replicated (`Solution.users`), whose cotangents are summed.
    """

    variable: int | tuple[int, ...]
    nbytes: int
    dtype: Any
    kind: str
    users: tuple[int, ...] = ()


@dataclass(frozen=True)
class Scattered:
    """The states of a variable in a choice, where it is produced and for its users, if a choice of the body changes them."""

    variable: int
    before: State
    after: State

    @property
    def scatters(self) -> bool:
        """Whether the variable is scattered by the choice at hand."""
        return self.before == PARTIAL and self.after.kind == "P"

    @property
    def moves(self) -> bool:
        """Whether the variable is moved to other slices, or gathered, by the choice at hand."""
        return self.before.kind == "P" and self.after != self.before


@dataclass(frozen=True)
class InnerSlot:
    """A division, by a choice, of a dimension of a variable inside of a body, or of a nested program.

    Attributes:
        size: the size of the dimension, or what the degrees of the nested program's choice must divide.
        outer: how far outside the dimension is divided, as in a `State`; 1 for a nested program; 0 if it is not divided.
    """

    size: int
    outer: int


@dataclass(frozen=True, eq=False)
class Choice:
    """A legal use of one mesh axis by an operator."""

    name: str
    operands: tuple[State, ...]
    results: tuple[State, ...]
    size: int  # the product of degrees on this choice must divide it; 0: any
    divided: float  # fraction of the operator's FLOPs that the devices share
    reduced: tuple[Reduced, ...] = ()
    partitions: frozenset[int] = frozenset()  # variables of the body that are partitioned
    inner_slots: tuple[InnerSlot, ...] = ()  # for everything inside that some choice of the body divides
    halos: tuple[HaloEdge, ...] = ()  # neighbours along the axis exchange the edges of their slices for them
    scattered: tuple[Scattered, ...] = ()  # all variables that this or another choice of the body scatters or moves
    arrays: tuple[CallArray, ...] = ()  # that devices along the axis reduce inside of calls with derivative rules, or divide
    contributions: frozenset[tuple[int, int]] = frozenset()  # pairs of operands (`propagation.contribution_operands`)

    @property
    def states(self) -> tuple[State, ...]:
        return self.operands + self.results

    @property
    def scatters(self) -> bool:
        """Whether it reduce-scatters a value inside."""
        return any(x.scatters for x in self.scattered)

    @property
    def moves(self) -> bool:
        """Whether it moves a waist inside to other slices, or gathers it."""
        return any(x.moves for x in self.scattered)

    def around_scatter(self, variable: int) -> tuple[State, State]:
        """Return the states, before and after, of a variable that some choice scatters or moves; replicated for any other."""
        return next(((x.before, x.after) for x in self.scattered if x.variable == variable), (REPLICATED, REPLICATED))


Part = TypeVar("Part", float, np.ndarray)


def part_of_work(divided: Part, size: Part) -> Part:
    """Return the fraction of an operator's work that each of `size` devices does.

    Args:
        divided: the fraction of the work that the devices share; each repeats the rest.
        size: the number of devices.
    """
    return 1 - divided + divided / size


def unused(body: Body) -> Choice:
    """Return the choice that every operator has: all devices along the axis do the same."""
    return Choice("unused", (UNUSED,) * len(body.inputs), (UNUSED,) * len(body.outputs), 0, 0.0)


def choice_of(body: Body, solution: Solution) -> Choice:
    """Return a solution as a choice."""
    size, names = 0, []
    for match in solution.matches:
        size = gcd(size, match.size)
        names += [match.name] if match.divided else []
    users_of = solution.users(body)
    inner = ((v, solution.reduced.get(v, ""), users) for v, users in users_of.items() if v in solution.reduced or users)
    reduced = tuple(Reduced(v, body.tensors[v].nbytes, body.tensors[v].dtype, kind, users) for v, kind, users in inner)
    agreed = (a for a in nested_agreements(solution) if a.kind and a.elements == 1)
    reduced += tuple(Reduced(a.where, a.dtype.itemsize, np.dtype(bool), AGREED) for a in agreed)
    name = names[0] if len(body.equations) == 1 and names else _name(solution)
    divided = divided_by(body, zip(body.equations, solution.matches, strict=True))
    scattered = tuple(Scattered(v, *solution.around_reduction(v)) for v in sorted(solution.scattered))
    halos, arrays = halo_edges(body, solution), tuple(call_arrays(solution))
    described = name, solution.operands, solution.results, size, divided, reduced
    pairs = contribution_operands(body, solution)
    return Choice(*described, halos=halos, scattered=scattered, arrays=arrays, contributions=pairs)


def divided_by(body: Body, matched: Iterable[tuple[Equation, Match]]) -> float:
    """Return the fraction of the FLOPs of a body's equations that devices share along an axis, given the match of each."""
    total, shared = 0.0, 0.0
    for equation, match in matched:
        spec = spec_of(body, equation)
        flops = 1.0 + (spec.flops if spec else 0.0)
        total, shared = total + flops, shared + flops * match.divided
    return shared / total if total else 0.0


def _name(solution: Solution) -> str:
    return ",".join(str(s) for s in solution.operands) + "→" + ",".join(str(s) for s in solution.results)
