"""Domains: the values of every site. A value assigns one choice to each mesh axis.

Axes of one size on one level are interchangeable, so choices are assigned to them in one fixed order: the order of the dimensions
that they split (samples first), followed through the graph. That keeps domains small without losing degrees of parallelism. It
does lose other orders in parts of the graph, which refinement considers (`unity.search.cost.refinement`).
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
from unity.base.formatting import short
from unity.machine.resharding_tables import Types
from unity.pcg.propagation.choice import Choice, InnerSlot, part_of_work
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import State, Type
from unity.search.space.masks import NOTHING, Mask, allowed, listed
from unity.search.space.sites import Site


@dataclass(frozen=True, eq=False)
class Domain:
    """The values of a site, from which the types of its operands and results follow.

    Args:
        choices: The choices along one axis.
        picks: For each value and axis, an index into `choices`, [values, axes].
        key: A content hash.
        whole: Whether no value was left out.
        mask: The restriction of the values by the user's constraints.
    """

    choices: tuple[Choice, ...]
    picks: np.ndarray
    key: str
    whole: bool = False
    mask: Mask = NOTHING

    def __len__(self) -> int:
        return len(self.picks)

    @cached_property
    def types(self) -> tuple[tuple[Types, np.ndarray], ...]:
        """For each operand and then each result: its distinct types, and the index of each value's type among them."""
        positions = range(len(self.choices[0].states))
        return tuple(distinct_types([c.states[position] for c in self.choices], self.picks) for position in positions)

    def type_of(self, value: int, position: int) -> Type:
        """Return the type of an operand, or of a result (results count after the operands)."""
        return tuple(self.states[c][position] for c in self.picks[value].tolist())

    @cached_property
    def states(self) -> tuple[tuple[State, ...], ...]:
        """The states of every choice, cached for `type_of`."""
        return tuple(c.states for c in self.choices)

    @cached_property
    def scattered(self) -> frozenset[int]:
        """The variables inside the operator that some value scatters along an axis."""
        if not any(c.scatters or c.moves for c in self.choices):
            return frozenset()
        chosen = (self.choices[i] for i in np.unique(self.picks).tolist())
        return frozenset(x.variable for c in chosen for x in c.scattered if x.scatters or x.moves)


def distinct_types(states: Sequence[State], picks: np.ndarray) -> tuple[Types, np.ndarray]:
    """Return the distinct types of a tensor over all values, and the index of each value's type among them.

    Args:
        states: the tensor's state in every choice.
        picks: for each value and axis, an index into these, [values, axes].
    """
    codes: dict[State, int] = {}
    of_choice = np.array([codes.setdefault(s, len(codes)) for s in states], np.int16)
    rows, index = np.unique(of_choice[picks], axis=0, return_inverse=True)
    return Types(tuple(codes), rows), index.reshape(-1)


def ranks(sites: Sequence[Site], offers: Sequence[tuple[Choice, ...]]) -> list[tuple[int, ...]]:
    """Return for every choice of every site the rank of the dimension that it splits; the samples' dimension has the lowest rank.

    A union-find over (site, result, state) joins the partitioned states that one choice has together.

    Args:
        sites: All sites of a graph.
        offers: The choices of every site.
    """
    parent: dict[tuple[int, int, State], tuple[int, int, State]] = {}

    def root(x: tuple[int, int, State]) -> tuple[int, int, State]:
        while parent.setdefault(x, x) != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    def partitioned_slots(s: int, choice: Choice) -> Iterator[tuple[int, int, State]]:
        for p, state in zip(sites[s].ports, choice.operands, strict=True):
            if state.kind == "P":
                yield (p.source, p.index, state)
        for k, state in enumerate(choice.results):
            if state.kind == "P":
                yield (s, k, state)

    for s, cs in enumerate(offers):
        for choice in cs:
            slots = list(partitioned_slots(s, choice))
            for other in slots[1:] if not choice.moves else ():
                parent[root(other)] = root(slots[0])
    order: dict[tuple[int, int, State], int] = {}
    first = sorted(range(len(sites)), key=lambda s: (sites[s].kind != "input" or sites[s].weight, s))
    for s in first:
        for choice in sorted(offers[s], key=lambda c: c.states):
            for slot in partitioned_slots(s, choice):
                order.setdefault(root(slot), len(order))
    last = {"replicated": len(order) + 1, "unused": len(order) + 2}
    return [
        tuple(min((order[root(e)] for e in partitioned_slots(s, c)), default=last.get(c.name, len(order))) for c in cs)
        for s, cs in enumerate(offers)
    ]


