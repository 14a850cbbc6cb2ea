"""Intermediate values of rules: whether one side computes nothing that the other does not compute.

Then no number of the one side overflows or vanishes unless one of the other does, whatever the type. Nor do cotangents, if nothing
is read more often, since the cotangents of several readers are added up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache

import numpy as np

from unity.substitutions.language.rule import Rule
from unity.substitutions.language.term import Apply, Term, subterms
from unity.substitutions.language.typecheck import TensorType, typecheck
from unity.verify.proofs.small_instances import small_instances, small_sizes
from unity.verify.semantics.domains import Array
from unity.verify.semantics.interpret import NotInterpreted
from unity.verify.semantics.meaning import evaluate
from unity.verify.semantics.pieces import symbolic_pieces
from unity.verify.semantics.primitives.core import StackedValue
from unity.verify.semantics.symbolic import PolynomialsTooLarge, Symbolic

INSTANCES = 4


@lru_cache(maxsize=4096)
def contained(rule: Rule, backward: bool) -> bool:
    """Whether all that takes the place of a side is computed there already, executed on symbols at small shapes.

    Args:
        rule: algebraic.
        backward: whether its left side takes the place of the right one.
    """
    old, new = (rule.right, rule.left) if backward else (rule.left, rule.right)
    if not _no_more_readers(old, new):
        return False
    domain, executed = Symbolic(), False
    for number, instance in enumerate(small_instances(rule, (), small_sizes(rule, 2), INSTANCES)):
        domain.renew()
        sides, types, rng = (instance.rule.left, instance.rule.right), instance.types, np.random.default_rng(number)
        try:
            found = typecheck(instance.rule.sides, types)
            known = {name: symbolic_pieces(_whole(name, t, domain, rng), (), (), domain, name, rng) for name, t in types.items()}
            values = evaluate(instance.rule.sides, found, known, (), domain)
        except (NotInterpreted, PolynomialsTooLarge):
            continue
        real = {term: x for term, x in values.items() if found[term].dtype.startswith("float")}
        there, here = (_elements(real, subterms(side), domain) for side in (sides[::-1] if backward else sides))
        if not here <= there:
            return False
        executed = True
    return executed


def _whole(name: str, type_: TensorType, domain: Symbolic, rng: np.random.Generator) -> StackedValue:
    """A tensor of symbols, or of indices."""
    if type_.dtype.startswith("float"):
        return StackedValue(domain.symbols(name, type_.shape), False)
    return StackedValue(rng.integers(0, 2, type_.shape), True)


def _elements(values: Mapping[Term, Array], terms: Iterable[Term], domain: Symbolic) -> set[int]:
    """The numbers of the elements of some terms, of 0 and of 1."""
    elements = {domain.zero, domain.one}
    for term in terms:
        elements.update(np.ravel(values.get(term, ())).tolist())
    return elements


def _no_more_readers(old: tuple[Term, ...], new: tuple[Term, ...]) -> bool:
    """Whether no term has more readers than before; a term that is new has one."""
    before, after = _readers(old), _readers(new)
    return all(count <= max(1, before[term]) for term, count in after.items())


def _readers(side: tuple[Term, ...]) -> Counter[Term]:
    """How many operands each term is, and outputs."""
    applications = {(t.operator, t.attributes, t.operands) for t in subterms(side) if isinstance(t, Apply)}
    return Counter([*side, *(operand for _, _, operands in applications for operand in operands)])
