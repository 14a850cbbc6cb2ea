"""The expressions of a user's source that compute the values of a traced function, to the column."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
from jax.extend import core

from unity.pcg.jaxprs.source_lines import owner

Shape = tuple[int, ...]
MAPS = ("vmap", "pmap", "shard_map")  # whose functions see values with fewer dimensions, or parts of them


@dataclass(frozen=True, order=True)
class CodeSpan:
    """The place of an expression in a file. Lines count from 1, columns are bytes of UTF-8 from 0, as in `ast`."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int


@dataclass(frozen=True)
class ExpressionValue:
    """The value of an expression: the primitive that computes it, and its shape and type.

    Attributes:
        is_mapped: whether the expression sees another shape, as inside of `jax.vmap`.
    """

    span: CodeSpan
    primitive: str
    shape: Shape
    dtype: str
    is_mapped: bool


@dataclass(frozen=True)
class _Call:
    """The call around a nested program: its expression, the function's name, and whether it is mapped."""

    span: CodeSpan | None = None
    function: str = ""
    is_mapped: bool = False


def expression_values(fn: Callable[..., Any], *args: Any) -> frozenset[ExpressionValue]:
    """Trace a function, and return the values of all expressions in the user's files that compute one.

    A value is that of an expression if an equation of another expression reads it, or if it is returned.
    """
    found: set[ExpressionValue] = set()
    _read(jax.make_jaxpr(fn)(*args).jaxpr, _Call(), found)
    return frozenset(found)


def _read(jaxpr: core.Jaxpr, call: _Call, found: set[ExpressionValue]) -> Sequence[str]:
    """Add the values of a program's expressions, and return the primitives of its results."""
    producers: dict[Any, tuple[_Call, str]] = {}

    def leave(v: Any, reader: CodeSpan | None) -> None:
        producer, primitive = producers.get(v, (_Call(), ""))
        if producer.span is not None and producer.span != reader:
            found.add(ExpressionValue(producer.span, primitive, tuple(v.aval.shape), str(v.aval.dtype), producer.is_mapped))

    for eqn in jaxpr.eqns:
        own = _call_of(eqn, call)
        for v in eqn.invars:
            if not isinstance(v, core.Literal):
                leave(v, own.span)
        primitives: Sequence[str] = [eqn.primitive.name] * len(eqn.outvars)
        for nested in _nested(eqn.params):
            results = _read(nested, own, found)
            if len(results) == len(eqn.outvars) and eqn.primitive.name not in ("scan", "while", "cond"):
                primitives = results
        producers.update((v, (own, name)) for v, name in zip(eqn.outvars, primitives, strict=True))
    for v in jaxpr.outvars:
        if not isinstance(v, core.Literal):
            leave(v, call.span)
    return ["" if isinstance(v, core.Literal) else producers.get(v, (call, ""))[1] for v in jaxpr.outvars]


def _nested(params: Mapping[str, Any]) -> Iterator[core.Jaxpr]:
    for value in params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if isinstance(part, core.ClosedJaxpr):
                yield part.jaxpr
            elif isinstance(part, core.Jaxpr):
                yield part


def _call_of(eqn: core.JaxprEqn, around: _Call) -> _Call:
    """Return the expression of an equation, as the call around a program that is nested in it.

    JAX may have traced the function around for an earlier call, and recorded that one's callers, so that only frames up to the
    function's own count (`unity.pcg.jaxprs.source_lines`).
    """
    name = str(eqn.params.get("name", ""))
    traceback = eqn.source_info.traceback
    if traceback is None:
        return _Call(around.span, name, around.is_mapped)
    frames = list(zip(traceback.frames, *traceback.raw_frames(), strict=True))
    if around.function:
        own = next((k for k, (f, *_) in enumerate(frames) if f.function_name.rpartition(".")[2] == around.function), -1)
        frames = frames[: own + 1]
    place = next((k for k, (f, *_) in enumerate(frames) if owner(f.file_name) == "user"), None)
    if place is None:
        return _Call(around.span, name, around.is_mapped)
    frame, code, instruction = frames[place]
    line, end_line, column, end_column = next(islice(code.co_positions(), instruction // 2, None))
    if line is None or end_line is None or column is None or end_column is None:  # Python was told to keep no columns
        return _Call(None, name, around.is_mapped)
    is_mapped = any(owner(f.file_name) == "jax" and any(m in f.function_name for m in MAPS) for f, *_ in frames[place:])
    return _Call(CodeSpan(frame.file_name, line, column, end_line, end_column), name, around.is_mapped or is_mapped)
