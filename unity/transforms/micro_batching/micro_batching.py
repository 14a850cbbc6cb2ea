"""The transformation that computes a loss for one micro-batch after the other, and adds up its values and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from msgspec import structs

from unity.base.documents import Positive
from unity.base.errors import PlanError
from unity.pcg.capture.capture import Bodies, Captured, capture, graph_of
from unity.pcg.ir.graph import PCG, Node, Value, accumulated_loss
from unity.pcg.ir.nested_programs import bodies, has
from unity.pcg.ir.payloads import Remat, Scan
from unity.pcg.ir.program import Body
from unity.pcg.ir.tracing import trace
from unity.pcg.jaxprs.jaxprs import RULED, floating
from unity.pcg.jaxprs.trace_contexts import precision_of
from unity.pcg.local.interpreter import run_body
from unity.pcg.parallel.stages import Mixed
from unity.pcg.types.accumulation import accumulator
from unity.pcg.types.axis import Axis
from unity.pcg.types.varying_axes import TIME, NoPosition, at_time
from unity.transforms.chosen_results import with_results
from unity.transforms.micro_batching.decomposition import Decomposition, decomposed
from unity.transforms.splice import aligned, in_order, operator_at, spliced, with_nodes, within
from unity.transforms.strided_micro_batches import joined, split
from unity.transforms.transformation import Transformation, TransformationRecord, TransformationSource, undifferentiated

WALK = "unity:accumulated"  # scope of the loop over micro-batches; no model has it


class MicroBatchingRecord(TransformationRecord, tag="micro-batches"):
    """A `MicroBatching` in a document: the number of micro-batches, and the hash of the graph after it."""

    graph: str
    count: Positive

    def apply(self, source: TransformationSource) -> MicroBatching:
        try:
            again = micro_batched(source.program, self.count)
        except Mixed as reason:
            raise PlanError(f"the program cannot run over {self.count} micro-batches: {reason}") from None
        if again.after.graph.key != self.graph:
            raise PlanError("its micro-batches lead to another graph: it was made by another version of unity")
        return again


@dataclass(frozen=True, eq=False, repr=False)
class MicroBatching(Transformation):
    """A program before and after its loss became a loop over micro-batches.

    Attributes:
        count: the number of micro-batches.
        size: the number of samples of each.
    """

    kind = "micro-batches"
    title = "Micro-batches"
    effect = "The loss is computed for one micro-batch after the other, and the gradients are added up"

    count: int
    size: int

    def __str__(self) -> str:
        return f"{self.count} micro-batches of {self.size} samples, their gradients added up"

    @property
    def record(self) -> MicroBatchingRecord:
        return MicroBatchingRecord(self.after.graph.key, self.count)

    def check(self) -> None:
        self._check_same(micro_batched(self.before, self.count))


def micro_batched(captured: Captured, count: int, known: Bodies | None = None) -> MicroBatching:
    """Return a program with a loop over `count` micro-batches in its loss. `known`: as for `capture.graph_of`.

    Raises Mixed, naming the operator and the user's line, if the program does not decompose over its samples.
    """
    part = decomposed(captured, count)
    try:
        walk = _traced(captured.body, part, count, numbered=False)
    except NoPosition:  # a position, or random bits, depend on where a sample stands in the batch
        walk = _traced(captured.body, part, count, numbered=True)
    results = (*part.sums, *(v for v, _ in part.each))
    makers = [i for i, e in enumerate(captured.body.equations) if not set(results).isdisjoint(e.results)]
    body = in_order(captured.body, makers, part.after)
    operands = (*part.constants, *(v for v, _ in part.read))
    named = captured.body.equations[makers[-1]]
    whole = spliced(body, results, operands, results, walk, named, WALK)
    after = captured.of(with_results(whole, range(len(whole.outputs))), known)
    (loop,) = [node for node in after.graph.nodes if node.kind == "scan" and within(node.scope, WALK)]
    assert loop.inside is not None
    lines = graph_of(part.body, [f"operand {p}" for p in range(len(part.body.inputs))], known)
    inside = aligned(loop.inside, lines)
    inside = inside if part.loss is None else _with_barriers(inside)
    walked = replace(loop, inside=inside, payload=structs.replace(loop.of(Scan), loss=part.loss))
    after = replace(after, graph=with_nodes(after.graph, {id(loop): walked}))
    return MicroBatching(captured, after, count, part.size // count, stopped=undifferentiated(captured, part.inactive))


def _with_barriers(graph: PCG) -> PCG:
    """Return the step of a loop whose backward pass follows each step at once, with barriers around what that recomputes.

    No loop separates the two passes there, as capture assumes of what is in a loop, so the compiler would merge them.
    """
    fenced: dict[int, Node] = {}
    for node in graph.nodes:
        if node.kind == "remat" and node.inside is not None:
            payload = structs.replace(node.of(Remat), prevent_cse=True)
            fenced[id(node)] = replace(node, inside=_with_barriers(node.inside), payload=payload)
        elif isinstance(node.payload, Scan) and node.inside is not None and node.payload.length <= node.payload.unroll:
            fenced[id(node)] = replace(node, inside=_with_barriers(node.inside))
    return with_nodes(graph, fenced)


def _traced(body: Body, part: Decomposition, count: int, numbered: bool) -> Body:
    """Return the program of the loop over micro-batches, which knows the number of each if `numbered`.

    Raises NoPosition if it needs the number and lacks it.
    """
    time, fixed = (Axis(TIME, count, 0),), len(part.constants)
    operands, results = ([(s,) for s in states] for states in (part.operands, part.results))
    dtypes = [body.tensors[v].dtype for v in part.sums]

    def one(constants: Sequence[Any], number: Any, parts: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        with nullcontext() if number is None else at_time(number):
            values = run_body(part.body, (*constants, *parts), operands, results, time)
        return values[: len(part.sums)], values[len(part.sums) :]

    def program(*xs: Any) -> list[Any]:
        # else the loop returns zero cotangents for them, and gradients of weights are computed and sent twice
        constants = [lax.stop_gradient(x) if v in part.inactive else x for x, v in zip(xs, part.constants, strict=False)]
        pieces = [split(x, s.dim, count, s.outer * count) for x, (_, s) in zip(xs[fixed:], part.read, strict=True)]
        numbers = jnp.arange(count, dtype=jnp.int32) if numbered else None
        first = (None if numbers is None else numbers[0], [x[0] for x in pieces])
        terms, _ = jax.eval_shape(lambda number, parts: one(constants, number, parts), *first)

        def step(sums: Any, xs: Any) -> Any:
            more, own = one(constants, *xs)
            return [x + y.astype(x.dtype) for x, y in zip(sums, more, strict=True)], own

        zeros = [jnp.zeros(t.shape, accumulator(t.dtype)) for t in terms]
        sums, own = lax.scan(step, zeros, (numbers, pieces), count)
        ends = [x.astype(dtype) for x, dtype in zip(sums, dtypes, strict=True)]
        # else they would be differentiated with the loop, which has the gradients of the loss alone
        ends = [lax.stop_gradient(x) if v in part.inactive else x for x, v in zip(ends, part.sums, strict=True)]
        return [*ends, *(joined(x, s.dim, s.outer * count) for x, (_, s) in zip(own, part.each, strict=True))]

    inputs, types = [body.tensors[v].struct for v in (*part.constants, *(v for v, _ in part.read))], part.body.tensors.values()
    walk = trace(program, inputs, types)  # first, so that only positions in derivative rules are left to find
    with precision_of(types):
        _check_rules(program, inputs, part.body)
    return walk


def _check_rules(program: Callable[..., list[Any]], inputs: Sequence[Any], body: Body) -> None:
    """Raise Mixed if a derivative rule in the loop needs a position in the batch: rules are traced outside of the loop."""
    calls = [e for e in body.equations if e.name in RULED or any(has(b, name) for b in bodies(e) for name in RULED)]

    def gradients(*xs: Any) -> Any:
        active = [k for k, x in enumerate(xs) if floating(x)]

        def results(*ys: Any) -> list[Any]:
            values = dict(zip(active, ys, strict=True))
            return [x for x in program(*(values.get(k, x) for k, x in enumerate(xs))) if floating(x)]

        out, back = jax.vjp(results, *(xs[k] for k in active))
        return back([jnp.ones_like(x) for x in out])

    if calls:
        try:
            jax.eval_shape(gradients, *inputs)
        except NoPosition as error:
            text = f"the derivative rule in {operator_at(calls[0])} depends on where a sample is in the batch"
            raise Mixed(text) from error


def with_recomputed_steps(graph: PCG) -> PCG:
    """Return a parallel graph with a checkpoint around each micro-batch, instead of a backward pass that follows it at once.

    Values and gradients are the same, and as few residuals are live, but the backward pass repeats the forward pass. Exported files
    have this form, which JAX can run without unity.
    """
    if all(accumulated_loss(node) is None for node in graph.nodes):
        return graph
    new: dict[Value, Value] = {}
    for node in graph.nodes:
        moved = replace(node, operands=tuple(new[v] for v in node.operands)) if node.operands else node
        if accumulated_loss(node) is not None:
            moved = _recomputed(moved)
        new.update(zip(node.results, moved.results, strict=True))
    return PCG(graph.inputs, tuple(new[v] for v in graph.outputs), graph.axes)


def _recomputed(loop: Node) -> Node:
    """Return a loop over micro-batches with a checkpoint around each.

    Narrow constants enter the loop in their accumulation types: JAX adds up their gradients in the types of the loop's operands.
    """
    inside, payload = loop.inside, loop.of(Scan)
    assert inside is not None
    inputs, operands, starts = list(inside.inputs), list(loop.operands), list[Value]()
    for k, start in enumerate(inside.inputs):
        wide, (tensor,) = accumulator(start.tensors[0].dtype), start.tensors
        if k < payload.consts and wide != tensor.dtype:
            operands[k] = _converted(loop.operands[k], wide, loop)
            inputs[k] = replace(start, tensors=operands[k].node.tensors)
        else:
            inputs[k] = replace(start)
        starts.append(_converted(Value(inputs[k]), tensor.dtype, loop) if inputs[k].tensors != start.tensors else Value(inputs[k]))
    tensors, types = zip(*((v.tensor, v.type) for v in inside.outputs), strict=True)
    step = Node("remat", tuple(starts), tensors, None, inside, Remat(False), types, loop.source, loop.scope)
    walk = PCG(tuple(inputs), step.results, inside.axes)
    return replace(loop, operands=tuple(operands), inside=walk, payload=structs.replace(payload, loss=None))


def _converted(v: Value, dtype: Any, place: Node) -> Value:
    """Return a value converted to another element type, with the line of the node `place`."""
    graph = capture(lambda x: x.astype(dtype), v.tensor.struct).graph
    (node,) = (n for n in graph.nodes if n.operands)
    return Value(replace(node, operands=(v,), types=(v.type,), source=place.source, scope=place.scope))
