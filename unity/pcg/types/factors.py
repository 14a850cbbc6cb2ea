"""The language of the operator table: factors, and the legal parallelizations that follow from them.

An operator iterates over *factors*, as an einsum does. A factor has a place in each operand and result: a range of a dimension's
digits. A mesh axis on a factor determines the types: operands and results that have the factor are partitioned there, operands
that lack it are replicated for use, results that lack it are partial.

A factor may carry a *halo*: windows that move along a dimension reach beyond a device's slice of it, into its neighbours'.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, State, partitioned


@dataclass(frozen=True)
class Slot:
    """The place of a factor in a tensor: dimension `dim` seen as `[outer, factor, rest]`."""

    dim: int
    outer: int = 1


Place = Slot | State | None  # None: the tensor lacks the factor; a State: it must be in this one instead


@dataclass(frozen=True)
class Window:
    """A window that moves along one dimension."""

    n: int  # indices of the dimension
    m: int  # positions of the window
    size: int
    stride: int
    padding: tuple[int, int]
    dilation: int = 1  # of the window
    base: int = 1  # dilation of the operand

    @property
    def span(self) -> int:
        """The number of indices from its first to its last."""
        return (self.size - 1) * self.dilation + 1

    def least(self, windows: int) -> int:
        """Return the smallest number of indices that contains this many consecutive windows, without any padding."""
        return -(-((windows - 1) * self.stride + self.span - 1) // self.base) + 1


WRAPPED = "wrapped"


@dataclass(frozen=True)
class Halo:
    """The indices `before` and `after` a device's slice of a dimension that its windows read, from its neighbours.

    Beyond the border of the tensor they read the neutral element of the reduction `outside`: "sum", "max" or "min"; or, if that is
    `WRAPPED`, the indices at the other end.
    """

    before: int
    after: int
    outside: str = "sum"


@dataclass(frozen=True)
class Factor:
    """A range of iteration. `reduction` combines the pieces of results that lack the factor.

    With a `halo`, consecutive devices must have consecutive slices, so only the most major digit is legal. An operator of several
    equations may lack an `optional` factor of one of them.
    """

    name: str
    size: int
    operands: tuple[Place, ...]
    results: tuple[Place, ...]
    reduction: str = ""  # "" (parallel), "sum", "max", "min", "or", "and"
    halo: Halo | None = None  # of every operand that has the factor
    shared: bool = True  # whether devices share the work along it; otherwise each does all, and keeps its part
    optional: bool = False

    def states(self, inner: int = 1) -> tuple[tuple[State, ...], tuple[State, ...]]:
        """Return the states of operands and results along an axis on the factor's digit at `inner` (1: the most major)."""
        return self._most_major if inner == 1 else self._states(inner)

    @cached_property
    def _most_major(self) -> tuple[tuple[State, ...], tuple[State, ...]]:
        return self._states(1)

    def _states(self, inner: int) -> tuple[tuple[State, ...], tuple[State, ...]]:
        missing = PARTIAL if self.reduction else REPLICATED
        operands = tuple(_state(p, inner, REPLICATED) for p in self.operands)
        return operands, tuple(_state(p, inner, missing) for p in self.results)


def _state(place: Place, inner: int, missing: State) -> State:
    if isinstance(place, Slot):
        return partitioned(place.dim, place.outer * inner)
    return missing if place is None else place


