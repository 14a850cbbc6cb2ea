"""Observations: side effects of a function, such as `jax.debug.print`, that run once after its program, on values it returns.

The program of a function is a graph of values, without a place for an effect. So the values of an effect become further results of
the program: those in a scan are stacked, those in a branch come with the index of the branch. The effect then runs on these
results, outside of the program, on a single device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from unity.base.formatting import size
from unity.pcg.ir.program import INLINED, Atom, Body, Equation, Literal, Tensor, program_of, tensor_type
from unity.pcg.ir.tracing import stop_gradient
from unity.pcg.jaxprs.effects import INSPECT, TITLES, Notice, dropped, free, is_effect, is_ordered, pruned
from unity.pcg.propagation.nested.programs import branches, nested_body
from unity.pcg.propagation.nested.scan_programs import REMATERIALIZED, SCANNED

COND = "cond"
ENTERED = INLINED | {*SCANNED, *REMATERIALIZED, COND}  # primitives whose programs can return the values of effects in them
SMALL = 1 << 16  # bytes of values that cost nothing beside a call on the host; larger ones are not gathered for an effect

Run = Callable[[Sequence[Any]], None]


@dataclass(frozen=True)
class Observation:
    """An effect that a plan runs once, after the program.

    Attributes:
        name: the effect's primitive.
        line: the user's line.
        results: the numbers of the program's results that it reads.
        large: whether it runs only where these are replicated, so that nothing is gathered.
        run: runs the effect on these results.
    """

    name: str
    line: str
    results: tuple[int, ...]
    large: bool
    run: Run


@dataclass(frozen=True, eq=False)
class _Pending:
    """An effect in a program: the values that it reads there, and how it runs on them."""

    equation: Equation
    values: tuple[int, ...]
    run: Run

    @property
    def name(self) -> str:
        return self.equation.primitive.name


@dataclass(frozen=True)
class ObservedProgram:
    """A function's program, whose last results are those that its effects read.

    Attributes:
        body, consts: as of `program_of`.
        observations: the effects.
        notices: the warnings about effects that are dropped, or run without their order.
    """

    body: Body
    consts: tuple[Any, ...]
    observations: tuple[Observation, ...] = ()
    notices: tuple[Notice, ...] = ()


def observed_program(closed: core.ClosedJaxpr) -> ObservedProgram:
    """Convert a traced function to a program without effects, and to its observations.

    Raises CaptureError if the results of an effect are used, or a `jax.Ref` is changed.
    """
    if not closed.effects:
        return ObservedProgram(*program_of(closed))
    remaining, notices = pruned(closed, ENTERED)
    body, consts = program_of(remaining)
    lifting = _Lifting(notices)
    body, observations = lifting.returned(*lifting.lifted(body))
    return ObservedProgram(body, consts, tuple(observations), tuple(notices))


class _Lifting:
    """A walk through a program and those nested in it that removes effects, and adds their values to the results.

    notices: the warnings about effects that are dropped, to which it adds.
    """

    def __init__(self, notices: list[Notice]) -> None:
        self.notices = notices

    def lifted(self, body: Body) -> tuple[Body, list[_Pending]]:
        """Return a program without its effects, and the effects on its values."""
        equations, pending = list[Equation](), list[_Pending]()
        tensors = dict(body.tensors)
        for e in body.equations:
            if e.origin is not None and is_effect(e.origin) and not e.results:
                pending.append(_Pending(e, tuple(a for a in e.operands if isinstance(a, int)), _binding(e)))
            elif e.origin is not None and e.origin.effects and e.name in ENTERED:
                equation, inner = self.nested(e, tensors)
                equations.append(equation)
                pending += inner
            else:
                equations.append(e)
        return replace(body, equations=tuple(equations), tensors=tensors), pending

    def nested(self, e: Equation, tensors: dict[int, Tensor]) -> tuple[Equation, list[_Pending]]:
        """Return an equation whose programs return the values of effects in them, and the effects on its results.

        Args:
            e: a scan, a remat or a conditional.
            tensors: the types of the variables around it, to which its new results are added.
        """
        loop = e.name in SCANNED
        bodies = branches(e) if e.name == COND else (nested_body(e),)
        programs, effects = zip(*map(self.lifted, bodies), strict=True)
        times = int(e.params["length"]) if loop else 1
        effects = [[p for p in pending if self.accepts(p, b, times)] for b, pending in zip(programs, effects, strict=True)]
        types = [b.tensors[v] for b, pending in zip(programs, effects, strict=True) for p in pending for v in p.values]
        extended = _with_values(programs, effects)
        changes = {"branches": extended} if e.name == COND else {"jaxpr": extended[0]}
        results = range(start := max(tensors) + 1, start + len(types))
        tensors.update(zip(results, (tensor_type((times, *t.shape), t.dtype) for t in types) if loop else types, strict=True))
        equation = replace(e, params={**e.params, **changes}, results=(*e.results, *results), origin=None)
        numbers, around = iter(results), list[_Pending]()
        for branch, p in ((k, p) for k, pending in enumerate(effects) for p in pending):
            outside = replace(p, values=tuple(next(numbers) for _ in p.values))
            if e.name == COND:
                outside = _in_branch(outside, e.operands[0], branch, len(programs))
            elif loop:
                outside = _looped(outside, times, bool(e.params["reverse"]))
            around.append(outside)
        return equation, around

    def accepts(self, pending: _Pending, body: Body, times: int) -> bool:
        """Return whether the values of an effect can leave a program that runs a number of times, and note it otherwise."""
        types = [body.tensors[v] for v in pending.values]
        if pending.name == INSPECT:
            return self.drops(pending, _SHARDINGS)
        if any(jnp.issubdtype(t.dtype, jax.dtypes.extended) for t in types):
            return self.drops(pending, "a key of random numbers cannot leave control flow")
        nbytes = times * sum(t.nbytes for t in types)
        return nbytes <= SMALL or self.drops(pending, _large(nbytes))

    def drops(self, pending: _Pending, reason: str) -> bool:
        """Note that an effect is dropped. Returns false."""
        self.notices.append(dropped(pending.name, pending.equation.source, reason))
        return False

    def returned(self, body: Body, pending: Sequence[_Pending]) -> tuple[Body, list[Observation]]:
        """Return a program that returns the values of effects, too, without gradients, and the effects on its results."""
        numbers = {a: k for k, a in reversed([*enumerate(body.outputs)]) if isinstance(a, int)}
        outputs, equations, tensors = [*body.outputs], [*body.equations], dict(body.tensors)
        observations = []
        for p in pending:
            nbytes, available = sum(body.tensors[v].nbytes for v in p.values), all(v in numbers for v in p.values)
            if p.name == INSPECT and not available:
                self.drops(p, _SHARDINGS)
                continue
            if nbytes > SMALL and not available:
                self.drops(p, _large(nbytes))
                continue
            for v in p.values:
                if v not in numbers:
                    numbers[v] = len(outputs)
                    outputs.append(_stopped(v, equations, tensors, p.equation.source))
            line = p.equation.source
            if is_ordered(p.equation.primitive, p.equation.params):
                self.notices.append(Notice(line, f"{TITLES[p.name]} runs without its order, which JAX has on one device only"))
            observations.append(Observation(p.name, line, tuple(numbers[v] for v in p.values), nbytes > SMALL, p.run))
        return replace(body, outputs=tuple(outputs), equations=tuple(equations), tensors=tensors), observations


_SHARDINGS = "only results have a sharding outside of the plan; plan.explain() shows the types of all values"


def _large(nbytes: int) -> str:
    return f"its values, {size(nbytes)}, would have to be gathered; give it a summary of them, such as a norm or a slice"


def not_replicated(observation: Observation) -> Notice:
    """Return the notice that an effect is dropped, since the plan divides the large results that it reads."""
    return dropped(observation.name, observation.line, "the plan divides its values; give it a summary of them, such as a norm")


def _binding(e: Equation) -> Run:
    """Return the function that runs an effect on its operands, but for literals."""

    def run(values: Sequence[Any]) -> None:
        rest = iter(values)
        operands = [next(rest) if isinstance(a, int) else jnp.asarray(a.value, a.tensor.dtype) for a in e.operands]
        e.primitive.bind(*operands, **free(e.primitive, e.params))

    return run


def _looped(p: _Pending, length: int, reverse: bool) -> _Pending:
    """Return an effect in a scan as one of the program around it, which runs for each step, on stacked values."""

    def step(_: None, values: Sequence[Any]) -> tuple[None, None]:
        p.run(values)
        return None, None

    def run(values: Sequence[Any]) -> None:
        lax.scan(step, None, values, length, reverse)

    return replace(p, run=run)


def _in_branch(p: _Pending, index: Atom, branch: int, count: int) -> _Pending:
    """Return an effect in a branch as one of the program around it, which reads the index of the branch, too."""
    assert isinstance(index, int), "a conditional with a constant index is captured as its branch"

    def run(values: Sequence[Any]) -> None:
        in_branch = jnp.clip(values[0], 0, count - 1) == branch
        lax.cond(in_branch, lambda rest: p.run(rest), lambda rest: None, tuple(values[1:]))

    return replace(p, values=(index, *p.values), run=run)


def _with_values(programs: Sequence[Body], effects: Sequence[Sequence[_Pending]]) -> tuple[Body, ...]:
    """Return programs that also return the values of all their effects: zeros of the other programs' in each."""
    types = [[b.tensors[v] for p in pending for v in p.values] for b, pending in zip(programs, effects, strict=True)]
    extended = []
    for k, (body, pending) in enumerate(zip(programs, effects, strict=True)):
        before = [_zeros(t) for some in types[:k] for t in some]
        after = [_zeros(t) for some in types[k + 1 :] for t in some]
        values = [v for p in pending for v in p.values]
        extended.append(replace(body, outputs=(*body.outputs, *before, *values, *after)))
    return tuple(extended)


def _zeros(tensor: Tensor) -> Literal:
    return Literal(np.zeros(tensor.shape, tensor.dtype), tensor)


def _stopped(variable: int, equations: list[Equation], tensors: dict[int, Tensor], line: str) -> int:
    """Add an equation that stops the gradient of a variable, if it has any, and return its result."""
    if not tensors[variable].floating:
        return variable
    number = max(tensors) + 1
    tensors[number] = tensors[variable]
    equations.append(stop_gradient(variable, number, line))
    return number
