"""Detection of equal consecutive layers that are written out.

Layers are detected where cuts of the program repeat (`unity.search.joint.segments`), and where its equations do: a layer may be a
few equations, or a single one, such as a call of `jax.checkpoint`. An input of a layer is a carry, if the layer before produces it;
shared, if all layers read the same value; or the layer's alone.

Layers that differ in a number or in a random key are equal, since both are inputs. So keys that are computed from keys alone belong
to no layer, and neither do equations that cut arguments into pieces or stop the gradient of one, if more layers are equal without
them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from unity.pcg.analysis.pieces import pieces
from unity.pcg.capture.capture import Captured
from unity.pcg.capture.heavy_operators import constants
from unity.pcg.ir.program import Body
from unity.pcg.jaxprs.jaxprs import NESTING
from unity.pcg.types.factors import facts_of
from unity.search.joint.segments import LEAST as LARGE
from unity.search.joint.segments import Segment, crossing, cuts, last_uses, part, shared
from unity.substitutions.rewriting.rewriting import content_key
from unity.transforms.pipelining.layer_constants import OpenProgram, opened

LEAST = 4  # layers, at least
PERIOD = 4  # segments in a layer, at most
EQUATIONS = (LARGE, 8, 3)  # in a segment, at least
LONGEST = 2 * LARGE  # equations in a layer that is detected without cuts, at most
STARTS = 4  # equations with which such a layer may begin that are tried


@dataclass(frozen=True)
class EqualLayers:
    """Equal consecutive parts of a program, with the positions of their inputs by role.

    Attributes:
        parts: the layers.
        carried: for each result of a layer, the input of the next layer that reads it.
        shared: inputs for which all layers read the same value.
        own: inputs for which each layer reads a different value.
        program: the program whose parts they are.
    """

    parts: tuple[Segment, ...]
    carried: tuple[int, ...]
    shared: tuple[int, ...]
    own: tuple[int, ...]
    program: OpenProgram

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def step(self) -> Body:
        """The program of one layer."""
        return self.parts[0].body

    @property
    def size(self) -> tuple[int, int]:
        """The number of equations, and of layers."""
        return len(self) * len(self.step.equations), len(self)


def layers(captured: Captured) -> EqualLayers | None:
    """Return the longest run of equal layers of a program, or None. Of those with cuts, large layers are tried first."""
    program = opened(captured.body)
    remainders = [_Remainder.of(program, left_out) for left_out in _left_out(program.body)]
    by_cuts = (_longest(remainder.by_cuts(least) for remainder in remainders) for least in EQUATIONS)
    largest = next((run for run in by_cuts if run is not None), None)
    return _longest([largest, *(remainder.by_period() for remainder in remainders)])


def _longest(runs: Iterator[EqualLayers | None] | Sequence[EqualLayers | None]) -> EqualLayers | None:
    return max((run for run in runs if run is not None), key=lambda run: run.size, default=None)


def _left_out(body: Body) -> list[frozenset[int]]:
    """Return the sets of equations, by number, to leave out of layers: none, or those of pieces, keys, or both."""
    constant = constants(body)
    keys = frozenset(i for i in shared(body, constant) if body.equations[i].results[0] not in constant)
    cutting = frozenset(i for piece in pieces(body).values() for i in piece.equations)
    arguments = set(body.inputs)
    stops = frozenset(i for i, e in enumerate(body.equations) if e.name == "stop_gradient" and arguments.issuperset(e.operands))
    return list(dict.fromkeys([frozenset(), cutting, keys | stops, cutting | keys | stops]))


@dataclass(frozen=True, eq=False)
class _Remainder:
    """The equations of a program that may belong to layers, by number. Constants, which every layer has itself, do not."""

    program: OpenProgram
    equations: list[int]
    constant: Mapping[int, int]
    last: Mapping[int, int]

    @staticmethod
    def of(program: OpenProgram, left_out: Collection[int]) -> _Remainder:
        constant = constants(program.body)
        numbered = enumerate(program.body.equations)
        equations = [i for i, e in numbered if i not in left_out and not (e.results and e.results[0] in constant)]
        return _Remainder(program, equations, constant, last_uses(program.body))

    def part(self, start: int, end: int) -> Segment:
        """Return the equations between two places."""
        return part(self.program.body, self.equations[start:end], self.constant, (), self.last)

    def by_cuts(self, least: int) -> EqualLayers | None:
        """Return the longest run of equal layers, cut into segments of at least `least` equations."""
        ends = [0, *cuts(self.program.body, self.equations, least), len(self.equations)]
        keys = [content_key(self.part(start, end).body) for start, end in pairwise(ends)]
        best: EqualLayers | None = None
        for period in range(1, PERIOD + 1):
            for first, end in _repeats(keys, period):
                places = [ends[k] for k in range(first, end + 1, period)]
                best = _longest([best, *self.runs(_longer(places, self.part, len(self.equations)))])
        return best

    def by_period(self) -> EqualLayers | None:
        """Return the longest run of equal layers of the same number of equations, each with a product or a nested program."""
        equations = [self.program.body.equations[i] for i in self.equations]
        keys = [f"{e.signature} {[str(self.program.body.tensors[v]) for v in e.results]}" for e in equations]
        heavy = [facts_of(e.name).product or e.name in NESTING for e in equations]
        crossing_at = crossing(self.program.body, self.equations)
        best: EqualLayers | None = None
        most = 0  # equations
        for period in range(1, min(LONGEST, len(keys) // LEAST) + 1):
            for first, end in _repeats(keys, period):
                if end - first < max(LEAST * period, most + 1) or not any(heavy[first : first + period]):
                    continue
                for start in sorted(range(first, first + period), key=lambda k: crossing_at[k])[:STARTS]:
                    for run in self.runs(list(range(start, end + 1, period))):
                        best, most = _longest([best, run]), max(most, len(run) * period)
        return best

    def runs(self, places: Sequence[int]) -> list[EqualLayers]:
        """Return the runs of equal layers among the parts between places.

        Parts of several segments may differ in how these read each other, though all are equal.
        """
        parts = [self.part(start, end) for start, end in pairwise(places)]
        equal = [list(run) for _, run in groupby(parts, key=lambda segment: content_key(segment.body))]
        return [run for parts in equal if len(parts) >= LEAST and (run := _wired(self.program, parts)) is not None]


def _repeats(keys: Sequence[str], period: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the last place of runs of keys that repeat with a period at least once."""
    first = 0
    for i in range(len(keys) - period + 1):
        if i + period == len(keys) or keys[i] != keys[i + period]:
            if i >= first + period:
                yield first, i + period
            first = i + 1


