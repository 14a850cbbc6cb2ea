"""A user's source with a plan's sharding constraints written in, as a diff to apply.

A constraint is written wherever `plan.constrained()` has one: at every expression whose result the plan changes in type or computes
from operands that it changed, and at names in a product `x @ w` that it changes before the product. A value that no single
expression computes is left out, and listed with the reason.
"""

from __future__ import annotations

import ast
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import unified_diff
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec

from unity.base.errors import PlanError
from unity.exec.sharding_constraints import divides_more, open_spec, origins_of, refuse_per_device
from unity.export.annotations.expressions import CodeSpan, ExpressionValue, expression_values
from unity.pcg.ir.graph import PARALLELIZATION, PCG, Node, Value
from unity.pcg.jaxprs.trace_contexts import without_mesh
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import PARTIAL, UNUSED, Type, misfit

if TYPE_CHECKING:
    from unity.plan.plan import Plan

CONSTRAINT = "with_sharding_constraint"
SIDES = ("left", "right")  # the operands of a product


@dataclass(frozen=True, order=True)
class Unannotated:
    """A line at which a constraint is missing, and the reason."""

    line: int
    reason: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}"


@dataclass(frozen=True)
class Annotation:
    """A file with sharding constraints written in. It prints as a diff, which `git apply` takes.

    Attributes:
        path: the file.
        before: its text.
        source: its text with the constraints.
        mesh_shape: the names and sizes of the mesh axes of the constraints, outermost first.
        in_specs: the partition specifications of the function's arguments over these axes.
        out_specs: those of its results.
        unannotated: the lines at which constraints are missing.
    """

    path: str
    before: str
    source: str
    mesh_shape: dict[str, int]
    in_specs: tuple[Any, ...]
    out_specs: Any
    unannotated: tuple[Unannotated, ...]

    @property
    def diff(self) -> str:
        """The unified diff, empty if there are no constraints to write."""
        path = Path(os.path.relpath(self.path))
        name = path.name if ".." in path.parts else path.as_posix()  # no diff may lead out of its folder
        before, after = (list(StringIO(text, newline="\n")) for text in (self.before, self.source))  # lines as git counts them
        lines = unified_diff(before, after, f"a/{name}", f"b/{name}")
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)

    def __str__(self) -> str:
        return self.diff


@dataclass(frozen=True)
class _Decision:
    """A value at which the plan changes a type: a result of an operator, or an operand of a product.

    Attributes:
        line: the operator's line.
        primitive: the primitive that computes the operator's result.
        shape: the shape of the operator's result.
        dtype: its type.
        type: the parallel type to constrain the value to, or None if it needs several.
        value_shape: the shape of the value.
        side: the operand, one of `SIDES`, or "" for the result.
    """

    line: int
    primitive: str
    shape: tuple[int, ...]
    dtype: str
    type: Type | None
    value_shape: tuple[int, ...]
    side: str = ""


def annotate(plan: Plan, path: str | Path) -> Annotation:
    """Write a plan's sharding constraints into a source file.

    Raises:
        PlanError: the file is not Python source, has none of the function's lines, or the plan has a pipeline,
            branches or micro-batches.
    """
    if plan.program.micro_batching is not None:
        raise PlanError(
            f"{plan.__name__} runs over {plan.program.micro_batching}, which its source does not: to write"
            " constraints into it, plan without micro_batches=. (docs: memory#micro-batches)"
        )
    before, tree = _parsed(path)
    decisions = list(dict.fromkeys(_decisions(plan.program.pcg, os.path.realpath(path))))
    if not any(_is_in(node, os.path.realpath(path)) for graph in plan.program.pcg.graphs() for node in graph.nodes):
        raise PlanError(f"{path} has no line of {plan.__name__}: give the file in which it computes. (docs: plan#in-your-source)")
    captured = plan.program.family.captured
    structs = [jax.ShapeDtypeStruct(n.tensors[0].shape, n.tensors[0].dtype) for n in plan.program.original.inputs]
    args = jax.tree.unflatten(captured.in_tree, structs[: len(captured.paths)])
    with without_mesh():
        values = expression_values(plan.program.family.fn, *args)
    boundary, axes = plan.program.boundary, plan.program.pcg.axes
    spans, unannotated = _placed(decisions, [v for v in values if os.path.realpath(v.span.file) == os.path.realpath(path)], axes)
    split = tuple(tuple(s if s.kind == "P" else UNUSED for s in d.type or ()) for d in spans.values())
    merged = replace(boundary, types=(*boundary.types, *split), shapes=(*boundary.shapes, *(d.value_shape for d in spans.values())))
    specs = {place: merged.merged(open_spec(d.type or (), axes, len(d.value_shape))) for place, d in spans.items()}
    source, missing = _Editor(before, tree).annotated(specs)
    count = len(captured.paths)
    return Annotation(
        str(path), before, source, merged.mesh_shape,
        jax.tree.unflatten(captured.in_tree, merged.specs[:count]),
        jax.tree.unflatten(captured.out_tree, merged.specs[count : len(boundary.types)]),
        tuple(sorted({*unannotated, *missing})),
    )  # fmt: skip


