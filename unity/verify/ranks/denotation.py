"""The denotation of terms: a reader evaluates a term over a domain, operator by operator (`operators.py`)."""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Mapping
from typing import Any

from unity.verify.ranks.composites import COMPOSITES, with_groups
from unity.verify.ranks.forms import FORMS, WORDED, Inexpressible, group_of, is_extremum, is_group, parts_of
from unity.verify.ranks.operators import OPERATORS, Attributes, EvaluationDomain, RankTensor, Vector
from unity.verify.ranks.rule import Signature


class Reader:
    """Evaluates terms over a domain."""

    def __init__(self, domain: EvaluationDomain, signature: Signature, operands: Mapping[str, RankTensor] | None = None) -> None:
        self.domain, self.signature, self.operands = domain, signature, operands or {}

    def integers(self, node: ast.expr, group: str, names: Mapping[str, Vector] | None = None) -> Vector:
        """Evaluate an expression of sizes and attributes for every dimension of a group.

        Args:
            node: the expression.
            group: the dimensions; an empty text for scalars.
            names: values of further names.
        """
        if isinstance(node, ast.Constant):
            return (node.value,) * self._rank(group)
        if isinstance(node, ast.Name):
            if names and node.id in names:
                return names[node.id]
            if self.signature.tensors.get(node.id) == ():
                return (self.domain.scalar(node.id),) * self._rank(group)
            if self.signature.numbers.get(node.id) != group:
                raise Inexpressible(f"{node.id} is neither an index, a size nor an attribute{f' of {group}' if group else ''}")
            return self.domain.number(node.id, group)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return tuple(-x for x in self.integers(node.operand, group, names))
        if isinstance(node, ast.BinOp):
            left, right = self.integers(node.left, group, names), self.integers(node.right, group, names)
            return tuple(self._binary(node.op, a, b) for a, b in zip(left, right, strict=True))
        if is_extremum(node):
            left, right = (self.integers(x, group, names) for x in node.args)  # type: ignore[attr-defined]
            compare = operator.ge if node.func.id == "max" else operator.le  # type: ignore[attr-defined]
            return tuple(self.domain.choose(compare(a, b), a, b) for a, b in zip(left, right, strict=True))
        raise Inexpressible(f"{ast.unparse(node)} is no expression of sizes")

    def _rank(self, group: str) -> int:
        return self.domain.rank(group) if group else 1

    def _binary(self, op: ast.operator, a: Any, b: Any) -> Any:
        plain = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
        if type(op) in plain:
            return plain[type(op)](a, b)
        if isinstance(op, ast.FloorDiv | ast.Mod):
            return self.domain.quotient(a, b)[isinstance(op, ast.Mod)]
        raise Inexpressible(f"{type(op).__name__} is no operation on sizes")

    def condition(self, node: ast.expr, group: str) -> Vector:
        """Evaluate a condition for every dimension of a group."""
        compare = {ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
                   ast.GtE: operator.ge}  # fmt: skip
        if isinstance(node, ast.Compare):
            sides = [self.integers(x, group) for x in (node.left, *node.comparators)]
            parts = [
                [compare[type(op)](a, b) for a, b in zip(x, y, strict=True)]
                for op, x, y in zip(node.ops, sides, sides[1:], strict=False)
            ]
            return tuple(self.domain.both(*column) for column in zip(*parts, strict=True))
        if isinstance(node, ast.BoolOp):
            columns = zip(*(self.condition(x, group) for x in node.values), strict=True)
            if isinstance(node.op, ast.And):
                return tuple(self.domain.both(*column) for column in columns)
            return tuple(functools.reduce(lambda a, b: self.domain.choose(a, True, b), column) for column in columns)
        raise Inexpressible(f"{ast.unparse(node)} is no condition on sizes")

    def condition_group(self, node: ast.AST) -> str:
        """Return the group of a condition; an empty text if it is about scalars."""
        return group_of(node, self.signature.numbers)

    def tensor(self, node: ast.expr) -> RankTensor:
        """Evaluate a term."""
        if isinstance(node, ast.Constant | ast.UnaryOp):
            value = ast.literal_eval(node)
            return RankTensor({}, lambda index: self.domain.apply("constant", value))
        if isinstance(node, ast.Name) and node.id in ("least", "greatest"):
            return RankTensor({}, lambda index: self.domain.apply(node.id))
        if isinstance(node, ast.Name) and node.id in self.operands:
            return self.operands[node.id]
        if isinstance(node, ast.Name | ast.Subscript):
            name = node.id if isinstance(node, ast.Name) else node.value.id  # type: ignore[attr-defined]
            shape = {g: self.integers(size, g) for g, size in self.signature.tensors[name]}
            return RankTensor(shape, lambda index: self.domain.access(name, {g: index[g] for g in shape}))
        assert isinstance(node, ast.Call)
        assert isinstance(node.func, ast.Name)
        name = node.func.id
        if name not in FORMS:
            return self._elementwise(name, [self.tensor(x) for x in node.args])
        words = [node.args[0].id] if name in WORDED and isinstance(node.args[0], ast.Name) else []
        rest = node.args[len(words) :]
        attributes = {g: self.fields(g, x) for x in rest if (g := is_group(x)) and isinstance(x, ast.Subscript)}
        bare = [is_group(x) for x in rest if is_group(x) and isinstance(x, ast.Name)]
        operands = [self.tensor(x) for x in rest if not is_group(x)]
        if definition := COMPOSITES.get(name):
            operands = [self.domain.shared(x) for x in operands]
            inner = Reader(self.domain, self.signature, dict(zip(definition.operands, operands, strict=True)))
            return inner.tensor(with_groups(definition, bare))
        return OPERATORS[name](self, Attributes(words, bare, attributes), *operands)

    def fields(self, group: str, node: ast.Subscript) -> tuple[Vector | None, ...]:
        """Return the fields of an attribute: those of `G[a:b:c]`, of `G[a, b]`, or of `G[a]`."""
        return tuple(None if p is None else self.integers(p, group) for p in parts_of(node.slice))

    def same(self, group: str, left: Vector, right: Vector) -> None:
        """Require two groups of sizes to be equal."""
        self.domain.require(group, tuple(a == b for a, b in zip(left, right, strict=True)))

    def _elementwise(self, name: str, operands: list[RankTensor]) -> RankTensor:
        """Apply a function to elements of operands of one shape; scalars are as large as needed."""
        large = [x for x in operands if x.sizes] or operands[:1]
        for other in large[1:]:
            if set(other.sizes) != set(large[0].sizes) or other.order != large[0].order:
                raise Inexpressible(f"the operands of {name} have different dimensions")
            for group in large[0].sizes:
                self.same(group, large[0].sizes[group], other.sizes[group])
        return RankTensor(large[0].sizes, lambda i: self.domain.apply(name, *(x.at(i) for x in operands)), large[0].order)
