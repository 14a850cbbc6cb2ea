"""Names for rules that nobody wrote: the operators of both sides, as one reads them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from unity.substitutions.language.rule import Rule
from unity.substitutions.language.term import Apply, Term

WORDS = {"map": "", "reduce_partition": "reduce-partition", "combine_replicate": "combine-replicate"}


def name_of(rule: Rule) -> str:
    """`operators-of-the-left.is.operators-of-the-right`."""
    return f"{_operators(rule.left)}.is.{_operators(rule.right)}"


def _operators(terms: Iterable[Term]) -> str:
    words: list[str] = []

    def visit(term: Term) -> None:
        if isinstance(term, Apply):
            words.append(str(term.attributes[0]) if term.operator == "map" else term.operator.replace("_", ""))
            for operand in term.operands:
                visit(operand)

    for term in terms:
        visit(term)
    return "-".join(words) or "itself"


def named(rules: Iterable[Rule]) -> list[Rule]:
    """Rules with names that differ: those of equal operators are numbered, in order."""
    seen: dict[str, int] = {}
    result = []
    for rule in rules:
        name = name_of(rule)
        seen[name] = seen.get(name, 0) + 1
        result.append(replace(rule, name=name if seen[name] == 1 else f"{name}.{seen[name]}"))
    return result
