"""The text of rules over groups of dimensions.

A capital letter is a group of dimensions, of any number unless an operator needs one dimension. `x[G, H:m]` is a tensor of two
groups: the sizes of the first are named `G` like the group, those of the second `m`. An attribute `G[s:e:p]` gives each dimension
of `G` its own `s`, `e` and `p`. Tensors whose names begin with `p` or `q` are truth values.

    slice-of-slice   slice(G[t:f], slice(G[s:e], x)) = slice(G[s + t:s + f], x)
    remove-reverse   reverse(G, x) = x   where G == 1

Behind the conditions, `via` pairs the indices of sums (`Pairing`), and `open: REASON` says that no proof is expected.

The text of a side is a Python expression, so `ast` parses it and mutations are transformations of it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from unity.base.errors import RuleError
from unity.base.formatting import with_article
from unity.verify.ranks.composites import COMPOSITES, with_groups
from unity.verify.ranks.forms import BOUND, NUMBER, WORDED, Checker, Inexpressible, check_names, is_group

SINGLE = {"concat", "iota", "lookup", "is_at"}  # operators whose bare group is one dimension
POWERS = {"exp", "pow"}
INTEGER = {"iota", "rem"}  # operators of integer elements


@dataclass(frozen=True)
class Pairing:
    """A bijection between the indices of two sums: each side's binders in terms of the other's.

    A binder is named by its group, and by the group and a number if a sum has several of one group: `C`, `C2`. The index of the
    result is named `iC`.
    """

    forward: dict[str, ast.expr] = field(default_factory=dict)
    backward: dict[str, ast.expr] = field(default_factory=dict)

    def __str__(self) -> str:
        sides = (", ".join(f"{k} = {ast.unparse(v)}" for k, v in side.items()) for side in (self.forward, self.backward))
        return " / ".join(sides)


@dataclass(frozen=True)
class RankRule:
    """A rule over tensors of any rank.

    Attributes:
        left: the term that is replaced.
        right: its replacement.
        conditions: comparisons of sizes and attributes; each holds of every dimension of its group, `some(...)` of at least one.
            `one(G)` and `nonempty(G)` are about the number of dimensions, `positive(x)` about the elements of a tensor.
        pairings: bijections between sums, in the order in which the sums are compared.
        reason: the comment before the rule.
        obstacle: the reason why the rule has no terms; empty if it has.
        unproved: the reason why the rule is expected to be open; empty if it is expected to be proved.
        line: of the text.
        fault: why the text is not a well-formed rule; empty if it is one.
        text: of a rule that has no sides.
    """

    name: str
    left: ast.expr
    right: ast.expr
    conditions: tuple[ast.expr, ...] = ()
    pairings: tuple[Pairing, ...] = ()
    reason: str = ""
    obstacle: str = ""
    unproved: str = ""
    line: int = 0
    fault: str = ""
    text: str = ""

    def __str__(self) -> str:
        if self.text or self.obstacle:
            return f"{self.name}   {self.text or f'not expressible: {self.obstacle}'}"
        where = f"   where {', '.join(map(ast.unparse, self.conditions))}" if self.conditions else ""
        via = f"   via {'; '.join(map(str, self.pairings))}" if self.pairings else ""
        mark = f"   open: {self.unproved}" if self.unproved else ""
        return f"{self.name}   {ast.unparse(self.left)} = {ast.unparse(self.right)}{where}{via}{mark}"


@dataclass(frozen=True)
class Signature:
    """The variables of a rule.

    Attributes:
        groups: names of the groups of dimensions, in the order of a tensor's dimensions.
        single: groups of exactly one dimension.
        nonempty: groups of at least one dimension.
        tensors: for each tensor its groups, with the expression of their sizes.
        numbers: for each name of a size or an attribute its group.
        positive: tensors whose elements are positive.
        integers: whether elements are integers rather than real numbers.
        powers: whether there are exponentials, for which elements are small.
    """

    groups: tuple[str, ...]
    single: frozenset[str]
    nonempty: frozenset[str]
    tensors: dict[str, tuple[tuple[str, ast.expr], ...]]
    numbers: dict[str, str]
    positive: frozenset[str]
    integers: bool
    powers: bool


def parse_rank_rules(text: str) -> list[RankRule]:
    """Parse rules over groups of dimensions, one a line; an indented line continues the one before.

    A rule that is not well-formed has a `fault`, and the others are parsed nevertheless.

    Raises:
        Inexpressible: the text has no rule.
    """
    rules: dict[str, RankRule] = {}
    reason: list[str] = []
    line = 1
    for block in re.split(r"\n(?![ \t])", text):
        if block.startswith("#"):
            reason.append(block.lstrip("# ").strip())
        elif block.strip():
            name, _, body = " ".join(block.split()).partition(" ")
            rule = replace(_parse(name, body), reason=" ".join(reason), line=line)
            if name in rules:
                rule = replace(rule, fault=f"two rules are called {name}; the first is in line {rules[name].line}")
            rules[f"{name}, line {line}" if name in rules else name] = rule
            reason = []
        else:
            reason = []
        line += block.count("\n") + 1
    if not rules:
        raise Inexpressible("the text has no rule")
    return list(rules.values())


def _parse(name: str, body: str) -> RankRule:
    nothing = ast.Constant(None)
    if body.startswith("not expressible:"):
        return RankRule(name, nothing, nothing, obstacle=body.removeprefix("not expressible:").strip())
    equation, _, unproved = body.partition(" open: ")
    equation, _, via = f"{equation} ".partition(" via ")
    equation, where, conditions = equation.partition(" where ")
    sides = equation.split(" = ")
    try:
        if len(sides) != 2:
            raise ValueError(f"{len(sides) - 1} equals signs between sides, expected one")
        left, right = map(_expression, sides)
        parsed = tuple(_expression(c) for c in _separated(conditions)) if where else ()
        pairings = tuple(map(_pairing, via.split(";"))) if via.strip() else ()
        rule = RankRule(name, left, right, parsed, pairings, unproved=unproved)
    except (SyntaxError, ValueError, RecursionError) as error:
        why = error.msg if isinstance(error, SyntaxError) else str(error)
        fault = f"{why}; expected NAME SIDE = SIDE [where CONDITIONS] [via PAIRINGS] [open: REASON]"
        return RankRule(name, nothing, nothing, fault=fault, text=body)
    try:
        signature(rule)
    except RuleError as error:
        return replace(rule, fault=error.reason)
    return rule


def _expression(text: str) -> ast.expr:
    if not text.strip():
        raise ValueError("an expression is missing")
    if "#" in text:
        raise ValueError("a comment is a line before the rule")
    return ast.parse(text.strip(), mode="eval").body


def _separated(text: str) -> list[str]:
    """Split a text at commas outside of brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "([") - (c in ")]")
        if c == "," and not depth:
            parts.append("")
        else:
            parts[-1] += c
    return parts