def _parsed(path: str | Path) -> tuple[str, ast.Module]:
    try:
        text = Path(path).read_bytes().decode()
        return text, ast.parse(text)
    except (OSError, SyntaxError, UnicodeDecodeError) as problem:
        raise PlanError(f"{path} cannot be read as Python source: {problem}. (docs: plan#in-your-source)") from None


def _is_in(node: Node, file: str) -> bool:
    return os.path.realpath(_place(node)[0]) == file if node.source else False


def _place(node: Node) -> tuple[str, int]:
    """Return the file and the number of a node's source line."""
    file, _, line = node.source.partition(" (")[0].rpartition(":")
    return file, int(line)


def _decisions(top: PCG, file: str) -> Iterator[_Decision]:
    """Yield the decisions about the operators that the lines of a file compute."""
    for graph in top.graphs():
        types: dict[Value, list[Type]] = defaultdict(list)  # of a result, those to constrain it to
        origins = origins_of(graph)
        for node in graph.nodes:
            refuse_per_device(node)
            if node.kind in PARALLELIZATION:
                (v,), origin = node.operands, origins[Value(node)]
                if PARTIAL not in origin.type:
                    types[origin].append(origin.type)
                elif PARTIAL in v.type and PARTIAL not in node.types[0]:  # the change that adds the partial sums
                    types[origin].append(node.types[0])
                continue
            for v in node.results:
                if PARTIAL not in v.type and (any(o in origins for o in node.operands) or divides_more(node, v)):
                    types[v].append(v.type)
            if node.body is not None and _is_in(node, file):
                yield from _decided_operands(node, origins)
        for v, several in types.items():
            if v.node.body is not None and v.tensor.ndim and _is_in(v.node, file):
                type_ = several[0] if len(set(several)) == 1 else None
                yield _Decision(*_computed(v), type_, v.tensor.shape)


def _decided_operands(node: Node, origins: Mapping[Value, Value]) -> Iterator[_Decision]:
    """Yield the decisions about the operands of a product that change in type before it."""
    body = node.body
    assert body is not None
    product = next((e for e in body.equations if e.results == body.outputs and e.primitive.name == "dot_general"), None)
    for side, atom in zip(SIDES, () if product is None else product.operands, strict=False):
        v = next((v for k, v in zip(body.inputs, node.operands, strict=True) if k == atom), None)
        if v is not None and v in origins and PARTIAL not in v.type:
            yield _Decision(*_computed(Value(node)), v.type, v.tensor.shape, side)


def _computed(v: Value) -> tuple[int, str, tuple[int, ...], str]:
    """Return the line, the primitive, the shape and the type of a result of an operator."""
    return _place(v.node)[1], _primitive(v), v.tensor.shape, str(v.tensor.dtype)


def _primitive(v: Value) -> str:
    """Return the primitive that computes a result of an operator."""
    body = v.node.body
    assert body is not None
    output = body.outputs[v.index]
    return next((e.primitive.name for e in body.equations if output in e.results), "") if isinstance(output, int) else ""