@dataclass(frozen=True)
class Limits:
    """Limits on the values that a first search considers; refinement considers the others (`unity.search.cost.refinement`).

    Args:
        distinct: The most different choices on one group of interchangeable axes.
        total: The most different choices on all axes, not counting idle ones.
        waste: The most work of one device, as a multiple of that of the best value.
        blocks: The number of blocks into which a group of axes is cut; all axes of a block have one choice.
    """

    distinct: int
    total: int
    waste: float
    blocks: int = 99


EXACT = (Limits(99, 99, np.inf),)
# From the widest limits to the narrowest. A value may satisfy any limits of a step. `benchmarks/pruning.py` compares them.
LADDER = (
    EXACT,
    (Limits(3, 3, np.inf),),
    (Limits(2, 3, np.inf),),
    (Limits(2, 2, np.inf),),
    (Limits(2, 2, np.inf, 2),),
    (Limits(2, 2, 4.0, 2), Limits(2, 1, np.inf, 2)),
    (Limits(2, 2, 2.0, 2), Limits(2, 1, np.inf, 2)),
)
IDLE = ("unused", "replicated")  # choices with which all devices along an axis do the same
VALUES = 200  # the most values of a site for which wider limits are used
LISTED = 20_000  # the most values that are enumerated before limits apply
ORDERED = 3  # the number of axes from which on interchangeable axes take choices in one order only


Shapes = Sequence[tuple[int, ...]]


def domain(
    site: Site,
    choices: tuple[Choice, ...],
    rank: tuple[int, ...],
    axes: tuple[Axis, ...],
    limits: tuple[Limits, ...] | None = None,
    mask: Mask = NOTHING,
) -> Domain:
    """Return the domain of a site: all assignments of choices to axes, in rank order on interchangeable axes, that fit its tensors.

    Args:
        site: The site.
        choices: Its choices along one axis.
        rank: The rank of every choice (see `ranks`).
        axes: The axes of the mesh.
        limits: Limits on the values; None takes the widest of `LADDER` that leave few enough.
        mask: The user's constraints; the values that they allow may have any order on interchangeable axes.

    Raises:
        InfeasibleError: The mask allows no value, or inside of a pipeline, the stage axes divide none.
    """
    if site.along:
        return _staged(site, choices, rank, axes, limits, mask)
    cs = tuple(choices[i] for i in sorted(range(len(choices)), key=lambda i: (rank[i], choices[i].states)))
    shapes = shapes_of(site)
    if limits is not None:
        picks, _ = _enumerated_for_storage(site, cs, shapes, axes, max(m.distinct for m in limits))
        return domain_of_picks(cs, _measured(cs, picks, axes).within(limits), shapes, axes)
    moving = np.array([c.moves for c in cs])
    staying = np.flatnonzero(~moving)
    picks, whole = _enumerated_for_storage(site, tuple(cs[i] for i in staying), shapes, axes, None)
    picks = staying[picks].astype(picks.dtype)
    if mask:
        picks = _masked(site, mask, cs, picks, axes)
    scattering = np.array([c.scatters for c in cs])[picks].any(axis=1)
    limited = _narrowed(cs, picks[~scattering], axes)
    limited = _filled(cs, limited, picks[scattering], axes)
    if moving.any() and not mask:
        more, whole = _with_moving(cs, moving, shapes, axes) if len(limited) == len(picks) < VALUES else (picks[:0], False)
        limited, picks = _filled(cs, limited, more, axes), np.vstack([picks, more])
    limited = limited if len(limited) else picks  # a mask may allow only values outside of all limits
    return domain_of_picks(cs, limited, shapes, axes, whole and len(limited) == len(picks), mask)


