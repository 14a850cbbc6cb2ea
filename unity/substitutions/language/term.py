"""Terms, which form the two sides of a rule. A term is immutable; equal subterms are one operator of the graph that it denotes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from unity.substitutions.language.vocabulary import VOCABULARY

Attribute = int | str  # a number, a word of the vocabulary ("same"), or a variable


@dataclass(frozen=True)
class Variable:
    """A tensor variable."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class Apply:
    """One result of an operator of the vocabulary, applied to operands."""

    operator: str
    attributes: tuple[Attribute, ...]
    operands: tuple[Term, ...]
    result: int = 0

    @cached_property
    def _hash(self) -> int:
        return hash((self.operator, self.attributes, self.operands, self.result))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Apply)
            and self._hash == other._hash
            and (self.operator, self.attributes, self.result) == (other.operator, other.attributes, other.result)
            and self.operands == other.operands
        )

    @property
    def node(self) -> Apply:
        """The operator application itself, represented by its first result."""
        return self if self.result == 0 else replace(self, result=0)


Term = Variable | Apply


def subterms(terms: Iterable[Term]) -> Iterator[Term]:
    """Yield every distinct subterm once, operands before their users."""
    visited: set[Term] = set()

    def visit(term: Term) -> Iterator[Term]:
        if term in visited:
            return
        if isinstance(term, Apply):
            for x in term.operands:
                yield from visit(x)
        visited.add(term)
        yield term

    for term in terms:
        yield from visit(term)


def applications(terms: Iterable[Term]) -> tuple[Apply, ...]:
    """Return the operators of the graph that the terms denote together, each once."""
    return tuple(dict.fromkeys(t.node for t in subterms(terms) if isinstance(t, Apply)))


def variables(terms: Iterable[Term]) -> tuple[str, ...]:
    """Return the names of the tensor variables, in the order of first appearance."""
    return tuple(t.name for t in subterms(terms) if isinstance(t, Variable))


def attribute_variables(terms: Iterable[Term]) -> dict[str, str]:
    """Return the kinds of the attribute variables, by name."""
    kinds: dict[str, str] = {}
    for term in applications(terms):
        operator = VOCABULARY[term.operator]
        for position, value in enumerate(term.attributes):
            if isinstance(value, str) and operator.is_variable(position, value):
                kinds.setdefault(value, operator.attributes[position])
    return kinds


def transform(terms: Iterable[Term], change: Callable[[Term], Term]) -> tuple[Term, ...]:
    """Return terms with every subterm changed, operands first: `change` takes a term whose operands have been changed."""
    changed: dict[Term, Term] = {}

    def visit(term: Term) -> Term:
        if term not in changed:
            inner = replace(term, operands=tuple(map(visit, term.operands))) if isinstance(term, Apply) else term
            changed[term] = change(inner)
        return changed[term]

    return tuple(map(visit, terms))


def substitute(terms: Iterable[Term], tensors: Mapping[str, Term], attributes: Mapping[str, Attribute]) -> tuple[Term, ...]:
    """Return terms with variables replaced: tensor variables by terms, attribute variables by values."""

    def change(term: Term) -> Term:
        if isinstance(term, Variable):
            return tensors.get(term.name, term)
        values = tuple(attributes.get(v, v) if isinstance(v, str) else v for v in term.attributes)
        return term if values == term.attributes else replace(term, attributes=values)

    return transform(terms, change)
