"""The kinds of constraints, each a value object that yields rules about the choices of the search's sites."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from msgspec import field, structs

from unity.base.documents import Record
from unity.base.errors import ConstraintError
from unity.base.formatting import short
from unity.constraints.paths import matched
from unity.constraints.resolver import KINDS, Dimension, Kind, Resolver, splits
from unity.pcg.ir.graph import CONSTRAIN, Node
from unity.pcg.ir.user_lines import spoken
from unity.pcg.parallel.axis_names import AxisNames
from unity.pcg.parallel.marks import mark_of, stated_at
from unity.pcg.parallel.sharding_spec import ShardingSpec, sharding_spec
from unity.search.space.masks import MaskRule


class Constraint(Record, tag_field="constraint"):
    """A condition that a plan must obey. It prints as the user wrote it."""

    def mask_rules(self, resolver: Resolver) -> Iterator[tuple[int, MaskRule]]:
        """Yield the restricted sites, each with a rule about its choices. Raises ConstraintError if a name refers to nothing."""
        return iter(())

    def described(self, names: AxisNames) -> str:
        """Return the constraint as text, with the names of mesh axes that users see."""
        return str(structs.replace(self, sharding=self.sharding.over(names))) if isinstance(self, SHARDED) else str(self)


class Pin(Constraint, tag="pin"):
    """A sharding of arguments."""

    path: str
    sharding: ShardingSpec = field(name="wanted")  # under this name in plan files

    def mask_rules(self, resolver: Resolver) -> Iterator[tuple[int, MaskRule]]:
        for k in matched(self.path, resolver.paths):
            site = resolver.inputs[k]
            rank = resolver.dimensions.opened.sites[site].results[0].ndim
            try:
                yield site, resolver.pinned(0, self.sharding, rank)
            except ConstraintError as error:
                raise ConstraintError(f"{self}: {resolver.paths[k][0]}: {error}") from None

    def __str__(self) -> str:
        return f'unity.pin("{self.path}", {self.sharding})'


class OperatorPin(Constraint, tag="operators"):
    """A sharding of operators' results.

    Attributes:
        name: the operators' kind, line, scope, or a kind at one of these (`user_lines.spoken`).
        sharding: the sharding of every result.
        results: the shapes and types of these operators' results in the captured program, sorted. A rewritten program in which the
            name refers to operators with other results is rejected, as the user did not mean these.
    """

    name: str
    sharding: ShardingSpec = field(name="wanted")
    results: tuple[str, ...]

    def mask_rules(self, resolver: Resolver) -> Iterator[tuple[int, MaskRule]]:
        sites = resolver.dimensions.opened.sites
        named = [(s, site, site.node) for s, site in enumerate(sites) if site.node is not None and self.means(site.node)]
        results = results_of(node for *_, node in named)
        if results != self.results:
            raise ConstraintError(f"{self}: the operators of this name give {results}, those captured {self.results}")
        for s, site, node in named:
            for k, result in enumerate(site.results):
                try:
                    yield s, resolver.pinned(len(site.ports) + k, self.sharding, result.ndim)
                except ConstraintError as error:
                    raise ConstraintError(f"{self}: the result {result} at {short(node.source)}: {error}") from None

    def means(self, node: Node) -> bool:
        """Return whether a node is one of the operators."""
        return node.body is not None and node.kind != CONSTRAIN and self.name in spoken(node)

    def __str__(self) -> str:
        return f'unity.pin("{self.name}", {self.sharding})'


def results_of(nodes: Iterable[Node]) -> tuple[str, ...]:
    """Return the shapes and types of operators' results as texts, sorted."""
    return tuple(sorted(str(tensor) for node in nodes for tensor in node.tensors))


class Marked(Constraint):
    """A sharding of the values that `unity.constrain` marks at a line of the function, or that are kept in a sharding there.

    Attributes:
        sharding: the sharding, in the names of the machine's axes.
        source: the line.
        stated: a sharding that `unity.keep_shardings()` keeps, as the user stated it; "" of `unity.constrain`.
    """

    sharding: ShardingSpec
    source: str
    stated: str = ""

    def mask_rules(self, resolver: Resolver) -> Iterator[tuple[int, MaskRule]]:
        for s, site in enumerate(resolver.dimensions.opened.sites):
            if site.mark is None or marked_by(site.mark) != self:
                continue
            try:
                yield s, resolver.pinned(len(site.ports), self.sharding, site.results[0].ndim)
            except ConstraintError as error:
                raise ConstraintError(f"{self}: {error}") from None

    def __str__(self) -> str:
        words = f"unity.keep_shardings() of {self.stated}" if self.stated else f"unity.constrain(..., {self.sharding})"
        return f"{words} at {self.source}"


SHARDED = (Pin, OperatorPin, Marked)  # the constraints that state a sharding


def marked_by(node: Node) -> Marked:
    """Return the constraint that a node of `unity.constrain`, or of a sharding that is kept, states."""
    return Marked(mark_of(node), short(node.source), stated_at(node))


Word = Literal["forbid", "only", "require"]


