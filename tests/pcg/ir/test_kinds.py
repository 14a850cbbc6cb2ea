"""Kinds of nodes, states and other records are words: one that is spelled wrong in a comparison would never be equal to any."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import unity

SOURCES = sorted(Path(unity.__file__).parent.rglob("*.py"))


def is_kind(node: ast.expr) -> bool:
    """Whether an expression is the kind of one of unity's records; those of numpy's types are numpy's."""
    return isinstance(node, ast.Attribute) and node.attr == "kind" and "dtype" not in ast.dump(node)


def compared(source: str) -> Iterator[str]:
    """The words that a module compares kinds with: for `kind in "PS"` both letters."""
    for test in (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Compare)):
        sides = [test.left, *test.comparators]
        for side in sides if any(map(is_kind, sides)) else ():
            words = [n.value for n in ast.walk(side) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            yield from "".join(words) if isinstance(side, ast.Constant) and isinstance(test.ops[0], ast.In | ast.NotIn) else words


def mistaken(sources: list[str]) -> set[str]:
    """The words that kinds are compared with, though no line names them that does not compare kinds itself."""
    lines = (line for source in sources for line in source.splitlines() if not re.search(r"\.kind\b", line))
    named = {word for line in lines for text in re.findall(r'"([\w -]+)"', line) for word in (text, *text.split())}
    return {word for source in sources if ".kind" in source for word in compared(source)} - named


def test_kinds_are_compared_with_kinds_that_something_has() -> None:
    assert mistaken([path.read_text() for path in SOURCES]) == set()


def test_a_word_that_nothing_has_is_a_mistake() -> None:
    source = 'nodes = [Node("scan"), State("P")]\nwrong = node.kind == "sacn" or node.kind in "PQ" or node.kind == "scan"\n'
    assert mistaken([source]) == {"sacn", "Q"}
    assert mistaken([source, 'KINDS = ("sacn", "Q")']) == set()
