"""The transformation that puts layers into a `jax.checkpoint`: the backward pass recomputes them from their operands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import jax
from jax.extend import core

from unity.base.documents import Natural
from unity.base.errors import PlanError
from unity.pcg.capture.capture import Bodies, Captured
from unity.pcg.capture.heavy_operators import constants
from unity.pcg.ir.dead_code import used
from unity.pcg.ir.program import Body, Equation
from unity.pcg.jaxprs.jaxprs import SCANNED
from unity.pcg.propagation.scan_programs import inside, with_inside
from unity.search.joint.segments import part
from unity.transforms.recomputing.layers import Span, equations_in_layers
from unity.transforms.transformation import Transformation, TransformationRecord, TransformationSource

Policy = Literal["nothing", "products", "offloaded products"]
# The values inside of a checkpoint that it saves: none, or products with weights, whose recomputation costs the most time, on the
# device or in the memory of the host.
POLICIES = {
    "nothing": None,
    "products": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "offloaded products": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}
EXCEPTIONS = {"nothing": "", "products": ", but for products", "offloaded products": ", but for products, which are offloaded"}
Spans = Mapping[str, tuple[Span, ...]]  # the recomputed spans of a program, and of the steps of its scans, by content hash


class RecomputingRecord(TransformationRecord, tag="recomputing"):
    """A `Recomputing` in a document: the hash of the graph after it, the recomputed spans of each program, and the policy."""

    graph: str
    spans: dict[str, tuple[tuple[Natural, Natural], ...]]
    saved: Policy

    def apply(self, source: TransformationSource) -> Recomputing:
        captured = source.program
        lengths = {program.key: len(equations_in_layers(program)) for program in _programs(captured.body)}
        for key, spans in self.spans.items():
            ends = [end for span in spans for end in span]
            if ends != sorted(ends) or any(start == stop for start, stop in spans) or max(ends, default=0) > lengths.get(key, 0):
                raise PlanError("it recomputes equations that the program does not have")
        again = recomputing(captured, self.spans, self.saved)
        if again.after.graph.key != self.graph:
            raise PlanError("its recomputed layers lead to another graph: it was made by another version of unity")
        return again


@dataclass(frozen=True, eq=False, repr=False)
class Recomputing(Transformation):
    """A captured function before and after some spans of its equations were put into a `jax.checkpoint` each."""

    kind = "recomputation"
    title = "Recomputed"
    effect = "The backward pass recomputes these layers from the values that cross their borders"

    spans: Spans
    saved: Policy = "nothing"

    def __str__(self) -> str:
        parts = sum(map(len, self.spans.values()))
        words = f"{parts} {'parts' if parts > 1 else 'part'} of the program recomputed in the backward pass"
        return words + EXCEPTIONS[self.saved]

    @property
    def record(self) -> RecomputingRecord:
        return RecomputingRecord(self.after.graph.key, dict(self.spans), self.saved)

    def check(self) -> None:
        self._check_same(recomputing(self.before, self.spans, self.saved))


def recomputing(captured: Captured, spans: Spans, saved: Policy = "nothing", known: Bodies | None = None) -> Recomputing:
    """Return a function with checkpoints around spans of its equations. `known`: as for `capture.graph_of`."""
    return Recomputing(captured, captured.of(checkpointed(captured.body, spans, saved), known), spans, saved)


def checkpointed(body: Body, spans: Spans, saved: Policy) -> Body:
    """Return a program with a checkpoint around each span, in the steps of its scans, too."""
    changed = {step.key: (step, checkpointed(step, spans, saved)) for step in steps(body.equations)}
    own, body = spans.get(body.key, ()), with_inside(body, {key: new for key, (old, new) in changed.items() if new is not old})
    if not own:
        return body
    constant, numbers = constants(body), equations_in_layers(body)
    inside_layers, at = set(numbers), 0
    equations = [e for i, e in enumerate(body.equations) if i not in inside_layers]
    for start, stop in own:
        equations += (body.equations[i] for i in numbers[at:start])
        equations.append(_checkpoint(body, numbers[start:stop], constant, saved))
        at = stop
    equations += (body.equations[i] for i in numbers[at:])
    return used(replace(body, equations=tuple(equations)))


def steps(equations: Iterable[Equation]) -> list[Body]:
    """Return the distinct programs of the steps of the scans among some equations, but not of those nested deeper."""
    programs = (inside(e) for e in equations if e.name in SCANNED)
    return list({step.key: step for step in programs if step is not None}.values())


def _checkpoint(body: Body, numbers: Sequence[int], constant: Mapping[int, int], saved: Policy) -> Equation:
    """Return a checkpoint around some equations of a program, as one equation."""
    segment, last = part(body, numbers, constant, ()), body.equations[numbers[-1]]
    primitive, params = _template(saved)
    params = {**params, "jaxpr": segment.body}
    return Equation(primitive, params, segment.inputs, segment.outputs, last.source, scope=last.scope)


@cache
def _template(saved: Policy) -> tuple[core.Primitive, Mapping[str, Any]]:
    """Return the primitive and the parameters of a checkpoint, as this version of JAX has them.

    Outside of loops, `capture` prevents the compiler from merging the two passes.
    """
    (eqn,) = jax.make_jaxpr(jax.checkpoint(lambda x: x * x, prevent_cse=False, policy=POLICIES[saved]))(1.0).eqns
    return eqn.primitive, eqn.params


def _programs(body: Body) -> Iterator[Body]:
    """Yield a program, and the steps of its scans at any depth."""
    yield body
    for step in steps(body.equations):
        yield from _programs(step)
