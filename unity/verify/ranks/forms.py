"""The forms of operators, and the kinds of elements: whether a text is a term, before it gets a meaning.

An element is a truth value, a number, or a *bound*: a number that may be infinite, as `least` and `greatest` are, and a maximum
of nothing. Bounds are compared and chosen, but not added or multiplied. Truth values do not count as 0 and 1."""

from __future__ import annotations

import ast
import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from unity.base.errors import RuleError
from unity.base.formatting import with_article
from unity.verify.ranks.composites import COMPOSITES, with_groups

MANY = 99
TRUTH, NUMBER, BOUND, INDEX = "truth value", "number", "bound", "index"
Shape = tuple[tuple[str, ast.expr], ...]


class Inexpressible(RuleError):
    """A term that the language has no meaning for."""

    docs = "rules#rules-for-every-rank"


class OutOfReach(Exception):
    """The reason why a rule that has a meaning is neither proved nor disproved."""


@dataclass(frozen=True)
class OperatorForm:
    """The form of an application: a word, bare groups, groups with fields in brackets, and operands, in this order.

    Attributes:
        usage: an example.
        bare: the least and the greatest number of bare groups.
        bracketed: the same of groups with fields.
        fields: the same of the fields of each.
        operands: the same of operands.
        word: whether a word comes first: a monoid, an order.
    """

    usage: str
    bare: tuple[int, int] = (0, 0)
    bracketed: tuple[int, int] = (0, 0)
    fields: tuple[int, int] = (0, 0)
    operands: tuple[int, int] = (1, 1)
    word: bool = False


FORMS = {
    "slice": OperatorForm("slice(G[start:end:stride], x)", bracketed=(1, MANY), fields=(2, 3)),
    "pad": OperatorForm("pad(G[low:high:interior], x, value)", bracketed=(1, MANY), fields=(2, 3), operands=(2, 2)),
    "dynamic_slice": OperatorForm("dynamic_slice(G[start:size], x)", bracketed=(1, MANY), fields=(2, 2)),
    "dynamic_update_slice": OperatorForm(
        "dynamic_update_slice(G[start], x, update)", bracketed=(1, MANY), fields=(1, 1), operands=(2, 2)
    ),
    "reverse": OperatorForm("reverse(G, x)", bare=(1, MANY)),
    "transpose": OperatorForm("transpose(order, x)", word=True),
    "broadcast": OperatorForm("broadcast(G[size], x)", bracketed=(1, MANY), fields=(1, 1)),
    "squeeze": OperatorForm("squeeze(G, x)", bare=(1, MANY)),
    "concat": OperatorForm("concat(C, x, y)", bare=(1, 1), operands=(1, MANY)),
    "iota": OperatorForm("iota(C, C[size], G[size])", bare=(1, 1), bracketed=(1, MANY), fields=(1, 1), operands=(0, 0)),
    "reduce": OperatorForm("reduce(add, G, x)", bare=(1, MANY), word=True),
    "dot": OperatorForm("dot(K, x, y)", bare=(0, MANY), operands=(2, 2)),
    "conv": OperatorForm(
        "conv(F, S[stride, low, high, dilation, window_dilation], x, w)",
        bare=(0, MANY),
        bracketed=(1, 1),
        fields=(5, 5),
        operands=(2, 2),
    ),
    "largest": OperatorForm("largest(K, x)", bare=(1, MANY)),
    "like": OperatorForm("like(x, y)", operands=(2, 2)),
    "is_at": OperatorForm("is_at(V[size], i)", bracketed=(1, 1), fields=(1, 1)),
    "lookup": OperatorForm("lookup(V, x, i)", bare=(1, 1), operands=(2, 2)),
    **{
        n: OperatorForm(d.usage, (len(d.groups), len(d.groups)), operands=(len(d.operands), len(d.operands)))
        for n, d in COMPOSITES.items()
    },
}
WORDED = {name for name, form in FORMS.items() if form.word}


@dataclass(frozen=True)
class Monoid:
    """The commutative monoid of a reduction.

    Attributes:
        kind: of its elements.
        unit: the neutral element: a constant, `least` or `greatest`; None if it is unknown.
    """

    kind: str
    unit: bool | int | str | None