def _placed(
    decisions: Sequence[_Decision], values: Sequence[ExpressionValue], axes: Sequence[Axis]
) -> tuple[dict[tuple[CodeSpan, str], _Decision], list[Unannotated]]:
    """Return the decisions by their expressions and sides, and the lines of those that no single expression computes."""
    by_place: dict[tuple[CodeSpan, str], list[_Decision]] = defaultdict(list)
    missing: list[tuple[int, str]] = []
    for d in decisions:
        computed = [v for v in values if v.span.line <= d.line <= v.span.end_line]
        alike = [v for v in computed if (v.primitive, v.shape, v.dtype) == (d.primitive, d.shape, d.dtype)]
        spans = {v.span for v in alike}
        if d.type is None:
            missing.append((d.line, f"{d.primitive} is needed in several ways"))
        elif any(v.is_mapped for v in alike):
            missing.append((d.line, f"{d.primitive} is inside of a function that is mapped, as by jax.vmap"))
        elif len(spans) > 1:
            missing.append((d.line, f"several expressions are a {d.primitive} of {d.dtype}{list(d.shape)}"))
        elif not spans:
            missing.append((d.line, f"{d.primitive} is computed inside of a library's function, or of a rewritten program"))
        else:
            by_place[spans.pop(), d.side].append(d)
    chosen: dict[tuple[CodeSpan, str], _Decision] = {}
    for (span, side), several in by_place.items():
        if len({(d.type, len(d.value_shape)) for d in several}) > 1:
            missing.append((span.line, "the line runs several times, and its results are divided in different ways"))
        elif not _fits(several[0], [v for v in values if v.span == span], axes):
            missing.append((span.line, "the expression has results of several shapes, and no constraint fits all"))
        else:
            chosen[span, side] = several[0]
    return chosen, [Unannotated(*row) for row in missing]


def _fits(decision: _Decision, values: Iterable[ExpressionValue], axes: Sequence[Axis]) -> bool:
    """Return whether all values of an expression, or of an operand of a product, can be divided as decided."""
    if decision.side:
        shapes = [v.operands[SIDES.index(decision.side)] for v in values if v.primitive == decision.primitive]
    else:
        shapes = [v.shape for v in values]
    return all(misfit(shape, decision.type or (), axes) is None for shape in shapes)


class _Editor:
    """Writes constraints into a text."""

    def __init__(self, text: str, tree: ast.Module) -> None:
        self.lines, self.tree = text.encode().splitlines(True), tree  # bytes end a line where Python does, and text at a form feed
        self.line_end = "\r\n" if self.lines[:1] and self.lines[0].endswith(b"\r\n") else "\n"
        self.nodes = {extent: n for n in _computing(tree) for extent in _recorded_extents(n)}
        self.names = {getattr(n, field, None) for n in ast.walk(tree) for field in ("id", "arg", "name", "asname")}

    def annotated(self, specs: Mapping[tuple[CodeSpan, str], PartitionSpec]) -> tuple[str, list[Unannotated]]:
        """Return the text with constraints, and the lines at which none can be written."""
        imports, constraint, spec_name = self.imports()
        insertions: list[tuple[tuple[int, ...], bytes]] = []  # (line, column, then the order at that place), text
        missing = []
        for (span, side), spec in specs.items():
            node = self.nodes.get((span.line, span.column, span.end_line, span.end_column))
            if side:
                if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)):
                    continue  # the result's constraint decides
                node = node.left if side == "left" else node.right
                if not isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
                    continue
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
            else:
                missing.append(Unannotated(span.line, "no expression is this result alone: assign it to a name"))
        if insertions and imports:
            insertions.append(((self.after_imports() + 1, 0), imports.replace("\n", self.line_end).encode()))
        lines = [*self.lines, b""]
        for (line, column, *_), text in sorted(insertions, reverse=True):
            lines[line - 1] = lines[line - 1][:column] + text + lines[line - 1][column:]
        return b"".join(lines).decode(), missing

    def is_alone(self, node: ast.AugAssign) -> bool:
        """Return whether a statement shares its lines with no other code."""
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
    """Return the parts of a node that a constraint cannot enclose: Python records their place for other values, or they are quoted.

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
    """Yield the extents that Python may record for a node. That of an attribute on a line below its object begins at its name."""
    line, column, end_line, end_column = _extent(node)
    yield line, column, end_line, end_column
    attribute = node.func if isinstance(node, ast.Call) else node
    if isinstance(attribute, ast.Attribute):
        _, _, name_line, name_end = _extent(attribute)
        yield name_line, name_end - len(attribute.attr.encode()), end_line, end_column


def _entry(spec_name: str) -> Any:
    """Return the function that writes an entry of a partition specification as code."""
    return lambda entry: f"{spec_name}.UNCONSTRAINED" if entry is PartitionSpec.UNCONSTRAINED else repr(entry)
