"""Intermediate values of rules: whether every value that the new side computes is also computed by the old one.

If so, no number of the new side overflows or vanishes, in any dtype, unless one of the old side does. The same holds for cotangents
if no value has more readers than before, since the cotangents of several readers are added up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache

import numpy as np

from unity.pcg.types.factors import TABLE
from unity.substitutions.language.rule import Rule
from unity.substitutions.language.term import Apply, Term, subterms
from unity.substitutions.language.typecheck import typecheck
from unity.verify.proofs.small_instances import small_instances, small_sizes
from unity.verify.semantics.domains import Array
from unity.verify.semantics.interpret import NotInterpreted
from unity.verify.semantics.meaning import evaluate, symbolic_tensor
from unity.verify.semantics.symbolic import PolynomialsTooLarge, Symbolic

INSTANCES = 4  # shapes at which a rule is executed


@TABLE.clears
@lru_cache(maxsize=4096)
def contained(rule: Rule, backward: bool) -> bool:
    """Return whether every value of the new side is a value of the old one, by execution on symbols at small shapes.

    Args:
        rule: an algebraic rule.
        backward: whether its left side replaces the right one.
    """
    old, new = (rule.right, rule.left) if backward else (rule.left, rule.right)
    if not _no_more_readers(old, new):
        return False
    domain, executed = Symbolic(), False
    for number, instance in enumerate(small_instances(rule, (), small_sizes(rule, 2), INSTANCES)):
        domain.renew()
        sides, rng = (instance.rule.left, instance.rule.right), np.random.default_rng(number)
        try:
            types = typecheck(instance.rule.sides, instance.types)
            variables = {name: symbolic_tensor(name, t, domain, rng, 0, 2).array for name, t in instance.types.items()}
            values = evaluate(instance.rule.sides, types, variables, (), domain)
        except (NotInterpreted, PolynomialsTooLarge):
            continue
        floating = {term: x for term, x in values.items() if types[term].dtype.startswith("float")}
        before, after = (_elements(floating, subterms(side), domain) for side in (sides[::-1] if backward else sides))
        if not after <= before:
            return False
        executed = True
    return executed


def _elements(values: Mapping[Term, Array], terms: Iterable[Term], domain: Symbolic) -> set[int]:
    """Return the elements of some terms, with 0 and 1."""
    elements = {domain.zero, domain.one}
    for term in terms:
        elements.update(np.ravel(values.get(term, ())).tolist())
    return elements


def _no_more_readers(old: tuple[Term, ...], new: tuple[Term, ...]) -> bool:
    """Return whether no term has more readers than before, and no new term more than one."""
    before, after = _readers(old), _readers(new)
    return all(count <= max(1, before[term]) for term, count in after.items())


def _readers(side: tuple[Term, ...]) -> Counter[Term]:
    """Count how often each term is an operand or an output."""
    applications = {(t.operator, t.attributes, t.operands) for t in subterms(side) if isinstance(t, Apply)}
    return Counter([*side, *(operand for _, _, operands in applications for operand in operands)])
