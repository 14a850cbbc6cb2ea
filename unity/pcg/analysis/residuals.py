"""Residuals: the values of an operator, inner ones included, that the forward pass keeps for the backward pass.

A derivative is linear in the tangent, and its coefficients are the residuals. The record of a primitive names them: none for a
linear primitive, the other factor of a product, the result (tanh) or the operands. XLA keeps fewer values: its fusions recompute
values that follow elementwise from kept ones. A CPU's reductions read a buffer, though, which is kept beside its sources; a GPU's
compute in their loop what they read. In a scan nothing is recomputed: JAX stacks the residuals of each step, and no fusion crosses
the loop.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from unity.pcg.analysis.traced_residuals import TypedEquation, traced_residuals
from unity.pcg.capture.heavy_operators import multiplies, reduces
from unity.pcg.ir.dead_code import ancestors
from unity.pcg.ir.differentiable_dependence import differentiated
from unity.pcg.ir.program import Atom, Body, Equation
from unity.pcg.jaxprs.jaxprs import BRANCHED, CUSTOM_VJP, RULED, SCANNED
from unity.pcg.operators.kernel_primitive import KERNEL, KernelError, kernel_residuals
from unity.pcg.propagation.nested.derivative_rules import Unreadable, jvp_body, read_residuals, vjp_bodies
from unity.pcg.propagation.specifications import spec_of
from unity.pcg.types.factors import facts_of

# Recompute a value if its sources take at most this multiple of its bytes, such as a bias beside the sum's other operand.
SLACK = 1.1
WIDER = 2  # float32 over bfloat16
ROW = 16  # bytes


@dataclass(frozen=True)
class Residuals:
    """The residuals of one operator.

    Attributes:
        operands: whether each operand is one.
        results: whether each result is one.
        inner: the inner values that are residuals, each as a variable with the same sharding, and the bytes of the whole value.
        hosted: the positions in `inner` of those that a checkpoint in a branch of a conditional offloads to the host.
    """

    operands: tuple[bool, ...]
    results: tuple[bool, ...]
    inner: tuple[tuple[int, int], ...] = ()
    hosted: tuple[int, ...] = ()


@lru_cache(maxsize=65536)
def residuals(body: Body, differentiated: tuple[bool, ...], stacked: bool = False, buffered: bool = False) -> Residuals:
    """Return the residuals of an operator.

    Args:
        body: its program.
        differentiated: whether a gradient flows to each operand.
        stacked: whether it is part of a scan's step.
        buffered: whether reductions read what they reduce from memory, as on a CPU.
    """
    derivative = _Derivative(body, stacked, buffered)
    derivative.differentiate({v for v, flag in zip(body.inputs, differentiated, strict=True) if flag})
    chosen = derivative.chosen()
    boundary = {*body.inputs, *(a for a in body.outputs if isinstance(a, int))}
    results = tuple(isinstance(a, int) and a in chosen and a not in body.inputs for a in body.outputs)
    inner = tuple((v, body.tensors[v].nbytes) for v in chosen if v not in boundary)
    hosted = tuple(len(inner) + k for k in derivative.hosted)
    return Residuals(tuple(v in chosen for v in body.inputs), results, inner + tuple(derivative.extra), hosted)


@lru_cache(maxsize=65536)
def read_backward(body: Body, differentiated: tuple[bool, ...], stacked: bool = False) -> frozenset[int]:
    """Return the variables that the derivative of an operator reads, kept or recomputed. Arguments as for `residuals`."""
    derivative = _Derivative(body, stacked)
    active = {v for v, flag in zip(body.inputs, differentiated, strict=True) if flag}
    derivative.differentiate(active)
    # the residuals of control flow are computed inside of it
    control_flow = {v for e in body.equations if e.name in (*BRANCHED, *SCANNED) for v in e.results if v in active}
    return frozenset(derivative.read_atoms | control_flow | {v for v, _ in derivative.extra})


@lru_cache(maxsize=65536)
def invariant(body: Body, differentiated: tuple[bool, ...]) -> frozenset[int]:
    """Return the variables that the derivative of an operator reads and that depend on no operand, such as the mask of attention.

    In a step of a loop JAX computes them once, before the loop.
    """
    derivative = _Derivative(body, stacked=False)
    derivative.differentiate({v for v, flag in zip(body.inputs, differentiated, strict=True) if flag})
    return frozenset(derivative.invariant)


def recomputable(body: Body, kept: Residuals) -> bool:
    """Return whether an operator's inner residuals follow from operands that are residuals, and none of its results is one."""
    sources = ancestors(body, (v for v, _ in kept.inner))
    sources_kept = [flag for v, flag in zip(body.inputs, kept.operands, strict=True) if v in sources]
    return bool(kept.inner) and all(sources_kept) and not any(kept.results)


