"""Equal layers that follow each other, as a scan over their stacked weights: what can be a pipeline, if layers are written out.

    layer(w3, layer(w2, layer(w1, x)))  =  scan(layer, x, stack(w1, w2, w3))

Layers are found where cuts of the program repeat (`unity.search.joint.segments`). What a layer reads is carried, if the one before
makes it; the same for all; or its own, and then stacked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unity.pcg.capture.capture import Captured, graph_of
from unity.pcg.capture.heavy_operators import constants
from unity.pcg.ir.graph import PCG
from unity.pcg.ir.program import Body, close
from unity.pcg.local.interpreter import run_body
from unity.search.joint.segments import LEAST as LARGE
from unity.search.joint.segments import Segment, cuts, part
from unity.substitutions.rewriting.rewriting import content_key
from unity.transforms.pipelining.named import named, with_nodes
from unity.transforms.pipelining.splice import spliced, within

LEAST = 4  # layers
ROLLED = "unity:layers"  # the scope of the scan over them, which no model has
PERIOD = 4  # segments in a layer, at most
EQUATIONS = (LARGE, 8, 3)  # in a segment, at least


@dataclass(frozen=True)
class Layers:
    """Equal parts of a program, by what they read: positions of the parts' inputs.

    `carried`: of each result of a layer, the position at which the next one reads it.
    """

    parts: tuple[Segment, ...]
    carried: tuple[int, ...]
    shared: tuple[int, ...]
    own: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def step(self) -> Body:
        """What one of them computes."""
        return self.parts[0].body


def layers(captured: Captured) -> Layers | None:
    """The longest run of equal layers of a program; nothing if there is none. Large layers are looked for first."""
    return next((found for least in EQUATIONS if (found := _layers(captured, least)) is not None), None)


def _layers(captured: Captured, least: int) -> Layers | None:
    """The longest run of equal layers that are cut into segments of at least so many equations."""
    body = captured.body
    constant = constants(body)
    kept = [i for i, e in enumerate(body.equations) if not (e.results and e.results[0] in constant)]
    ends = [0, *cuts(body, kept, least), len(kept)]

    def of(start: int, end: int) -> Segment:
        return part(body, kept[start:end], constant, ())

    keys = [content_key(of(start, end).body) for start, end in pairwise(ends)]
    best: Layers | None = None
    for period in range(1, PERIOD + 1):
        for first, times in _runs(keys, period):
            places = [ends[first + k * period] for k in range(times + 1)]
            found = _wired(body, [of(start, end) for start, end in pairwise(_longer(places, of, len(kept)))])
            if found is not None and len(found) >= LEAST and (best is None or _size(found) > _size(best)):
                best = found
    return best


def _size(found: Layers) -> int:
    return len(found) * len(found.step.equations)


def _runs(keys: Sequence[str], period: int) -> list[tuple[int, int]]:
    """Where keys repeat with a period: (first, times)."""
    found, first = [], 0
    for i in range(len(keys) - period + 1):
        if i + period == len(keys) or keys[i] != keys[i + period]:
            times = (i + period - first) // period
            found += [(first, times)] if times > 1 else []
            first = i + 1
    return found


def _longer(places: list[int], of: Any, end: int) -> list[int]:
    """Ends of equal parts, with more such parts before the first and after the last: cuts may join these to what they follow."""
    size, key = places[1] - places[0], content_key(of(places[0], places[1]).body)
    while places[0] >= size and content_key(of(places[0] - size, places[0]).body) == key:
        places = [places[0] - size, *places]
    while places[-1] + size <= end and content_key(of(places[-1], places[-1] + size).body) == key:
        places = [*places, places[-1] + size]
    return places


def _wired(body: Body, run: Sequence[Segment]) -> Layers | None:
    """A run as layers, if each reads of the one before all that it makes, always at the same positions, and nobody else does."""
    found = [_reads(one, other) for one, other in pairwise(run)]
    carried = found[0]
    if carried is None or any(other != carried for other in found):
        return None
    columns = list(zip(*(layer.inputs for layer in run), strict=True))
    shared = tuple(p for p, column in enumerate(columns) if p not in carried and len(set(column)) == 1)
    own = tuple(p for p in range(len(columns)) if p not in carried and p not in shared)
    made = {v for layer in run for e in layer.body.equations for v in e.results}
    inner = {v for layer in run[:-1] for v in layer.outputs}
    outside = {a for a in body.outputs if isinstance(a, int)}
    outside |= {a for e in body.equations if made.isdisjoint(e.results) for a in e.operands if isinstance(a, int)}
    if inner & outside or any(v in made for p in own + shared for v in columns[p]):
        return None
    return Layers(tuple(run), carried, shared, own)


def _reads(one: Segment, other: Segment) -> tuple[int, ...] | None:
    """Where a layer reads each result of the one before; nothing if it does not read all, or one twice."""
    places = [[p for p, v in enumerate(other.inputs) if v == made] for made in one.outputs]
    return tuple(p for (p,) in places) if places and all(len(p) == 1 for p in places) else None


def rolled(captured: Captured, found: Layers, count: int) -> Captured:
    """The program, its last `count` layers a scan."""
    found = replace(found, parts=found.parts[len(found) - count :])
    first, last = found.parts[0], found.parts[-1]
    columns = [[layer.inputs[p] for layer in found.parts] for p in found.own]
    shared, start = [first.inputs[p] for p in found.shared], [first.inputs[p] for p in found.carried]
    given = [*shared, *start, *(v for column in columns for v in column)]
    program = jax.make_jaxpr(lambda *xs: _scanned(found, xs))(*(captured.body.tensors[v].struct for v in given))
    made = {v for layer in found.parts for e in layer.body.equations for v in e.results} - constants(captured.body).keys()
    where = next(e for e in captured.body.equations if not made.isdisjoint(e.results))
    after = captured.of(spliced(captured.body, made, given, last.outputs, close(program), where, ROLLED), captured.bodies)
    return replace(after, graph=_with_lines(after.graph, found))


def _scanned(found: Layers, xs: Sequence[Any]) -> Sequence[Any]:
    step, s, c, n = found.step, len(found.shared), len(found.carried), len(found)
    shared, start, rest = xs[:s], tuple(xs[s : s + c]), xs[s + c :]
    stacks = [jnp.stack(rest[k * n : (k + 1) * n]) for k in range(len(found.own))]
    types, results = [()] * len(step.inputs), [()] * len(step.outputs)

    def one(carry: Any, own: Any) -> Any:
        at = dict(zip(found.shared, shared, strict=True)) | dict(zip(found.carried, carry, strict=True))
        at |= dict(zip(found.own, own, strict=True))
        return tuple(run_body(step, [at[p] for p in range(len(step.inputs))], types, results, ())), None

    return lax.scan(one, start, stacks, n)[0]


def _with_lines(graph: PCG, found: Layers) -> PCG:
    """The graph, operators in the scan at the lines of the first layer's."""
    (loop,) = [n for n in graph.nodes if n.kind == "scan" and within(n.scope, ROLLED)]
    assert loop.inside is not None
    step = graph_of(found.step, [f"operand {k}" for k in range(len(found.step.inputs))])
    return with_nodes(graph, {id(loop): replace(loop, inside=named(loop.inside, step))})
