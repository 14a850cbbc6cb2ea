"""Rolling of equal consecutive layers into a scan over their stacked weights, so that unrolled layers can be a pipeline.

    layer(w3, layer(w2, layer(w1, x)))  =  scan(layer, x, stack(w1, w2, w3))

Layers are detected where cuts of the program repeat (`unity.search.joint.segments`). An input of a layer is a carry, if the layer
before produces it; shared, if all layers read the same value; or the layer's alone, and then stacked. Layers may also read the
pieces of one array, which is then what the scan walks over."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice, pairwise
from typing import Any

import jax.numpy as jnp
from jax import lax

from unity.pcg.analysis.pieces import ArrayPiece, Stack, pieces, stack_of
from unity.pcg.capture.capture import Captured, graph_of
from unity.pcg.capture.heavy_operators import constants
from unity.pcg.ir.graph import PCG
from unity.pcg.ir.program import Body
from unity.pcg.ir.tracing import trace
from unity.pcg.local.interpreter import run_body
from unity.search.joint.segments import LEAST as LARGE
from unity.search.joint.segments import Segment, cuts, part
from unity.substitutions.rewriting.rewriting import content_key
from unity.transforms.splice import named, spliced, with_nodes, within

LEAST = 4  # layers, at least
ROLLED = "unity:layers"  # the scope of the scan over them, which no model has
PERIOD = 4  # segments in a layer, at most
EQUATIONS = (LARGE, 8, 3)  # in a segment, at least


@dataclass(frozen=True)
class EqualLayers:
    """Equal consecutive parts of a program, with the positions of their inputs by role.

    Attributes:
        parts: the layers.
        carried: for each result of a layer, the input of the next layer that reads it.
        shared: inputs for which all layers read the same value.
        own: inputs for which each layer reads a different value.
    """

    parts: tuple[Segment, ...]
    carried: tuple[int, ...]
    shared: tuple[int, ...]
    own: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def step(self) -> Body:
        """The program of one layer."""
        return self.parts[0].body


def layers(captured: Captured) -> EqualLayers | None:
    """Return the longest run of equal layers of a program, or None. Large layers are tried first."""
    return next((run for least in EQUATIONS if (run := _layers(captured, least)) is not None), None)


def _layers(captured: Captured, least: int) -> EqualLayers | None:
    """Return the longest run of equal layers, cut into segments of at least `least` equations."""
    cutting = {i for piece in pieces(captured.body).values() for i in piece.equations}
    runs = [_layers_without(left_out, captured.body, least) for left_out in ([set(), cutting] if cutting else [set()])]
    return max((run for run in runs if run is not None), key=_size, default=None)


def _layers_without(left_out: Collection[int], body: Body, least: int) -> EqualLayers | None:
    """Return the longest run of equal layers. The equations that are left out, by number, belong to none."""
    constant = constants(body)
    variable = [i for i, e in enumerate(body.equations) if i not in left_out and not (e.results and e.results[0] in constant)]
    ends = [0, *cuts(body, variable, least), len(variable)]

    def of(start: int, end: int) -> Segment:
        return part(body, variable[start:end], constant, ())

    keys = [content_key(of(start, end).body) for start, end in pairwise(ends)]
    best: EqualLayers | None = None
    for period in range(1, PERIOD + 1):
        for first, times in _runs(keys, period):
            places = [ends[first + k * period] for k in range(times + 1)]
            parts = [of(start, end) for start, end in pairwise(_longer(places, of, len(variable)))]
            for run in _alike(parts):
                candidate = _wired(body, run) if len(run) >= LEAST else None
                if candidate is not None and (best is None or _size(candidate) > _size(best)):
                    best = candidate
    return best


def _alike(parts: Sequence[Segment]) -> list[list[Segment]]:
    """Return the runs of equal parts: parts of several segments may differ in how these read each other, though all are equal."""
    return [list(run) for _, run in groupby(parts, key=lambda segment: content_key(segment.body))]


def _size(run: EqualLayers) -> int:
    return len(run) * len(run.step.equations)


def _runs(keys: Sequence[str], period: int) -> list[tuple[int, int]]:
    """Return the runs of keys that repeat with a period, as (first, times)."""
    runs, first = [], 0
    for i in range(len(keys) - period + 1):
        if i + period == len(keys) or keys[i] != keys[i + period]:
            times = (i + period - first) // period
            runs += [(first, times)] if times > 1 else []
            first = i + 1
    return runs


def _longer(places: list[int], of: Any, end: int) -> list[int]:
    """Extend a run of equal parts, given by their ends, to both sides: cuts may have joined further parts to their neighbours."""
    size, key = places[1] - places[0], content_key(of(places[0], places[1]).body)
    while places[0] >= size and content_key(of(places[0] - size, places[0]).body) == key:
        places = [places[0] - size, *places]
    while places[-1] + size <= end and content_key(of(places[-1], places[-1] + size).body) == key:
        places = [*places, places[-1] + size]
    return places


def _wired(body: Body, run: Sequence[Segment]) -> EqualLayers | None:
    """Return a run as layers, or None.

    Each layer must read all results of the one before, always at the same positions, and nothing else may read them.
    """
    reads = [_reads(one, other) for one, other in pairwise(run)]
    carried = reads[0]
    if carried is None or any(other != carried for other in reads):
        return None
    columns = list(zip(*(layer.inputs for layer in run), strict=True))
    shared = tuple(p for p, column in enumerate(columns) if p not in carried and len(set(column)) == 1)
    own = tuple(p for p in range(len(columns)) if p not in carried and p not in shared)
    computed = {v for layer in run for e in layer.body.equations for v in e.results}
    inner = {v for layer in run[:-1] for v in layer.outputs}
    outside = {a for a in body.outputs if isinstance(a, int)}
    outside |= {a for e in body.equations if computed.isdisjoint(e.results) for a in e.operands if isinstance(a, int)}
    if inner & outside or any(v in computed for p in own + shared for v in columns[p]):
        return None
    return EqualLayers(tuple(run), carried, shared, own)


def _reads(one: Segment, other: Segment) -> tuple[int, ...] | None:
    """Return the inputs at which a layer reads the results of the one before; None if it does not read each exactly once."""
    places = [[p for p, v in enumerate(other.inputs) if v == made] for made in one.outputs]
    return tuple(p for (p,) in places) if places and all(len(p) == 1 for p in places) else None


def rolled(captured: Captured, run: EqualLayers, count: int) -> Captured:
    """Return the program with its last `count` layers rolled into a scan."""
    run = replace(run, parts=run.parts[len(run) - count :])
    first, last = run.parts[0], run.parts[-1]
    shared, start = [first.inputs[p] for p in run.shared], [first.inputs[p] for p in run.carried]
    known = pieces(captured.body)
    walked = [_Walked.of(known, [layer.inputs[p] for layer in run.parts]) for p in run.own]
    inputs = [*shared, *start, *(v for each in walked for v in each.inputs)]
    structs = (captured.body.tensors[v].struct for v in inputs)
    program = trace(lambda *xs: _scanned(run, walked, xs), structs, run.step.tensors.values())
    computed = {v for layer in run.parts for e in layer.body.equations for v in e.results} - constants(captured.body).keys()
    where = next(e for e in captured.body.equations if not computed.isdisjoint(e.results))
    after = captured.of(spliced(captured.body, computed, inputs, last.outputs, program, where, ROLLED), captured.bodies)
    return replace(after, graph=_with_lines(after.graph, run))


@dataclass(frozen=True)
class _Walked:
    """What a scan over layers walks over: the values that they read at one input, or the array of which these are pieces."""

    inputs: list[int]  # variables of the program
    stack: Stack | None

    @staticmethod
    def of(known: Mapping[int, ArrayPiece], values: list[int]) -> _Walked:
        """Return what is walked over for the values of one input, of which some may be known as pieces."""
        stack = stack_of([known[v] for v in values]) if all(v in known for v in values) else None
        return _Walked(values, None) if stack is None else _Walked([stack.array], stack)

    def array(self, xs: Sequence[Any]) -> Any:
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
