"""Syntactic matching of terms with patterns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from unity.substitutions.language.term import Apply, Attribute, Term, Variable
from unity.substitutions.language.vocabulary import VOCABULARY


@dataclass(frozen=True)
class Substitution:
    """The terms and values bound to a pattern's tensor variables and attribute variables."""

    tensors: dict[str, Term] = field(default_factory=dict)
    attributes: dict[str, Attribute] = field(default_factory=dict)


def match(patterns: Sequence[Term], terms: Sequence[Term]) -> Substitution | None:
    """Return the substitution that turns each pattern into the term at its position, or None if no substitution does."""
    substitution = Substitution()
    matches = len(patterns) == len(terms) and all(_match(p, t, substitution) for p, t in zip(patterns, terms, strict=True))
    return substitution if matches else None


def _match(pattern: Term, term: Term, substitution: Substitution) -> bool:
    if isinstance(pattern, Variable):
        return substitution.tensors.setdefault(pattern.name, term) == term
    if not isinstance(term, Apply) or (pattern.operator, pattern.result) != (term.operator, term.result):
        return False
    if not bind(pattern, term.attributes, substitution.attributes):
        return False
    return all(_match(p, t, substitution) for p, t in zip(pattern.operands, term.operands, strict=True))


def bind(pattern: Apply, attributes: Sequence[Attribute], bindings: dict[str, Attribute]) -> bool:
    """Return whether a pattern's operator matches these attributes, and add its attribute variables to `bindings`."""
    operator = VOCABULARY[pattern.operator]
    for position, (expected, value) in enumerate(zip(pattern.attributes, attributes, strict=True)):
        if operator.is_variable(position, expected):
            assert isinstance(expected, str)
            if bindings.setdefault(expected, value) != value:
                return False
        elif expected != value:
            return False
    return True
