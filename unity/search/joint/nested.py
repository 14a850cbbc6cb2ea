"""Nested programs: a program and those inside its scans and remats, all cut into segments that are searched for rewritings.

Segments and nested programs are identified by their contents, so a rewriting applies wherever the same content occurs. Nested
programs of the same content whose functions hide different state are not searched.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from unity.pcg.ir.program import Body, Equation
from unity.pcg.jaxprs.loops import constants_and_carry
from unity.pcg.propagation.nested.scan_programs import SCANNED, ambiguous, inside, with_inside
from unity.search.joint.segments import Segment, flows, joined, segments
from unity.substitutions.rewriting.forms import planning_form, search_form


@dataclass(frozen=True, eq=False)
class Program:
    """A program in the form that is searched, with the nested programs by their contents.

    Args:
        body: The program, opened (see `forms.opened`).
        segments: Its segments, in order.
        inside: The nested programs, by content.
        times: Its runs in one run of the program around it.
    """

    body: Body
    segments: tuple[Segment, ...]
    inside: Mapping[str, Program]
    times: int

    def walk(self, times: int = 1) -> Iterator[tuple[Program, int]]:
        """Yield this program and all nested ones, with the runs of each in one run of this one."""
        yield self, times
        for program in self.inside.values():
            yield from program.walk(times * program.times)

    def with_segments(self, instead: Mapping[str, Body]) -> Body:
        """Return the whole program, closed, with the segments of some keys replaced."""
        changed = {key: p.with_segments(instead) for key, p in self.inside.items() if p.has(instead)}
        return planning_form(with_inside(joined(self.body, self.segments, instead), changed))

    def has(self, keys: Collection[str]) -> bool:
        """Return whether a segment with one of these keys is here or in a nested program."""
        return any(part.key in keys for program, _ in self.walk() for part in program.segments)


def program(body: Body, differentiated: Collection[int], times: int = 1) -> Program:
    """Return a program with its nested programs; `differentiated` are the inputs, by number, whose gradients are wanted."""
    whole = search_form(body)
    flowing = flows(whole, differentiated)
    nested: dict[str, Program] = {}
    unsearched = ambiguous(whole)
    for e in whole.equations:
        inner = inside(e)
        if inner is None or inner.key in unsearched:
            continue
        length = int(e.params["length"]) if e.name in SCANNED else 1
        runs = length + (nested[inner.key].times if inner.key in nested else 0)
        nested[inner.key] = program(inner, _differentiated(e, inner, flowing), runs)
    return Program(whole, segments(whole, differentiated), nested, times)


def _differentiated(e: Equation, inner: Body, flowing: Collection[int]) -> frozenset[int]:
    """Return the inputs of a nested program that gradients flow into, including those that reach it through a scan's carries."""
    inputs = {k for k, a in enumerate(e.operands) if isinstance(a, int) and a in flowing}
    if e.name not in SCANNED:
        return frozenset(inputs)
    constants, carry = constants_and_carry(e.params)
    while True:
        reached = flows(inner, inputs)
        more = {constants + k for k, a in enumerate(inner.outputs[:carry]) if isinstance(a, int) and a in reached}
        if more <= inputs:
            return frozenset(inputs)
        inputs |= more