MONOIDS = {
    "add": Monoid(NUMBER, 0),
    "mul": Monoid(NUMBER, 1),
    "max": Monoid(BOUND, "least"),
    "min": Monoid(BOUND, "greatest"),
    "logical_and": Monoid(TRUTH, True),
    "logical_or": Monoid(TRUTH, False),
    "f": Monoid(NUMBER, None),
}
ALIKE = "alike"  # operands of one kind, which is that of the result
ELEMENTWISE: dict[str, tuple[tuple[str, ...], str]] = {
    **dict.fromkeys(("neg", "abs", "sign", "exp", "log", "sqrt", "rsqrt", "erf"), ((NUMBER,), NUMBER)),
    **dict.fromkeys(("add", "sub", "mul", "div", "rem", "pow"), ((NUMBER, NUMBER), NUMBER)),
    **dict.fromkeys(("max", "min"), ((BOUND, BOUND), ALIKE)),
    "clamp": ((BOUND, BOUND, BOUND), ALIKE),
    "select": ((TRUTH, ALIKE, ALIKE), ALIKE),
    **dict.fromkeys(("lt", "le", "gt", "ge"), ((BOUND, BOUND), TRUTH)),
    **dict.fromkeys(("eq", "ne"), ((ALIKE, ALIKE), TRUTH)),
    **dict.fromkeys(("logical_and", "logical_or", "logical_xor"), ((TRUTH, TRUTH), TRUTH)),
    "logical_not": ((TRUTH,), TRUTH),
}
EXPECTED = {"largest": (NUMBER,), "like": (ALIKE, ALIKE), "is_at": (INDEX,), "lookup": (ALIKE, INDEX)}
GENERIC = ("f", "g", "h")  # names of any functions of numbers
STATEMENTS = {"one", "nonempty", "positive", "some"}
RESERVED = {*FORMS, *ELEMENTWISE, *STATEMENTS, "least", "greatest", "names"}
ARITHMETIC = ast.Add | ast.Sub | ast.Mult | ast.FloorDiv | ast.Mod
COMPARISON = ast.Eq | ast.NotEq | ast.Lt | ast.LtE | ast.Gt | ast.GtE


def is_group(node: ast.expr) -> str:
    """Return the group that an argument of an operator is about, or an empty text if the argument is a tensor."""
    name = node.value if isinstance(node, ast.Subscript) else node
    return name.id if isinstance(name, ast.Name) and name.id[0].isupper() else ""


def kind_of(name: str) -> str:
    """Return the kind of a tensor's elements, by its name."""
    return TRUTH if name[0] in "pq" else INDEX if name[0] == "i" else NUMBER


def check_names(groups: Iterable[str], others: Iterable[str]) -> None:
    """Refuse names that mean something else: of operators, of the indices of sums (`K2`, `iK`)."""
    for group in groups:
        if not re.fullmatch("[A-Z][A-Za-z_]*", group):
            raise Inexpressible(f"a group of dimensions has a name such as G, of letters, not {group}: K2 is the second index of K")
    for name in others:
        if name in RESERVED or re.fullmatch("i[A-Z].*|[A-Z][A-Za-z_]*[0-9].*", name):
            raise Inexpressible(f"{name} means something else in this language; call the tensor or the size otherwise")


