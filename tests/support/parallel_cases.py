"""Runs an operator on pieces, in every way that the operator table allows, and compares it with the whole operator."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ci_cases import CI
from compiler_options import QUICK
from pieces import differing, dual, join, mesh_of, normal, stack_spec, take
from separate_equations import COLLECTIVES

from unity.exec.compiled.hlo import collectives
from unity.pcg.ir.program import Body, close
from unity.pcg.local.interpreter import run_body
from unity.pcg.parallel.resharding import steps
from unity.pcg.propagation.choice import AGREED, Choice
from unity.pcg.propagation.choices import choices
from unity.pcg.propagation.halos import exchanges
from unity.pcg.propagation.nested.agreements import RulePass
from unity.pcg.propagation.placement import placing
from unity.pcg.types.accumulation import storage_dtype
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import PARTIAL, UNUSED, Type, misfit, partitioned
from unity.pcg.types.varying_axes import vary

MOST = 3 if CI else 6  # combinations of choices for one application and mesh, beside every choice: compiling takes the time
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")


@dataclass(frozen=True)
class Combination:
    """A choice for every axis of the mesh."""

    choices: tuple[Choice, ...]

    @property
    def operands(self) -> tuple[Type, ...]:
        return tuple(zip(*(c.operands for c in self.choices), strict=True))

    @property
    def results(self) -> tuple[Type, ...]:
        return tuple(zip(*(c.results for c in self.choices), strict=True))

    @property
    def reduces(self) -> int:
        """Several axes' Reduces of one kind at one variable are one. What has no kind is only replicated."""
        reduced = {(r.variable, r.kind) for c in self.choices for r in c.reduced if r.kind}
        return sum(variable not in self.scattered for variable, _ in reduced)

    @property
    def scattered(self) -> dict[int, tuple[Type, Type]]:
        """The types, before and after, of the variables that are scattered along an axis."""
        types = {x.variable: [c.scattered[k] for c in self.choices] for k, x in enumerate(self.choices[0].scattered)}
        around = {v: (tuple(x.before for x in xs), tuple(x.after for x in xs)) for v, xs in types.items()}
        return {v: t for v, t in around.items() if any(s == PARTIAL != r and r.kind == "P" for s, r in zip(*t, strict=True))}

    def scatters(self, axes: Sequence[Axis], way: int) -> Counter[str]:
        """The collectives of the changes of type inside, forward (0) or backward (1)."""
        changes = (step for types in self.scattered.values() for step in steps(*types, tuple(axes)))
        return Counter(kind.replace("-", "_") for step in changes if (kind := COLLECTIVES[step.kind][way]))

    @property
    def duals(self) -> int:
        """All-reduces of cotangents, at most: one of a variable along each set of axes along which users find it replicated."""
        over: dict[Any, dict[int, list[int]]] = {}
        for k, c in enumerate(self.choices):
            for r in c.reduced:
                users = over.setdefault((r.variable, r.kind if r.kind == AGREED else ""), {})
                for user in r.users or (0,):  # those in programs inside are not named
                    users.setdefault(user, []).append(k)
        in_rules = {x.key for c in self.choices for x in c.arrays if x.agreement.kind and x.run is RulePass.BACKWARD}
        return len(in_rules) + sum(len(set(map(tuple, users.values()))) for users in over.values())

    def messages(self, body: Body, axes: Sequence[Axis]) -> int:
        """What neighbours send each other for halos."""
        return sum(1 for _ in exchanges(body, placing(body, self.operands, self.results, len(axes)), tuple(axes)))

    def __str__(self) -> str:
        return " × ".join(c.name for c in self.choices)


def inner_seeds(body: Body) -> list:
    """States at the second digit of every dimension of every operand, as a neighbour might ask for."""
    places = [(p, i, n) for p, v in enumerate(body.inputs) for i, n in enumerate(body.tensors[v].shape)]
    return [(p, partitioned(i, outer)) for p, i, n in places for outer in (2, 3) if n % outer == 0 and n > outer]


def fits(body: Body, found: Combination, axes: Sequence[Axis]) -> bool:
    """Whether the degrees divide what they must."""
    degree: Counter[int] = Counter()
    for c, a in zip(found.choices, axes, strict=True):
        degree[id(c)] = max(degree[id(c)], 1) * a.size
    if any(c.size % degree[id(c)] for c in found.choices):
        return False
    ends = [body.tensor(a).shape for a in (*body.inputs, *body.outputs)]
    return all(misfit(shape, t, axes) is None for shape, t in zip(ends, found.operands + found.results, strict=True))


