"""Drawings of a rule's two graphs as text: one operator on each line, with operands named by earlier lines."""

from __future__ import annotations

from collections.abc import Sequence

from unity.substitutions.language.rule import Rule
from unity.substitutions.language.term import Apply, Term, Variable, subterms
from unity.substitutions.language.vocabulary import VOCABULARY


def draw(rule: Rule) -> str:
    """Return the left graph as lines of text, then the right one."""
    return "\n".join(["", "left", *_lines(rule.left), "", "right", *_lines(rule.right)])


def _lines(outputs: Sequence[Term]) -> list[str]:
    names: dict[Term, str] = {}
    lines: list[str] = []
    numbers: dict[Apply, str] = {}
    for term in subterms(outputs):
        if isinstance(term, Variable):
            names[term] = term.name
            lines.append(f"  {term.name}")
            continue
        if term.node not in numbers:
            numbers[term.node] = f"%{len(numbers) + 1}"
            operands = "  ".join(names[x] for x in term.operands)
            attributes = f" [{', '.join(map(str, term.attributes))}]" if term.attributes else ""
            lines.append(f"  {numbers[term.node]} ← {term.operator}{attributes}  {operands}")
        several = VOCABULARY[term.operator].results > 1
        names[term] = numbers[term.node] + (f".{term.result}" if several else "")
    return [*lines, "  out: " + ", ".join(names[t] for t in outputs)]