class _Derivative:
    """The derivative of one body, and the values that it reads.

    Args:
        body: the program.
        stacked: whether it is part of a scan's step.
        buffered: whether reductions read what they reduce from memory.
        rule: whether it is the program of a custom derivative.

    Attributes:
        needed: the variables that it reads, in order; of equal ones, the first.
        read_atoms: the variables that it reads, equal ones included.
        invariant: the variables that it reads and that do not depend on inputs.
        elementwise: the needed variables that others than reductions read.
        extra: further residuals, as in `Residuals.inner`.
        hosted: the positions in `extra` of those in the memory of the host.
        buffers: variables that are read from memory, so that they are not fused into their users.
        varying: variables that depend on inputs.
        known_sources: the results of `sources`.
    """

    def __init__(self, body: Body, stacked: bool, buffered: bool = False, rule: bool = False) -> None:
        self.body, self.stacked, self.buffered, self.rule = body, stacked, buffered, rule
        self.producers = {v: e for e in body.equations for v in e.results}
        self.needed: dict[int, None] = {}
        self.read_atoms: set[int] = set()
        self.invariant: set[int] = set()
        self.elementwise: set[int] = set()
        self.extra: list[tuple[int, int]] = []
        self.hosted: list[int] = []
        self.known_sources: dict[int, frozenset[int]] = {}
        self.buffers = {v for e in body.equations if self.reads_buffers(e) for v in self.buffers_of(e)}
        self.varying = set(body.inputs)
        for e in body.equations:
            if not self.varying.isdisjoint(_variables(e)):
                self.varying.update(e.results)

    def reads_buffers(self, e: Equation) -> bool:
        """Return whether an equation reads its operands from memory, so that their producers do not fuse into it."""
        return facts_of(e.name).reads_buffers and not multiplies(e) and (self.buffered or not reduces(self.body, e))

    def buffers_of(self, e: Equation) -> list[int]:
        """Return the buffers that a reduction reads: the sources of the equations that fuse into it."""
        buffers, stack = [], _variables(e)
        while stack:
            producer = self.producers.get(v := stack.pop())
            if producer is not None and facts_of(producer.name).fused_into_reductions:
                stack += _variables(producer)
            else:
                buffers.append(v)
        return buffers

    def differentiate(self, active: set[int]) -> None:
        """Record the reads of the derivative for these variables, and add all variables that depend on them to `active`.

        In the program of a custom derivative, these are tangents.
        """
        useful = {a for a in self.body.outputs if isinstance(a, int) and self.body.tensors[a].floating}
        for e in reversed(self.body.equations):
            if not useful.isdisjoint(e.results):
                useful.update(differentiated(e))
        for e in self.body.equations:
            facts = facts_of(e.name)
            at = [p for p, a in enumerate(e.operands) if a in active and facts.reads_for(p) is not None]
            results = [v for v in e.results if self.body.tensors[v].floating and v in useful]
            if at and results:
                active.update(results)
                self.read(e, at)

    def need(self, atoms: Iterable[Atom], elementwise: bool = True) -> None:
        """Record that the derivative reads these atoms, elementwise or in a reduction."""
        atoms = list(atoms)
        read = [a for a in atoms if isinstance(a, int) and a in self.varying]
        self.read_atoms.update(read)
        self.invariant.update(a for a in atoms if isinstance(a, int) and a not in self.varying)
        firsts = [self.first_equal[a] for a in read]
        self.needed.update(dict.fromkeys(firsts))
        self.elementwise.update(firsts if elementwise else ())

    @cached_property
    def first_equal(self) -> dict[int, int]:
        """For every variable, the first with an equal value, broadcasts aside: a variance computes the mean again."""
        numbers: dict[Hashable, int] = {}
        number_of = {v: numbers.setdefault(v, k) for k, v in enumerate(self.body.inputs)}
        for e in self.body.equations:
            operands = tuple(number_of[a] if isinstance(a, int) else a.key for a in e.operands)
            moved = e.operands[0] if facts_of(e.name).moves else None
            for v in e.results:
                key = ("alone", v) if e.name in RULED or len(e.results) > 1 else (e.signature, operands)
                number_of[v] = number_of[moved] if isinstance(moved, int) else numbers.setdefault(key, len(numbers))
        first: dict[tuple[int, int], int] = {}
        return {v: first.setdefault((number, self.body.tensors[v].nbytes), v) for v, number in number_of.items()}

    def read(self, e: Equation, at: list[int]) -> None:
        """Record the reads of the derivative of one equation for the operands at these positions.

        In a scan these are exactly the values that JAX stacks: where a function of operands may be one, JAX traces it. So it does
        for a conditional, whose residuals are its results in the forward pass.
        """
        if e.name in RULED:
            self.read_rule(e, at)
            return
        if e.name == KERNEL:
            self.read_kernel(e)
            return
        spec, facts = spec_of(self.body, e), facts_of(e.name)
        groups = (*(spec.linear if spec is not None else ()), *facts.linear_in)
        together = next((g for g in groups if all(p in g for p in at)), None)
        group_of = {p: together or next((g for g in groups if p in g), None) for p in at}
        factors = {p: [a for q, a in enumerate(e.operands) if q not in g] for p, g in group_of.items() if g is not None}
        exact = factors.keys() >= set(at) and all(self.body.tensor(a).floating for read in factors.values() for a in read)
        if (self.stacked or e.name in BRANCHED) and not exact and self.read_traced(e, at):
            return
        for p in at:
            reads = facts.reads_for(p)
            if p in factors:
                self.read_factors(e, p, factors[p])
            elif reads is not None:
                self.need(a for q, a in enumerate(e.operands) if q in reads.operands)
                self.need(v for k, v in enumerate(e.results) if k in reads.results)

    def read_traced(self, e: Equation, at: list[int]) -> bool:
        """Record the residuals that JAX itself keeps of an equation. Returns whether it can differentiate the equation."""
        varying = tuple(p for p, a in enumerate(e.operands) if a in self.varying)
        operands, results = (tuple(self.body.tensor(a).struct for a in atoms) for atoms in (e.operands, e.results))
        residuals = traced_residuals(TypedEquation(e.signature, e.identity, operands, results, tuple(at), varying, e))
        if residuals is not None:
            self.need(e.operands[p] for p in residuals.operands)
            self.need(e.results[k] for k in residuals.results)
            self.extra += [(e.results[0], nbytes) for nbytes in (*residuals.other_nbytes, *residuals.host_nbytes)]
            self.hosted += range(len(self.extra) - len(residuals.host_nbytes), len(self.extra))
        return residuals is not None

    def read_factors(self, e: Equation, p: int, factors: list[Atom]) -> None:
        """Record the reads of the other factors of operand `p` of a product.

        If the operand is smaller than the result, its gradient is a reduction, and may read buffers.
        """
        smaller = self.unbroadcast_nbytes(e.operands[p]) < self.body.tensors[e.results[0]].nbytes
        self.need(factors, elementwise=not (self.buffered and smaller))
        self.buffers.update(a for a in factors if self.buffered and smaller and isinstance(a, int))

    def unbroadcast_nbytes(self, atom: Atom) -> int:
        """Return the bytes of a value before broadcasts."""
        producer = self.producers.get(atom) if isinstance(atom, int) else None
        if producer is not None and producer.name == "broadcast_in_dim":
            return self.unbroadcast_nbytes(producer.operands[0])
        return self.body.tensor(atom).nbytes

    def read_rule(self, e: Equation, at: list[int]) -> None:
        """Record the reads of a custom derivative: all operands if its program cannot be read."""
        try:
            self.read_program(e, at)
        except Unreadable:
            self.need(e.operands)

    def read_kernel(self, e: Equation) -> None:
        """Record the residuals of a kernel's declared derivative."""
        try:
            declared = kernel_residuals(e.params["function"], tuple(self.body.tensor(a).struct for a in e.operands))
        except KernelError as problem:
            raise KernelError(f"{e.source}: {problem.reason}") from problem
        self.need(a for a, flag in zip((*e.operands, *e.results), (*declared.operands, *declared.results), strict=True) if flag)
        self.extra += [(e.results[0], nbytes) for nbytes in declared.other_nbytes]

    def read_program(self, e: Equation, at: list[int]) -> None:
        """Record the reads of a custom derivative from its program, whose first inputs are the operands of the call."""
        if e.name in CUSTOM_VJP:
            program = vjp_bodies(e).forward
            inside = _Derivative(program, self.stacked, self.buffered, rule=True)
            inside.need(program.outputs[len(e.results) + k] for k in read_residuals(e))
        else:
            rule, program = jvp_body(e), jvp_body(e).body
            inside = _Derivative(program, self.stacked, self.buffered, rule=True)
            floating = [p for p, flag in enumerate(rule.floating) if flag]
            tangents = program.inputs[len(e.operands) :]
            inside.differentiate({t for p, t in zip(floating, tangents, strict=True) if p in at})
        outside: dict[int, Atom] = dict(zip(program.inputs, e.operands, strict=False))
        outside |= {a: v for a, v in zip(program.outputs, e.results, strict=False) if isinstance(a, int)}
        chosen = inside.chosen()
        self.need(outside[v] for v in chosen if v in outside)
        self.extra += [(e.results[0], program.tensors[v].nbytes) for v in chosen if v not in outside] + [
            (e.results[0], nbytes) for _, nbytes in inside.extra
        ]

    def chosen(self) -> dict[int, None]:
        """Return the residuals: the needed variables that are not recomputed, and the sources of those that are.

        In the program of a custom derivative every cheap variable is recomputed, because the caller decides about the operands of
        the call anew.
        """
        cheap = [v for v in self.needed if not self.stacked and self.is_cheap(v)]
        residuals = {v: None for v in self.needed if v not in cheap}
        for v in [v for v in residuals if v in self.elementwise and self.is_recomputable(v) and not self.stacked]:
            residuals.update(dict.fromkeys(self.sources(v) if self.are_small(self.sources(v), v) else ()))
        for v in cheap:
            sources = {s for s in self.sources(v) if s not in residuals}
            residuals.update((s, None) for s in (sources if self.rule or self.are_small(sources, v) else (v,)))
        return residuals

    def are_small(self, sources: Iterable[int], v: int) -> bool:
        """Return whether a variable's sources take about as many bytes as it does, or fewer."""
        return sum(self.body.tensors[s].nbytes for s in sources) <= SLACK * self.body.tensors[v].nbytes

    def is_recomputable(self, v: int) -> bool:
        """Return whether a variable follows elementwise from others."""
        return v in self.producers and facts_of(self.producers[v].name).recomputed

    def is_widened(self, v: int) -> bool:
        """Return whether a GPU recomputes a wide variable, such as a softmax's exponentials in float32, from narrow residuals.

        Its compiler makes a softmax one kernel where rows are multiples of `ROW` bytes, and keeps exponentials of others.
        """
        if self.buffered or v not in self.producers or not facts_of(self.producers[v].name).pointwise:
            return False
        wide, sources = self.body.tensors[v], [self.body.tensors[s] for s in self.sources(v)]
        narrow = min((s.itemsize for s in sources), default=wide.itemsize)
        if narrow >= wide.itemsize or not wide.ndim or wide.shape[-1] * narrow % ROW:
            return False
        return WIDER * sum(s.nbytes for s in sources) <= SLACK * wide.nbytes

    def is_cheap(self, v: int) -> bool:
        """Return whether a variable is recomputable and no reduction reads it from a buffer."""
        return (self.is_recomputable(v) or self.is_widened(v)) and v not in self.buffers

    def sources(self, v: int) -> frozenset[int]:
        """Return the variables from which a recomputable one follows through cheap ones. All reads must be recorded before."""
        if v not in self.known_sources:
            varying = (a for a in _variables(self.producers[v]) if a in self.varying)
            sources = (self.sources(a) if self.is_cheap(a) else {self.first_equal[a]} for a in varying)
            self.known_sources[v] = frozenset[int]().union(*sources)
        return self.known_sources[v]


def _variables(e: Equation) -> list[int]:
    return [a for a in e.operands if isinstance(a, int)]
