"""The user's line behind a node of a graph, and behind an instruction of its compiled program."""

from __future__ import annotations

import os
import re

from unity.base.formatting import pattern, short
from unity.pcg.ir.graph import PCG, Node

# Separates operator and line in a scope's name. An "@" would end the name in compiled programs, and hide nested scopes.
AT = " at "


def label(node: Node, source: str = "") -> str:
    """Return an operator's name in traces, profiles and compiled programs: its kind and the user's line, "softmax at model.py:42".

    Args:
        node: the operator.
        source: the source that stands for its own.
    """
    return re.sub(r"[^\w\-. +]", "", node.kind) + AT + place(source or node.source)


def place(source: str) -> str:
    """Return the name of the file and the number of a source line, "model.py:42"."""
    file, line = file_and_number(source)
    return re.sub(r"[^\w\-. +:]", "", f"{os.path.basename(file)}:{line}") if file else ""


def file_and_number(source: str) -> tuple[str, str]:
    """Return the path and the number of a source line, `path:number (function)`. Both are empty for an empty text."""
    path, _, number = source.partition(" (")[0].rpartition(":")
    return path, number


def labelled_place(scope: str) -> str:
    """Return the innermost line that the labels in a scope of a compiled program name, "" if none does.

    JAX wraps labels in the names of its transformations: `transpose(jvp(dot_general at model.py:42))`.
    """
    places = [part.rpartition(AT)[2] for part in re.split("[/()]", scope) if AT in part]
    return next((p for p in reversed(places) if p), "")


def line_behind(node: Node) -> str:
    """Return the user's line behind a parallelization operator, or the argument: its own, or that of its operand."""
    while not node.source and node.operands:
        node = node.operands[0].node
    return short(node.source) or pattern(node.name)


def source_of_use(node: Node, graph: PCG) -> str:
    """Return the source of a node of a graph, or, if it has none, as arguments and changes of type, that of its first use."""
    uses, seen = [node], {id(node)}
    for use in uses:  # grows: a breadth-first search along the uses
        if use.source:
            return use.source
        for user, _ in graph.users[id(use)]:
            if id(user) not in seen:
                seen.add(id(user))
                uses.append(user)
    return ""


def spoken(node: Node) -> tuple[str, ...]:
    """The names that users may call an operator by: its kind, its line, the scopes that it is in, and its kind at any of these."""
    names = node.scope.split("/") if node.scope else []
    places = [short(node.source).partition(" (")[0], *("/".join(names[: k + 1]) for k in range(len(names)))]
    return (node.kind, *(place for place in places if place), *(f"{node.kind} at {place}" for place in places if place))
