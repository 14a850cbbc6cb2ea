"""What the backward pass needs of the forward pass: which values of an operator are kept, its inner ones included.

A derivative is linear in what is differentiated; whatever multiplies that must still be there. Every primitive says what it is:
nothing where it is linear, the other factor of a product, its result (tanh) or its operands. XLA keeps less: what follows
elementwise from kept values is computed again where it is used, unless a reduction reads it, which makes it a buffer anyway. In
a scan nothing is computed again: JAX stacks what each step leaves, and no fusion crosses the loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from unity.pcg.body import Atom, Body, Equation
from unity.pcg.custom import jvp_body, vjp_bodies
from unity.pcg.solve import spec_of

# Their derivative is computed from the result. JAX saves so many more values of its size ((1 - y) beside y).
OF_RESULT = {"exp": 0, "exp2": 0, "expm1": 0, "tanh": 1, "logistic": 1, "sqrt": 0, "rsqrt": 0, "cbrt": 0}
# No derivative flows through these.
FLAT = frozenset(
    "eq ne lt le gt ge and or not xor sign floor ceil round is_finite stop_gradient iota argmax argmin random_bits".split()
)
# The same values, placed otherwise.
MOVED = frozenset("broadcast_in_dim reshape transpose squeeze expand_dims convert_element_type copy rev name stop_gradient".split())
# Cheaper to compute again than to keep.
CHEAP = FLAT | frozenset("add sub mul neg abs max min clamp select_n square integer_pow real imag conj add_any iota".split())
# What a reduction computes on the way.
FOLDED = frozenset("mul square integer_pow convert_element_type".split())
REDUCTIONS = ("reduce_", "dot_general", "conv_general_dilated", "cumsum", "reduce_window")
CUSTOM_VJP = ("custom_vjp_call", "custom_vjp_call_jaxpr")


@dataclass(frozen=True)
class Residuals:
    """Which operands and results are kept; and inner values, each as a variable that it lies like, and its whole bytes."""

    operands: tuple[bool, ...]
    results: tuple[bool, ...]
    inner: tuple[tuple[int, int], ...] = ()


@lru_cache(maxsize=65536)
def residuals(body: Body, differentiated: tuple[bool, ...], stacked: bool = False) -> Residuals:
    """What is kept of an operator if gradients flow to the operands marked. `stacked`: it is part of a scan's step."""
    return _Reading(body, stacked).residuals({v for v, flag in zip(body.inputs, differentiated, strict=True) if flag})