@dataclass(frozen=True)
class Spec:
    """One application of an operator, as its table entry describes it.

    Attributes:
        factors: the ranges that it iterates over.
        linear: groups of operands in which it is jointly linear: if all operands of a group are partial sums, and the others are
            replicated, the results are partial sums.
        linear_if_bounded: further groups in which it is linear if all operands of the group are results of `bounded` applications.
        bounded: whether its results are sums of integers that cannot overflow.
        flops: floating-point operations of the whole application, forward.
        blocked: dimensions of the first operand along which windows move, but that cannot be divided, each with the reason.
        windows: the windows that move along its dimensions.
        reads: the fraction of the first operand that it reads, and whose gradient it adds to; above 1 where it reads rows again.
        selects: whether other operands tell which part it reads. Then its gradient begins as zeros of the first operand's size.
        view: whether each result is the first operand in another shape, or a block of it, so that nothing runs.
        rounds: whether its derivative rounds cotangents, which may then not be partial sums.
        matched: the cache of `matching`, which propagation calls for an equation from every side.
    """

    factors: tuple[Factor, ...]
    linear: tuple[frozenset[int], ...] = ()
    flops: float = 0.0
    blocked: tuple[tuple[int, str], ...] = ()
    windows: tuple[Window, ...] = ()
    reads: float = 1.0
    selects: bool = False
    view: bool = False
    linear_if_bounded: tuple[frozenset[int], ...] = ()
    bounded: bool = False
    rounds: bool = False
    matched: dict[tuple, tuple[Match, ...]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def halos(self) -> tuple[Reach, ...]:
        """All halos, in the order in which devices exchange them."""
        reaches = (
            Reach(p, place.dim, f.halo)
            for f in self.factors
            if f.halo is not None
            for p, place in enumerate(f.operands)
            if isinstance(place, Slot)
        )
        return tuple(sorted(reaches, key=lambda r: (r.operand, r.dim)))


class Reach(NamedTuple):
    """A halo along a dimension of an operand (by position)."""

    operand: int
    dim: int
    halo: Halo


@dataclass(frozen=True)
class Agreement:
    """A value inside of the program of a call, a branch or a loop that devices reduce along an axis, or hold slices of.

    It is a scalar, but for programs that are not differentiated: those of a `custom_vjp` and of its rules.

    Attributes:
        where: the path to its variable, through equations and their programs. Of a call, program 0 is its own, 1 its rule or its
            forward rule, and 2 its backward rule.
        dtype: its element type.
        kind: "or", "max", ...; empty for an array that the axis divides, which devices may reduce along other axes.
        elements: of the whole value.
        times: reductions in one run of its equation; a loop without a known trip count counts as one step.
        serves: the operands of its equation whose cotangents alone depend on it; None: any result may.
    """

    where: tuple[int, ...]
    dtype: Any
    kind: str
    elements: int = 1
    times: int = 1
    serves: frozenset[int] | None = None

    @property
    def equation(self) -> int:
        """The number of the equation of the outermost program that contains it."""
        return self.where[0]

    def needed(self, wanted: Collection[int]) -> bool:
        """Return whether it runs if only the cotangents of the `wanted` operands of its equation are computed."""
        return self.serves is None or not self.serves.isdisjoint(wanted)


@dataclass(frozen=True)
class Differentiated:
    """The agreements of a derivative rule that replaces a program, forward and backward.

    Attributes:
        rounds: as in `Match`, of the rule.
    """

    forward: tuple[Agreement, ...] = ()
    backward: tuple[Agreement, ...] = ()
    rounds: bool = False


@dataclass(frozen=True)
class Match:
    """One legal use of one axis by one primitive: the states of its operands and results."""

    name: str
    operands: tuple[State, ...]
    results: tuple[State, ...]
    size: int  # the degree of parallelism must divide it; 0: any degree
    divided: float  # the fraction of the work that the devices share
    reduction: str = ""  # the operation that combines partial results
    halo: bool = False  # devices exchange the edges of their slices
    rounds: bool = False  # each device would round cotangents that are partial sums, unless all compute its results alike
    agreed: tuple[Agreement, ...] = ()  # the agreements in its nested programs
    ruled: Differentiated | None = None  # the agreements in derivative rules of these programs

    @property
    def states(self) -> tuple[State, ...]:
        return self.operands + self.results

    @cached_property
    def whole(self) -> bool:
        """Whether every operand and result is replicated."""
        return all(s == REPLICATED for s in self.states)

    @property
    def communicates(self) -> bool:
        """Return whether devices along the axis communicate while the primitive or its derivative runs."""
        ruled = (*self.ruled.forward, *self.ruled.backward) if self.ruled is not None else ()
        return self.halo or any(a.kind for a in (*self.agreed, *ruled))


Specification = Callable[..., Spec]
Local = Callable[..., list]


@dataclass(frozen=True)
class AllBut:
    """The set of all positions but some."""

    excluded: frozenset[int] = frozenset()

    def __contains__(self, position: object) -> bool:
        return position not in self.excluded


Positions = frozenset[int] | AllBut
NONE: Positions = frozenset()
EVERY: Positions = AllBut()


def at(*positions: int) -> frozenset[int]:
    """Return a set of positions."""
    return frozenset(positions)


@dataclass(frozen=True)
class Reads:
    """The residuals of a derivative: the operands and results, by position, that it reads itself or a function of."""

    operands: Positions = EVERY
    results: Positions = NONE


# What derivatives read: one entry for each operand, the last one for all that follow. None: no derivative flows through it.
DerivativeReads = tuple[Reads | None, ...]
OPERANDS: DerivativeReads = (Reads(),)
RESULT: DerivativeReads = (Reads(NONE, EVERY),)  # as the derivative of tanh does
OPERANDS_AND_RESULT: DerivativeReads = (Reads(EVERY, EVERY),)
NOTHING: DerivativeReads = (None,)


class Role(Enum):
    """The role of a primitive in an operator, which is named by the primitives that do its work."""

    WORK = "work"
    LAYOUT = "changes the shape or the order of elements alone"
    CONVERSION = "forwards values, perhaps in another type"
    ARRANGEMENT = "cuts or joins values"
    NUMBERING = "numbers elements"


@dataclass(frozen=True)
class Facts:
    """Facts about a primitive beside how it divides: its derivative, and how compilers and people see it.

    Attributes:
        reads: the residuals of its derivative in the installed JAX, for the operands in which the primitive is not linear.
        linear_in: further groups of operands, beside those of `Spec.linear`, in which JAX treats it as jointly linear: the
            derivative reads only the other operands, but pieces of these operands cannot be summed.
    """

    reads: DerivativeReads = OPERANDS
    linear_in: tuple[Positions, ...] = ()
    moves: bool = False  # the result has the operand's values, elsewhere or in another type
    cheap: bool = False  # the result is recomputed for the backward pass, not kept
    fused_into_reductions: bool = False  # it fuses into a reduction that reads the result
    reads_buffers: bool = False  # it reads its operands from memory: producers do not fuse into it
    product: bool = False  # a product of matrices or a convolution, whose work dominates
    alone: bool = False  # always a separate operator, never part of a composite
    distinct: bool = False  # equal applications are not merged into one
    sizes_follow: bool = False  # sizes among its parameters follow from those of its results
    role: Role = Role.WORK
    identity: bool = False  # the result is the operand itself: no instruction of the compiled program
    commutative: bool = False  # its two operands may be exchanged
    pointwise: bool = False  # a function of numbers: each element of the result is that of the operands' elements at its place
    slides: bool = False  # it reads windows of an operand
    picks: bool = False  # each element of the result is one of a window
    looks_up: bool = False  # it reads rows of a table
    draws: bool = False  # it draws random bits
    invariant: bool = False  # JAX cannot run it on operands that differ between devices
    key: bool = False  # it computes keys of random numbers
    extends: bool = False  # it runs on longer dimensions of a factor, with what it computes of the former indices unchanged

    @property
    def recomputed(self) -> bool:
        """Return whether the backward pass recomputes the result from the operands, rather than keep it."""
        return self.cheap or self.moves or self.reads == NOTHING

    @property
    def rearranges(self) -> bool:
        """Return whether each element of the results is one of an operand's, in the same type."""
        return self.role in (Role.LAYOUT, Role.ARRANGEMENT)

    def reads_for(self, operand: int) -> Reads | None:
        """Return the residuals of the derivative in an operand, or None if it has none."""
        return self.reads[min(operand, len(self.reads) - 1)]


@dataclass(frozen=True)
class Entry:
    """A record of the operator table: everything that is known of a primitive, and how it runs on one device's pieces."""

    name: str
    spec: Specification
    local: Local | None = None  # None: the primitive is bound to the local pieces as it is
    exact: bool = False  # all but one summand of its partial sums are zero, so that nothing is rounded
    facts: Facts = Facts()


class Cached(Protocol):
    """A function with a cache, as `functools.lru_cache` returns it."""

    def cache_clear(self) -> None: ...


C = TypeVar("C", bound=Cached)


class OperatorTable(dict[str, Entry]):
    """The operator table. `version` counts its changes, for the keys of caches whose values depend on the table."""

    def __init__(self) -> None:
        super().__init__()
        self.version = 0
        self._caches: list[Cached] = []

    def clears(self, function: C) -> C:
        """Clear a function's cache whenever the table changes. Used as a decorator.

        Caches with names, rules or jaxprs as keys need this. All other caches have the identities of programs as keys, and new
        programs are made when these caches are cleared.
        """
        self._caches.append(function)
        return function

    def __setitem__(self, name: str, entry: Entry) -> None:
        super().__setitem__(name, entry)
        self._changed()

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self._changed()

    def _changed(self) -> None:
        self.version += 1
        for cache in self._caches:
            cache.cache_clear()


TABLE = OperatorTable()
DEFAULTS = Facts()  # of every primitive that the table lacks; searches ask for them millions of times


def facts_of(name: str) -> Facts:
    """Return the facts on record about a primitive, or the defaults if the table lacks it."""
    entry = TABLE.get(name)
    return DEFAULTS if entry is None else entry.facts


def is_convolution(name: str) -> bool:
    """Return whether a primitive is a product of windows with a kernel."""
    return facts_of(name).product and facts_of(name).slides


def operator(
    *names: str, local: Local | None = None, exact: bool = False, facts: Facts | None = None
) -> Callable[[Specification], Specification]:
    """Register a specification under primitive names. The specification takes `(params, operand avals, result avals)`."""

    def register(spec: Specification) -> Specification:
        for name in names:
            TABLE[name] = Entry(name, spec, local, exact, facts or Facts())
        return spec

    return register


def matching(spec: Spec, known: Mapping[int, State], n_operands: int, n_results: int) -> tuple[Match, ...]:
    """Return the choices that agree with the known states (position → state; results follow operands).

    The first partitioned position determines a factor's inner digit: its `outer` relative to the beginning of the factor.
    """
    key = (n_operands, n_results, *known.items())
    if key not in spec.matched:
        spec.matched[key] = tuple(_matching(spec, known, n_operands, n_results))
    return spec.matched[key]


def _matching(spec: Spec, known: Mapping[int, State], n_operands: int, n_results: int) -> list[Match]:
    matches = []
    for factor in spec.factors:
        inner = _inner(factor, known)
        if inner is not None:
            operands, results = factor.states(inner)
            if all((operands + results)[i] == s for i, s in known.items()):
                size, halo = factor.size // inner, factor.halo is not None
                matches.append(Match(factor.name, operands, results, size, float(factor.shared), factor.reduction, halo))
    if all(s.kind in "RS" for s in known.values()):
        matches += _linear(spec, known, n_operands, n_results)
    if all(s == REPLICATED for s in known.values()):
        matches.append(Match("replicated", (REPLICATED,) * n_operands, (REPLICATED,) * n_results, 0, 0.0, rounds=spec.rounds))
    return matches


def _inner(factor: Factor, known: Mapping[int, State]) -> int | None:
    places = factor.operands + factor.results
    for position, state in known.items():
        if state.kind != "P":
            continue
        place = places[position]
        if not isinstance(place, Slot) or place.dim != state.dim or state.outer % place.outer:
            return None
        inner = state.outer // place.outer
        if factor.halo is not None and inner > 1:
            return None
        return inner if inner < factor.size and factor.size % inner == 0 else None
    return 1


def _linear(spec: Spec, known: Mapping[int, State], n_operands: int, n_results: int) -> list[Match]:
    matches = []
    for group in spec.linear:
        operands = tuple(PARTIAL if i in group else REPLICATED for i in range(n_operands))
        states = operands + (PARTIAL,) * n_results
        if all(states[i] == s for i, s in known.items()):
            name = "linear " + ",".join(map(str, sorted(group)))
            matches.append(Match(name, operands, (PARTIAL,) * n_results, 0, 0.0, "sum"))
    return matches
