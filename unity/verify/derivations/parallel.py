"""A parallel graph, made again from the serial one by the rules that are on record for it.

Nothing of the search is used, nor what it makes parallel graphs with. Every operator is brought into the states that its rules say,
axis by axis; what its rules put around it meets what its neighbours' put there, and between them must stand parallelization
operators that lead from the one type to the other. A rule is one of the library, held against the operator (`splits`), or one of
the operator table, whose claims are on record as proved (`claims`); what is neither is counted. In the end the graph must be the
plan's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from unity.base.errors import DerivationError, RuleError
from unity.pcg.ir.graph import BRANCHES, LOOPS, PCG, PIPELINE, TAIL, Node, Value, carried_by
from unity.pcg.ir.program import Body
from unity.pcg.propagation.propagation import Unmatched
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import UNUSED, Type, digits, misfit
from unity.substitutions.language.library import Library
from unity.substitutions.language.parallel_derivation import Changes, Parallelization, Row, Split
from unity.substitutions.language.term import Apply, Variable
from unity.substitutions.language.vocabulary import VOCABULARY
from unity.verify.proofs.claims import claims, proved
from unity.verify.proofs.splits import says

COMPOSED = {  # parallelization operators that stand for two of the others
    "combine_partition": ("partition", "combine"),
    "combine_replicate": ("replicate", "combine"),
    "reduce_partition": ("partition", "reduce"),
}


@dataclass(frozen=True)
class Replayed:
    """What a parallelization was made of. An application is a rule, at one operator, along one axis.

    `by_rule`: applications by the library's rules; `by_table`: by what the operator table claims of an operator, all of it proved;
    `unproved`: the others, by operator and the claims that are not on record as proved. `changes`: parallelization operators, by
    kind; those that stand for two others with the library's rule that says so.
    """

    by_rule: Counter[str] = field(default_factory=Counter)
    by_table: Counter[str] = field(default_factory=Counter)
    unproved: Counter[tuple[str, str]] = field(default_factory=Counter)
    changes: Counter[tuple[str, str]] = field(default_factory=Counter)

    @cached_property
    def applications(self) -> int:
        """All that split an operator."""
        return sum(sum(c.values()) for c in (self.by_rule, self.by_table, self.unproved))

    def __str__(self) -> str:
        proved = self.applications - sum(self.unproved.values())
        lines = [
            f"{proved} of {self.applications} applications of parallelization rules are proved:"
            f" {sum(self.by_rule.values())} by rules of the library, {sum(self.by_table.values())} by the operator table's proofs"
        ]
        lines += [f"{n} changes of type, {_called(*change)}" for change, n in self.changes.most_common()]
        lines += [f"not proved: {n} of {operator}: {claim}" for (operator, claim), n in self.unproved.most_common()]
        return "\n".join(lines)


def _called(kind: str, rule: str) -> str:
    return f"{kind} (by {rule})" if rule else kind


def check_parallelization(serial: PCG, parallel: PCG, found: Parallelization, library: Library) -> Replayed:
    """Whether the rules on record lead from one graph to the other. Raises DerivationError where they do not, naming the place."""
    replay = _Replay(parallel.axes, found, library)
    made = replay.graph(serial, None)
    if next(replay.rows, None) is not None:
        raise DerivationError("the parallelization has more rows than the program has operators")
    if made.key != parallel.key:
        raise DerivationError("the rules on record do not lead to the parallel graph: it was changed after they were written down")
    return replay.report


class _Replay:
    """Makes a graph parallel, row by row."""

    def __init__(self, axes: tuple[Axis, ...], found: Parallelization, library: Library) -> None:
        self.axes, self.rows, self.outputs = axes, iter(found.rows), iter(found.outputs)
        self.rules = _Rules(library)
        self.report = Replayed()

    def graph(self, graph: PCG, given: Sequence[Type] | None) -> PCG:
        """`given`: the inputs' types, where they follow from outside."""
        ends = self.following(self.outputs, "outputs")
        values: dict[Value, Value] = {}
        inputs = []
        for node in graph.nodes:
            row = self.following(self.rows, "rows")
            if node.kind == "input":
                made = replace(node, types=row.placed)
                inputs.append(made)
                self.fits(node, made, row.placed)
            else:
                made = self.node(node, row, values)
            values.update(zip(node.results, made.results, strict=True))
        if given is not None and [n.types[0] for n in inputs] != list(given):
            raise DerivationError("what a program inside takes is of other types than what it is given")
        if len(ends) != len(graph.outputs):
            raise DerivationError(f"there are changes of {len(ends)} outputs on record, and the program has {len(graph.outputs)}")
        outputs = tuple(self.changed(values[v], c) for v, c in zip(graph.outputs, ends, strict=True))
        return PCG(tuple(inputs), outputs, self.axes)

    def following(self, rest: Iterator, what: str):
        found = next(rest, None)
        if found is None:
            raise DerivationError(f"the parallelization has fewer {what} than the program")
        return found

    def node(self, node: Node, row: Row, values: dict[Value, Value]) -> Node:
        if len(row.changes) != len(node.operands):
            raise _wrong(node, f"changes of {len(row.changes)} operands are on record, and it has {len(node.operands)}")
        operands = tuple(self.changed(values[v], c) for v, c in zip(node.operands, row.changes, strict=True))
        inside = self.graph(node.inside, self.inner(node, operands)) if node.inside is not None else None
        types = row.placed if inside is not None else self.split(node, row.splits, operands)
        if inside is not None and [*types] != [*self.outer(node, inside, types)]:
            raise _wrong(node, "its results have other types than what the program inside gives")
        attributes = {**node.attributes, "again": row.again} if row.again else node.attributes
        made = replace(node, operands=operands, types=types, inside=inside, attributes=attributes)
        self.fits(node, made, types)
        return made

    def inner(self, node: Node, operands: Sequence[Value]) -> Sequence[Type] | None:
        """The types in which a program inside finds the operands. A pipeline's ends, and those of
        branches, are held to its stages and groups by the type checker."""
        if node.kind in (PIPELINE, TAIL, BRANCHES):
            return None
        if node.kind not in LOOPS:
            return [v.type for v in operands]
        stacked = carried_by(node).stop
        return [v.type if p < stacked else self.step(node, v.type, -1) for p, v in enumerate(operands)]

    def outer(self, node: Node, inside: PCG, types: Sequence[Type]) -> Sequence[Type]:
        """The types of what a program inside gives, where it is seen from outside."""
        if node.kind in (PIPELINE, TAIL, BRANCHES):
            return types
        carried = len(carried_by(node)) if node.kind in LOOPS else len(inside.outputs)
        return [v.type if k < carried else self.step(node, v.type, 1) for k, v in enumerate(inside.outputs)]

    def step(self, node: Node, type_: Type, more: int) -> Type:
        """The type of one step of what is stacked, or of the stack: one dimension less, or more."""
        if more < 0 and any(s.kind == "P" and s.dim == 0 for s in type_):
            raise _wrong(node, "the steps of a scan are not partitioned")
        return tuple(s._replace(dim=s.dim + more) if s.kind == "P" else s for s in type_)

    def split(self, node: Node, splits: Sequence[Split], operands: Sequence[Value]) -> tuple[Type, ...]:
        """The types of an operator's results, by its rule along every axis."""
        if len(splits) != len(self.axes) or any(len(s.results) != len(node.tensors) for s in splits):
            raise _wrong(node, f"it has {len(splits)} rules on record for {len(self.axes)} axes, or of other results")
        for k, (axis, split) in enumerate(zip(self.axes, splits, strict=True)):
            there = tuple(v.type[k] for v in operands)
            if split.operator != node.kind or split.operands != there:
                raise _wrong(node, f'along axis "{axis.name}" its operands are not as its rule wants them')
            self.count(node, split, axis)
        return tuple(tuple(s.results[r] for s in splits) for r in range(len(node.tensors)))

    def count(self, node: Node, split: Split, axis: Axis) -> None:
        """Notes why an operator may be split so. Raises DerivationError where it may not."""
        if all(s == UNUSED for s in split.operands + split.results):
            return
        assert node.body is not None
        if split.rule:
            self.rules.held(node, node.body, split, axis)
            self.report.by_rule[split.rule] += 1
            return
        missing = self.rules.unproved(node, node.body, split)
        if missing:
            self.report.unproved[node.kind, missing] += 1
        else:
            self.report.by_table[node.kind] += 1

    def changed(self, v: Value, changes: Changes) -> Value:
        """A value behind parallelization operators, each of which must be one, along every axis that it changes."""
        for change in changes:
            self.follows(v, change.kind, change.after)
            attributes = {"again": True} if change.again else {}
            made = Node(change.kind, (v,), (v.tensor,), attributes=attributes, types=(change.after,), source=v.node.source)
            self.fits(v.node, made, (change.after,))
            self.report.changes[change.kind, self.rules.composed(change.kind)] += 1
            v = Value(made)
        return v

    def follows(self, v: Value, kind: str, after: Type) -> None:
        """Slices are compared by where they lie, whatever other axes slice."""
        if len(after) != len(self.axes):
            raise _wrong(v.node, f"a change to a type of {len(after)} axes, on a mesh of {len(self.axes)}")
        old, new = (_absolute(t, self.axes) for t in (v.type, after))
        allowed = _kinds(kind)
        for s, t in zip(old, new, strict=True):
            if s != t and (s[0] + t[0]) not in allowed:
                raise _wrong(v.node, f"{kind} does not change {s[0]} to {t[0]}")

    def fits(self, where: Node, made: Node, types: Sequence[Type]) -> None:
        if len(types) != len(made.tensors) or any(len(t) != len(self.axes) for t in types):
            raise _wrong(where, "its types on record are not one for each result and axis")
        for tensor, t in zip(made.tensors, types, strict=True):
            problem = misfit(tensor.shape, t, self.axes)
            if problem:
                raise _wrong(where, problem)


