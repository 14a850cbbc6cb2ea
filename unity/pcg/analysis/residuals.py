"""What the backward pass needs of the forward pass: which values of an operator are kept, its inner ones included.

A derivative is linear in what is differentiated; whatever multiplies that must still be there. Every primitive says what it is:
nothing where it is linear, the other factor of a product, its result (tanh) or its operands. XLA keeps less: what follows
elementwise from kept values is computed again where it is used elementwise; a reduction reads a buffer, though, which is kept
beside what it was computed from. In a scan nothing is computed again: JAX stacks what each step leaves, and no fusion crosses
the loop.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from typing import Any

import jax
from jax import lax
from jax.extend import core

from unity.pcg.ir.program import Atom, Body, Equation
from unity.pcg.operators.kernel_primitive import KERNEL, KernelError, kernel_residuals
from unity.pcg.propagation.derivative_rules import Unreadable, jvp_body, vjp_bodies
from unity.pcg.propagation.solver import spec_of
from unity.pcg.types.factors import Reads, facts_of

# So much more may be kept instead of a value for it to be computed again: a bias beside what it is added to.
SLACK = 1.1
CUSTOM_VJP = ("custom_vjp_call", "custom_vjp_call_jaxpr")
CUSTOM = ("custom_jvp_call", *CUSTOM_VJP)
BRANCHING = ("cond", "scan")


@cache
def stacked(name: str) -> tuple[bool, bool, int]:
    """What JAX stacks of a function in a scan: whether its operand, whether its result, and how many other values of its size.

    Versions of JAX differ (1 - y beside y, or 1 - y² alone), so this one is asked.
    """
    steps = jax.ShapeDtypeStruct((2, 3), "float32")
    function = partial(lax.integer_pow, y=3) if name == "integer_pow" else getattr(lax, name)

    def run(xs: jax.Array) -> Any:
        return jax.vjp(lambda xs: lax.scan(lambda _, x: (None, function(x)), None, xs)[1], xs)

    program = jax.make_jaxpr(run)(steps).jaxpr
    scan = next(e for e in program.eqns if e.primitive.name == "scan")
    inner = scan.params["jaxpr"]
    step = inner.jaxpr if isinstance(inner, core.ClosedJaxpr) else inner
    made = {id(v): id(of) for v, of in zip(scan.outvars, step.outvars, strict=True)}  # of each stack, the value in a step
    made |= {id(v): 0 for v in program.invars}
    result, *kept = (made[id(v)] for v in program.outvars if id(v) in made)
    return 0 in kept, result in kept, len({*kept} - {result, 0})


@dataclass(frozen=True)
class Residuals:
    """Which operands and results are kept; and inner values, each as a variable that it lies like, and its whole bytes."""

    operands: tuple[bool, ...]
    results: tuple[bool, ...]
    inner: tuple[tuple[int, int], ...] = ()


@lru_cache(maxsize=65536)
def residuals(body: Body, differentiated: tuple[bool, ...], stacked: bool = False) -> Residuals:
    """What is kept of an operator if gradients flow to the operands marked. `stacked`: it is part of a scan's step."""
    reading = _Reading(body, stacked)
    reading.differentiate({v for v, flag in zip(body.inputs, differentiated, strict=True) if flag})
    chosen = reading.chosen()
    ends = {*body.inputs, *(a for a in body.outputs if isinstance(a, int))}
    results = tuple(isinstance(a, int) and a in chosen and a not in body.inputs for a in body.outputs)
    inner = tuple((v, body.tensors[v].nbytes) for v in chosen if v not in ends)
    return Residuals(tuple(v in chosen for v in body.inputs), results, inner + tuple(reading.more))


@lru_cache(maxsize=65536)
def read_backward(body: Body, differentiated: tuple[bool, ...], stacked: bool = False) -> frozenset[int]:
    """Returns the variables that must be there for the gradients of the operands marked, wherever they come from."""
    reading = _Reading(body, stacked)
    live = {v for v, flag in zip(body.inputs, differentiated, strict=True) if flag}
    reading.differentiate(live)
    inside = {v for e in body.equations if e.name in BRANCHING for v in e.results if v in live}  # what these keep is made in them
    return frozenset(reading.read_atoms | inside | {v for v, _ in reading.more})