def combinations(body: Body, axes: Sequence[Axis]) -> list[Combination]:
    """Every choice on all axes, or where that does not fit on one, by turns; and pairs of choices: as many as there is time for."""
    plain, more = choices(body), choices(body, inner_seeds(body))
    unused = plain[0]
    assert all(s == UNUSED for s in unused.states)
    wanted = []
    for turn, c in enumerate(plain[1:]):
        same = Combination((c,) * len(axes))
        alone = Combination(tuple(c if k == turn % len(axes) else unused for k in range(len(axes))))
        wanted += [one for one in (same, alone) if fits(body, one, axes)][:1]
    pairs = [Combination(p) for p in itertools.product(more, repeat=len(axes)) if len(set(map(id, p))) > 1]
    rng = random.Random(body.key)
    rng.shuffle(pairs)
    states = {(c.operands, c.results) for c in wanted}
    for c in pairs:
        if len(wanted) >= MOST:
            break
        if (c.operands, c.results) not in states and fits(body, c, axes):
            wanted.append(c)
            states.add((c.operands, c.results))
    return wanted


def is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def plain(x: Any) -> np.ndarray:
    """Any array as numpy has it; keys as their data."""
    return np.asarray(jax.random.key_data(x) if is_key(x) else x)


class Application:
    """One operator applied to whole operands: what it gives, and how it is to be split."""

    def __init__(self, fn: Callable, args: Sequence[Any], sizes: Sequence[int], body: Body | None = None) -> None:
        self.args = [x if isinstance(x, jax.Array) and is_key(x) else np.asarray(x) for x in args]
        self.fn = fn
        self.body = body or close(jax.make_jaxpr(lambda *a: jax.tree.leaves(fn(*a)))(*self.args))
        self.mesh, self.axes = mesh_of(sizes)
        self.rng: Any = np.random.default_rng(0)
        self.floating = [i for i, v in enumerate(self.body.inputs) if self.body.tensors[v].floating]
        self.differentiable = [i for i, a in enumerate(self.body.outputs) if self.body.tensor(a).floating]
        self.cotangents = [normal(self.rng, t.shape, t.dtype) for t in self.results if t.floating]

    @property
    def precision(self) -> float:
        """A bound on relative errors: by the narrowest type that anything, a gradient for instance, is rounded to."""
        types = {t.dtype for t in self.body.tensors.values() if t.floating}
        eps = max((float(jnp.finfo(t).eps) for t in types), default=0.0)
        bits = [e.params["mantissa_bits"] for e in self.body.equations if e.name == "reduce_precision"]
        eps = max([eps, *(2.0**-b for b in bits)])
        return (300 if eps < 1e-10 else 8) * eps

    @property
    def results(self) -> list:
        return [self.body.tensor(a) for a in self.body.outputs]

    def steps(self, fn: Callable, every: Sequence[Sequence[Any]], cotangents: Sequence[Sequence[Any]]) -> tuple[list, list]:
        """Of every list of operands the results, and gradients of the floating ones: differentiating all at once takes half."""

        def chosen(some: Any) -> tuple[list, list]:
            given = [dict(zip(self.floating, xs, strict=True)) for xs in some]
            out = fn([[g.get(i, x) for i, x in enumerate(args)] for g, args in zip(given, every, strict=True)])
            return [[results[i] for i in self.differentiable] for results in out], out

        _, pull, out = jax.vjp(chosen, [[args[i] for i in self.floating] for args in every], has_aux=True)
        (gradients,) = pull([list(some) for some in cotangents])
        return out, gradients

    def whole(self) -> tuple[list, list]:
        run = jax.jit(lambda a, c: self.steps(lambda every: [jax.tree.leaves(self.fn(*x)) for x in every], [a], [c]))
        (out,), (gradients,) = run(self.args, self.cotangents)
        return out, gradients

    def on_pieces(self, every: Sequence[Combination], stacked: Sequence[Sequence[Any]]) -> list[list]:
        """For every combination, stacked pieces of operands → stacked pieces of results."""
        into = [[stack_spec(t, self.axes) for t in c.operands] for c in every]
        out = [[stack_spec(t, self.axes) for t in c.results] for c in every]

        def local(pieces: Any) -> list:
            return [self.local(c, [x[0] for x in operands]) for c, operands in zip(every, pieces, strict=True)]

        return jax.shard_map(local, mesh=self.mesh, in_specs=(into,), out_specs=out)([list(xs) for xs in stacked])

    def local(self, found: Combination, pieces: Sequence[Any]) -> list:
        results = run_body(self.body, pieces, found.operands, found.results, self.axes)
        ends = zip(results, self.results, found.results, strict=True)
        own = [(x.astype(storage_dtype(whole.dtype, t, self.axes)) if whole.floating else x, t) for x, whole, t in ends]
        return [vary(x, [a.name for a in differing(t, self.axes)])[None] for x, t in own]

    def pieces(self, whole: Any, type_: Type) -> Any:
        """Stacked pieces as devices hold them."""
        if is_key(whole):
            data = plain(whole)
            stacked = jnp.asarray(take(data, type_, self.axes, self.rng, extra=data.ndim - whole.ndim))
            return jax.random.wrap_key_data(stacked, impl=jax.random.key_impl(whole))
        return take(whole, type_, self.axes, self.rng).astype(storage_dtype(whole.dtype, type_, self.axes))

    def check(self) -> list[Combination]:
        """Compares values, gradients and collectives of every combination with the whole operator's."""
        every = combinations(self.body, self.axes)
        operands = [[self.pieces(x, t) for x, t in zip(self.args, c.operands, strict=True)] for c in every]
        types = [[dual(c.results[i]) for i in self.differentiable] for c in every]
        cotangents = [[self.pieces(g, t) for g, t in zip(self.cotangents, ts, strict=True)] for ts in types]

        def all_of_them(operands: Any, cotangents: Any) -> tuple[list, list]:
            return self.steps(partial(self.on_pieces, every), operands, cotangents)

        lowered = jax.jit(all_of_them).lower(operands, cotangents)
        compiled = lowered.compile(compiler_options=QUICK)
        expected, gradients = self.whole()
        for c, out, grads in zip(every, *compiled(operands, cotangents), strict=True):
            for k, (x, whole, t) in enumerate(zip(out, expected, c.results, strict=True)):
                self.compare(f"{c}: result {k}", x, whole, t)
            for k, x, whole in zip(self.floating, grads, gradients, strict=True):
                self.compare(f"{c}: gradient of operand {k}", x, whole, dual(c.operands[k]))
        self.check_collectives(every, operands, lowered.as_text(), compiled.as_text() or "")
        self.check_constants(every, operands)
        return every

    def check_constants(self, every: Sequence[Combination], operands: Sequence[Sequence[Any]]) -> None:
        """Traces every combination on constants, which JAX knows to be equal on all devices: an operand need not vary between
        the devices that its type divides it between."""
        out = [[stack_spec(t, self.axes) for t in c.results] for c in every]

        def local() -> list:
            return [self.local(c, [x[0] for x in pieces]) for c, pieces in zip(every, operands, strict=True)]

        jax.eval_shape(jax.shard_map(local, mesh=self.mesh, in_specs=(), out_specs=out))

    def compare(self, what: str, pieces: Any, whole: Any, type_: Type) -> None:
        pieces, expected = plain(pieces), plain(whole)
        floating = jnp.issubdtype(expected.dtype, jnp.inexact)
        rounded = (expected, pieces)  # the parts of a partial sum may be larger than the sum, and so is their rounding
        largest = [float(np.max(np.abs(np.nan_to_num(x.astype(complex))), initial=0)) for x in rounded]
        scale = max(1.0, *largest) if floating else 0
        near = self.precision * scale if floating else 0
        try:
            found = join(pieces, whole.shape, type_, self.axes, near)
            np.testing.assert_allclose(found, expected.astype(found.dtype), rtol=0, atol=near)
        except AssertionError as error:
            raise AssertionError(f"{what} as {'; '.join(map(str, type_))}: {error}\n{show(self.body)}") from None

    def check_collectives(self, every: list[Combination], operands: Any, lowered: str, compiled: str) -> None:
        """Forward: the Reduces and scatters inside and what halos need, no more. Backward: at most their duals, and those of
        what is replicated inside. XLA adds nothing."""
        reduces, duals = sum(c.reduces for c in every), sum(c.duals for c in every)
        messages = sum(c.messages(self.body, self.axes) for c in every)
        scatters = [sum((c.scatters(self.axes, way) for c in every), Counter()) for way in (0, 1)]
        declared = +Counter({"all_reduce": reduces, "collective_permute": messages}) + scatters[0]
        both = count(lowered)
        backward = Counter({"all_reduce": duals, "collective_permute": messages}) + scatters[1]
        assert declared <= both <= declared + backward, (both, declared, backward)
        if declared:
            forward = jax.jit(partial(self.on_pieces, every)).lower(operands)
            assert count(forward.as_text()) == declared, [(str(c), c.reduces, c.messages(self.body, self.axes)) for c in every]
        ran: Counter[str] = Counter()
        for c in collectives(compiled):
            ran[c.kind.replace("-", "_")] += c.parts
        assert ran <= both, ran


def count(stablehlo: str) -> Counter[str]:
    found = Counter({kind: stablehlo.count(f'stablehlo.{kind}"') for kind in KINDS})
    return +found


def show(body: Body) -> str:
    lines = [f"{e.results} = {e.name} {[a if isinstance(a, int) else '·' for a in e.operands]}" for e in body.equations]
    return "\n".join([f"inputs {body.inputs}", *lines, f"outputs {body.outputs}"])
