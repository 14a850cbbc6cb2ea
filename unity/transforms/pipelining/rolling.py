"""Rolling of equal consecutive layers into a scan over their stacked weights, so that unrolled layers can be a pipeline.

    layer(w3, layer(w2, layer(w1, x)))  =  scan(layer, x, stack(w1, w2, w3))

What each layer reads alone is stacked: weights, random keys, numbers. Layers may also read the pieces of one array, which is then
what the scan walks over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from unity.pcg.analysis.pieces import ArrayPiece, Stack, pieces, stack_of
from unity.pcg.capture.capture import Captured, graph_of
from unity.pcg.capture.heavy_operators import constants
from unity.pcg.ir.graph import PCG
from unity.pcg.ir.tracing import trace
from unity.pcg.local.interpreter import run_body
from unity.transforms.pipelining.equal_layers import EqualLayers
from unity.transforms.pipelining.layer_constants import OpenProgram
from unity.transforms.splice import named, spliced, with_nodes, within

ROLLED = "unity:layers"  # the scope of the scan over them, which no model has


def rolled(captured: Captured, run: EqualLayers, count: int) -> Captured:
    """Return the program with its last `count` layers rolled into a scan."""
    run = replace(run, parts=run.parts[len(run) - count :])
    first, last = run.parts[0], run.parts[-1]
    shared, start = [first.inputs[p] for p in run.shared], [first.inputs[p] for p in run.carried]
    known = pieces(captured.body)
    walked = [_Walked.of(run.program, known, [layer.inputs[p] for layer in run.parts]) for p in run.own]
    inputs = [*shared, *start, *(v for each in walked for v in each.inputs)]
    structs = (captured.body.tensors[v].struct for v in inputs)
    program = trace(lambda *xs: _scanned(run, walked, xs), structs, run.step.tensors.values())
    computed = {v for layer in run.parts for e in layer.body.equations for v in e.results} - constants(captured.body).keys()
    where = next(e for e in captured.body.equations if not computed.isdisjoint(e.results))
    after = captured.of(spliced(captured.body, computed, inputs, last.outputs, program, where, ROLLED), captured.bodies)
    return replace(after, graph=_with_lines(after.graph, run))


@dataclass(frozen=True)
class _Walked:
    """The values that a scan over layers reads at one input in each step, or the array of which these are pieces."""

    inputs: list[int]  # variables of the program
    stack: Stack | None
    numbers: np.ndarray | None = None  # the values, if they are numbers in the program's equations

    @staticmethod
    def of(program: OpenProgram, known: Mapping[int, ArrayPiece], values: list[int]) -> _Walked:
        """Return what is walked over for the values of one input, of which some may be known as pieces."""
        if values[0] in program.numbers:
            return _Walked([], None, program.stacked(values))
        stack = stack_of([known[v] for v in values]) if all(v in known for v in values) else None
        return _Walked(values, None) if stack is None else _Walked([stack.array], stack)

    def array(self, xs: Sequence[Any]) -> Any:
        if self.numbers is not None:
            return jnp.asarray(self.numbers)
        return jnp.stack(xs) if self.stack is None else self.stack.of(xs[0])


def _scanned(run: EqualLayers, walked: Sequence[_Walked], xs: Sequence[Any]) -> Sequence[Any]:
    step, s, c, n = run.step, len(run.shared), len(run.carried), len(run)
    shared, start, rest = xs[:s], tuple(xs[s : s + c]), iter(xs[s + c :])
    stacks = [each.array(list(islice(rest, len(each.inputs)))) for each in walked]
    types, results = [()] * len(step.inputs), [()] * len(step.outputs)

    def one(carry: Any, own: Any) -> Any:
        at = dict(zip(run.shared, shared, strict=True)) | dict(zip(run.carried, carry, strict=True))
        at |= dict(zip(run.own, own, strict=True))
        return tuple(run_body(step, [at[p] for p in range(len(step.inputs))], types, results, ())), None

    return lax.scan(one, start, stacks, n)[0]


def _with_lines(graph: PCG, run: EqualLayers) -> PCG:
    """Return the graph with the scan's operators at the lines of the first layer."""
    (loop,) = [n for n in graph.nodes if n.kind == "scan" and within(n.scope, ROLLED)]
    assert loop.inside is not None
    step = graph_of(run.step, [f"operand {k}" for k in range(len(run.step.inputs))])
    return with_nodes(graph, {id(loop): replace(loop, inside=named(loop.inside, step))})