class _Reading:
    """One body, and the values of it that are needed: those `chosen` are kept."""

    def __init__(self, body: Body, stacked: bool, rule: bool = False) -> None:
        self.body, self.stacked, self.rule = body, stacked, rule
        self.maker = {v: e for e in body.equations for v in e.results}
        self.needed: dict[int, None] = {}
        self.chosen: dict[int, None] = {}
        self.more: list[tuple[int, int]] = []
        self.buffers = {v for e in body.equations if e.name.startswith(REDUCTIONS) for v in self.folded(e)}
        self.varying = set(body.inputs)  # depends on the operands
        for e in body.equations:
            if self.varying.intersection(e.operands):
                self.varying.update(e.results)

    def folded(self, e: Equation) -> list[int]:
        """The values that a reduction reads, before what it computes on the way."""
        found, stack = [], [a for a in e.operands if isinstance(a, int)]
        while stack:
            made = self.maker.get(v := stack.pop())
            if made is not None and made.name in FOLDED:
                stack += [a for a in made.operands if isinstance(a, int)]
            else:
                found.append(v)
        return found

    def residuals(self, live: set[int]) -> Residuals:
        """`live`: the variables that carry a derivative (in a derivative's own program, that are one)."""
        wanted = self.leading_to_results()
        for e in self.body.equations:
            at = [p for p, a in enumerate(e.operands) if isinstance(a, int) and a in live]
            ahead = [v for v in e.results if self.body.tensors[v].floating and v in wanted]
            if at and ahead and e.name not in FLAT:
                live.update(ahead)
                self.read(e, at)
        self.choose()
        outputs = self.body.outputs
        ends = {*self.body.inputs, *(a for a in outputs if isinstance(a, int))}
        inner = tuple((v, self.body.tensors[v].nbytes) for v in self.chosen if v not in ends)
        kept = tuple(isinstance(a, int) and a in self.chosen and a not in self.body.inputs for a in outputs)
        return Residuals(tuple(v in self.chosen for v in self.body.inputs), kept, inner + tuple(self.more))

    def leading_to_results(self) -> set[int]:
        wanted = {a for a in self.body.outputs if isinstance(a, int) and self.body.tensors[a].floating}
        for e in reversed(self.body.equations):
            if e.name not in FLAT and wanted.intersection(e.results):
                wanted.update(a for a in e.operands if isinstance(a, int))
        return wanted

    def need(self, atom: Atom) -> None:
        if isinstance(atom, int) and atom in self.varying:
            self.needed[atom] = None

    def read(self, e: Equation, at: list[int]) -> None:
        """What the derivative of one equation reads, if it is taken for the operands at these positions."""
        if e.name == "custom_jvp_call" or e.name in CUSTOM_VJP:
            self.read_rule(e, at)
            return
        spec = spec_of(self.body, e)
        groups = spec.linear if spec is not None else ()
        together = next((g for g in groups if g.issuperset(at)), None)
        if together is not None or all(any(p in g for g in groups) for p in at):
            for p in at:
                group = together or next(g for g in groups if p in g)
                self.read_factors(e, p, [a for q, a in enumerate(e.operands) if q not in group])
        elif e.name in OF_RESULT:
            self.need(e.results[0])
            copies = OF_RESULT[e.name] if self.stacked else 0
            self.more += [(e.results[0], self.body.tensors[e.results[0]].nbytes)] * copies
        else:
            for a in e.operands:
                self.need(a)

    def read_factors(self, e: Equation, p: int, factors: list[Atom]) -> None:
        """The other factors of a product. The gradient of one that is smaller is a reduction, and that reads a buffer."""
        size = self.body.tensors[e.results[0]].nbytes
        for a in factors:
            self.need(a)
            if isinstance(a, int) and self.source(e.operands[p]) < size:
                self.buffers.add(a)

    def source(self, atom: Atom) -> int:
        """Bytes of a value before it was broadcast."""
        made = self.maker.get(atom) if isinstance(atom, int) else None
        return self.source(made.operands[0]) if made is not None and made.name == "broadcast_in_dim" else self.body.tensor(atom).nbytes

    def read_rule(self, e: Equation, at: list[int]) -> None:
        """What a custom derivative reads: through its own program, whose arguments are the call's operands."""
        if e.name in CUSTOM_VJP:
            rule = vjp_bodies(e)
            inside = _Reading(rule.forward, self.stacked, rule=True)
            for a in rule.forward.outputs[len(e.results) :]:
                inside.need(a)
            inside.choose()
            results = rule.forward.outputs[: len(e.results)]
        else:
            rule = jvp_body(e)
            inside = _Reading(rule.body, self.stacked, rule=True)
            floating = [p for p, flag in enumerate(rule.floating) if flag]
            tangents = rule.body.inputs[len(e.operands) :]
            inside.residuals({t for p, t in zip(floating, tangents, strict=True) if p in at})
            results = rule.body.outputs[: len(e.results)]
        outside = dict(zip(inside.body.inputs, e.operands, strict=False))
        outside |= {a: v for a, v in zip(results, e.results, strict=True) if isinstance(a, int)}
        for v in inside.chosen:
            if v in outside:
                self.need(outside[v])
            else:
                self.more.append((e.results[0], inside.body.tensors[v].nbytes))

    def choose(self) -> None:
        """Decides what is kept of what is needed: first what cannot be computed again, then what is not worth it.

        What a custom rule computes cheaply is followed to the call's operands, for which the same is asked outside.
        """
        again = [v for v in self.needed if not self.stacked and v not in self.buffers and self.cheap(v)]
        self.chosen.update((v, None) for v in self.needed if v not in again)
        for v in again:
            roots = {r for r in self.roots(v) if r not in self.chosen}
            better = sum(self.body.tensors[r].nbytes for r in roots) <= self.body.tensors[v].nbytes
            self.chosen.update((r, None) for r in (roots if better or self.rule else (v,)))

    def cheap(self, v: int) -> bool:
        return v in self.maker and self.maker[v].name in CHEAP | MOVED

    def roots(self, v: int) -> set[int]:
        """The values that a cheap one is computed again from."""
        found: set[int] = set()
        for a in self.maker[v].operands:
            if isinstance(a, int) and a in self.varying:
                found |= self.roots(a) if self.cheap(a) and a not in self.buffers and a not in self.chosen else {a}
        return found
