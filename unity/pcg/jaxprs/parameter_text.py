"""Parameters of primitives as text that is the same in every process: programs and functions by content."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core

from unity.pcg.jaxprs.jaxprs import Program
from unity.pcg.jaxprs.trace_contexts import words_of

Follow = Callable[[Any], str | None]  # text for values that the caller formats itself, such as programs; None for others

DEEPEST = 12  # levels of functions that close over functions; deeper ones are compared by type alone


def text_of(value: Any, known: Follow, depth: int = 0) -> str:
    """Format a value: arrays and functions by content, unknown objects by their printed form without addresses.

    A NumPy integer is an integer: JAX's own transformations compute numbers of dimensions in either type.
    """
    text = known(value)
    if text is not None:
        return text
    if isinstance(value, (bool, int, float, str, bytes, type(None), np.dtype)):
        return repr(value)
    if isinstance(value, np.integer):
        return repr(int(value))
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(text_of(v, known, depth) for v in value) + ")"
    if isinstance(value, (set, frozenset)):  # in no order, and printed in another by each process
        return "{" + ", ".join(sorted(text_of(v, known, depth) for v in value)) + "}"
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{k}: {text_of(v, known, depth)}" for k, v in sorted(value.items(), key=lambda kv: repr(kv[0]))) + "}"
        )
    if isinstance(value, type):  # before arrays: NumPy's scalar types have attributes of the same names
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, Tracer):
        return f"a traced {value.aval}"
    if hasattr(value, "__array__") and hasattr(value, "dtype"):
        return array_text(value)
    parts = list(_parts(value))
    if parts and depth < DEEPEST:
        return _function_name(value) + "[" + "; ".join(text_of(p, known, depth + 1) for p in parts) + "]"
    if callable(value) or depth:
        return _function_name(value)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def program_text(value: Any) -> str | None:
    """Format a program by content, in which variables are numbered; None for any other value.

    JAX's printed form leaves out strides of indices, so different kernels may have the same.
    """
    if not isinstance(value, Program):
        return None
    numbers: dict[core.Var, int] = {}

    def named(atom: Any) -> str:
        if isinstance(atom, core.Literal):
            return f"{text_of(atom.val, program_text)}:{atom.aval}"
        return f"{numbers.setdefault(atom, len(numbers))}:{atom.aval}"

    program, consts = (value.jaxpr, value.consts) if isinstance(value, core.ClosedJaxpr) else (value, ())
    lines = [[named(v) for v in (*program.constvars, *program.invars)], text_of(tuple(consts), program_text)]
    for e in program.eqns:
        operands = [*map(named, e.invars)]
        lines.append([e.primitive.name, operands, text_of(dict(e.params), program_text), [*map(named, e.outvars)]])
    return "\n".join(map(str, [*lines, [named(v) for v in program.outvars]]))


def array_text(value: Any) -> str:
    """Format an array, or random keys, by a hash of its bytes."""
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return f"{value.dtype}{hashlib.sha256(words_of(value).tobytes()).hexdigest()[:16]}"
    data = np.asarray(value)
    return f"{data.dtype}{data.shape}{hashlib.sha256(data.tobytes()).hexdigest()[:16]}"


def identities(value: Any, depth: int = 0) -> Iterator[int]:
    """Iterate over the ids of functions that `text_of` may not see through: values of equal text and ids do the same."""
    if isinstance(value, (tuple, list)):
        for v in value:
            yield from identities(v, depth)
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from identities(v, depth)
    elif _of_jax(value) and depth < DEEPEST:  # JAX wraps a rule anew at every call; the rule itself tells
        for p in _parts(value):
            yield from identities(p, depth + 1)
    elif callable(value) and not isinstance(value, type):
        yield id(value)


def _of_jax(value: Any) -> bool:
    module = getattr(value, "__module__", None) or ""
    return module.partition(".")[0] in ("jax", "jaxlib")


def _function_name(value: Any) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    code = getattr(value, "__code__", None)
    return f"{named.__module__}.{named.__qualname__}{_code_text(code) if code else ''}"


@functools.lru_cache(maxsize=4096)
def _code_text(code: types.CodeType) -> str:
    inner = [_code_text(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts if not isinstance(c, frozenset)]
    content = "\n".join([code.co_code.hex(), *code.co_names, *inner])
    return "#" + hashlib.sha256(content.encode()).hexdigest()[:12]


def _parts(value: Any) -> Iterator[Any]:
    """Iterate over the parts of a function: closed-over values, the wrapped function, bound arguments."""
    if isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(params := getattr(value, "params", None), dict) and hasattr(value, "in_avals"):
        # Since JAX 0.12 `searchsorted`, `ldexp` and others are one primitive with an object for the rest.
        yield from (str(value.in_avals), *(part for item in sorted(params.items()) for part in map(_telling, item)))
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # a function that refers to itself, not yet defined
                continue
            if not (_of_jax(value) and isinstance(content, dict)):  # JAX's caches change as they are used
                yield content
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
    elif _of_jax(type(value)) and hasattr(value, "__wrapped__"):  # a jit, or a function with its derivative rules
        rules = (getattr(value, name, None) for name in ("fwd", "bwd", "jvp"))
        yield from (value.__wrapped__, *(rule for rule in rules if rule is not None))
    elif _of_jax(value) and isinstance(getattr(value, "f", None), (types.FunctionType, types.MethodType, functools.partial)):
        yield value.f  # a wrapped function
    elif _of_jax(value) and callable(value) and dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (getattr(value, f.name) for f in dataclasses.fields(value))  # a callback, and the structure of its arguments
        yield from map(_telling, fields)


def _telling(part: Any) -> Any:
    """Return a function or a program as it is, and anything else as its printed form."""
    return part if callable(part) or isinstance(part, (core.Jaxpr, core.ClosedJaxpr)) else str(part)
