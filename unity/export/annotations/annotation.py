"""A user's source with a plan's sharding constraints written in, as a diff to apply.

A constraint is written wherever `plan.constrained()` has one: at every expression whose result the plan changes in type or computes
from operands that it changed, and at names in a product `x @ w` that it changes before the product. A value that no single
expression computes is left out, and listed with the reason.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import unified_diff
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from unity.base.errors import PlanError, file_fault
from unity.base.formatting import with_article
from unity.exec.sharding_constraints import open_spec
from unity.export.annotations.constraint_writer import SIDES, ConstraintWriter, Unannotated
from unity.export.annotations.decisions import PRODUCT, ComputationSignature, PlannedValue, is_in, planned_values, times_computed
from unity.export.annotations.expressions import CodeSpan, ExpressionValue, expression_values
from unity.pcg.jaxprs.trace_contexts import without_mesh
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import UNUSED, misfit

if TYPE_CHECKING:
    from unity.plan.plan import Plan


@dataclass(frozen=True)
class Annotation:
    """A file with sharding constraints written in. It prints as a diff, which `git apply` takes, or says that nothing changes.

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
        """The unified diff; empty without constraints to write."""
        path = Path(os.path.relpath(self.path))
        name = path.name if ".." in path.parts else path.as_posix()  # no diff may lead out of its folder
        before, after = (list(StringIO(text, newline="\n")) for text in (self.before, self.source))  # lines as git counts them
        lines = unified_diff(before, after, f"a/{name}", f"b/{name}")
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)

    def __str__(self) -> str:
        reason = f"{len(self.unannotated)} could not be written" if self.unannotated else "the specifications of arguments say all"
        return self.diff or f"no constraint to write into {self.path}: {reason}"


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
    file = os.path.realpath(path)
    planned = list(planned_values(plan.program.pcg, file))
    if not any(is_in(node.source, file) for graph in plan.program.pcg.graphs() for node in graph.nodes):
        raise PlanError(f"{path} has no line of {plan.__name__}: give the file in which it computes. (docs: plan#in-your-source)")
    captured = plan.program.family.captured
    structs = [jax.ShapeDtypeStruct(n.tensors[0].shape, n.tensors[0].dtype) for n in plan.program.original.inputs]
    args = jax.tree.unflatten(captured.in_tree, structs[: len(captured.paths)])
    with without_mesh():
        values = expression_values(plan.program.family.fn, *args)
    boundary, axes = plan.program.boundary, plan.program.pcg.axes
    writer = ConstraintWriter(before, tree)
    changed = times_computed(plan.program.original, file)
    changed.subtract(times_computed(plan.program.pcg, file))
    traced = [v for v in values if os.path.realpath(v.span.file) == file]
    places, unannotated = _ConstraintPlaces(planned, traced, changed, writer, axes).constrained()
    split = tuple(tuple(s if s.kind == "P" else UNUSED for s in v.type or ()) for v in places.values())
    merged = replace(boundary, types=(*boundary.types, *split), shapes=(*boundary.shapes, *(v.shape for v in places.values())))
    specs = {place: merged.merged(open_spec(v.type or (), axes, len(v.shape))) for place, v in places.items()}
    source, missing = writer.annotated(specs)
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
        raise PlanError(f"{path} cannot be read as Python source: {file_fault(problem)}. (docs: plan#in-your-source)") from None


Place = tuple[CodeSpan, str]  # an expression and one of `SIDES`, or "" for its result


@dataclass(frozen=True, eq=False)
class _ConstraintPlaces:
    """The expressions that compute the values of a plan's program, and those at which a constraint holds for every run.

    Attributes:
        planned: the values of the file's lines.
        traced: the values of the file's expressions.
        missing: by computation, the number of its runs in the captured program less that in the plan's program.
        writer: the writer of constraints, which knows at which expressions one can be written.
        axes: the plan's mesh axes.
    """

    planned: Sequence[PlannedValue]
    traced: Sequence[ExpressionValue]
    missing: Mapping[ComputationSignature, int]
    writer: ConstraintWriter
    axes: Sequence[Axis]

    def constrained(self) -> tuple[dict[Place, PlannedValue], list[Unannotated]]:
        """Return a value for every place at which to constrain it, and the constraints that are missing."""
        chosen: dict[Place, PlannedValue] = {}
        problems: list[Unannotated] = []
        for v in dict.fromkeys(v for v in self.planned if v.is_decided):
            span = self.expression(v.computed)
            if isinstance(span, Unannotated):
                problems.append(span)
            elif v.side and self.writer.node(span, v.side) is None:
                continue  # the result's constraint decides
            elif reason := self.conflict(span, v.side):
                problems.append(Unannotated(span.line, reason, self.writer.text(span, v.side)))
            else:
                chosen[span, v.side] = v
        return chosen, problems

    def expression(self, computed: ComputationSignature) -> CodeSpan | Unannotated:
        """Return the only expression that computes a value, or the reason why a constraint cannot be written."""
        alike = self.computing(computed)
        spans = {x.span for x in alike}
        name = next((x.function for x in alike if x.function), computed.name)
        if any(x.is_mapped for x in alike):
            reason = f"{name} is inside of a function that is mapped, as by jax.vmap"
        elif len(spans) > 1:
            reason = f"several expressions are {with_article(name)} of {computed.dtype}{list(computed.shape)}"
        elif not spans:
            reason = f"{name} is computed inside of a library's function, or of a rewritten program"
        else:
            return next(iter(spans))
        return Unannotated(computed.line, reason)

    def computing(self, computed: ComputationSignature) -> list[ExpressionValue]:
        """Return the expressions that may compute an equation of the plan's program.

        A product whose operands capture swapped is the value of the transpose that reads it in the source.
        """
        alike = [x for x in self.traced if (x.shape, x.dtype) == (computed.shape, computed.dtype)]
        direct = [x for x in alike if x.primitive == computed.primitive and x.span.has(computed.line)]
        if direct or computed.primitive != PRODUCT:
            return direct
        return [x for x in alike if x.transposed is not None and x.transposed.has(computed.line)]

    def computes(self, span: CodeSpan, computed: ComputationSignature) -> bool:
        """Return whether an equation of the plan's program may be the value of an expression."""
        return any(x.span == span for x in self.computing(computed))

    def conflict(self, span: CodeSpan, side: str) -> str:
        """Return the reason why one constraint does not suit all runs of an expression, "" if it does."""
        evaluated = [x for x in self.traced if x.span == span]
        runs = [v for v in self.planned if v.side == side and self.computes(span, v.computed)]
        problems = sorted({v.problem for v in runs if v.type is None})
        if problems:
            return f"{problems[0]}, in one of its runs" if len(runs) > 1 else problems[0]
        if any(count > 0 and self.computes(span, c) for c, count in self.missing.items()):
            return "one of its runs was changed by a rule"
        if len({tuple(s if s.kind == "P" else UNUSED for s in v.type or ()) for v in runs}) > 1:
            return "the line runs several times, and its results are divided in different ways"
        index = SIDES.index(side) if side else None
        shapes = [x.shape if index is None else x.operands[index] for x in evaluated if not side or x.primitive == PRODUCT]
        fits = all(misfit(shape, runs[0].type or (), self.axes) is None for shape in shapes)
        if not fits or len({len(v.shape) for v in runs}) > 1:
            return "the expression has results of several shapes, and no constraint fits all"
        return ""
