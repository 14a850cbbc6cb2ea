"""The values of every site: which choice each mesh axis takes.

Axes of one size on one level are interchangeable, so choices are given to them in one fixed order: the order of the tensor
dimensions that they follow through the graph (samples first). That keeps domains small without losing degrees; what it does
lose is other orders in parts of the graph, and those are looked at around what was found (`unity.search.cost.refinement`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations_with_replacement, groupby, product

import numpy as np

from unity.base.errors import InfeasibleError
from unity.machine.resharding_tables import Types
from unity.pcg.propagation.choices import Choice, part_of_work
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import State, Type
from unity.search.space.masks import NOTHING, Mask, every, left
from unity.search.space.sites import Site


@dataclass(frozen=True, eq=False)
class Domain:
    """The values of a site: for each, the choice along each axis, and from that the types of operands and results."""

    choices: tuple[Choice, ...]
    picks: np.ndarray  # [values, axes], indices into `choices`
    key: str
    whole: bool = False  # whether these are all values that there are
    mask: Mask = NOTHING  # what else is left out, by a user's constraints

    def __len__(self) -> int:
        return len(self.picks)

    @cached_property
    def types(self) -> tuple[tuple[Types, np.ndarray], ...]:
        """For each operand and then each result: its distinct types, and which of them each value has."""
        found = []
        for position in range(len(self.choices[0].states)):
            codes: dict[State, int] = {}
            of_choice = np.array([codes.setdefault(c.states[position], len(codes)) for c in self.choices], np.int16)
            rows, index = np.unique(of_choice[self.picks], axis=0, return_inverse=True)
            found.append((Types(tuple(codes), rows), index.reshape(-1)))
        return tuple(found)

    def type_of(self, value: int, position: int) -> Type:
        """The type of an operand, or (counted after the operands) of a result."""
        return tuple(self.states[c][position] for c in self.picks[value].tolist())

    @cached_property
    def states(self) -> tuple[tuple[State, ...], ...]:
        """Of every choice, as `type_of` asks for them again and again."""
        return tuple(c.states for c in self.choices)


def ranks(sites: Sequence[Site], found: Sequence[tuple[Choice, ...]]) -> list[tuple[int, ...]]:
    """For every choice, the rank of the dimension that it follows through the graph; the samples' dimension comes first."""
    parent: dict[tuple[int, int, State], tuple[int, int, State]] = {}

    def root(x: tuple[int, int, State]) -> tuple[int, int, State]:
        while parent.setdefault(x, x) != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    def ends(s: int, choice: Choice) -> Iterator[tuple[int, int, State]]:
        for p, state in zip(sites[s].ports, choice.operands, strict=True):
            if state.kind == "P":
                yield (p.source, p.index, state)
        for k, state in enumerate(choice.results):
            if state.kind == "P":
                yield (s, k, state)

    for s, cs in enumerate(found):
        for choice in cs:
            slots = list(ends(s, choice))
            for other in slots[1:]:
                parent[root(other)] = root(slots[0])
    order: dict[tuple[int, int, State], int] = {}
    first = sorted(range(len(sites)), key=lambda s: (sites[s].kind != "input" or sites[s].weight, s))
    for s in first:
        for choice in sorted(found[s], key=lambda c: c.states):
            for slot in ends(s, choice):
                order.setdefault(root(slot), len(order))
    last = {"replicated": len(order) + 1, "unused": len(order) + 2}
    return [
        tuple(min((order[root(e)] for e in ends(s, c)), default=last.get(c.name, len(order))) for c in cs)
        for s, cs in enumerate(found)
    ]


@dataclass(frozen=True)
class Limits:
    """Which values a first search looks at. What is left out is looked at around what was found (`unity.search.cost.refinement`).

    `distinct`: different choices on one group of interchangeable axes, and `total` on all axes, idle ones not counted.
    `waste`: how many times more work than the best value a device may do. `blocks`: into how many blocks of axes with one
    choice each a group is cut.
    """

    distinct: int
    total: int
    waste: float
    blocks: int = 99


EXACT = (Limits(99, 99, np.inf),)
# From the widest limits to the narrowest; a value may keep to any of one step's. `benchmarks/pruning.py` compares them.
LADDER = (
    EXACT,
    (Limits(3, 3, np.inf),),
    (Limits(2, 3, np.inf),),
    (Limits(2, 2, np.inf),),
    (Limits(2, 2, np.inf, 2),),
    (Limits(2, 2, 4.0, 2), Limits(2, 1, np.inf, 2)),
    (Limits(2, 2, 2.0, 2), Limits(2, 1, np.inf, 2)),
)
IDLE = ("unused", "replicated")  # choices along whose axes a site's devices have the same
VALUES = 200  # of a site, for which wider limits are taken
LISTED = 20_000  # values that are listed to choose among them
ORDERED = 3  # axes from which on choices on interchangeable ones are taken in one order only