class Across(Constraint, tag="across"):
    """A condition on the dimensions that are split across a level of the machine.

    Attributes:
        word: "forbid" (no value is split in the dimension), "only" (no value is split in another one) or "require" (all arguments
            that have the dimension are split in it).
        dimension: the dimension, as `forbid` takes it.
        level: the level, or a mesh axis.
    """

    word: Word
    dimension: Kind | tuple[str, int]
    level: str

    def mask_rules(self, resolver: Resolver) -> Iterator[tuple[int, MaskRule]]:
        axes, follows = resolver.level(self.level), resolver.follows(self.dimension)
        sites = range(len(resolver.dimensions.choices)) if self.word != "require" else resolver.inputs
        exists = False
        for s in sites:
            split = resolver.split(s, follows)
            exists |= any(split)
            if self.word == "only":
                pairs = zip(split, resolver.dimensions.choices[s], strict=True)
                allowed = tuple(flag or not splits(choice) for flag, choice in pairs)
                restricts = not all(allowed)
            else:
                allowed = split if self.word == "require" else tuple(not flag for flag in split)
                restricts = any(split)
            if axes and restricts:
                yield s, resolver.along(s, axes, allowed)
        if not exists and self.word != "forbid":
            raise ConstraintError(f"{self}: nothing of this program can be split in such a dimension")

    def __str__(self) -> str:
        return f'unity.{self.word}({self.dimension!r}, across="{self.level}")'.replace("'", '"')


class WithoutRules(Constraint, tag="without_rules"):
    """Names or patterns of rules that may not rewrite the program."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"unity.without_rules({', '.join(map(repr, self.names))})".replace("'", '"')


class KeptShardings(Constraint):
    """Every sharding that the function states for a mesh that it sets. `unity.optimize` makes a constraint of each."""

    def __str__(self) -> str:
        return "unity.keep_shardings()"

    __repr__ = __str__


Passed = Pin | OperatorPin | Across | WithoutRules  # constraints that are passed to `unity.optimize`


def pin(path: str, spec: Any, *, mesh: Any = None) -> Pin:
    """Fix the sharding of arguments (how weights are stored, how the batch is loaded) or of operators' results.

    Args:
        path: the arguments, as `plan.explain()` prints them, or with the function's own names: `params['layers'][*]['w']`.
            `*` matches anything in one pair of brackets, `**` anything at all. Or operators: their kind ("dot_general"), their
            line ("model.py:42"), their scope ("decoder/mlp"), or a kind at one of these ("dot_general at model.py:42").
        spec: a `jax.sharding.PartitionSpec`. A name is a level of the machine ("node", "device"), an axis of `mesh`, or one of
            the user's mesh that is planned for; a number n means n slices over any axes; UNCONSTRAINED leaves a dimension to
            the search. Dimensions that are not mentioned are not split.
        mesh: the names and sizes of the parts of a level ("device_a", "device_b"), if the specification has any: the mesh of
            the plan that printed it (`plan.mesh_shape`), or your own.

    Raises:
        ConstraintError: the specification is malformed. Whether the arguments or operators exist is checked when a function is
            planned.
    """
    return Pin(path, sharding_spec(spec, mesh))


def forbid(dimension: Dimension, *, across: str) -> Across:
    """Forbid splitting a dimension across a level of the machine.

    Args:
        dimension: "samples" (the first dimension of the arguments that are not weights, without the steps of a loop, followed
            through the program), "weights" (any other dimension of weights, as they are stored), "tensor" (any dimension of
            operators and values but samples), or a pair of a path and a number: that dimension of those arguments, followed
            through the program.
        across: the level ("node": between nodes), or a mesh axis.
    """
    return _across("forbid", dimension, across)


def only(dimension: Dimension, *, across: str) -> Across:
    """Forbid splitting any other dimension across a level: `only("samples", across="node")` is data parallelism between nodes.

    Weights are then replicated across that level, too. The arguments are those of `forbid`.
    """
    return _across("only", dimension, across)


def require(dimension: Dimension, *, across: str) -> Across:
    """Require that all arguments with a dimension are split in it, across a whole level. The arguments are those of `forbid`."""
    if dimension == "tensor":
        raise ConstraintError('require("tensor") says nothing of arguments: give "samples", "weights", or a path and a dimension')
    return _across("require", dimension, across)


def without_rules(*names: str) -> WithoutRules:
    """Exclude rules, by name, from rewriting the program. `*` matches anything, as in "merge-*"."""
    return WithoutRules(names)


def keep_shardings() -> KeptShardings:
    """Keep every sharding that the function states for a mesh that it sets.

    These are `jax.sharding.reshard`, `out_sharding=`, `with_sharding_constraint`, and the placement of the arguments. Otherwise the
    plan decides them.
    """
    return KeptShardings()


def _across(word: Word, dimension: Any, across: str) -> Across:
    pair = isinstance(dimension, tuple) and len(dimension) == 2 and isinstance(dimension[0], str) and isinstance(dimension[1], int)
    if not (pair or dimension in KINDS):
        raise ConstraintError(f"{dimension!r} is no dimension: give {', '.join(map(repr, KINDS))}, or a path and a number")
    return Across(word, dimension, across)
