"""The application of rules of loops by name, to the scans of a program and of its nested programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from unity.pcg.ir.equation_writer import EquationWriter
from unity.pcg.ir.program import Body, Equation
from unity.pcg.propagation.nested.scan_programs import inside
from unity.substitutions.language.loop_rules import (
    BATCHED,
    INVARIANTS,
    JOINED,
    LOOK_UPS,
    MAPPED,
    PRODUCTS,
    RESULTS,
    SUMS,
    UNROLLED,
    WRITTEN_OUT,
    LoopRule,
)
from unity.transforms.loops.batching import equal_loops, with_batched
from unity.transforms.loops.dependences import ScanParts, scans, takes_steps
from unity.transforms.loops.hoisting import add_hoisted, invariants, look_ups, needed, products
from unity.transforms.loops.joined import add_with_parts, joined_products
from unity.transforms.loops.maps_of_loops import add_map_at_once, loops_of_map
from unity.transforms.loops.results import add_with_final_results, final_equations
from unity.transforms.loops.sums import add_with_sums, summed_products
from unity.transforms.loops.unrolling import add_unrolled, add_written_out, short, unrollable


@dataclass(frozen=True)
class _Way:
    """How a rule about a single scan is applied.

    Attributes:
        moved: returns the equations of the step that the rule changes or moves, without those that these depend on.
        add: appends the scan after the rule, and the equations that left it. Returns False if it appends the scan as it is.
    """

    moved: Callable[[ScanParts], list[Equation]]
    add: Callable[[EquationWriter, ScanParts], bool]


WAYS: Mapping[str, _Way] = {
    JOINED.name: _Way(lambda parts: [j.product for j in joined_products(parts)], add_with_parts),
    LOOK_UPS.name: _Way(partial(needed, targets=look_ups), partial(add_hoisted, targets=look_ups)),
    PRODUCTS.name: _Way(partial(needed, targets=products), partial(add_hoisted, targets=products)),
    INVARIANTS.name: _Way(partial(needed, targets=invariants), partial(add_hoisted, targets=invariants)),
    SUMS.name: _Way(lambda parts: [s.product for s in summed_products(parts)], add_with_sums),
    RESULTS.name: _Way(final_equations, add_with_final_results),
    MAPPED.name: _Way(loops_of_map, add_map_at_once),
    UNROLLED.name: _Way(unrollable, add_unrolled),
    WRITTEN_OUT.name: _Way(short, add_written_out),
}


@dataclass(frozen=True, eq=False)
class ChangedScan:
    """A scan that a rule changes, with the equations that it moves or changes, without those that these depend on."""

    parts: ScanParts
    equations: Sequence[Equation]


def changed_scans(body: Body, rule: LoopRule) -> Iterator[ChangedScan]:
    """Yield the scans of a program and of its nested programs that a rule changes."""
    if rule is BATCHED:
        yield from (ChangedScan(parts, [parts.scan]) for loops in equal_loops(body) for parts in loops)
        for program in filter(None, map(inside, body.equations)):
            yield from changed_scans(program, rule)
        return
    for parts in map(ScanParts.of, scans(body)):
        if equations := WAYS[rule.name].moved(parts):
            yield ChangedScan(parts, equations)


def applied(body: Body, rule: LoopRule, step: str) -> Body:
    """Return a program with a rule applied to all scans whose steps have a content hash, at any depth of scans and remats.

    Returns the same object if it applies to none.
    """
    new = with_batched(body, step) if rule is BATCHED else body
    writer, changed = EquationWriter.beside(new), new is not body
    for e in new.equations:
        program = inside(e)
        parts = ScanParts.of(e) if rule is not BATCHED and takes_steps(e) else None
        if parts is not None and parts.step.key == step:
            changed = WAYS[rule.name].add(writer, parts) or changed
            continue
        other = None if program is None else applied(program, rule, step)
        if other is not program:
            e, changed = replace(e, params={**e.params, "jaxpr": other}, origin=None), True
        writer.equations.append(e)
    return writer.body(body.inputs, body.outputs) if changed else body
