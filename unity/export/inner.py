"""Functions inside of the one that is being written: their parameters, and several values as one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from unity.export.applied import Operand
from unity.export.source import Code, definition, lines, returned, sequence, unpacked
from unity.export.tracing import Program

if TYPE_CHECKING:
    from unity.export.block import Block

LETTERS = ("x", "y", "z", "u", "v")


def packed(items: Sequence[Code]) -> Code:
    """Several values as one: nothing, itself, or a tuple."""
    return items[0] if len(items) == 1 else sequence(items) if items else Code("None")


def stem(x: Code) -> str:
    """A name like that of an expression."""
    found = re.findall(r"[A-Za-z_]\w*", x.text)
    return re.sub(r"(_\d+)+$", "", found[-1]) if found else "x"


def targets(names: Sequence[str]) -> str:
    """Where several values packed as one are unpacked to."""
    return names[0] if len(names) == 1 else f"({', '.join(names)})" if names else "_"


def inputs_of(program: Program, names: Sequence[Code]) -> list[Operand]:
    """A program's operands, by name."""
    body, varying = program.body, program.varying
    return [Operand(c, body.tensors[v], axes) for c, v, axes in zip(names, body.inputs, varying, strict=True)]


class Inner:
    """A function inside of the one that is being written."""

    def __init__(self, outer: Block, wanted: str) -> None:
        self.outer, self.name = outer, outer.scope.new(wanted)
        self.scope = outer.scope.copy()
        self.block = type(outer)(outer.module, self.scope, outer.indent + 4)

    def finish(self, parameters: Sequence[str], first: Sequence[str], results: Sequence[Code]) -> None:
        """Writes the function."""
        at = self.outer
        before = [""] if at.lines and at.lines[-1] else []
        end = lines(packed(results), at.indent + 4, "return ") if len(results) == 1 else returned(results, at.indent + 4)
        inside = self.block.lines
        gap = [""] if first and inside and inside[0].lstrip().startswith("def ") else []
        body = [*first, *gap, *inside, *end]
        at.lines += [*before, *definition(self.name, parameters, at.indent), *body, ""]


def unpacked_in(inner: Inner, wanted: str, names: Sequence[str]) -> tuple[str, list[str]]:
    """A parameter for several values, and the lines that unpack them."""
    if len(names) == 1:
        return names[0], []
    name = inner.scope.new(wanted) if names else "_"
    return name, unpacked(names, name, inner.block.indent) if names else []
