"""The transformation that puts layers into a `jax.checkpoint`: the backward pass recomputes them from their operands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

import jax
import msgspec
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from unity.base.documents import Natural
from unity.base.errors import PlanError
from unity.pcg.capture.capture import Bodies, Captured
from unity.pcg.capture.heavy_operators import constants
from unity.pcg.ir.dead_code import used
from unity.pcg.ir.program import Body, Equation
from unity.pcg.jaxprs.jaxprs import SCANNED
from unity.pcg.propagation.nested.scan_programs import inside, with_inside
from unity.search.joint.segments import part
from unity.transforms.recomputing.layers import Span, equations_in_layers
from unity.transforms.recomputing.products import SavedProducts
from unity.transforms.transformation import Transformation, TransformationRecord, TransformationSource

Policy = Literal["nothing", "some products", "products", "offloaded products"]
SAVED = "unity: a saved product"  # the name of the products that "some products" saves
# The values inside of a checkpoint that it saves: none, or products with weights, whose recomputation costs the most time, on the
# device or in the memory of the host, or products that are chosen one by one.
POLICIES = {
    "nothing": None,
    "some products": jax.checkpoint_policies.save_only_these_names(SAVED),
    "products": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "offloaded products": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}
EXCEPTIONS = {
    "nothing": "",
    "some products": ", but for some products",
    "products": ", but for products",
    "offloaded products": ", but for products, which are offloaded",
}
Spans = Mapping[str, tuple[Span, ...]]  # the recomputed spans of a program, and of the steps of its scans, by content hash


class RecomputingRecord(TransformationRecord, tag="recomputing"):
    """A `Recomputing` in a document.

    Attributes:
        graph: the hash of the graph after it.
        spans: the recomputed spans of each program.
        saved: the policy.
        products: the places of the products that "some products" saves, in each program.
    """

    graph: str
    spans: dict[str, tuple[tuple[Natural, Natural], ...]]
    saved: Policy
    products: dict[str, tuple[Natural, ...]] = msgspec.field(default_factory=dict)

    def apply(self, source: TransformationSource) -> Recomputing:
        captured = source.program
        lengths = {program.key: len(equations_in_layers(program)) for program in _programs(captured.body)}
        for key, spans in self.spans.items():
            ends = [end for span in spans for end in span]
            if ends != sorted(ends) or any(start == stop for start, stop in spans) or max(ends, default=0) > lengths.get(key, 0):
                raise PlanError("it recomputes equations that the program does not have")
        for key, places in self.products.items():
            if max(places, default=0) >= lengths.get(key, 0):
                raise PlanError("it saves products that the program does not have")
        again = recomputing(captured, self.spans, self.saved, products=self.products)
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
    products: SavedProducts = field(default_factory=dict)

    def __str__(self) -> str:
        parts = sum(map(len, self.spans.values()))
        words = f"{parts} {'parts' if parts > 1 else 'part'} of the program recomputed in the backward pass"
        return words + EXCEPTIONS[self.saved]

    @property
    def record(self) -> RecomputingRecord:
        return RecomputingRecord(self.after.graph.key, dict(self.spans), self.saved, dict(self.products))

    def check(self) -> None:
        self._check_same(recomputing(self.before, self.spans, self.saved, products=self.products))


def recomputing(
    captured: Captured,
    spans: Spans,
    saved: Policy = "nothing",
    known: Bodies | None = None,
    products: SavedProducts = MappingProxyType({}),
) -> Recomputing:
    """Return a function with checkpoints around spans of its equations.

    Args:
        captured: The function.
        spans: The spans.
        saved: What the checkpoints save.
        known: As for `capture.graph_of`.
        products: The products that "some products" saves.
    """
    after = captured.of(checkpointed(captured.body, spans, saved, products), known)
    return Recomputing(captured, after, spans, saved, products)


def checkpointed(body: Body, spans: Spans, saved: Policy, products: SavedProducts) -> Body:
    """Return a program with a checkpoint around each span, in the steps of its scans, too."""
    changed = {step.key: (step, checkpointed(step, spans, saved, products)) for step in steps(body.equations)}
    own, chosen = spans.get(body.key, ()), products.get(body.key, ())
    body = with_inside(body, {key: new for key, (old, new) in changed.items() if new is not old})
    if not own:
        return body
    constant, numbers = constants(body), equations_in_layers(body)
    names = {v: max(body.tensors) + 1 + k for k, v in enumerate(v for p in chosen for v in body.equations[numbers[p]].results)}
    inside_layers, at = set(numbers), 0
    equations = [e for i, e in enumerate(body.equations) if i not in inside_layers]
    for start, stop in own:
        equations += (body.equations[i] for i in numbers[at:start])
        segment, last = part(body, numbers[start:stop], constant, ()), body.equations[numbers[stop - 1]]
        primitive, params = _template(saved)
        params = {**params, "jaxpr": _with_names(segment.body, names)}
        equations.append(Equation(primitive, params, segment.inputs, segment.outputs, last.source, scope=last.scope))
        at = stop
    equations += (body.equations[i] for i in numbers[at:])
    return used(replace(body, equations=tuple(equations)))


def steps(equations: Iterable[Equation]) -> list[Body]:
    """Return the distinct programs of the steps of the scans among some equations, but not of those nested deeper."""
    programs = (inside(e) for e in equations if e.name in SCANNED)
    return list({step.key: step for step in programs if step is not None}.values())


def _with_names(body: Body, names: Mapping[int, int]) -> Body:
    """Return a program in which some variables are named values, for the policy "some products".

    Args:
        body: The program.
        names: For each variable that is named, a new one for its value without the name.
    """
    equations, tensors, (primitive, params) = list[Equation](), dict(body.tensors), _name()
    for e in body.equations:
        new = {v: names[v] for v in e.results if v in names}
        equations.append(replace(e, results=tuple(new.get(v, v) for v in e.results)) if new else e)
        for v, value in new.items():
            tensors[value] = tensors[v]
            equations.append(Equation(primitive, params, (value,), (v,), e.source).with_provenance_of(e))
    return replace(body, equations=tuple(equations), tensors=tensors)


@cache
def _name() -> tuple[core.Primitive, Mapping[str, Any]]:
    """Return the primitive and the parameters of the name `SAVED`, as this version of JAX has them."""
    (eqn,) = jax.make_jaxpr(lambda x: checkpoint_name(x, SAVED))(1.0).eqns
    return eqn.primitive, eqn.params


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
