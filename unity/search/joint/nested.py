"""A program together with the programs inside of its scans and remats, as segments: all that is searched for rewritings.

Each program inside is cut into segments of its own. A segment is named by its content, so what is found for it holds wherever
it is; and a program inside is named by its content too, so it is rewritten in the same way wherever it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from unity.pcg.ir.program import Body, Equation
from unity.pcg.jaxprs.scan_operands import constants_and_carry
from unity.pcg.propagation.scan_programs import SCANNED, inside, with_inside
from unity.search.joint.segments import Segment, flows, joined, segments
from unity.substitutions.rewriting.forms import closed, opened


@dataclass(frozen=True, eq=False)
class Program:
    """A program as it is searched, and those inside of it by their content."""

    given: Body
    body: Body
    segments: tuple[Segment, ...]
    inside: Mapping[str, Program]
    times: int  # it runs in the program that it is inside of

    def walk(self, times: int = 1) -> Iterator[tuple[Program, int]]:
        """This program and all inside of it, with how often each runs in one run of this one."""
        yield self, times
        for program in self.inside.values():
            yield from program.walk(times * program.times)

    def with_segments(self, instead: Mapping[str, Body]) -> Body:
        """The whole program as it is planned, where segments of these keys are other programs."""
        changed = {key: p.with_segments(instead) for key, p in self.inside.items() if p.has(instead)}
        return closed(with_inside(joined(self.body, self.segments, instead), changed))

    def has(self, keys: Collection[str]) -> bool:
        """Whether a segment of these keys is here or inside."""
        return any(part.key in keys for program, _ in self.walk() for part in program.segments)


def program(body: Body, differentiated: Collection[int], times: int = 1) -> Program:
    """A program with all that is inside. `differentiated`: inputs, by number, whose gradients are wanted."""
    whole = opened(body)
    flowing = flows(whole, differentiated)
    found: dict[str, Program] = {}
    for e in whole.equations:
        inner = inside(e)
        if inner is None:
            continue
        length = int(e.params["length"]) if e.name in SCANNED else 1
        often = length + (found[inner.key].times if inner.key in found else 0)
        found[inner.key] = program(inner, _differentiated(e, inner, flowing), often)
    return Program(body, whole, segments(whole, differentiated), found, times)


def _differentiated(e: Equation, inner: Body, flowing: Collection[int]) -> frozenset[int]:
    """The inputs of a program inside that gradients flow into: also through what a scan carries from step to step."""
    found = {k for k, a in enumerate(e.operands) if isinstance(a, int) and a in flowing}
    if e.name not in SCANNED:
        return frozenset(found)
    constants, carry = constants_and_carry(e.params)
    while True:
        reached = flows(inner, found)
        more = {constants + k for k, a in enumerate(inner.outputs[:carry]) if isinstance(a, int) and a in reached}
        if more <= found:
            return frozenset(found)
        found |= more
