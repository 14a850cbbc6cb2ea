"""Proofs of the ways to split operators: every operator of the vocabulary, and a user's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from unity.base.errors import IllTypedError
from unity.substitutions.generator.families import FAMILIES
from unity.substitutions.language.typecheck import body_of, concrete, result_types
from unity.substitutions.language.vocabulary import VOCABULARY
from unity.verify.proofs.operators import ChoiceVerdict, check_body, check_operator


def check_vocabulary() -> list[tuple[str, ChoiceVerdict]]:
    """Check every operator of the families, on their leaves, at every choice of one axis."""
    verdicts: list[tuple[str, ChoiceVerdict]] = []
    done: set[tuple] = set()
    for family in FAMILIES:
        leaves = {leaf.type.shape: leaf.type for leaf in family.leaves}
        for name, attributes in family.instances:
            operator = VOCABULARY[name]
            if operator.parallel:
                continue
            for operands in itertools.product(leaves.values(), repeat=operator.operands):
                types = tuple(type(t)(t.shape, (), t.dtype) for t in operands)
                key = (name, attributes, types)
                if key in done:
                    continue
                done.add(key)
                try:
                    result_types(name, attributes, types, ())
                except IllTypedError:
                    continue
                body = body_of(name, concrete(operator, attributes, types), tuple((t.shape, t.dtype) for t in types))
                text = f"{name}({', '.join(map(str, attributes))})"
                verdicts += [(text, verdict) for verdict in check_body(body)]
    return verdicts


def check_users(fn: Callable[..., Any], *args: Any) -> list[tuple[str, ChoiceVerdict]]:
    """Check a user's operator, at the sizes of its arguments."""
    name = getattr(fn, "__name__", "the operator")
    return [(name, verdict) for verdict in check_operator(fn, *args)]
