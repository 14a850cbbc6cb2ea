"""Sharding constraints written into a source text, around its expressions and with the imports that they need."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from unity.export.annotations.expressions import CodeSpan

CONSTRAINT = "with_sharding_constraint"
LEFT, RIGHT = SIDES = ("left", "right")  # the operands of a product


@dataclass(frozen=True, order=True)
class Unannotated:
    """A constraint that is missing: the line, the reason, and the expression, if a single one computes the value."""

    line: int
    reason: str
    expression: str = ""

    def __str__(self) -> str:
        return f"line {self.line}: {self.expression and f'{self.expression}: '}{self.reason}"


class ConstraintWriter:
    """Writes constraints into a text, given with its syntax tree."""

    def __init__(self, text: str, tree: ast.Module) -> None:
        self.lines, self.tree = text.encode().splitlines(True), tree  # bytes end a line where Python does, and text at a form feed
        self.line_end = "\r\n" if self.lines[:1] and self.lines[0].endswith(b"\r\n") else "\n"
        self.nodes = {extent: n for n in _computing(tree) for extent in _recorded_extents(n)}
        self.names = {getattr(n, field, None) for n in ast.walk(tree) for field in ("id", "arg", "name", "asname")}

    def node(self, span: CodeSpan, side: str) -> ast.expr | ast.AugAssign | None:
        """Return the expression or operand that a constraint encloses; None without one, or if the operand's own decides."""
        node = self.nodes.get((span.line, span.column, span.end_line, span.end_column))
        if not side:
            return node
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)):
            return None  # the result's constraint decides
        operand = node.left if side == LEFT else node.right
        return operand if isinstance(operand, ast.Name | ast.Attribute | ast.Subscript) else None

    def text(self, span: CodeSpan, side: str) -> str:
        """Return an expression, or an operand of a product and where it is, as one line of text."""
        expression = self._text(span.line, span.column, span.end_line, span.end_column)
        operand = self.node(span, side)
        return f"{self._text(*_extent(operand))} in {expression}" if side and operand is not None else expression

    def _text(self, line: int, column: int, end_line: int, end_column: int) -> str:
        lines = self.lines[line - 1 : end_line]
        lines[-1] = lines[-1][:end_column]
        lines[0] = lines[0][column:]
        return " ".join(b"".join(lines).decode().split())

    def annotated(self, specs: Mapping[tuple[CodeSpan, str], PartitionSpec]) -> tuple[str, list[Unannotated]]:
        """Return the text with constraints, and the expressions at which none can be written."""
        imports, constraint, spec_name = self.imports()
        insertions: list[tuple[tuple[int, ...], bytes]] = []  # (line, column, then the order at that place), text
        missing = []
        for (span, side), spec in specs.items():
            node = self.node(span, side)
            code = f"{spec_name}({', '.join(map(_entry(spec_name), spec))})"
            if isinstance(node, ast.expr):
                start, end = _extent(node)[:2], _extent(node)[2:]
                # Of nested expressions the outer one opens first, and the inner one closes first.
                insertions.append(((*start, 1, -end[0], -end[1]), f"{constraint}(".encode()))
                insertions.append(((*end, 0, -start[0], -start[1]), f", {code})".encode()))
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and self.is_alone(node):
                indent, name = self.lines[span.line - 1][: span.column].decode(), node.target.id
                line = f"{indent}{name} = {constraint}({name}, {code}){self.line_end}".encode()
                insertions.append(((span.end_line + 1, 0), line))
            elif not side:
                reason = "no expression is this result alone: assign it to a name"
                missing.append(Unannotated(span.line, reason, self.text(span, "")))
        if insertions and imports:
            insertions.append(((self.after_imports() + 1, 0), imports.replace("\n", self.line_end).encode()))
        lines = [*self.lines, b""]
        for (line, column, *_), text in sorted(insertions, reverse=True):
            lines[line - 1] = lines[line - 1][:column] + text + lines[line - 1][column:]
        return b"".join(lines).decode(), missing

    def is_alone(self, node: ast.AugAssign) -> bool:
        """Return whether nothing else stands on a statement's lines."""
        first, last = self.lines[node.lineno - 1], self.lines[(node.end_lineno or node.lineno) - 1]
        rest = last[node.end_col_offset or 0 :].strip()
        return not first[: node.col_offset].strip() and (not rest or rest.startswith(b"#")) and last.endswith(b"\n")

    def imports(self) -> tuple[str, str, str]:
        """Return the imports that are missing, and the names of the constraint and of the specification."""
        jax_name, spec_name = "", ""
        for node in self.tree.body:
            if isinstance(node, ast.Import):
                jax_name = next((a.asname or a.name for a in node.names if a.name == "jax"), jax_name)
            elif isinstance(node, ast.ImportFrom) and node.module == "jax.sharding":
                spec_name = next((a.asname or a.name for a in node.names if a.name == "PartitionSpec"), spec_name)
        missing = "" if jax_name else "import jax\n"
        jax_name = jax_name or "jax"
        if not spec_name and "P" not in self.names:
            missing, spec_name = missing + "from jax.sharding import PartitionSpec as P\n", "P"
        return missing, f"{jax_name}.lax.{CONSTRAINT}", spec_name or f"{jax_name}.sharding.PartitionSpec"

    def after_imports(self) -> int:
        """Return the last line of the module's imports, or else of its docstring."""
        imports = [n.end_lineno or 0 for n in self.tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
        has_docstring = ast.get_docstring(self.tree) is not None
        return max(imports, default=(self.tree.body[0].end_lineno or 0) if has_docstring else 0)


def _computing(tree: ast.AST) -> Iterator[ast.expr | ast.AugAssign]:
    """Yield the expressions and statements that a constraint can enclose."""
    others = {id(part) for node in ast.walk(tree) for part in _not_enclosed(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.expr | ast.AugAssign) and id(node) not in others:
            yield node


def _not_enclosed(node: ast.AST) -> Iterable[ast.AST]:
    """Return the parts of a node whose place in the file Python gives to other values, and those in quotes.

    The equations that take a row from an array have the place of the iterable or of the target, and not of a row.
    """
    match node:
        case ast.For(iter=part) | ast.comprehension(iter=part) | ast.YieldFrom(value=part):
            return [part]
        case ast.Starred(value=part):
            return [node, part]
        case ast.JoinedStr():  # a constraint has quotes, which end the string before Python 3.12
            return ast.walk(node)
        case ast.Name() | ast.Attribute() | ast.Subscript() | ast.Tuple() | ast.List() if not isinstance(node.ctx, ast.Load):
            return [node]
    return []


def _extent(node: ast.expr | ast.AugAssign) -> tuple[int, int, int, int]:
    return node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0


def _recorded_extents(node: ast.expr | ast.AugAssign) -> Iterator[tuple[int, int, int, int]]:
    """Yield the places that Python may record for a node: that of an attribute on a line below its object begins at its name."""
    line, column, end_line, end_column = _extent(node)
    yield line, column, end_line, end_column
    attribute = node.func if isinstance(node, ast.Call) else node
    if isinstance(attribute, ast.Attribute):
        _, _, name_line, name_end = _extent(attribute)
        yield name_line, name_end - len(attribute.attr.encode()), end_line, end_column


def _entry(spec_name: str) -> Any:
    """Return the function that writes an entry of a partition specification as code."""
    return lambda entry: f"{spec_name}.UNCONSTRAINED" if entry is PartitionSpec.UNCONSTRAINED else repr(entry)
