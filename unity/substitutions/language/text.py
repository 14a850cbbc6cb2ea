"""Parser and printer of rules as text, one on a line: `name   left = right   where conditions`. A printed rule parses to itself.

    matmul-over-samples   matmul(x, y) = combine(0, a, matmul(partition(0, a, x), replicate(a, y)))
    combine-then-split    partition(d, a, combine(d, a, x)) = x   where x: d@a
    split-of-concat       (split(d, concat(d, x, y)).0, split(d, concat(d, x, y)).1) = (x, y)

Attributes come before operands. A side with several outputs stands in parentheses, `.1` is an operator's second result, `#`
begins a comment. Conditions: `x: 0@a` (x is partitioned in dimension 0 along a), `x: partial@a`, `x: replicated@a`,
`x.0 = y.1` (equal sizes), `rank x = 2`, `d != e`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from unity.base.errors import RuleError
from unity.base.formatting import with_article
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, State, partitioned
from unity.substitutions.language.rule import Condition, Different, EqualSizes, HasState, Rank, Rule
from unity.substitutions.language.term import Apply, Attribute, Term, Variable
from unity.substitutions.language.vocabulary import VOCABULARY, Operator

TOKENS = re.compile(r"\s*(?:(?P<comment>#.*)|(?P<number>-?\d+)|(?P<name>[A-Za-z_][\w]*)|(?P<sign>!=|[(),.=:@|]))")
NAME = re.compile(r"\s*(?P<name>[\w][\w.-]*)\s")
STATES = {"partial": PARTIAL, "replicated": REPLICATED, "unused": UNUSED}


@dataclass(frozen=True)
class Token:
    """A token, and the column (from 1) where it begins."""

    kind: str
    text: str
    column: int


def parse_rule(line: str, number: int = 1) -> Rule:
    """Parse a rule from its line. Raises RuleError with the line, the column and what was expected there."""
    head = NAME.match(line)
    if head is None:
        raise RuleError(f"line {number}, column 1: expected the rule's name and a space after it")
    reader = _Reader(line, number, head.end())
    left = reader.side()
    reader.expect("=")
    right = reader.side()
    conditions = reader.conditions() if reader.at("where") else ()
    reader.end()
    try:
        return Rule(head["name"], left, right, conditions)
    except RuleError as problem:
        raise RuleError(f"line {number}: {problem}") from None


def parse_rules(text: str) -> tuple[Rule, ...]:
    """Parse all rules of a text, in which empty lines and comments may occur. Raises RuleError if two have one name."""
    rules: dict[str, Rule] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            rule = parse_rule(line, number)
            if rule.name in rules:
                raise RuleError(f"line {number}: there is a rule {rule.name} already")
            rules[rule.name] = rule
    return tuple(rules.values())


def parse_term(text: str) -> Term:
    """Parse a single term."""
    reader = _Reader(text, 1, 0)
    term = reader.term()
    reader.end()
    return term


class _Reader:
    """A recursive-descent parser of one line."""

    def __init__(self, line: str, number: int, start: int) -> None:
        self.number = number
        self.tokens = [*_tokens(line, number, start), Token("end", "the end of the line", len(line) + 1)]
        self.position = 0

    @property
    def token(self) -> Token:
        return self.tokens[self.position]

    def fail(self, expected: str, token: Token | None = None) -> NoReturn:
        token = token or self.token
        raise RuleError(f"line {self.number}, column {token.column}: expected {expected}, found {token.text}")

    def at(self, text: str) -> bool:
        return self.token.kind != "end" and self.token.text == text

    def take(self, kind: str, expected: str) -> Token:
        token = self.token
        if token.kind != kind:
            self.fail(expected)
        self.position += 1
        return token

    def expect(self, text: str) -> None:
        if not self.at(text):
            self.fail(f'"{text}"')
        self.position += 1

    def end(self) -> None:
        if self.token.kind != "end":
            self.fail("the end of the rule")

    def side(self) -> tuple[Term, ...]:
        if not self.at("("):
            return (self.term(),)
        self.expect("(")
        terms = [self.term()]
        while self.at(","):
            self.expect(",")
            terms.append(self.term())
        self.expect(")")
        return tuple(terms)

    def term(self) -> Term:
        name = self.take("name", "a variable or an operator")
        if not self.at("("):
            if name.text in VOCABULARY:
                self.fail(f'"(" after operator {name.text}')
            return Variable(name.text)
        operator = VOCABULARY.get(name.text)
        if operator is None:
            self.fail("an operator of the vocabulary", name)
        self.expect("(")
        attributes = tuple(self.attribute(operator, i) for i in range(len(operator.attributes)))
        operands = tuple(self.operand(i, operator) for i in range(operator.operands))
        self.expect(")")
        return Apply(operator.name, attributes, operands, self.result(operator))

    def attribute(self, operator: Operator, i: int) -> Attribute:
        token, kind, words = self.token, operator.attributes[i], operator.words(i)
        if token.kind == "number" and kind in ("dim", "size", "groups"):
            value: Attribute = int(token.text)
        elif token.kind == "name" and (not words or token.text in words or len(token.text) == 1):
            value = token.text
        else:
            self.fail(
                f"{', '.join(words)} or a letter" if words else f"{with_article(kind)} (attribute {i + 1} of {operator.name})"
            )
        self.position += 1
        if i + 1 < len(operator.attributes) or operator.operands:
            self.expect(",")
        return value

    def operand(self, i: int, operator: Operator) -> Term:
        if i:
            self.expect(",")
        return self.term()

    def result(self, operator: Operator) -> int:
        if not self.at("."):
            return 0
        self.expect(".")
        number = self.take("number", "the number of a result")
        if not 0 <= int(number.text) < operator.results:
            self.fail(f"a result of {operator.name}, 0 to {operator.results - 1}", number)
        return int(number.text)

    def conditions(self) -> tuple[Condition, ...]:
        self.expect("where")
        conditions = [self.condition()]
        while self.at(","):
            self.expect(",")
            conditions.append(self.condition())
        return tuple(conditions)

    def condition(self) -> Condition:
        name = self.take("name", "a condition").text
        if name == "rank":
            tensor = self.take("name", "a variable").text
            self.expect("=")
            return Rank(tensor, int(self.take("number", "a rank").text))
        if self.at("!="):
            self.expect("!=")
            token = self.token
            self.position += 1
            return Different(name, int(token.text) if token.kind == "number" else token.text)
        if self.at("."):
            dim = self.after_dot()
            self.expect("=")
            other = self.take("name", "a variable").text
            return EqualSizes(name, dim, other, self.after_dot())
        self.expect(":")
        state = self.state()
        self.expect("@")
        return HasState(name, self.take("name", "an axis").text, state)

    def after_dot(self) -> int:
        self.expect(".")
        return int(self.take("number", "a dimension").text)

    def state(self) -> State:
        token = self.token
        self.position += 1
        if token.kind == "number":
            return partitioned(int(token.text))
        if token.text in STATES:
            return STATES[token.text]
        if token.kind == "name":
            return State("P", token.text)  # type: ignore[arg-type]  # a dimension variable
        self.fail("a dimension, partial, replicated or unused", token)


def _tokens(line: str, number: int, start: int) -> Iterator[Token]:
    position, end = start, len(line.rstrip())
    while position < end:
        match = TOKENS.match(line, position)
        if match is None:
            column = len(line) - len(line[position:].lstrip()) + 1
            raise RuleError(f"line {number}, column {column}: expected a name, a number or a sign, found {line[column - 1]}")
        if match.lastgroup == "comment":
            return
        kind = match.lastgroup or ""
        yield Token(kind, match[kind], match.start(kind) + 1)
        position = match.end()


def print_term(term: Term) -> str:
    """Return a term as text."""
    if isinstance(term, Variable):
        return term.name
    inside = ", ".join([*map(str, term.attributes), *map(print_term, term.operands)])
    several = VOCABULARY[term.operator].results > 1
    return f"{term.operator}({inside})" + (f".{term.result}" if several else "")


def print_side(terms: tuple[Term, ...]) -> str:
    """Return one side of a rule as text."""
    return print_term(terms[0]) if len(terms) == 1 else f"({', '.join(map(print_term, terms))})"


def print_body(rule: Rule) -> str:
    """Return a rule without its name as text, of which its content hash is taken."""
    where = ", ".join(map(print_condition, rule.conditions))
    return f"{print_side(rule.left)} = {print_side(rule.right)}" + (f"   where {where}" if where else "")


def print_rule(rule: Rule) -> str:
    """Return a rule as a line of text."""
    return f"{rule.name}   {print_body(rule)}"


def print_condition(condition: Condition) -> str:
    """Return a condition as text."""
    match condition:
        case HasState(tensor, axis, state):
            return f"{tensor}: {print_state(state)}@{axis}"
        case EqualSizes(tensor, dim, other, other_dim):
            return f"{tensor}.{dim} = {other}.{other_dim}"
        case Rank(tensor, rank):
            return f"rank {tensor} = {rank}"
        case Different(left, right):
            return f"{left} != {right}"


def print_state(state: State) -> str:
    """Return a state in the notation of conditions."""
    return str(state.dim) if state.kind == "P" else str(state)