Shapes = Sequence[tuple[int, ...]]


def domain(
    site: Site,
    found: tuple[Choice, ...],
    rank: tuple[int, ...],
    axes: tuple[Axis, ...],
    limits: tuple[Limits, ...] | None = None,
    mask: Mask = NOTHING,
) -> Domain:
    """The values of a site: one choice for each axis, in rank order on interchangeable axes, that fits all its tensors.

    Without `limits`, the widest of the ladder's that leave few enough. A mask leaves some, in any order.

    Raises:
        InfeasibleError: the mask leaves none.
    """
    if site.along:
        return _staged(site, found, rank, axes, limits, mask)
    cs = tuple(found[i] for i in sorted(range(len(found)), key=lambda i: (rank[i], found[i].states)))
    shapes = shapes_of(site)
    if limits is not None:
        picks, _ = _as_stored(site, cs, shapes, axes, max(m.distinct for m in limits))
        return made(cs, _within(cs, picks, axes, limits), shapes, axes)
    picks, whole = _as_stored(site, cs, shapes, axes, None)
    if mask:
        picks = _masked(mask, cs, shapes, picks, axes)
    kept = next((k for step in LADDER if 0 < len(k := _within(cs, picks, axes, step)) <= VALUES), None)
    kept = _within(cs, picks, axes, LADDER[-1]) if kept is None else kept
    kept = kept if len(kept) else picks  # a mask may leave none but of wider limits
    return made(cs, kept, shapes, axes, whole and len(kept) == len(picks), mask)


def _masked(mask: Mask, cs: Sequence[Choice], shapes: Shapes, picks: np.ndarray, axes: Sequence[Axis]) -> np.ndarray:
    """The values that a mask leaves, those included that are not listed otherwise."""
    more = every(mask, cs, axes)
    picks = left(mask, cs, np.unique(np.vstack([picks, more[fits(cs, shapes, more, axes)]]), axis=0), axes)
    if not len(picks):
        raise InfeasibleError("constraints leave no way to split a tensor")
    return picks


def _staged(
    site: Site,
    found: tuple[Choice, ...],
    rank: tuple[int, ...],
    axes: tuple[Axis, ...],
    limits: tuple[Limits, ...] | None,
    mask: Mask,
) -> Domain:
    """The values of a site inside of a pipeline: those on the other axes, with its own choice, the last, on the stage axes."""
    assert site.staged is not None
    others = [k for k, axis in enumerate(axes) if axis.name not in site.along]
    inner = domain(replace(site, along=()), found, rank, tuple(axes[k] for k in others), limits)
    cs, shapes = (*inner.choices, site.staged), shapes_of(site)
    picks = np.full((len(inner), len(axes)), len(inner.choices), np.int16)
    picks[:, others] = inner.picks
    picks = left(mask, cs, picks[fits(cs, shapes, picks, axes)], axes)
    if mask and not len(picks):
        raise InfeasibleError("constraints leave no way to split a tensor")
    return made(cs, picks, shapes, axes, inner.whole, mask)


def legal(site: Site, cs: Sequence[Choice], picks: np.ndarray, axes: Sequence[Axis]) -> np.ndarray:
    """Which picks a site of a domain with these choices may have: those that fit, and keep to its stages, if it has any."""
    good = fits(cs, shapes_of(site), picks, axes)
    for k, axis in enumerate(axes if site.along else ()):
        good &= (picks[:, k] == len(cs) - 1) == (axis.name in site.along)
    return good


def shapes_of(site: Site) -> list[tuple[int, ...]]:
    """The shapes of a site's operands and results."""
    return [p.tensor.shape for p in site.ports] + [t.shape for t in site.results]


def made(
    cs: tuple[Choice, ...],
    picks: np.ndarray,
    shapes: Shapes,
    axes: tuple[Axis, ...],
    whole: bool = False,
    mask: Mask = NOTHING,
) -> Domain:
    """A domain, with a key that is equal for equal ones."""
    content = hashlib.blake2b(digest_size=12)
    text = [(c.states, c.size, round(c.divided, 6), c.reduced, sorted(c.partitions), c.halos) for c in cs]
    content.update(repr((text, shapes, axes, picks.shape)).encode())
    content.update(np.ascontiguousarray(picks).tobytes())
    return Domain(cs, picks, content.hexdigest(), whole, mask)


def _groups(axes: Sequence[Axis]) -> list[int]:
    """How many axes are interchangeable, group by group."""
    return [len(list(g)) for _, g in groupby(axes, key=lambda a: (a.size, a.level))]


