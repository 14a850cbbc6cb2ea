"""Whether a term is an instance of a pattern, and by what its variables are replaced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from unity.substitutions.language.term import Apply, Attribute, Term, Variable
from unity.substitutions.language.vocabulary import VOCABULARY


@dataclass(frozen=True)
class Substitution:
    """What a pattern's tensor variables and attribute variables stand for."""

    tensors: dict[str, Term] = field(default_factory=dict)
    attributes: dict[str, Attribute] = field(default_factory=dict)


def match(patterns: Sequence[Term], terms: Sequence[Term]) -> Substitution | None:
    """The substitution that makes each pattern the term beside it. None if there is none."""
    found = Substitution()
    good = len(patterns) == len(terms) and all(_match(p, t, found) for p, t in zip(patterns, terms, strict=True))
    return found if good else None


def _match(pattern: Term, term: Term, found: Substitution) -> bool:
    if isinstance(pattern, Variable):
        return found.tensors.setdefault(pattern.name, term) == term
    if not isinstance(term, Apply) or (pattern.operator, pattern.result) != (term.operator, term.result):
        return False
    if not bind(pattern, term.attributes, found.attributes):
        return False
    return all(_match(p, t, found) for p, t in zip(pattern.operands, term.operands, strict=True))


def bind(pattern: Apply, attributes: Sequence[Attribute], found: dict[str, Attribute]) -> bool:
    """Whether a pattern's operator may have these attributes. Adds what its attribute variables stand for."""
    operator = VOCABULARY[pattern.operator]
    for position, (wanted, value) in enumerate(zip(pattern.attributes, attributes, strict=True)):
        if operator.variable(position, wanted):
            assert isinstance(wanted, str)
            if found.setdefault(wanted, value) != value:
                return False
        elif wanted != value:
            return False
    return True
