"""Replay of a parallelization: the parallel graph is derived again from the serial one, by the rules that the plan records.

The search is not used, nor its construction of parallel graphs. Every operator takes the states of its recorded rules, axis by
axis. Where its operands have other types, recorded parallelization operators must lead from one type to the other. A rule is one
of the library, matched with the operator (`splits`), or an entry of the operator table whose claims are on record as proved
(`claims`); others are counted as unproved. In the end the graph must be the plan's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from unity.base.errors import DerivationError, RuleError
from unity.pcg.ir.graph import BRANCHES, LOOPS, PCG, PIPELINE, TAIL, Node, Value, carried_by
from unity.pcg.ir.payloads import Recompute
from unity.pcg.ir.program import Body
from unity.pcg.propagation.propagation import Unmatched
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import UNUSED, Type, digits, misfit
from unity.substitutions.language.library import Library
from unity.substitutions.language.parallel_derivation import Changes, Parallelization, Row, Split
from unity.substitutions.language.term import Apply, Term, Variable
from unity.substitutions.language.vocabulary import VOCABULARY
from unity.verify.proofs.claims import claims, proved
from unity.verify.proofs.splits import justifies

COMPOSED = {  # parallelization operators that are equal to two others, one after the other
    "combine_partition": ("partition", "combine"),
    "combine_replicate": ("replicate", "combine"),
    "reduce_partition": ("partition", "reduce"),
}


@dataclass(frozen=True)
class Replayed:
    """Counts of the rules that a parallelization applies, each at one operator along one axis.

    Attributes:
        by_rule: applications of the library's rules, by rule.
        by_table: applications of the operator table whose claims are all proved, by operator.
        unproved: the other applications, by operator and the claims that are not on record as proved.
        changes: parallelization operators, by kind, and for composed ones by the library's rule about them.
    """

    by_rule: Counter[str] = field(default_factory=Counter)
    by_table: Counter[str] = field(default_factory=Counter)
    unproved: Counter[tuple[str, str]] = field(default_factory=Counter)
    changes: Counter[tuple[str, str]] = field(default_factory=Counter)

    @cached_property
    def applications(self) -> int:
        """The number of applications."""
        return sum(sum(c.values()) for c in (self.by_rule, self.by_table, self.unproved))

    def __str__(self) -> str:
        proved = self.applications - sum(self.unproved.values())
        lines = [
            f"{proved} of {self.applications} applications of parallelization rules are proved:"
            f" {sum(self.by_rule.values())} by rules of the library, {sum(self.by_table.values())} by the operator table's proofs"
        ]
        lines += [f"{n} changes of type, {_change_text(*change)}" for change, n in self.changes.most_common()]
        lines += [f"not proved: {n} of {operator}: {claim}" for (operator, claim), n in self.unproved.most_common()]
        return "\n".join(lines)


def _change_text(kind: str, rule: str) -> str:
    return f"{kind} (by {rule})" if rule else kind


def check_parallelization(serial: PCG, parallel: PCG, parallelization: Parallelization, library: Library) -> Replayed:
    """Check that the rules on record lead from one graph to the other. Raises DerivationError, naming the place, if they do not."""
    replay = _Replay(parallel.axes, parallelization, library)
    replayed = replay.graph(serial, None)
    if next(replay.rows, None) is not None:
        raise DerivationError("the parallelization has more rows than the program has operators")
    if replayed.key != parallel.key:
        raise DerivationError("the rules on record do not lead to the parallel graph: it was changed after they were written down")
    return replay.report


class _Replay:
    """The derivation of a parallel graph, row by row."""

    def __init__(self, axes: tuple[Axis, ...], parallelization: Parallelization, library: Library) -> None:
        self.axes, self.rows, self.outputs = axes, iter(parallelization.rows), iter(parallelization.outputs)
        self.rules = _RuleChecks(library)
        self.report = Replayed()

    def graph(self, graph: PCG, input_types: Sequence[Type] | None) -> PCG:
        """Derive the parallel graph of a program. Those of a nested program's inputs must have the types of its operands."""
        output_changes = self.next_of(self.outputs, "outputs")
        values: dict[Value, Value] = {}
        inputs = []
        for node in graph.nodes:
            row = self.next_of(self.rows, "rows")
            if node.kind == "input":
                parallel = replace(node, types=row.placed)
                inputs.append(parallel)
                self.check_types(node, parallel, row.placed)
            else:
                parallel = self.node(node, row, values)
            values.update(zip(node.results, parallel.results, strict=True))
        if input_types is not None and [n.types[0] for n in inputs] != list(input_types):
            raise DerivationError("the inputs of a nested program have other types than its operands")
        if len(output_changes) != len(graph.outputs):
            count = f"there are changes of {len(output_changes)} outputs on record"
            raise DerivationError(f"{count}, and the program has {len(graph.outputs)}")
        outputs = tuple(self.change(values[v], c) for v, c in zip(graph.outputs, output_changes, strict=True))
        return PCG(tuple(inputs), outputs, self.axes)

    def next_of(self, records: Iterator, kind: str) -> Any:
        """Return the next record of a kind."""
        record = next(records, None)
        if record is None:
            raise DerivationError(f"the parallelization has fewer {kind} than the program")
        return record

    def node(self, node: Node, row: Row, values: dict[Value, Value]) -> Node:
        """Derive the parallel node of an operator."""
        if len(row.changes) != len(node.operands):
            raise _wrong(node, f"changes of {len(row.changes)} operands are on record, and it has {len(node.operands)}")
        operands = tuple(self.change(values[v], c) for v, c in zip(node.operands, row.changes, strict=True))
        inside = self.graph(node.inside, self.inner_types(node, operands)) if node.inside is not None else None
        types = row.placed if inside is not None else self.split(node, row.splits, operands)
        if inside is not None and [*types] != [*self.outer_types(node, inside, types)]:
            raise _wrong(node, "its results have other types than the outputs of its nested program")
        again = Recompute(row.again) if row.again else node.again
        parallel = replace(node, operands=operands, types=types, inside=inside, again=again)
        self.check_types(node, parallel, types)
        return parallel

    def inner_types(self, node: Node, operands: Sequence[Value]) -> Sequence[Type] | None:
        """Return the types that operands have inside of a nested program.

        None for pipelines and branches, whose operands the type checker compares with their stages and groups.
        """
        if node.kind in (PIPELINE, TAIL, BRANCHES):
            return None
        if node.kind not in LOOPS:
            return [v.type for v in operands]
        stacked = carried_by(node).stop
        return [v.type if p < stacked else self.slice_type(node, v.type, -1) for p, v in enumerate(operands)]

    def outer_types(self, node: Node, inside: PCG, types: Sequence[Type]) -> Sequence[Type]:
        """Return the types that the outputs of a nested program have outside of it."""
        if node.kind in (PIPELINE, TAIL, BRANCHES):
            return types
        carried = len(carried_by(node)) if node.kind in LOOPS else len(inside.outputs)
        return [v.type if k < carried else self.slice_type(node, v.type, 1) for k, v in enumerate(inside.outputs)]

    def slice_type(self, node: Node, type_: Type, more: int) -> Type:
        """Return the type of one step's slice of a stacked tensor (`more` is -1), or of the stack of such slices (1)."""
        if more < 0 and any(s.kind == "P" and s.dim == 0 for s in type_):
            raise _wrong(node, "the steps of a scan are not partitioned")
        return tuple(s._replace(dim=s.dim + more) if s.kind == "P" else s for s in type_)

    def split(self, node: Node, splits: Sequence[Split], operands: Sequence[Value]) -> tuple[Type, ...]:
        """Return the types of an operator's results, by its rules along all axes."""
        if len(splits) != len(self.axes) or any(len(s.results) != len(node.tensors) for s in splits):
            raise _wrong(node, f"it has {len(splits)} rules on record for {len(self.axes)} axes, or of other results")
        for k, (axis, split) in enumerate(zip(self.axes, splits, strict=True)):
            states = tuple(v.type[k] for v in operands)
            if split.operator != node.kind or split.operands != states:
                raise _wrong(node, f'along axis "{axis.name}" its operands are not in the states that its rule requires')
            self.count(node, split, axis)
        return tuple(tuple(s.results[r] for s in splits) for r in range(len(node.tensors)))

    def count(self, node: Node, split: Split, axis: Axis) -> None:
        """Count the rule or claims that justify a split. Raises DerivationError where there are none."""
        if all(s == UNUSED for s in split.operands + split.results):
            return
        assert node.body is not None
        if split.rule:
            self.rules.check_rule(node, node.body, split, axis)
            self.report.by_rule[self.rules.library.present_name(split.rule)] += 1
            return
        missing = self.rules.unproved_claims(node, node.body, split)
        if missing:
            self.report.unproved[node.kind, missing] += 1
        else:
            self.report.by_table[node.kind] += 1

    def change(self, v: Value, changes: Changes) -> Value:
        """Apply parallelization operators to a value."""
        for change in changes:
            self.check_change(v, change.kind, change.after)
            again = Recompute.WHOLE if change.again else Recompute.NOTHING
            node = Node(change.kind, (v,), (v.tensor,), types=(change.after,), source=v.node.source, again=again)
            self.check_types(v.node, node, (change.after,))
            self.report.changes[change.kind, self.rules.composing_rule(change.kind)] += 1
            v = Value(node)
        return v

    def check_change(self, v: Value, kind: str, after: Type) -> None:
        """Check that a parallelization operator makes this change along every axis; slices are compared by their digits."""
        if len(after) != len(self.axes):
            raise _wrong(v.node, f"a change to a type of {len(after)} axes, on a mesh of {len(self.axes)}")
        old, new = (_absolute(t, self.axes) for t in (v.type, after))
        allowed = _allowed_changes(kind)
        for s, t in zip(old, new, strict=True):
            if s != t and (s[0] + t[0]) not in allowed:
                raise _wrong(v.node, f"{kind} does not change {s[0]} to {t[0]}")

    def check_types(self, where: Node, node: Node, types: Sequence[Type]) -> None:
        """Check that a node's results can have their types. An error names the serial node `where`."""
        if len(types) != len(node.tensors) or any(len(t) != len(self.axes) for t in types):
            raise _wrong(where, "its types on record are not one for each result and axis")
        for tensor, t in zip(node.tensors, types, strict=True):
            problem = misfit(tensor.shape, t, self.axes)
            if problem:
                raise _wrong(where, problem)