def _absolute(type_: Type, axes: Sequence[Axis]) -> list[tuple]:
    return [(s.kind, d) if d is not None else (s.kind,) for s, d in zip(type_, digits(type_, axes), strict=True)]


def _kinds(kind: str) -> frozenset[str]:
    """Which changes of state a parallelization operator makes, by kinds."""
    operator = VOCABULARY.get(kind)
    if operator is None or operator.change is None:  # a view: it renames slices, and moves none
        return frozenset()
    before, after = operator.change(*range(len(operator.attributes) - 1))
    # what is replicated is sliced too, its gradient padded; and pieces, too, are put among zeros
    more = {"partition": {"RP"}, "contribute": {"RS", "PS"}}.get(kind, set())
    return frozenset({before.kind + after.kind, *more})


def _wrong(node: Node, problem: str) -> DerivationError:
    return DerivationError(f"{node.source or 'the graph'}: {node.kind}: {problem}")


class _Rules:
    """What is known of rules: each is looked at once for equal operators."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.seen: dict[tuple, str] = {}

    def held(self, node: Node, body: Body, split: Split, axis: Axis) -> None:
        """Raises DerivationError unless a rule of the library says that an operator may be split so."""
        key = (body.key, split, axis)
        if key in self.seen:
            return
        try:
            entry = self.library[split.rule]
        except RuleError:
            raise _wrong(node, f"the library has no rule {split.rule}. Use the library that the plan was made with") from None
        if entry.hash != split.hash:
            raise _wrong(node, f"the library's rule {split.rule} has hash {entry.hash}, and the plan was made with {split.hash}")
        if not says(entry.rule, body, split.operands + split.results, axis):
            raise _wrong(node, f'the rule {split.rule} does not say that it may be split so along axis "{axis.name}"')
        self.seen[key] = ""

    def unproved(self, node: Node, body: Body, split: Split) -> str:
        """What of the operator table's claims about an operator is not on record as proved."""
        key = (body.key, split)
        if key not in self.seen:
            try:
                needed = claims(body, split.operands, split.results)
            except Unmatched:
                raise _wrong(node, "the operator table does not allow that it is split so") from None
            self.seen[key] = "; ".join(sorted(f"{name} {kinds}" for name, kinds in needed if not proved((name, kinds))))
        return self.seen[key]

    def composed(self, kind: str) -> str:
        """The library's rule that says what a fused parallelization operator is made of."""
        if kind not in COMPOSED:
            return ""
        return next((e.rule.name for e in self.library.entries if _says_composed(e.rule.sides, kind)), "")


def _says_composed(sides: Sequence, kind: str) -> bool:
    """Whether a rule's sides are the two operators, one after the other, and the one that stands for them."""
    if len(sides) != 2:
        return False
    for two, one in (sides, sides[::-1]):
        inner = two.operands[0] if isinstance(two, Apply) else None
        if isinstance(two, Apply) and isinstance(one, Apply) and isinstance(inner, Apply) and one.operator == kind:
            plain = isinstance(one.operands[0], Variable) and inner.operands == one.operands
            if plain and (two.operator, inner.operator) == COMPOSED[kind]:
                return True
    return False
