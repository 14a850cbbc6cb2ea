"""The parallel types that a plan gives the values of a source file's lines, each time that a line runs.

A line runs once for every equation of the program that has its number: in every layer, for example. Values inside of an operator's
body have types, too, which the solver derives from those of its operands and results.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from unity.exec.sharding_constraints import divides_more, origins_of, refuse_per_device
from unity.export.annotations.constraint_writer import SIDES
from unity.pcg.capture.operator_names import name_of_equation
from unity.pcg.ir.graph import PARALLELIZATION, PCG, Node, Value
from unity.pcg.ir.nested_programs import bodies
from unity.pcg.ir.program import Body, Equation
from unity.pcg.ir.user_lines import file_and_number
from unity.pcg.propagation.placement import placing
from unity.pcg.types.parallel_type import PARTIAL, UNUSED, Type

PRODUCT = "dot_general"
SUM = "a sum over devices that is not added up there"
NESTED = "inside of a conditional, a loop or a derivative rule"
SEVERAL_WAYS = "needed in several ways"


@dataclass(frozen=True)
class ComputationSignature:
    """An equation's line and primitive, and the shape and type of its result, by which expressions are told apart.

    Attributes:
        name: the name of the primitive, or of the function with its own derivative, for texts.
    """

    line: int
    primitive: str
    shape: tuple[int, ...]
    dtype: str
    name: str = field(compare=False)


@dataclass(frozen=True)
class PlannedValue:
    """A value in the plan's program: the result of an equation, or an operand of a product.

    Attributes:
        computed: the equation.
        type: the value's parallel type where it is read; None if no single partition specification states it.
        shape: the value's shape.
        side: the operand, one of `SIDES`, or "" for the result.
        is_decided: whether the plan changes the type here, or divides what no operand divides.
        problem: the reason why `type` is None.
    """

    computed: ComputationSignature
    type: Type | None
    shape: tuple[int, ...]
    side: str = ""
    is_decided: bool = False
    problem: str = ""


def planned_values(top: PCG, file: str) -> Iterator[PlannedValue]:
    """Yield the values of the lines of a file, in the order of a parallel graph, those of nested programs included.

    Raises:
        PlanError: the plan has a pipeline or branches.
    """
    for graph in top.graphs():
        origins = origins_of(graph)
        types = _types_where_read(graph, origins)
        for node in graph.nodes:
            refuse_per_device(node)
            if node.body is not None:
                yield from _values_of(node, node.body, types, origins, file)


def times_computed(top: PCG, file: str) -> Counter[ComputationSignature]:
    """Count the equations of a graph by what they compute."""
    nodes = (node for graph in top.graphs() for node in graph.nodes)
    return Counter(c for node in nodes if node.body is not None for c in _computations(node, node.body, file))


def _computations(node: Node, body: Body, file: str, around: str = "") -> Iterator[ComputationSignature]:
    for e, line in zip(body.equations, _lines(node, body, around), strict=True):
        yield from (c for v in e.results if (c := _computation((line, node.source), body, e, v, file)) is not None)
        for nested in bodies(e):
            yield from _computations(node, nested, file, line)


def _types_where_read(graph: PCG, origins: Mapping[Value, Value]) -> dict[Value, list[Type]]:
    """Return the types that the plan decides for results of operators: those after changes of type, or where they are divided."""
    types: dict[Value, list[Type]] = defaultdict(list)
    for node in graph.nodes:
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
    return types


def _values_of(
    node: Node, body: Body, types: Mapping[Value, list[Type]], origins: Mapping[Value, Value], file: str
) -> Iterator[PlannedValue]:
    """Yield the values of a node's body: its results, the values between its equations, and the operands of products."""
    outputs = {a: v for a, v in zip(body.outputs, node.results, strict=True) if isinstance(a, int)}
    inputs = dict(zip(body.inputs, node.operands, strict=True))
    inner: tuple[Type, ...] = tuple(v.type for v in node.operands)
    solutions = placing(body, inner, node.types, len(node.types[0])) if len(body.equations) > 1 and node.types else ()

    def type_between(variable: int) -> Type:
        return tuple(UNUSED if s is None or variable in s.unused else s.seen(variable) for s in solutions)

    for e, line in zip(body.equations, _lines(node, body), strict=True):
        for variable in e.results:
            computed = _computation((line, node.source), body, e, variable, file)
            if computed is None or not computed.shape:
                continue
            v = outputs.get(variable)
            if v is None:
                yield _value(computed, [type_between(variable)], False)
            else:
                yield _value(computed, types.get(v) or [v.type], v in types)
            if e.primitive.name != PRODUCT:
                continue
            for side, atom in zip(SIDES, e.operands, strict=False):
                if isinstance(atom, int):
                    operand = inputs.get(atom)
                    type_ = type_between(atom) if operand is None else operand.type
                    yield PlannedValue(
                        computed, None if PARTIAL in type_ else type_, body.tensors[atom].shape, side,
                        operand in origins and e.results == body.outputs and PARTIAL not in type_,
                        SUM if PARTIAL in type_ else "",
                    )  # fmt: skip
        for nested in bodies(e):
            for computed in _computations(node, nested, file, line):
                yield PlannedValue(computed, None, computed.shape, problem=NESTED)
                yield from (PlannedValue(computed, None, computed.shape, side, problem=NESTED) for side in SIDES)


def _value(computed: ComputationSignature, types: list[Type], is_decided: bool) -> PlannedValue:
    """Return the result of an equation, whose type differs between readers if there are several `types`."""
    problem = SEVERAL_WAYS if len(set(types)) > 1 else SUM if PARTIAL in types[0] else ""
    return PlannedValue(computed, None if problem else types[0], computed.shape, "", is_decided, problem)


def _lines(node: Node, body: Body, around: str = "") -> Sequence[str]:
    """Return the lines of the equations of a node's body, or of a program nested in it, in an equation on the line `around`.

    Equal operators share a body, whose equations have the lines of the first of them. The others know the lines of their own
    equations (`Node.lines`), and not those inside of these.
    """
    if not node.lines:
        return [e.source for e in body.equations]
    return node.lines if body is node.body else [around] * len(body.equations)


def _computation(sources: Sequence[str], body: Body, equation: Equation, variable: int, file: str) -> ComputationSignature | None:
    """Return the computation of a result of an equation, on the first of its `sources` in a file, or None if none is."""
    for source in sources:
        if is_in(source, file):
            tensor = body.tensors[variable]
            name = name_of_equation(equation)
            return ComputationSignature(line_of(source), equation.primitive.name, tensor.shape, str(tensor.dtype), name)
    return None


def is_in(source: str, file: str) -> bool:
    """Return whether a source line, `file:line (function)`, is in a file, whose real path is given."""
    return bool(source) and os.path.realpath(file_and_number(source)[0]) == file


def line_of(source: str) -> int:
    """Return the number of a source line."""
    return int(file_and_number(source)[1])