def _absolute(type_: Type, axes: Sequence[Axis]) -> list[tuple]:
    """Return the states of a type with absolute digits, which do not depend on other axes."""
    return [(s.kind, d) if d is not None else (s.kind,) for s, d in zip(type_, digits(type_, axes), strict=True)]


def _allowed_changes(kind: str) -> frozenset[str]:
    """Return the pairs of kinds of states between which a parallelization operator leads."""
    operator = VOCABULARY.get(kind)
    if operator is None or operator.change is None:  # a view, which renames slices and moves none
        return frozenset()
    before, after = operator.change(*range(len(operator.attributes) - 1))
    # a replicated tensor can be sliced too, with a padded gradient, and pieces can be padded with zeros to a partial sum
    more = {"partition": {"RP"}, "contribute": {"RS", "PS"}}.get(kind, set())
    return frozenset({before.kind + after.kind, *more})


def _wrong(node: Node, problem: str) -> DerivationError:
    return DerivationError(f"{node.source or 'the graph'}: {node.kind}: {problem}")


class _RuleChecks:
    """Checks of the rules for operators, made once for equal operators."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.checked: dict[tuple, str] = {}  # claims that are not proved

    def check_rule(self, node: Node, body: Body, split: Split, axis: Axis) -> None:
        """Check that a rule of the library allows a split. Raises DerivationError if it does not."""
        key = (body.key, split, axis)
        if key in self.checked:
            return
        try:
            entry = self.library[split.rule]
        except RuleError:
            raise _wrong(node, f"the library has no rule {split.rule}. Use the library that the plan was made with") from None
        if entry.hash != split.hash:
            raise _wrong(node, f"the library's rule {split.rule} has hash {entry.hash}, and the plan was made with {split.hash}")
        if not justifies(entry.rule, body, split.operands + split.results, axis):
            raise _wrong(node, f'the rule {split.rule} does not allow this split along axis "{axis.name}"')
        self.checked[key] = ""

    def unproved_claims(self, node: Node, body: Body, split: Split) -> str:
        """Return, as text, the claims of the operator table about a split that are not on record as proved."""
        key = (body.key, split)
        if key not in self.checked:
            try:
                needed = claims(body, split.operands, split.results)
            except Unmatched:
                raise _wrong(node, "the operator table does not allow this split") from None
            self.checked[key] = "; ".join(sorted(f"{name} {kinds}" for name, kinds in needed if not proved((name, kinds))))
        return self.checked[key]

    def composing_rule(self, kind: str) -> str:
        """Return the library's rule that composes a fused parallelization operator of two others, or an empty text."""
        if kind not in COMPOSED:
            return ""
        return next((e.rule.name for e in self.library.entries if _is_composition(e.rule.sides, kind)), "")


def _is_composition(sides: Sequence[Term], kind: str) -> bool:
    """Return whether a rule's sides are a fused operator of a variable, and the two operators that it is equal to."""
    if len(sides) != 2:
        return False
    for outer, fused in (sides, sides[::-1]):
        inner = outer.operands[0] if isinstance(outer, Apply) else None
        if isinstance(outer, Apply) and isinstance(fused, Apply) and isinstance(inner, Apply) and fused.operator == kind:
            same_variable = isinstance(fused.operands[0], Variable) and inner.operands == fused.operands
            if same_variable and (outer.operator, inner.operator) == COMPOSED[kind]:
                return True
    return False