def _pairing(text: str) -> Pairing:
    """Parse `C = C2 + n / C = 1, C2 = C - n`: the right sum's binders in the left's, and the left's in the right's."""

    def assignments(part: str) -> dict[str, ast.expr]:
        items = [item.split("=", 1) for item in _separated(part) if item.strip()]
        if any(len(item) < 2 for item in items):
            raise ValueError(f"expected INDEX = EXPRESSION, not {part.strip()}")
        return {name.strip(): _expression(value) for name, value in items}

    sides = re.split("(?<!/)/(?!/)", text)
    if len(sides) != 2:
        raise ValueError(f"expected INDICES / INDICES, there and back, not {text.strip()}")
    return Pairing(*map(assignments, sides))


def calls(*terms: ast.expr) -> Iterator[ast.Call]:
    """Yield the applications of operators in terms, and in the programs of composite operators."""
    for term in terms:
        for node in ast.walk(term):
            if isinstance(node, ast.Call):
                yield node
                definition, groups = COMPOSITES.get(_operator(node)), [g for a in node.args if (g := is_group(a))]
                if definition is not None and len(groups) == len(definition.groups):
                    yield from calls(with_groups(definition, groups))


def names_of(operator: str, rule: RankRule) -> set[str]:
    """Return the words that an operator has in a rule: the orders of its transposes, the monoids of its reductions."""
    return {ast.unparse(c.args[0]) for c in calls(rule.left, rule.right) if _operator(c) == operator}


def names_in(*nodes: ast.AST) -> Iterator[str]:
    """Yield the names in expressions, without those of functions."""
    for node in nodes:
        functions = [n.func for n in ast.walk(node) if isinstance(n, ast.Call)]
        yield from (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and n not in functions)