def _narrowed(cs: Sequence[Choice], picks: np.ndarray, axes: Sequence[Axis]) -> np.ndarray:
    """Return the values within the widest limits that leave few enough."""
    measured = _measured(cs, picks, axes)
    limited = next((p for step in LADDER if 0 < len(p := measured.within(step)) <= VALUES), None)
    return measured.within(LADDER[-1]) if limited is None else limited


def _filled(cs: Sequence[Choice], picks: np.ndarray, more: np.ndarray, axes: Sequence[Axis]) -> np.ndarray:
    """Return `picks` and as many of `more` as there is room for: those that move or scatter a value inside are rarely better."""
    if not len(more):
        return picks
    others = _measured(cs, more, axes)
    rest = (others.within(step) for step in LADDER)
    return np.vstack([picks, next((p for p in rest if len(p) <= VALUES - len(picks)), picks[:0])])


def _with_moving(cs: tuple[Choice, ...], moving: np.ndarray, shapes: Shapes, axes: tuple[Axis, ...]) -> tuple[np.ndarray, bool]:
    """Return the values that move a value inside, if there are few enough to list, and whether these are all."""
    orders = len(cs) ** len(axes) if len(axes) < ORDERED else math.prod(math.comb(len(cs) + n - 1, n) for n in _groups(axes))
    if orders > LISTED:
        return np.zeros((0, len(axes)), np.int16), False
    picks, whole = _enumerated(cs, shapes, axes, None)
    return picks[moving[picks].any(axis=1)], whole


def _masked(site: Site, mask: Mask, cs: Sequence[Choice], picks: np.ndarray, axes: Sequence[Axis]) -> np.ndarray:
    """Return the values of a site that a mask allows, including those that are otherwise not enumerated."""
    more = listed(mask, cs, axes)
    picks = allowed(mask, cs, np.unique(np.vstack([picks, more[fits(cs, shapes_of(site), more, axes)]]), axis=0), axes)
    if not len(picks):
        raise InfeasibleError(f"constraints leave no way to split {_described(site)}")
    return picks


def _described(site: Site) -> str:
    """Return the tensors of a site for an error message: their name or their operator with the user's line, and their shapes."""
    node, shapes = site.node, ", ".join(map(str, site.results or [port.tensor for port in site.ports]))
    if node is None:
        return f"a value ({shapes})"
    return f"{node.name or f'{node.kind} at {short(node.source)}'} ({shapes})"


def _staged(
    site: Site,
    choices: tuple[Choice, ...],
    rank: tuple[int, ...],
    axes: tuple[Axis, ...],
    limits: tuple[Limits, ...] | None,
    mask: Mask,
) -> Domain:
    """Return the domain of a site inside a pipeline: its values on the other axes, with its staged choice on the stage axes.

    The staged choice is the last of the domain's choices.
    """
    assert site.staged is not None
    others = [k for k, axis in enumerate(axes) if axis.name not in site.along]
    inner = domain(replace(site, along=()), choices, rank, tuple(axes[k] for k in others), limits)
    # Inner slots are numbered over all choices of one listing, of which the staged choice may not be.
    alike = (c for c in choices if c.states == site.staged.states)
    staged = next(alike, replace(site.staged, inner_slots=()))
    cs, shapes = (*inner.choices, staged), shapes_of(site)
    picks = np.full((len(inner), len(axes)), len(inner.choices), np.int16)
    picks[:, others] = inner.picks
    picks = allowed(mask, cs, picks[fits(cs, shapes, picks, axes)], axes)
    if not len(picks):
        if mask:
            raise InfeasibleError(f"constraints leave no way to split {_described(site)} inside of a stage")
        raise InfeasibleError(f"the stage axes cannot divide {_described(site)} inside of a stage")
    return domain_of_picks(cs, picks, shapes, axes, inner.whole, mask)


def legal(site: Site, cs: Sequence[Choice], picks: np.ndarray, axes: Sequence[Axis]) -> np.ndarray:
    """Return for each pick whether it fits the site's tensors and has the staged choice on exactly the stage axes, if any."""
    good = fits(cs, shapes_of(site), picks, axes)
    for k, axis in enumerate(axes if site.along else ()):
        good &= (picks[:, k] == len(cs) - 1) == (axis.name in site.along)
    return good