@dataclass(frozen=True)
class Checker:
    """Checks terms and conditions over declared variables.

    Attributes:
        tensors: for each tensor its groups, with the expression of their sizes.
        numbers: for each name of a size or an attribute its group.
        integers: whether elements are integers.
        operands: the kinds of a composite's operands, within its program.
    """

    tensors: Mapping[str, Shape]
    numbers: Mapping[str, str]
    integers: bool
    operands: Mapping[str, str] = field(default_factory=dict)

    def kind(self, node: ast.expr) -> str:
        """Return the kind of a term's elements."""
        literal = node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else node
        if isinstance(literal, ast.Constant):
            if isinstance(literal.value, bool) and literal is node:
                return TRUTH
            if _is_number(literal.value):
                if self.integers and isinstance(literal.value, float):
                    raise Inexpressible(f"{literal.value} in a rule of integers, which iota and rem make of it")
                return NUMBER
        if isinstance(node, ast.Name) and node.id in ("least", "greatest"):
            return BOUND
        if isinstance(node, ast.Name | ast.Subscript) and not is_group(node):
            name = node.value if isinstance(node, ast.Subscript) else node
            if isinstance(name, ast.Name):
                return self.operands.get(name.id) or kind_of(name.id)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.keywords or any(isinstance(a, ast.Starred) for a in node.args):
                raise Inexpressible(f"{ast.unparse(node)}: operators have no keywords")
            return self._structural(node, node.func.id) if node.func.id in FORMS else self._elementwise(node, node.func.id)
        raise Inexpressible(f"{ast.unparse(node)} is no term; terms are x, -1, True, least, and operators such as add(x, neg(y))")

    def _elementwise(self, node: ast.Call, name: str) -> str:
        if name not in ELEMENTWISE and name not in GENERIC:
            near = ", ".join(difflib.get_close_matches(name, [*FORMS, *ELEMENTWISE]))
            raise Inexpressible(f"{name} is an unknown operator" + (f"; near it are {near}" if near else ""))
        expected, result = ELEMENTWISE.get(name, ((NUMBER,) * max(1, len(node.args)), NUMBER))
        if any(map(is_group, node.args)):
            raise Inexpressible(f"{ast.unparse(node)}: the elementwise function {name} has no attributes")
        if len(node.args) != len(expected):
            raise Inexpressible(f"{ast.unparse(node)}: {name} has {len(expected)} operands, not {len(node.args)}")
        kinds = [self.kind(a) for a in node.args]
        for kind, wanted in zip(kinds, expected, strict=True):
            if wanted != ALIKE and kind != wanted and (kind, wanted) != (NUMBER, BOUND):
                raise Inexpressible(
                    f"{ast.unparse(node)}: {name} of {with_article(kind)}; expected {with_article(wanted)}"
                    + HINTS.get((kind, wanted), "")
                )
        alike = self._joined(node, [k for k, wanted in zip(kinds, expected, strict=True) if wanted in (ALIKE, BOUND)])
        return alike if result == ALIKE else result

    def _joined(self, node: ast.Call, kinds: list[str]) -> str:
        if len(set(kinds) - {BOUND}) > 1 or {TRUTH, BOUND} <= set(kinds):
            raise Inexpressible(f"{ast.unparse(node)}: operands of different kinds, {' and '.join(sorted(set(kinds)))}")
        return BOUND if BOUND in kinds else kinds[0] if kinds else NUMBER

    def _structural(self, node: ast.Call, name: str) -> str:
        form = FORMS[name]

        def refuse(why: str) -> Inexpressible:
            return Inexpressible(f"{ast.unparse(node)} is not of the form {form.usage}: {why}")

        def count(number: int, limits: tuple[int, int], what: str) -> None:
            if not limits[0] <= number <= limits[1]:
                least, most = limits
                expected = str(least) if least == most else f"at least {least}" if most == MANY else f"{least} to {most}"
                raise refuse(f"{number} {what}, expected {expected}")

        arguments = list(node.args)
        word = arguments.pop(0) if form.word and arguments else None
        if form.word and (not isinstance(word, ast.Name) or is_group(word)):
            raise refuse("the first argument is a word")
        order = [0 if isinstance(a, ast.Name) and is_group(a) else 1 if is_group(a) else 2 for a in arguments]
        if order != sorted(order):
            raise refuse("bare groups come first, then groups with fields, then operands")
        bare, bracketed, operands = ([a for a, k in zip(arguments, order, strict=True) if k == j] for j in range(3))
        count(len(bare), form.bare, "bare groups")
        count(len(bracketed), form.bracketed, "groups with fields")
        count(len(operands), form.operands, "operands")
        for part in (bare, bracketed):
            if len({*map(is_group, part)}) < len(part):
                raise refuse("a group is repeated")
        for group in bracketed:
            assert isinstance(group, ast.Subscript)
            parts = parts_of(group.slice)
            count(len(parts), form.fields, f"fields of {is_group(group)}")
            if None in parts and form.fields != (2, 3):
                raise refuse("a field is missing")
            for part in parts:
                if part is not None:
                    self.number(part, is_group(group))
        if name == "iota" and is_group(bare[0]) not in map(is_group, bracketed):
            raise refuse(f"the size of {is_group(bare[0])} is missing")
        kinds = [self.kind(x) for x in operands]
        if name == "reduce":
            assert isinstance(word, ast.Name)
            if word.id not in MONOIDS:
                raise refuse(f"{word.id} is no commutative monoid; there are {', '.join(MONOIDS)}")
            kind = MONOIDS[word.id].kind
            if kinds[0] != kind and (kinds[0], kind) != (NUMBER, BOUND):
                raise refuse(f"{word.id} of {with_article(kinds[0])}")
            return kind
        if name in ("dot", "conv") and set(kinds) != {NUMBER}:
            raise refuse(f"a product of {with_article(kinds[0])} and {with_article(kinds[1])}")
        expected = tuple(map(kind_of, COMPOSITES[name].operands)) if name in COMPOSITES else EXPECTED.get(name, ())
        for kind, wanted in zip(kinds, expected, strict=False):
            if wanted not in (kind, ALIKE):
                raise refuse(f"an operand is {with_article(kind)}; expected {with_article(wanted)}")
        if name in COMPOSITES:
            definition = COMPOSITES[name]
            body = with_groups(definition, [is_group(g) for g in bare])
            return replace(self, operands=dict(zip(definition.operands, kinds, strict=True))).kind(body)
        if name in EXPECTED:
            return {"like": kinds[-1], "is_at": TRUTH}.get(name, kinds[0])
        return self._joined(node, kinds)

    def number(self, node: ast.expr, group: str, condition: bool = False) -> None:
        """Check an expression of sizes, attributes and scalars; only a condition may compare scalars other than integers."""
        if isinstance(node, ast.Constant) and type(node.value) is int and _is_number(node.value):
            return
        if isinstance(node, ast.Name):
            self._named_number(node.id, group, condition)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            self.number(node.operand, group, condition)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ARITHMETIC):
            condition = condition and not isinstance(node.op, ast.FloorDiv | ast.Mod)
            self.number(node.left, group, condition)
            self.number(node.right, group, condition)
        elif is_extremum(node):
            for argument in node.args:  # type: ignore[attr-defined]
                self.number(argument, group, condition)
        else:
            raise Inexpressible(
                f"{ast.unparse(node)} is no expression of sizes: names, whole numbers, + - * // %, max and min of two"
            )

    def _named_number(self, name: str, group: str, condition: bool) -> None:
        if name in self.tensors:
            if self.tensors[name] or kind_of(name) != NUMBER:
                raise Inexpressible(f"{name} is neither a size, an attribute nor a scalar number")
            if not self.integers and not condition:
                raise Inexpressible(f"{name} is a real number; sizes, attributes and quotients are of integers")
        elif self.numbers.get(name) != group:
            raise Inexpressible(f"{name} is neither a size nor an attribute{f' of {group}' if group else ''}, nor a scalar")

    def condition(self, node: ast.expr, groups: Iterable[str]) -> None:
        """Check a condition."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in STATEMENTS:
            word = node.func.id
            known = [n for n in self.tensors if kind_of(n) == NUMBER] if word == "positive" else groups
            if word == "some" and len(node.args) == 1:
                return self.comparison(node.args[0])
            if word == "some" or not node.args or node.keywords:
                raise Inexpressible(f"{ast.unparse(node)}: expected some(CONDITION), one(G), nonempty(G) or positive(x)")
            if unknown := [ast.unparse(a) for a in node.args if not isinstance(a, ast.Name) or a.id not in known]:
                kind = "tensor of numbers" if word == "positive" else "group of dimensions"
                raise Inexpressible(f"{ast.unparse(node)}: the rule has no {kind} {', '.join(unknown)}")
            return None
        return self.comparison(node)

    def comparison(self, node: ast.expr) -> None:
        """Check a comparison of numbers of one group."""
        if isinstance(node, ast.BoolOp):
            for value in node.values:
                self.comparison(value)
        elif isinstance(node, ast.Compare) and all(isinstance(op, COMPARISON) for op in node.ops):
            group = group_of(node, self.numbers)
            for side in (node.left, *node.comparators):
                self.number(side, group, True)
        else:
            raise Inexpressible(
                f"{ast.unparse(node)} is no condition on sizes; expected a comparison, or one of {', '.join(sorted(STATEMENTS))}"
            )


def _is_number(value: object) -> bool:
    """Return whether a literal is a finite number; a whole one has at most 32 bits, like those of JAX."""
    if type(value) is int:
        return abs(value) < 2**31
    return type(value) is float and math.isfinite(value)


HINTS = {
    (TRUTH, NUMBER): "; select(p, 1, 0) makes a number of a truth value",
    (BOUND, NUMBER): "; what may be infinite is only compared and chosen",
}


def is_extremum(node: ast.AST) -> bool:
    """Return whether a node is a maximum or minimum of two numbers."""
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("max", "min")
    return called and len(node.args) == 2 and not node.keywords  # type: ignore[attr-defined]


def parts_of(fields: ast.expr) -> list[ast.expr | None]:
    """Return the fields of `[a:b]`, `[a:b:c]`, `[a, b]` or `[a]`."""
    if isinstance(fields, ast.Slice):
        return [fields.lower, fields.upper, *([fields.step] if fields.step else [])]
    return list(fields.elts) if isinstance(fields, ast.Tuple) else [fields]


def group_of(node: ast.AST, numbers: Mapping[str, str]) -> str:
    """Return the group of the numbers in a condition; an empty text if it is about scalars."""
    groups = {numbers[n.id] for n in ast.walk(node) if isinstance(n, ast.Name) and n.id in numbers}
    if len(groups) > 1:
        raise Inexpressible(f"{ast.unparse(node)} is about several groups")
    return groups.pop() if groups else ""