def signature(rule: RankRule) -> Signature:
    """Return the variables of a rule.

    Raises:
        RuleError: a name belongs to two groups, a tensor has two shapes, or a side or a condition is not well-formed.
    """
    tensors: dict[str, tuple[tuple[str, ast.expr], ...]] = {}
    attributes: list[tuple[str, ast.AST]] = []
    bare: list[str] = []
    for side in (rule.left, rule.right):
        _collect(side, tensors, attributes, bare)
    for name in bare:
        tensors.setdefault(name, (("G", ast.Name("G")),))
    attributes += [(group, size) for shape in tensors.values() for group, size in shape]
    numbers: dict[str, str] = {}
    for group, node in attributes:
        for name in names_in(node):
            if name not in tensors and numbers.setdefault(name, group) != group:
                raise Inexpressible(f"{name} belongs to the groups {numbers[name]} and {group}; name one of them differently")
    groups = list(dict.fromkeys([g for shape in tensors.values() for g, _ in shape] + [g for g, _ in attributes]))
    operators = list(calls(rule.left, rule.right))
    single = {g for c in operators if _operator(c) in SINGLE for a in c.args[:1] if (g := is_group(a))}
    statements = {word: {n for c in rule.conditions for n in _about(c, word)} for word in ("one", "nonempty", "positive")}
    single |= statements["one"]
    integers = any(_operator(c) in INTEGER for c in operators)
    check_names(groups, [*tensors, *(n for n in numbers if n not in groups)])
    checker = Checker(tensors, numbers, integers)
    for group, size in ((g, s) for shape in tensors.values() for g, s in shape):
        checker.number(size, group)
    kinds = [checker.kind(side) for side in (rule.left, rule.right)]
    if kinds[0] != kinds[1] and {*kinds} != {NUMBER, BOUND}:
        raise Inexpressible(f"one side is {with_article(kinds[0])}, the other {with_article(kinds[1])}")
    for condition in rule.conditions:
        checker.condition(condition, groups)
    return Signature(
        tuple(groups),
        frozenset(single),
        frozenset(single | statements["nonempty"]),
        tensors,
        numbers,
        frozenset(statements["positive"]),
        integers,
        any(_operator(c) in POWERS for c in operators),
    )


def _about(condition: ast.expr, word: str) -> list[str]:
    """Return the names that a condition such as `nonempty(G)` is about."""
    if isinstance(condition, ast.Call) and _operator(condition) == word:
        return [a.id for a in condition.args if isinstance(a, ast.Name)]
    return []


def _operator(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _dimensions(item: ast.expr) -> tuple[str, ast.expr]:
    """Return a group of dimensions and its sizes: of `G:n`, or of `G`, whose sizes are named like it."""
    if isinstance(item, ast.Slice) and isinstance(item.lower, ast.Name) and is_group(item.lower) and item.upper and not item.step:
        return item.lower.id, item.upper
    if isinstance(item, ast.Name) and is_group(item):
        return item.id, ast.Name(item.id)
    raise Inexpressible(f"expected a group such as G, or G:n, not {ast.unparse(item)}")


def _collect(node: ast.expr, tensors: dict, attributes: list, bare: list[str]) -> None:
    """Collect the declared tensors, the attributes by group, and the tensors without a declaration."""
    if isinstance(node, ast.Call):
        for argument in node.args:
            if group := is_group(argument):
                attributes.append((group, argument.slice if isinstance(argument, ast.Subscript) else ast.Constant(0)))
            elif not (_operator(node) in WORDED and argument is node.args[0]):
                _collect(argument, tensors, attributes, bare)
    elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        shape = tuple(_dimensions(i) for i in items)
        if len({g for g, _ in shape}) < len(shape):
            raise Inexpressible(f"{ast.unparse(node)} has a group of dimensions twice; a second one has another name")
        other = tensors.setdefault(node.value.id, shape)
        if [(g, ast.dump(size)) for g, size in shape] != [(g, ast.dump(size)) for g, size in other]:
            raise Inexpressible(f"{node.value.id} has two shapes")
    elif isinstance(node, ast.Name) and node.id not in ("least", "greatest"):
        bare.append(node.id)