def _longer(places: list[int], of: Callable[[int, int], Segment], end: int) -> list[int]:
    """Extend a run of equal parts, given by their ends, to both sides: cuts may have joined further parts to their neighbours."""
    size, key = places[1] - places[0], content_key(of(places[0], places[1]).body)
    while places[0] >= size and content_key(of(places[0] - size, places[0]).body) == key:
        places = [places[0] - size, *places]
    while places[-1] + size <= end and content_key(of(places[-1], places[-1] + size).body) == key:
        places = [*places, places[-1] + size]
    return places


def _wired(program: OpenProgram, parts: Sequence[Segment]) -> EqualLayers | None:
    """Return a run of equal parts as layers, or None.

    Each layer must read all results of the one before, always at the same positions, and nothing else may read them. A number may
    not be in the place of a variable.
    """
    run = program.closed(parts)
    reads = [_reads(one, other) for one, other in pairwise(run)]
    carried = reads[0]
    if carried is None or any(other != carried for other in reads):
        return None
    if not program.numbers.keys().isdisjoint(run[0].inputs[p] for p in carried):  # the first layer begins with a number
        return _wired(program, parts[1:]) if len(parts) > LEAST else None
    columns = list(zip(*(layer.inputs for layer in run), strict=True))
    shared = tuple(p for p, column in enumerate(columns) if p not in carried and len(set(column)) == 1)
    own = tuple(p for p in range(len(columns)) if p not in carried and p not in shared)
    computed = {v for layer in run for e in layer.body.equations for v in e.results}
    if any(len({v in program.numbers for v in columns[p]}) > 1 for p in own):
        return None
    inner = {v for layer in run[:-1] for v in layer.outputs}
    outside = {a for a in program.body.outputs if isinstance(a, int)}
    outside |= {a for e in program.body.equations if computed.isdisjoint(e.results) for a in e.operands if isinstance(a, int)}
    if inner & outside or any(v in computed for p in own + shared for v in columns[p]):
        return None
    return EqualLayers(tuple(run), carried, shared, own, program)


def _reads(one: Segment, other: Segment) -> tuple[int, ...] | None:
    """Return the inputs at which a layer reads the results of the one before; None if it does not read each exactly once."""
    places = [[p for p, v in enumerate(other.inputs) if v == made] for made in one.outputs]
    return tuple(p for (p,) in places) if places and all(len(p) == 1 for p in places) else None