def shapes_of(site: Site) -> list[tuple[int, ...]]:
    """Return the shapes of a site's operands and results."""
    return [p.tensor.shape for p in site.ports] + [t.shape for t in site.results]


def domain_of_picks(
    cs: tuple[Choice, ...],
    picks: np.ndarray,
    shapes: Shapes,
    axes: tuple[Axis, ...],
    whole: bool = False,
    mask: Mask = NOTHING,
) -> Domain:
    """Return the domain of these choices and picks, with its content hash as its key."""
    content = hashlib.blake2b(digest_size=12)
    text = [
        (c.states, c.size, round(c.divided, 6), c.reduced, sorted(c.partitions), c.inner_slots, c.halos, c.scattered, c.arrays)
        for c in cs
    ]
    content.update(repr((text, shapes, axes, picks.shape)).encode())
    content.update(np.ascontiguousarray(picks).tobytes())
    return Domain(cs, picks, content.hexdigest(), whole, mask)


def _groups(axes: Sequence[Axis]) -> list[int]:
    """Return the sizes of the groups of interchangeable axes, in order."""
    return [len(list(g)) for _, g in groupby(axes, key=lambda a: a.extent)]


def _enumerated_for_storage(
    site: Site, cs: tuple[Choice, ...], shapes: Shapes, axes: tuple[Axis, ...], distinct: int | None
) -> tuple[np.ndarray, bool]:
    """Return the enumerated values of a site, and whether they are all.

    A weight also has values with idle axes first: at its users the first axes split samples, and along those the weight is idle.
    """
    picks, whole = _enumerated(cs, shapes, axes, distinct)
    if not site.weight or len(axes) < ORDERED or max(_groups(axes)) == 1:  # in every order already
        return picks, whole
    order = np.array(sorted(range(len(cs)), key=lambda i: cs[i].name not in IDLE))
    other, _ = _enumerated([cs[i] for i in order], shapes, axes, distinct)
    return np.unique(np.vstack([picks, order[other].astype(picks.dtype)]), axis=0), whole


def _enumerated(cs: Sequence[Choice], shapes: Shapes, axes: tuple[Axis, ...], distinct: int | None) -> tuple[np.ndarray, bool]:
    """Enumerate the values that fit, [values, axes]; return them and whether they are all.

    Groups of axes are added one by one, as a value that does not fit on some axes does not fit on more. If `distinct` is None and
    there are too many values, a group has at most 3 different choices, then 2.
    """
    orders = combinations_with_replacement if len(axes) >= ORDERED else _in_any_order
    whole = len(axes) < ORDERED or max(_groups(axes)) == 1
    picks, done = np.zeros((1, 0), np.int16), 0
    for n in _groups(axes):
        more = np.array(list(orders(range(len(cs)), n)), np.int16).reshape(-1, n)
        more = more[fits(cs, shapes, more, axes[done : done + n])]
        kinds = 1 + (np.diff(np.sort(more, axis=1), axis=1) > 0).sum(1)
        cut = [more[kinds <= most] for most in ((99, 3, 2) if distinct is None else (distinct,))]
        chosen = next((k for k in cut if len(picks) * len(k) <= LISTED), cut[-1])
        done, whole = done + n, whole and len(chosen) == len(more)
        picks = np.hstack([np.repeat(picks, len(chosen), axis=0), np.tile(chosen, (len(picks), 1))])
        picks = picks[fits(cs, shapes, picks, axes[:done])]
    return picks, whole


def _in_any_order(choices: Iterable[int], n: int) -> Iterator[tuple[int, ...]]:
    return product(choices, repeat=n)