def _as_stored(
    site: Site, cs: tuple[Choice, ...], shapes: Shapes, axes: tuple[Axis, ...], distinct: int | None
) -> tuple[np.ndarray, bool]:
    """What is listed; of a weight also with idle axes first: where it is used, samples come first, and there it is idle."""
    picks, whole = _listed(cs, shapes, axes, distinct)
    if not site.weight or len(axes) < ORDERED or max(_groups(axes)) == 1:  # in every order already
        return picks, whole
    order = np.array(sorted(range(len(cs)), key=lambda i: cs[i].name not in IDLE))
    other, _ = _listed([cs[i] for i in order], shapes, axes, distinct)
    return np.unique(np.vstack([picks, order[other].astype(picks.dtype)]), axis=0), whole


def _listed(cs: Sequence[Choice], shapes: Shapes, axes: tuple[Axis, ...], distinct: int | None) -> tuple[np.ndarray, bool]:
    """Values that fit, [values, axes], and whether these are all. Without `distinct`, too many are cut to 3 choices, or 2.

    What does not fit on some of the axes does not fit on more.
    """
    orders = combinations_with_replacement if len(axes) >= ORDERED else _in_any_order
    whole = len(axes) < ORDERED or max(_groups(axes)) == 1
    picks, done = np.zeros((1, 0), np.int16), 0
    for n in _groups(axes):
        more = np.array(list(orders(range(len(cs)), n)), np.int16).reshape(-1, n)
        more = more[fits(cs, shapes, more, axes[done : done + n])]
        kinds = 1 + (np.diff(np.sort(more, axis=1), axis=1) > 0).sum(1)
        cut = [more[kinds <= most] for most in ((99, 3, 2) if distinct is None else (distinct,))]
        kept = next((k for k in cut if len(picks) * len(k) <= LISTED), cut[-1])
        done, whole = done + n, whole and len(kept) == len(more)
        picks = np.hstack([np.repeat(picks, len(kept), axis=0), np.tile(kept, (len(picks), 1))])
        picks = picks[fits(cs, shapes, picks, axes[:done])]
    return picks, whole


def _in_any_order(choices: Iterable[int], n: int) -> Iterator[tuple[int, ...]]:
    return product(choices, repeat=n)


def _within(cs: Sequence[Choice], picks: np.ndarray, axes: Sequence[Axis], limits: Sequence[Limits]) -> np.ndarray:
    """The values that keep to some of the limits. An operator that shares no work wastes none."""
    idle = np.array([c.name in IDLE for c in cs])
    used = [(part[:, :, None] == np.arange(len(cs))).any(1) for part in np.split(picks, np.cumsum(_groups(axes))[:-1], axis=1)]
    distinct = np.max([u.sum(1) for u in used], axis=0, initial=0) if used else np.zeros(len(picks), int)
    total = (np.any(used, axis=0) & ~idle).sum(1) if used else distinct
    share = work_shares(cs, picks, axes)
    least = share.min(initial=1.0)
    allowed = [
        (distinct <= m.distinct) & (total <= m.total) & (share <= m.waste * least) & _blocked(picks, axes, m.blocks) for m in limits
    ]
    return picks[np.any(allowed, axis=0)]


def work_shares(cs: Sequence[Choice], picks: np.ndarray, axes: Sequence[Axis]) -> np.ndarray:
    """What part of the work one device does, for every value."""
    divided = np.array([c.divided for c in cs])[picks]
    return np.prod(part_of_work(divided, np.array([a.size for a in axes], float)), axis=1)


def _blocked(picks: np.ndarray, axes: Sequence[Axis], blocks: int) -> np.ndarray:
    """Whether a group's axes, cut into so many blocks, have one choice in each."""
    same, done = np.ones(len(picks), bool), 0
    for n in _groups(axes):
        for block in np.array_split(np.arange(done, done + n), min(blocks, n)):
            same &= (picks[:, block] == picks[:, block[:1]]).all(1)
        done += n
    return same


def fits(cs: Sequence[Choice], shapes: Shapes, picks: np.ndarray, axes: Sequence[Axis]) -> np.ndarray:
    """Which picks divide everything that they partition: `pcg.state.misfit`, and every choice's own size."""
    sizes = np.array([a.size for a in axes], int)
    every = math.prod(a.size for a in axes)  # what is divided by all axes together is by any of them
    good = np.ones(len(picks), bool)
    for i, c in enumerate(cs):
        if c.size % every:
            good &= c.size % np.where(picks == i, sizes, 1).prod(1) == 0
    for position, shape in enumerate(shapes):
        states = [c.states[position] for c in cs]
        slots = sorted({s for s in states if s.kind == "P"}, key=lambda s: (s.dim, -s.outer))
        for dim, same in groupby(slots, key=lambda s: s.dim):
            innermost, *more = same
            if not more and shape[dim] % (innermost.outer * every) == 0:
                continue
            end = np.full(len(picks), shape[dim])
            for slot in (innermost, *more):
                degree = np.where(np.array([s == slot for s in states])[picks], sizes, 1).prod(1)
                good &= (degree == 1) | (end % (slot.outer * degree) == 0)
                end = np.where(degree > 1, slot.outer, end)
    return good
