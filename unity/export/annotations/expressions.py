"""The expressions of a user's source that compute the values of a traced function, to the column."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from types import CodeType
from typing import Any

import jax
from jax.extend import core

from unity.pcg.capture.operator_names import CUSTOM_DERIVATIVES
from unity.pcg.jaxprs.source_lines import owner

Shape = tuple[int, ...]
OPERATORS = ("scan", "while", "cond", *CUSTOM_DERIVATIVES)  # how names of primitives begin that a plan does not inline
MAPS = ("vmap", "pmap", "shard_map")  # whose functions see values with fewer dimensions, or parts of them


@dataclass(frozen=True, order=True)
class CodeSpan:
    """The place of an expression in a file. Lines count from 1, columns are bytes of UTF-8 from 0, as in `ast`."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int

    def has(self, line: int) -> bool:
        """Return whether a line is one of the expression's."""
        return self.line <= line <= self.end_line


@dataclass(frozen=True)
class ExpressionValue:
    """The value of an expression: the primitive that computes it, and its shape and type.

    Attributes:
        function: the name of the function that the user calls, where the primitive is a function with its own derivative.
        operands: the shapes of the primitive's operands.
        transposed: the expression of the product that it transposes, if it does.
        is_mapped: whether the expression sees another shape, as inside of `jax.vmap`.
    """

    span: CodeSpan
    primitive: str
    function: str
    operands: tuple[Shape, ...]
    shape: Shape
    dtype: str
    is_mapped: bool
    transposed: CodeSpan | None


@dataclass(frozen=True)
class _Call:
    """The call around a nested program: its expression, the function's name, and whether it is mapped.

    Attributes:
        evaluation: the code and the instruction of the expression and of its callers, which tell two runs of a line apart.
    """

    span: CodeSpan | None = None
    evaluation: tuple[tuple[CodeType, int], ...] = ()
    function: str = ""
    is_mapped: bool = False


_Producers = dict[core.Var, tuple[_Call, core.JaxprEqn | None]]  # the expressions and equations that compute values


def expression_values(fn: Callable[..., Any], *args: Any) -> frozenset[ExpressionValue]:
    """Trace a function, and return the values of all expressions in the user's files.

    A traced value is the value of the expression that computes it unless only equations of the same expression read it.
    """
    values: set[ExpressionValue] = set()
    _read(jax.make_jaxpr(fn)(*args).jaxpr, _Call(), values)
    return frozenset(values)


def _read(jaxpr: core.Jaxpr, call: _Call, values: set[ExpressionValue]) -> Sequence[core.JaxprEqn | None]:
    """Add the values of a program's expressions, and return the equations that compute its results."""
    producers: _Producers = {}
    unread: dict[core.Var, None] = {}

    def leave(v: core.Var, reader: _Call | None = None) -> None:
        producer, eqn = producers.get(v, (_Call(), None))
        unread.pop(v, None)
        if producer.span is not None and eqn is not None and (reader is None or producer.evaluation != reader.evaluation):
            name, operands = eqn.primitive.name, tuple(_shape(x.aval) for x in eqn.invars)
            function = eqn.params["call_jaxpr"].jaxpr.debug_info.func_name if name.startswith(CUSTOM_DERIVATIVES) else ""
            transposed = _product_read_by(eqn, producers) if name == "transpose" else None
            result = _shape(v.aval), _dtype(v.aval)
            values.add(ExpressionValue(producer.span, name, function, operands, *result, producer.is_mapped, transposed))

    for eqn in jaxpr.eqns:
        own = _call_of(eqn, call)
        for v in eqn.invars:
            if not isinstance(v, core.Literal):
                leave(v, own)
        equations: Sequence[core.JaxprEqn | None] = [eqn] * len(eqn.outvars)
        for nested in _nested(eqn.params):
            results = _read(nested, own, values)
            if len(results) == len(eqn.outvars) and not eqn.primitive.name.startswith(OPERATORS):
                equations = results
        producers.update((v, (own, e)) for v, e in zip(eqn.outvars, equations, strict=True))
        unread.update(dict.fromkeys(eqn.outvars))
    for v in [*(v for v in jaxpr.outvars if not isinstance(v, core.Literal)), *unread]:
        leave(v, call if v in jaxpr.outvars else None)
    return [None if isinstance(v, core.Literal) else producers.get(v, (call, None))[1] for v in jaxpr.outvars]


def _product_read_by(eqn: core.JaxprEqn, producers: _Producers) -> CodeSpan | None:
    """Return the expression of the product that an equation reads, None if it reads something else."""
    operand = eqn.invars[0]
    if isinstance(operand, core.Literal) or operand not in producers:
        return None
    call, producer = producers[operand]
    return call.span if producer is not None and producer.primitive.name == "dot_general" else None


def _shape(aval: Any) -> Shape:
    return tuple(getattr(aval, "shape", ()))  # a token has none


def _dtype(aval: Any) -> str:
    return str(getattr(aval, "dtype", ""))


def _nested(params: Mapping[str, Any]) -> Iterator[core.Jaxpr]:
    for value in params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if isinstance(part, core.ClosedJaxpr):
                yield part.jaxpr
            elif isinstance(part, core.Jaxpr):
                yield part


def _call_of(eqn: core.JaxprEqn, around: _Call) -> _Call:
    """Return the expression of an equation, as the call around a program that is nested in it.

    JAX may have traced the enclosing function for an earlier call and recorded the callers of that call. So only frames up to the
    function's own count (`unity.pcg.jaxprs.source_lines`).
    """
    name = str(eqn.params.get("name", ""))
    traceback = eqn.source_info.traceback
    if traceback is None:
        return replace(around, function=name)
    frames = list(zip(traceback.frames, *traceback.raw_frames(), strict=True))
    if around.function:
        own = next((k for k, (f, *_) in enumerate(frames) if f.function_name.rpartition(".")[2] == around.function), -1)
        frames = frames[: own + 1]
    place = next((k for k, (f, *_) in enumerate(frames) if owner(f.file_name) == "user"), None)
    if place is None:
        return replace(around, function=name)
    frame, code, instruction = frames[place]
    line, end_line, column, end_column = next(islice(code.co_positions(), instruction // 2, None))
    if line is None or end_line is None or column is None or end_column is None:  # Python was told to keep no columns
        return _Call(function=name, is_mapped=around.is_mapped)
    is_mapped = any(owner(f.file_name) == "jax" and any(m in f.function_name for m in MAPS) for f, *_ in frames[place:])
    span = CodeSpan(frame.file_name, line, column, end_line, end_column)
    return _Call(span, tuple((c, i) for _, c, i in frames[place:]), name, around.is_mapped or is_mapped)