@dataclass(frozen=True, eq=False)
class _Measured:
    """Values with the measures that `Limits` bounds, which are the same for every step of a ladder.

    Attributes:
        picks: the values.
        axes: the axes of the mesh.
        distinct: for every value, the largest number of different choices on one group of interchangeable axes.
        total: for every value, the number of different choices on all axes, without idle ones.
        share: for every value, the fraction of the work that one device does.
    """

    picks: np.ndarray
    axes: Sequence[Axis]
    distinct: np.ndarray
    total: np.ndarray
    share: np.ndarray

    def within(self, limits: Sequence[Limits]) -> np.ndarray:
        """Return the values that satisfy at least one of the limits; an operator that divides no work wastes none."""
        least = self.share.min(initial=1.0)
        allowed = [
            (self.distinct <= m.distinct)
            & (self.total <= m.total)
            & (self.share <= m.waste * least)
            & _blocked(self.picks, self.axes, m.blocks)
            for m in limits
        ]
        return self.picks[np.any(allowed, axis=0)]


def _measured(cs: Sequence[Choice], picks: np.ndarray, axes: Sequence[Axis]) -> _Measured:
    idle = np.array([c.name in IDLE for c in cs])
    uses = [(part[:, :, None] == np.arange(len(cs))).any(1) for part in np.split(picks, np.cumsum(_groups(axes))[:-1], axis=1)]
    distinct = np.max([u.sum(1) for u in uses], axis=0, initial=0) if uses else np.zeros(len(picks), int)
    total = (np.any(uses, axis=0) & ~idle).sum(1) if uses else distinct
    return _Measured(picks, axes, distinct, total, work_shares(cs, picks, axes))


def work_shares(cs: Sequence[Choice], picks: np.ndarray, axes: Sequence[Axis]) -> np.ndarray:
    """Return for every value the fraction of the work that one device does."""
    divided = np.array([c.divided for c in cs])[picks]
    return np.prod(part_of_work(divided, np.array([a.size for a in axes], float)), axis=1)


def _blocked(picks: np.ndarray, axes: Sequence[Axis], blocks: int) -> np.ndarray:
    """Return for every value whether each group of axes, cut into `blocks` blocks, has one choice in each block."""
    same, done = np.ones(len(picks), bool), 0
    for n in _groups(axes):
        if blocks >= n:  # every axis is a block of its own
            done += n
            continue
        for block in np.array_split(np.arange(done, done + n), min(blocks, n)):
            same &= (picks[:, block] == picks[:, block[:1]]).all(1)
        done += n
    return same


def fits(cs: Sequence[Choice], shapes: Shapes, picks: np.ndarray, axes: Sequence[Axis]) -> np.ndarray:
    """Return for every pick whether it divides all dimensions that it partitions (as `misfit`), and every choice's own size."""
    sizes = np.array([a.size for a in axes], int)
    every = math.prod(a.size for a in axes)  # a size that all axes together divide is divisible by any of them
    good = np.ones(len(picks), bool)
    for i, c in enumerate(cs):
        if c.size % every:
            good &= c.size % np.where(picks == i, sizes, 1).prod(1) == 0
    for size, outers in _divided_dimensions(cs, shapes):
        innermost, *more = sorted(set(outers) - {0}, reverse=True)
        if not more and size % (innermost * every) == 0:
            continue
        end = np.full(len(picks), size)
        for outer in (innermost, *more):
            degree = np.where((outers == outer)[picks], sizes, 1).prod(1)
            good &= (degree == 1) | (end % (outer * degree) == 0)
            end = np.where(degree > 1, outer, end)
    return good


def _divided_dimensions(cs: Sequence[Choice], shapes: Shapes) -> Iterator[tuple[int, np.ndarray]]:
    """Yield every dimension that some choice divides, inside too: its size, and for each choice how far outside, or 0."""
    for position, shape in enumerate(shapes):
        states = [c.states[position] for c in cs]
        for dim in sorted({s.dim for s in states if s.kind == "P"}):
            yield shape[dim], np.array([s.outer if s.kind == "P" and s.dim == dim else 0 for s in states])
    inside = [c.inner_slots for c in cs]
    for column in range(max(map(len, inside), default=0)):
        slots = [slots[column] if slots else InnerSlot(1, 0) for slots in inside]
        if any(slot.outer for slot in slots):
            yield max(slot.size for slot in slots), np.array([slot.outer for slot in slots])
