"""Delta debugging of a program that has a wrong plan: fewer results and steps, plainer data, as long as a plan stays wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.fuzz.data import drawn
from benchmarks.fuzz.programs import Argument, Function, Program, Step, dtype_name, kind_of, pruned, struct

Fails = Callable[[Program], bool]
PLAIN = {"f": "normal", "i": "small", "b": "half", "c": "normal", "k": "key"}


def minimized(program: Program, fails: Fails, seconds: float = 120.0) -> Program:
    """The smallest program reached by single reductions within so many seconds, all of which fail."""
    until, changed = time.monotonic() + seconds, True
    while changed and time.monotonic() < until:
        changed = False
        for smaller in reductions(program):
            if time.monotonic() > until:
                break
            if runs(smaller) and fails(smaller):
                program, changed = smaller, True
                break
    return program


def runs(program: Program) -> bool:
    """Whether JAX accepts the program at all."""
    try:
        with jax.enable_x64(program.x64):
            jax.eval_shape(program.function, *(struct(a.dtype, a.shape) for a in program.arguments))
    except Exception:  # whatever JAX raises for a program that makes no sense
        return False
    return True


def reductions(program: Program) -> Iterator[Program]:
    """Programs that are a little smaller, the much smaller ones first."""
    body = program.body
    if len(body.returned) > 1:
        for one in body.returned:
            yield with_body(program, body.steps, (one,))
    types = structs(program)
    for step in reversed(body.steps):
        yield from without(program, step, types)
    for step in body.steps:
        for smaller in smaller_steps(step):
            yield with_body(program, tuple(smaller if s is step else s for s in body.steps), body.returned)
    for a in program.arguments:
        plain = replace(a, kind=PLAIN[kind_of(struct(a.dtype, ()).dtype)])
        if plain != a and not a.kind.startswith(("index", "unique")):
            yield replace(program, arguments=tuple(plain if x is a else x for x in program.arguments))
        if a.kind.endswith("outside"):
            inside = replace(a, kind=a.kind.removesuffix(" outside"))
            yield replace(program, arguments=tuple(inside if x is a else x for x in program.arguments))


def with_body(program: Program, steps: Sequence[Step], returned: Sequence[str], more: Sequence[Argument] = ()) -> Program:
    """A program of some steps and results, with the arguments that these read."""
    returned = tuple(dict.fromkeys(returned))
    outputs = ", ".join(f"{{{k}}}" for k in range(len(returned))) + ("," if len(returned) == 1 else "")
    body = Function("fn", (), pruned(steps, returned), outputs, returned)
    arguments = tuple(a for a in (*program.arguments, *more) if a.name in body.free)
    return replace(program, arguments=arguments, body=replace(body, parameters=tuple(a.name for a in arguments)))


def structs(program: Program) -> dict[str, Any]:
    """The shapes and types of all values."""
    names = [n for s in program.body.steps for n in s.results]
    whole = replace(program.body, outputs="[" + ", ".join(names) + "]", returned=())
    with jax.enable_x64(program.x64):
        inputs = [struct(a.dtype, a.shape) for a in program.arguments]
        found = jax.eval_shape(whole.compiled(), *inputs)
    return dict(zip(names, found, strict=True)) | {a.name: s for a, s in zip(program.arguments, inputs, strict=True)}


def without(program: Program, step: Step, types: dict[str, Any]) -> Iterator[Program]:
    """Programs in which a step's results are operands of it, or arguments."""
    others = [s for s in program.body.steps if s is not step]

    def renamed(names: dict[str, str], more: Sequence[Argument] = ()) -> Program:
        steps = [s.renamed(names) for s in others]
        return with_body(program, steps, [names.get(n, n) for n in program.body.returned], more)

    (first, *rest) = step.results
    if not rest:
        same = [o for o in step.reads if (types[o].shape, types[o].dtype) == (types[first].shape, types[first].dtype)]
        for operand in same:
            yield renamed({first: operand})
    if set(step.results) & set(program.body.returned) and len(program.body.returned) == len(
        set(step.results) & set(program.body.returned)
    ):
        floats = [o for o in step.operands if o not in {a.name for a in program.arguments}]
        if floats:
            yield with_body(program, others, floats)
    arguments = []
    for name in step.results:
        dtype = dtype_name(types[name].dtype)
        arguments.append(Argument(f"b{name[1:]}", tuple(types[name].shape), dtype, PLAIN[kind_of(types[name].dtype)]))
    yield renamed({n: a.name for n, a in zip(step.results, arguments, strict=True)}, arguments)


def smaller_steps(step: Step) -> Iterator[Step]:
    """The step with a smaller function inside."""
    for k, f in enumerate(step.functions):
        for inner in reversed(f.steps):
            for name in inner.results[:1]:
                for other in (*inner.operands, *f.parameters):
                    steps = tuple(s.renamed({name: other}) for s in f.steps if s is not inner)
                    smaller = replace(f, steps=steps, returned=tuple(other if r == name else r for r in f.returned))
                    smaller = replace(smaller, steps=pruned(smaller.steps, smaller.returned))
                    yield replace(step, functions=(*step.functions[:k], smaller, *step.functions[k + 1 :]))


def as_test(program: Program, name: str, nodes: int, devices: int, words: str) -> str:
    """A test of the program, ready to be pasted, of plain source and literal data."""
    lines = [f"def test_{name}() -> None:", f'    """Random plans of it: {words}"""']
    lines += [f"    {line}" for line in program.source.splitlines()]
    with jax.enable_x64(program.x64):
        data = [literal(x) for x in drawn(program)]
    lines.append("")
    lines.append(f"    with jax.enable_x64({program.x64}):")
    lines += [f"        {a.name} = {text}" for a, text in zip(program.arguments, data, strict=True)]
    given = ", ".join(a.name for a in program.arguments)
    lines.append(f"        assert wrong_plans(fn, [{given}], unity.Machine.grid({nodes}, {devices})) == []")
    return "\n".join(lines) + "\n"


def literal(x: Any) -> str:
    """An array as source."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        impl = dtype_name(x.dtype)[4:]
        return f"jax.random.wrap_key_data(jnp.array({np.asarray(jax.random.key_data(x)).tolist()}, 'uint32'), impl='{impl}')"
    values = np.asarray(x)
    text = repr(values.astype(np.float64).tolist() if values.dtype.kind not in "biuc" else values.tolist())
    text = text.replace("nan", "np.nan").replace("inf", "np.inf")
    shape = "" if values.size else f".reshape({values.shape})"
    return f"jnp.array({text}, '{values.dtype}'){shape}"
