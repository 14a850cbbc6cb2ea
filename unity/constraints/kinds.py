"""The constraints, each a small value: what it says, and what it leaves of the search's values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from unity.base.errors import ConstraintError
from unity.base.formatting import short
from unity.constraints.ground import KINDS, Dimension, Ground, splits
from unity.constraints.paths import matched
from unity.pcg.ir.graph import CONSTRAIN, Node
from unity.pcg.ir.user_lines import spoken
from unity.pcg.parallel.marks import mark_of
from unity.pcg.parallel.wanted_types import Wanted, wanted
from unity.search.space.masks import MaskRule


class Constraint(ABC):
    """Something that a plan must obey. Printed, it is what the user wrote."""

    @abstractmethod
    def rules(self, ground: Ground) -> Iterator[tuple[int, MaskRule]]:
        """The sites that are not free, and what is left of their values. Raises ConstraintError if it speaks of nothing there."""

    @abstractmethod
    def to_json(self) -> list[Any]:
        """As JSON data, its kind first."""


@dataclass(frozen=True)
class Pin(Constraint):
    """Arguments that are stored as the user says."""

    path: str
    wanted: Wanted

    def rules(self, ground: Ground) -> Iterator[tuple[int, MaskRule]]:
        for k in matched(self.path, ground.paths):
            site = ground.inputs[k]
            rank = ground.dimensions.opened.sites[site].results[0].ndim
            try:
                yield site, ground.pinned(0, self.wanted, rank)
            except ConstraintError as error:
                raise ConstraintError(f"{self}: {ground.paths[k][0]}: {error}") from None

    def to_json(self) -> list[Any]:
        return ["pin", self.path, self.wanted.to_json()]

    def __str__(self) -> str:
        return f'unity.pin("{self.path}", {self.wanted})'


@dataclass(frozen=True)
class OperatorPin(Constraint):
    """Operators whose results are sharded as the user says.

    Args:
        name: the operators' kind, line, scope, or a kind at one of these (`wording.spoken`).
        wanted: the sharding of every result.
        results: the results of these operators in the captured program, in words, sorted. A rewritten program in which the name
            means others is not the one that the user speaks of, and is not taken.
    """

    name: str
    wanted: Wanted
    results: tuple[str, ...]

    def rules(self, ground: Ground) -> Iterator[tuple[int, MaskRule]]:
        sites = ground.dimensions.opened.sites
        named = [(s, site, site.node) for s, site in enumerate(sites) if site.node is not None and self.means(site.node)]
        results = results_of(node for *_, node in named)
        if results != self.results:
            raise ConstraintError(f"{self}: the operators of this name give {results}, those captured {self.results}")
        for s, site, node in named:
            for k, result in enumerate(site.results):
                try:
                    yield s, ground.pinned(len(site.ports) + k, self.wanted, result.ndim)
                except ConstraintError as error:
                    raise ConstraintError(f"{self}: the result {result} at {short(node.source)}: {error}") from None

    def means(self, node: Node) -> bool:
        """Whether a node is one of the operators."""
        return node.body is not None and node.kind != CONSTRAIN and self.name in spoken(node)

    def to_json(self) -> list[Any]:
        return ["operators", self.name, self.wanted.to_json(), list(self.results)]

    def __str__(self) -> str:
        return f'unity.pin("{self.name}", {self.wanted})'


def results_of(nodes: Iterable[Node]) -> tuple[str, ...]:
    """The results of operators in words, sorted."""
    return tuple(sorted(str(tensor) for node in nodes for tensor in node.tensors))


@dataclass(frozen=True)
class Marked(Constraint):
    """Values inside of the function, as `unity.constrain` says at a line."""

    wanted: Wanted
    source: str

    def rules(self, ground: Ground) -> Iterator[tuple[int, MaskRule]]:
        for s, site in enumerate(ground.dimensions.opened.sites):
            if site.mark is None or marked_by(site.mark) != self:
                continue
            try:
                yield s, ground.pinned(len(site.ports), self.wanted, site.results[0].ndim)
            except ConstraintError as error:
                raise ConstraintError(f"{self}: {error}") from None

    def to_json(self) -> list[Any]:
        raise TypeError("what a function says itself is part of its graph, and of no file")

    def __str__(self) -> str:
        return f"unity.constrain(..., {self.wanted}) at {self.source}"


def marked_by(node: Node) -> Marked:
    """The constraint that a node of `unity.constrain` is."""
    return Marked(mark_of(node), short(node.source))


@dataclass(frozen=True)
class Across(Constraint):
    """What may be split across a level. `word`: "forbid", "only" (nothing else is) or "require" (arguments that have it are)."""

    word: str
    dimension: Dimension
    level: str

    def rules(self, ground: Ground) -> Iterator[tuple[int, MaskRule]]:
        axes, follows = ground.level(self.level), ground.follows(self.dimension)
        every = range(len(ground.dimensions.choices)) if self.word != "require" else ground.inputs
        there = False
        for s in every:
            split = ground.split(s, follows)
            there |= any(split)
            if not axes:
                continue
            if self.word == "require":
                if any(split):
                    yield s, ground.along(s, axes, split)
            elif self.word == "forbid":
                if any(split):
                    yield s, ground.along(s, axes, tuple(not flag for flag in split))
            else:
                neutral = tuple(not splits(c) for c in ground.dimensions.choices[s])
                good = tuple(a or b for a, b in zip(split, neutral, strict=True))
                if not all(good):
                    yield s, ground.along(s, axes, good)
        if not there and self.word != "forbid":
            raise ConstraintError(f"{self}: nothing of this program can be split in such a dimension")

    def to_json(self) -> list[Any]:
        return [self.word, list(self.dimension) if isinstance(self.dimension, tuple) else self.dimension, self.level]

    def __str__(self) -> str:
        return f'unity.{self.word}({self.dimension!r}, across="{self.level}")'.replace("'", '"')


@dataclass(frozen=True)
class WithoutRules(Constraint):
    """Rules that may not rewrite the program."""

    names: tuple[str, ...]

    def rules(self, ground: Ground) -> Iterator[tuple[int, MaskRule]]:
        return iter(())

    def to_json(self) -> list[Any]:
        return ["without_rules", *self.names]

    def __str__(self) -> str:
        return f"unity.without_rules({', '.join(map(repr, self.names))})".replace("'", '"')


def from_json(data: list[Any]) -> Constraint:
    """What `to_json` wrote."""
    word, *rest = data
    if word == "pin":
        return Pin(str(rest[0]), Wanted.from_json(rest[1]))
    if word == "operators":
        return OperatorPin(str(rest[0]), Wanted.from_json(rest[1]), tuple(map(str, rest[2])))
    if word == "without_rules":
        return WithoutRules(tuple(map(str, rest)))
    dimension, level = rest
    return _across(str(word), (str(dimension[0]), int(dimension[1])) if isinstance(dimension, list) else dimension, str(level))


def pin(path: str, spec: Any) -> Constraint:
    """Fixes the sharding of arguments (how weights are stored, how the batch is loaded) or of operators' results.

    Args:
        path: the arguments, as `plan.explain()` prints them, or with the function's own names: `params['layers'][*]['w']`.
            `*` stands for anything in one pair of brackets, `**` for anything at all. Or operators: their kind
            ("dot_general"), their line ("model.py:42"), their scope ("decoder/mlp"), or a kind at one of these
            ("dot_general at model.py:42").
        spec: a `jax.sharding.PartitionSpec`. A name is a level of the machine ("node", "device") or one of its mesh axes
            ("d0"); a number is so many slices over whatever axes; UNCONSTRAINED leaves a dimension open. Dimensions that are
            not mentioned are whole.

    Raises:
        ConstraintError: the specification says nothing that is known. Whether there are such arguments or operators is known
            only when a function is planned.
    """
    return Pin(path, wanted(spec))


def forbid(dimension: Dimension, *, across: str) -> Constraint:
    """A dimension that is not split across a level of the machine.

    Args:
        dimension: "samples" (the first dimension of the arguments that are no weights, after the steps of a loop, wherever it
            goes), "weights" (weights stored in pieces, along any other dimension), "tensor" (operators and values split in
            anything but samples), or a pair of a path and a number: that dimension of those arguments, wherever it goes.
        across: the level ("node": between nodes), or a mesh axis.
    """
    return _across("forbid", dimension, across)


def only(dimension: Dimension, *, across: str) -> Constraint:
    """A dimension beside which nothing is split across a level: `only("samples", across="node")` is data parallelism there.

    Weights are stored whole across that level then, too. The arguments are those of `forbid`.
    """
    return _across("only", dimension, across)


def require(dimension: Dimension, *, across: str) -> Constraint:
    """A dimension that all arguments that have it are split in, across all of a level. The arguments are those of `forbid`."""
    if dimension == "tensor":
        raise ConstraintError('require("tensor") says nothing of arguments: give "samples", "weights", or a path and a dimension')
    return _across("require", dimension, across)


def without_rules(*names: str) -> Constraint:
    """Rules, by name, that may not rewrite the program. `*` stands for anything, as in "merge-*"."""
    return WithoutRules(names)


def _across(word: str, dimension: Any, across: str) -> Constraint:
    pair = isinstance(dimension, tuple) and len(dimension) == 2 and isinstance(dimension[0], str) and isinstance(dimension[1], int)
    if word not in ("forbid", "only", "require") or not (pair or dimension in KINDS):
        raise ConstraintError(f"{dimension!r} is no dimension: give {', '.join(map(repr, KINDS))}, or a path and a number")
    return Across(word, dimension, across)