def recomputable(body: Body, kept: Residuals) -> bool:
    """Whether the inner values that an operator keeps follow from operands that it keeps anyway, and it keeps no results."""
    maker = {v: e for e in body.equations for v in e.results}
    seen: set[int] = set()
    stack = [v for v, _ in kept.inner]
    while stack:
        v = stack.pop()
        if v not in seen:
            seen.add(v)
            stack += _variables(maker[v]) if v in maker else []
    read = [flag for v, flag in zip(body.inputs, kept.operands, strict=True) if v in seen]
    return bool(kept.inner) and all(read) and not any(kept.results)


class _Reading:
    """One body, and which of its values a derivative reads. `rule`: the body is a custom derivative's own program."""

    def __init__(self, body: Body, stacked: bool, rule: bool = False) -> None:
        self.body, self.stacked, self.rule = body, stacked, rule
        self.maker = {v: e for e in body.equations for v in e.results}
        self.needed: dict[int, None] = {}
        self.read_atoms: set[int] = set()  # the same, but not the first of those that are equal
        self.elementwise: set[int] = set()  # those that are not needed by reductions alone
        self.more: list[tuple[int, int]] = []  # kept beside the body's own values
        self.buffers = {v for e in body.equations if facts_of(e.name).reads_buffers for v in self.folded(e)}
        self.varying = set(body.inputs)  # what is not constant
        for e in body.equations:
            if not self.varying.isdisjoint(_variables(e)):
                self.varying.update(e.results)

    def folded(self, e: Equation) -> list[int]:
        """The values that a reduction reads, before what it computes on the way."""
        found, stack = [], _variables(e)
        while stack:
            made = self.maker.get(v := stack.pop())
            if made is not None and facts_of(made.name).fused_into_reductions:
                stack += _variables(made)
            else:
                found.append(v)
        return found

    def differentiate(self, live: set[int]) -> None:
        """Reads what the derivative for these variables needs (in a rule's program, for these tangents)."""
        wanted = {a for a in self.body.outputs if isinstance(a, int) and self.body.tensors[a].floating}
        for e in reversed(self.body.equations):
            if facts_of(e.name).reads is not Reads.NOTHING and not wanted.isdisjoint(e.results):
                wanted.update(_variables(e))
        for e in self.body.equations:
            at = [p for p, a in enumerate(e.operands) if isinstance(a, int) and a in live]
            ahead = [v for v in e.results if self.body.tensors[v].floating and v in wanted]
            if at and ahead and facts_of(e.name).reads is not Reads.NOTHING:
                live.update(ahead)
                self.read(e, at)

    def need(self, atoms: Iterable[Atom], elementwise: bool = True) -> None:
        read = [a for a in atoms if isinstance(a, int) and a in self.varying]
        self.read_atoms.update(read)
        found = [self.same[a] for a in read]
        self.needed.update(dict.fromkeys(found))
        self.elementwise.update(found if elementwise else ())

    @cached_property
    def same(self) -> dict[int, int]:
        """For every value the first that equals it, wherever broadcasts stand: a variance computes a mean of its own."""
        numbers: dict[Hashable, int] = {}
        meaning = {v: numbers.setdefault(v, k) for k, v in enumerate(self.body.inputs)}
        for e in self.body.equations:
            operands = tuple(meaning[a] if isinstance(a, int) else a.key for a in e.operands)
            moved = e.operands[0] if facts_of(e.name).moves else None
            for v in e.results:
                key = ("alone", v) if e.name in CUSTOM or len(e.results) > 1 else (e.signature, operands)
                meaning[v] = meaning[moved] if isinstance(moved, int) else numbers.setdefault(key, len(numbers))
        first: dict[tuple[int, int], int] = {}
        return {v: first.setdefault((m, self.body.tensors[v].nbytes), v) for v, m in meaning.items()}

    def read(self, e: Equation, at: list[int]) -> None:
        """What the derivative of one equation reads, if it is taken for the operands at these positions."""
        if e.name in CUSTOM:
            self.read_rule(e, at)
            return
        if e.name == KERNEL:
            self.read_kernel(e)
            return
        spec = spec_of(self.body, e)
        groups = spec.linear if spec is not None else ()
        facts = facts_of(e.name)
        groups = groups if facts.linear_in is None else (*groups, frozenset({facts.linear_in}))
        together = next((g for g in groups if g.issuperset(at)), None)
        if together is not None or all(any(p in g for g in groups) for p in at):
            for p in at:
                group = together or next(g for g in groups if p in g)
                self.read_factors(e, p, [a for q, a in enumerate(e.operands) if q not in group])
        elif facts.reads is Reads.RESULT or (self.stacked and facts.reads is Reads.FUNCTION):
            operand, itself, others = stacked(e.name) if self.stacked else (False, True, 0)
            self.need(e.operands if operand else ())
            self.need(e.results if itself else ())
            self.more += [(e.results[0], self.body.tensors[e.results[0]].nbytes)] * others
        else:
            self.need(e.operands)

    def read_factors(self, e: Equation, p: int, factors: list[Atom]) -> None:
        """The other factors of a product. The gradient of a smaller operand is a reduction, and reads a buffer."""
        smaller = self.source(e.operands[p]) < self.body.tensors[e.results[0]].nbytes
        self.need(factors, elementwise=not smaller)
        self.buffers.update(a for a in factors if smaller and isinstance(a, int))

    def source(self, atom: Atom) -> int:
        """Bytes of a value before it was broadcast."""
        made = self.maker.get(atom) if isinstance(atom, int) else None
        if made is not None and made.name == "broadcast_in_dim":
            return self.source(made.operands[0])
        return self.body.tensor(atom).nbytes

    def read_rule(self, e: Equation, at: list[int]) -> None:
        """What a custom derivative reads, found in its own program, whose first arguments are the call's operands."""
        try:
            self.read_program(e, at)
        except Unreadable:
            self.need(e.operands)

    def read_kernel(self, e: Equation) -> None:
        """What a kernel's own derivative keeps."""
        try:
            found = kernel_residuals(e.params["function"], tuple(self.body.tensor(a).struct for a in e.operands))
        except KernelError as problem:
            raise KernelError(f"{e.source}: {problem.reason}") from problem
        self.need(a for a, flag in zip((*e.operands, *e.results), (*found.operands, *found.results), strict=True) if flag)
        self.more += [(e.results[0], nbytes) for nbytes in found.other_nbytes]

    def read_program(self, e: Equation, at: list[int]) -> None:
        """What the program of a custom derivative reads."""
        if e.name in CUSTOM_VJP:
            program = vjp_bodies(e).forward
            inside = _Reading(program, self.stacked, rule=True)
            inside.need(program.outputs[len(e.results) :])
        else:
            rule, program = jvp_body(e), jvp_body(e).body
            inside = _Reading(program, self.stacked, rule=True)
            floating = [p for p, flag in enumerate(rule.floating) if flag]
            tangents = program.inputs[len(e.operands) :]
            inside.differentiate({t for p, t in zip(floating, tangents, strict=True) if p in at})
        outside: dict[int, Atom] = dict(zip(program.inputs, e.operands, strict=False))
        outside |= {a: v for a, v in zip(program.outputs, e.results, strict=False) if isinstance(a, int)}
        chosen = inside.chosen()
        self.need(outside[v] for v in chosen if v in outside)
        self.more += [(e.results[0], program.tensors[v].nbytes) for v in chosen if v not in outside] + [
            (e.results[0], nbytes) for _, nbytes in inside.more
        ]

    def chosen(self) -> dict[int, None]:
        """What is kept of what is needed: all that cannot be computed again, and what it takes to compute the rest.

        What a rule computes cheaply is followed to the call's operands in any case: the same is asked there again.
        """
        again = [v for v in self.needed if not self.stacked and self.cheap(v)]
        found = {v: None for v in self.needed if v not in again}
        for v in [v for v in found if v in self.elementwise and self.follows(v) and not self.stacked]:
            found.update(dict.fromkeys(self.roots(v)))
        for v in again:
            roots = {r for r in self.roots(v) if r not in found}
            better = sum(self.body.tensors[r].nbytes for r in roots) <= SLACK * self.body.tensors[v].nbytes
            found.update((r, None) for r in (roots if better or self.rule else (v,)))
        return found

    def follows(self, v: int) -> bool:
        """Whether a value follows elementwise from others."""
        return v in self.maker and facts_of(self.maker[v].name).recomputed

    def cheap(self, v: int) -> bool:
        """Whether it is computed again, then, rather than kept."""
        return self.follows(v) and v not in self.buffers

    def roots(self, v: int) -> set[int]:
        """The values that a cheap one is computed again from."""
        found: set[int] = set()
        for a in _variables(self.maker[v]):
            if a in self.varying:
                found |= self.roots(a) if self.cheap(a) else {self.same[a]}
        return found


def _variables(e: Equation) -> list[int]:
    return [a for a in e.operands if isinstance(a, int)]
