"""Narrow numbers: a plan rounds no more often than the function, and what is finite in the function is finite in the plan."""

from __future__ import annotations

import itertools
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import by_hand, one_in
from compiler_options import QUICK_FUSED
from jax.sharding import PartitionSpec as P
from operator_cases import CASES, KINDS
from parallel_cases import Application, Combination, fits, is_key
from pieces import dual, indices, normal, places

import unity
from benchmarks.random_programs import computed
from unity.pcg.jaxprs.product_precision import of_swapped_operands
from unity.pcg.parallel.traffic import traffic
from unity.pcg.propagation.choices import choices
from unity.pcg.types.accumulation import exact, narrow, storage_dtype
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, Type
from unity.substitutions.language.term import Variable, applications, subterms
from unity.substitutions.language.typecheck import typecheck
from unity.substitutions.rewriting.occurrences import Pattern, patterns
from unity.transforms.rewriting import library_of
from unity.verify.proofs.intermediates import contained
from unity.verify.proofs.small_instances import small_instances, small_sizes
from unity.verify.semantics.meaning import operator_function

NARROW = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
LARGE = 100.0  # of the parts of a partial sum, as a multiple of the sum


class Narrow(Application):
    """An operator on narrow numbers whose partial sums are much larger than their totals."""

    def __init__(self, name: str, dtype: Any) -> None:
        fn, args = CASES[name]
        args = [a() if callable(a) else a for a in args]
        super().__init__(fn, [_cast(a, dtype) for a in args], (2,))
        self.dtype = dtype

    @property
    def summing(self) -> list[Combination]:
        """Return the choices that introduce a partial sum, forward or backward."""
        found = [Combination((c,)) for c in choices(self.body)]
        return [c for c in found if fits(self.body, c, self.axes) and any(s in (PARTIAL, REPLICATED) for s in c.choices[0].states)]

    @property
    def rounds(self) -> float:
        """Return the relative spacing of numbers in the narrowest type in which the operator computes."""
        computed = [self.body.tensors[v].dtype for e in self.body.equations for v in e.results]
        bits = [e.params["mantissa_bits"] for e in self.body.equations if "mantissa_bits" in e.params]
        spaces = [float(jnp.finfo(t).eps) for t in computed if jnp.issubdtype(t, jnp.floating)]
        return max([*spaces, *(2.0**-b for b in bits)], default=0.0)

    @property
    def sums(self) -> bool:
        """Return whether some choice introduces a partial sum."""
        every = (c.choices[0] for c in self.summing)
        return any(PARTIAL in c.results and PARTIAL not in c.operands for c in every)

    def cancelling(self, c: Combination) -> tuple[int, int] | None:
        """Return the first operand that an axis divides, and the dimension, or None."""
        found = (
            (k, t[0].dim)
            for k, (x, t) in enumerate(zip(self.args, c.operands, strict=True))
            if t[0].kind == "P" and t[0].outer == 1 and _real(x)
        )
        return next(found, None)

    def data(self, cancelling: tuple[int, int] | None) -> list[Any]:
        """Return operands of which one cancels between devices along the divided dimension."""
        given = list(self.args)
        if cancelling is not None:
            k, dim = cancelling
            first, second = np.split(np.asarray(given[k], np.float64), 2, axis=dim)
            given[k] = np.concatenate([LARGE * first, second - LARGE * first], axis=dim).astype(given[k].dtype)
        return given

    def parts(self, whole: Any, type_: Type, rng: np.random.Generator) -> np.ndarray:
        """Return stacked pieces as devices hold them; those of a partial sum are large and cancel."""
        kind = np.asarray(whole).dtype
        own = storage_dtype(kind, type_, self.axes)
        at = places(type_, self.axes)
        if type_[0] != PARTIAL or not _floats(np.asarray(whole)):
            return np.stack([np.asarray(whole)[_index(whole.shape, type_, self.axes, p)] for p in at]).astype(own)
        first = (LARGE * normal(rng, whole.shape, np.dtype(np.float64 if _real(whole) else kind))).astype(own)
        return np.stack([first, np.asarray(whole, own) - first])

    def errors(self) -> list[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
        """Yield (name, value of the function, of the plan, in float64) of every result and gradient of every choice."""
        rng = np.random.default_rng(1)
        every = self.summing
        if not every or not any(_real(x) for x in (*self.args, *self.cotangents)):
            return []
        kinds = list(dict.fromkeys(map(self.cancelling, every)))  # what the function says of equal operands is computed once
        number, data = [kinds.index(self.cancelling(c)) for c in every], [self.data(kind) for kind in kinds]
        ends = [zip(data[k], c.operands, strict=True) for k, c in zip(number, every, strict=True)]
        operands = [[self.parts(x, t, rng) for x, t in end] for end in ends]
        types = [[dual(c.results[i]) for i in self.differentiable] for c in every]
        given = [[self.parts(g, t, rng) for g, t in zip(self.cotangents, ts, strict=True)] for ts in types]
        whole = [self.cotangents] * len(data)

        def compiled(fn: Any, *given: Any) -> Any:
            lowered = jax.jit(lambda d, g: self.steps(fn, d, g)).lower(*given)
            return lowered.compile(compiler_options=QUICK_FUSED)(*given)

        def function(xs: Any) -> list[Any]:
            return [jax.tree.leaves(self.fn(*x)) for x in xs]

        ours, theirs = compiled(partial(self.on_pieces, every), operands, given), compiled(function, data, whole)
        exact_data = [[_wide(x) for x in d] for d in data]
        wide = [r.dtype for r in jax.eval_shape(lambda a: jax.tree.leaves(self.fn(*a)), exact_data[0]) if _floats(r)]
        right = compiled(function, exact_data, [[np.asarray(g, k) for g, k in zip(w, wide, strict=True)] for w in whole])
        found = []
        for k, c in enumerate(every):
            ends = [(f"{c}: result {i}", t) for i, t in enumerate(c.results)]
            ends += [(f"{c}: gradient {i}", dual(c.operands[i])) for i in self.floating]
            columns = ([*r[0][n], *r[1][n]] for r, n in ((ours, k), (theirs, number[k]), (right, number[k])))
            for (name, t), a, b, r in zip(ends, *columns, strict=True):
                if _real(b):
                    found.append((name, np.asarray(b), _summed(np.asarray(a), np.asarray(b), t, self.axes), np.asarray(r)))
        return found


def _floats(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _real(x: Any) -> bool:
    return jnp.issubdtype(np.asarray(x).dtype, jnp.floating)


def _cast(x: Any, dtype: Any) -> Any:
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return np.asarray(x).astype(dtype) if _real(x) else x


def _index(shape: Any, type_: Type, axes: Any, at: Any) -> Any:
    return np.ix_(*indices(shape, type_, axes, at)) if shape else ()


def _wide(x: Any) -> Any:
    return np.asarray(x, np.float64) if _real(x) else x


def _summed(stacked: np.ndarray, like: np.ndarray, type_: Type, axes: Any) -> np.ndarray:
    """Return the tensor of stacked pieces; a partial sum is rounded after it is added up."""
    at = places(type_, axes)
    if type_[0] == PARTIAL:
        return stacked.sum(0).astype(like.dtype)
    whole = np.zeros(like.shape, like.dtype)
    for piece, p in zip(stacked, at, strict=True):
        whole[_index(like.shape, type_, axes, p)] = piece
    return whole


def check(found: list[tuple[str, np.ndarray, np.ndarray, np.ndarray]], inside: float = 0) -> None:
    """A plan may err by as much as the function, and by its own rounding of results; what is finite stays so.

    `inside`: of what the function rounds to inside. It may do so in float64, too, where a plan does not round the parts of a sum;
    and XLA may not round at all what it fuses. Parts of what is not narrow are rounded themselves.
    """
    for name, function, plan, right in found:
        own = function.dtype
        parts = 1 if narrow(own) else LARGE
        eps = max(parts * float(jnp.finfo(own).eps), inside)
        function, plan, right = (x.astype(np.float64) for x in (function, plan, right))
        beyond = np.abs(right) > float(jnp.finfo(own).max) if narrow(own) else np.zeros(right.shape, bool)
        finite = np.isfinite(function) & ~beyond  # rounding inside may bring what is too large back into the range of a narrow type
        assert np.isfinite(plan[finite]).all(), f"{name}: {function[finite]} became {plan[finite]}"
        good = finite & np.isfinite(right)
        if good.any():
            largest = max(np.abs(right[good]).max(), np.abs(function[good]).max())
            allowed = 2 * np.abs(function - right)[good].max() + 2 * eps * largest
            assert np.abs(plan - right)[good].max() <= allowed + 1e-30, f"{name}: {np.abs(plan - right)[good].max()} > {allowed}"


SUMMED = """
    attention; batch norm; bf16 matmul; conv, 2-D; conv, stride two; conv, transposed; cosine similarity; cross entropy;
    custom_vjp, reduction; dot_general; dot_general, batch; dot_general, preferred type; embedding; embedding, filled with zeros;
    embedding, then a product; gather of pairs; gradient of an embedding; labels; logsumexp; masked mean; mean over one dimension;
    one_hot, contracted; ragged_dot; ragged_dot, with gradients; scan, of a number that begins with zero; scatter-add into zeros;
    segment_sum; sum of two partial sums; sum over all; sum, then a product; take_along_axis; two convs of one image;
    var over one dimension; while, of a number that begins with zero
"""  # what makes partial sums, each kind once
PRIMITIVE = """
    conv, 2-D; custom_vjp, reduction; dot_general; dot_general, batch; dot_general, preferred type; embedding, filled with zeros;
    gather of pairs; gradient of an embedding; logsumexp; mean over one dimension; ragged_dot;
    scan, of a number that begins with zero; segment_sum; sum of two partial sums; sum over all;
    while, of a number that begins with zero
"""  # in the other narrow types, too; what is made of these differs between them in nothing that bfloat16 does not show
SUMS, PRIMITIVES = (re.split(r";\s+", names.strip()) for names in (SUMMED, PRIMITIVE))
NARROWED = [(name, "bfloat16") for name in sorted({*by_hand(*KINDS, *SUMS), *PRIMITIVES, "attention", "cross entropy", "qr, raw"})]
NARROWED += one_in(4, [(name, dtype) for name in PRIMITIVES for dtype in NARROW[1:]])


@pytest.mark.parametrize(("name", "dtype"), NARROWED)
def test_sums_over_devices_are_rounded_once(name: str, dtype: str) -> None:
    with jax.enable_x64(True), np.errstate(all="ignore"):
        try:
            operator = Narrow(name, jnp.dtype(dtype))
            jax.eval_shape(
                lambda a, g: operator.steps(lambda every: [jax.tree.leaves(operator.fn(*x)) for x in every], [a], [g]),
                operator.args,
                operator.cotangents,
            )
        except (TypeError, NotImplementedError, ValueError) as error:
            pytest.skip(f"JAX has no such operator for {dtype}: {error}")
        if any(is_key(x) for x in operator.args):
            pytest.skip("random numbers are drawn, not summed")
        assert dtype == "bfloat16" or operator.sums
        check(operator.errors(), operator.rounds)


MACHINE = unity.Machine.grid(1, 8, "a100")
COLUMNS, ROWS = P(None, "device"), P("device")


def pinned(**where: P) -> list[Any]:
    return [unity.pin(name, spec) for name, spec in where.items()]


def worst(found: Any, right: Any) -> float:
    return float(np.abs(np.asarray(found, np.float64) - np.asarray(right, np.float64)).max())


@pytest.mark.parametrize("dtype", NARROW)
def test_two_products_and_their_sum_are_rounded_once(dtype: str) -> None:
    """Return a parallel block as in PaLM, whose partial sums cancel."""
    rng = np.random.default_rng(0)

    def block(narrow: Any, weights: Any, x: Any) -> Any:
        up, down, gate, out = weights
        y = (jax.nn.relu(x @ up) @ down).astype(narrow)
        return (y + (jnp.tanh(x @ gate) @ out).astype(narrow)).astype(jnp.float32)

    up, down = rng.normal(size=(32, 256)) / 8, np.ones((256, 32)) * rng.normal(size=32)
    up[:, 128:] = up[:, :128]
    down[128:] *= -1
    down += 0.01 * rng.normal(size=down.shape)
    weights = [np.float32(w) for w in (up, down, rng.normal(size=(32, 256)) / 8, rng.normal(size=(256, 32)) / 32)]
    x, narrow = np.float32(rng.normal(size=(16, 32))), jnp.dtype(dtype)
    pins = [unity.pin(f"weights[{k}]", ROWS if k % 2 else COLUMNS) for k in range(4)]
    right = block(jnp.float32, weights, x)

    def fn(weights: Any, x: Any) -> Any:
        return block(narrow, weights, x)

    plan = unity.optimize(fn, weights, x, machine=MACHINE, training=False, constraints=pins, progress=False)
    assert any(PARTIAL in node.types[0] for node, _ in plan.program.pcg.walk() if node.kind == "dot_general")
    found = jax.jit(plan)(*plan.shard(weights, x))
    assert worst(found, right) <= 1.5 * worst(jax.jit(fn)(weights, x), right)


@pytest.mark.parametrize("product", ["bsd,df->bsf", "bsd,fd->bsf", "bsd,bdf->bsf"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_of_weights_that_are_summed_over_two_dimensions_can_be_run(dtype: str, product: str) -> None:
    rng, (samples, weight, result) = np.random.default_rng(0), product.replace("->", ",").split(",")
    sizes = {"b": 4, "s": 6, "d": 12, "f": 8}
    x, w, g = (jnp.asarray(rng.normal(size=[sizes[d] for d in dims]), dtype) for dims in (samples, weight, result))

    def loss(w: Any, x: Any, g: Any) -> Any:
        return jnp.sum((jnp.einsum(product, x, w) * g).astype(jnp.float32))

    row = P(None, "device")  # the partial sums are over s, too
    pair = unity.Machine.grid(1, 2)
    plan = unity.optimize(loss, w, x, g, machine=pair, budget=0, progress=False, constraints=pinned(x=row, g=row, w=P()))
    found = jax.jit(jax.grad(plan))(*plan.shard(w, x, g))
    right = np.einsum(f"{samples},{result}->{weight}", np.float64(x), np.float64(g))
    np.testing.assert_allclose(np.float64(found), right, rtol=2 * float(jnp.finfo(dtype).eps), atol=1e-5)


@pytest.mark.parametrize(
    ("stored", "dtype"), [("float32", "bfloat16"), ("narrow", "float16"), *by_hand(("float32", "float16"), ("narrow", "bfloat16"))]
)
def test_gradients_of_weights_are_rounded_once(dtype: str, stored: str) -> None:
    """The gradients of samples on different devices cancel."""
    rng, narrow = np.random.default_rng(0), jnp.dtype(dtype)
    x = np.float32(np.tile(rng.normal(size=(32, 16)), (2, 1)))
    signs = np.float32(np.repeat([1.0, -1.0], 32)[:, None] * 50 + rng.normal(size=(64, 1)) / 10)
    p = {
        "a": rng.normal(size=(16, 32)) / 4,
        "b": rng.normal(size=32),
        "e": rng.normal(size=(5, 32)),
        "c": rng.normal(size=(32, 8)) / 8,
    }

    def loss(narrow: Any, p: Any, x: Any, signs: Any) -> Any:
        p = jax.tree.map(lambda w: w.astype(narrow), p)
        h = jnp.tanh(x.astype(narrow) @ p["a"] + p["b"]) * p["e"][jnp.arange(64) % 5]
        return jnp.mean((h @ p["c"]).astype(jnp.float32) * signs)

    given = jax.tree.map(lambda w: jnp.asarray(w, jnp.float32 if stored == "float32" else narrow), p)
    fn = partial(loss, narrow)
    plan = unity.optimize(fn, given, x, signs, machine=MACHINE, budget=0, progress=False, constraints=pinned(x=ROWS, signs=ROWS))
    right = jax.grad(partial(loss, jnp.float32))(jax.tree.map(lambda w: w.astype(jnp.float32), given), x, signs)
    theirs, ours = jax.jit(jax.grad(fn))(given, x, signs), jax.jit(jax.grad(plan))(*plan.shard(given, x, signs))
    for name in p:
        scale = float(np.abs(right[name]).max())
        assert worst(ours[name], right[name]) <= 1.5 * worst(theirs[name], right[name]) + float(jnp.finfo(narrow).eps) * scale, name
    again = jax.jit(jax.grad(lambda p: sum(jnp.sum(g.astype(jnp.float32)) for g in jax.tree.leaves(jax.grad(plan)(p, x, signs)))))
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in jax.tree.leaves(again(given)))


def test_sums_that_overflow_on_one_device_are_finite() -> None:
    k = 256
    x = jnp.asarray(np.tile(np.r_[np.full(k // 2, 200.0), np.full(k // 2, -200.0)], (8, 1)), jnp.float16)
    w = jnp.full((k, 8), 200.0, jnp.float16)
    for fn, args, pins in (
        (lambda w, x: x @ w, (w, x), pinned(w=ROWS, x=COLUMNS)),
        (lambda x: (x * 200).sum(1), (x,), pinned(x=COLUMNS)),
        (lambda x: jnp.mean(x * 200, 1), (x,), pinned(x=COLUMNS)),
    ):
        plan = unity.optimize(fn, *args, machine=MACHINE, training=False, progress=False, constraints=pins)
        given = plan.shard(*args)
        np.testing.assert_array_equal(jax.jit(plan)(*(given if len(args) > 1 else (given,))), jax.jit(fn)(*args))


@pytest.mark.parametrize(("dtype", "rewritten"), [("float32", True), ("bfloat16", True), ("float16", False)])
def test_products_are_regrouped_only_where_that_cannot_overflow(dtype: str, rewritten: bool) -> None:
    x = jnp.full((4096, 64), 5e-4, dtype)
    p = {"a": jnp.full((64, 256), 200.0, dtype), "b": jnp.full((256, 8), 10.0, dtype)}

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean((x @ p["a"] @ p["b"]).astype(jnp.float32) ** 2)

    plan = unity.optimize(loss, p, x, machine=unity.Machine.grid(1, 8, "v100"), progress=False)
    assert bool(plan.program.rewriting) == rewritten
    np.testing.assert_allclose(jax.jit(plan)(*plan.shard(p, x)), loss(p, x), rtol=0.02)


USABLE = patterns(library_of(None).rules)


@pytest.mark.parametrize("pattern", one_in(2, USABLE), ids=str)
def test_a_contained_rule_stays_finite(pattern: Pattern) -> None:
    if not contained(pattern.rule, pattern.backward):
        pytest.skip("not applied in types of a smaller range")
    with np.errstate(all="ignore"):
        for seed, instance in enumerate(small_instances(pattern.rule, (), small_sizes(pattern.rule, 2), 1)):
            rng = np.random.default_rng(seed)
            kinds = {n: t.dtype.replace("float32", "float16") for n, t in instance.types.items()}
            known = {n: type(t)(t.shape, t.states, kinds[n]) for n, t in instance.types.items()}
            types = typecheck(instance.rule.sides, known)
            for scale in (1e-3, 30.0, 300.0):
                found: dict[Any, Any] = {
                    Variable(n): jnp.asarray(
                        rng.normal(size=t.shape) * scale if "float" in t.dtype else rng.integers(0, 2, t.shape), t.dtype
                    )
                    for n, t in known.items()
                }
                for term in subterms(instance.rule.sides):
                    if not isinstance(term, Variable) and term not in found:
                        operands = tuple(types[x] for x in term.operands)
                        run = operator_function(term.operator, term.attributes, operands, ())
                        found[term] = run(*(found[x] for x in term.operands))[term.result]
                old, new = instance.rule.left, instance.rule.right
                for a, b in zip(*((new, old) if pattern.backward else (old, new)), strict=True):
                    finite = np.isfinite(np.asarray(found[a]))
                    assert np.isfinite(np.asarray(found[b])[finite]).all(), (str(pattern), scale)


@pytest.mark.parametrize("pattern", one_in(2, USABLE), ids=str)
def test_operands_of_one_size_stay_finite_where_a_rule_applies(pattern: Pattern) -> None:
    """A replacement is finite, with its gradients, up to the largest power of two at which the replaced expression is."""
    instance = small_instances(pattern.rule, (), small_sizes(pattern.rule, 2), 6)[-1]
    sides = (instance.rule.left, instance.rule.right)
    old, new = (_with_gradients(terms, instance.types) for terms in (sides[::-1] if pattern.backward else sides))
    rng, floats = np.random.default_rng(0), [t.dtype.startswith("float") for t in instance.types.values()]
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=sum(floats) + 1)), np.float32)  # the last is the cotangents'
    drawn = iter(signs.T[:-1])
    data = []
    for t, floating in zip(instance.types.values(), floats, strict=True):
        full = np.broadcast_to(next(drawn).reshape(-1, *[1] * len(t.shape)), (len(signs), *t.shape)) if floating else None
        mixed = rng.choice([-1.0, 1.0], (len(signs), *t.shape)).astype(np.float32)
        ids = rng.integers(0, 2, (2 * len(signs), *t.shape)).astype(np.int32)
        data.append(ids if full is None else np.concatenate([full, mixed]))
    cotangents = np.concatenate([signs[:, -1], signs[:, -1]])

    def finite(side: Any, size: float) -> bool:
        given = [x * np.float32(size) if floating else x for x, floating in zip(data, floats, strict=True)]
        return all(np.isfinite(np.asarray(x)).all() for x in side(cotangents * np.float32(size), *given))

    largest = next((k for k in reversed(range(128)) if finite(old, 2.0**k)), None)
    assert largest is not None
    assert finite(new, 2.0**largest)
    assert not finite(old, 2.0**127) or all(a.operator in ("concat", "split", "map") for a in applications(instance.rule.sides))


def _with_gradients(terms: Any, types: Any) -> Any:
    """Return results and gradients of terms at many operands, for cotangents of one size."""
    side = computed(terms, types)

    def one(size: Any, *args: Any) -> list[Any]:
        floats = [k for k, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]

        def of(*chosen: Any) -> list[Any]:
            given = dict(zip(floats, chosen, strict=True))
            return side(*(given.get(k, x) for k, x in enumerate(args)))

        out, pull = jax.vjp(of, *(args[k] for k in floats))
        return [*out, *pull([jnp.full(x.shape, size, x.dtype) for x in out])]

    return jax.jit(jax.vmap(one))


def test_numbers_of_very_different_sizes_may_overflow_where_products_are_regrouped() -> None:
    """The exceptions of `docs/numerics.md` occur."""
    x, a, b = (jnp.full((1, 1), size, jnp.float32) for size in (1e-20, 1e20, 1e20))
    assert np.isfinite((x @ a) @ b).all()
    assert not np.isfinite(x @ (a @ b)).any()


def test_rules_that_regroup_compute_something_new() -> None:
    names = ("regroup-products", "merge-added-products", "merge-shared-input")
    by_name = {str(p): contained(p.rule, p.backward) for p in USABLE if str(p).removesuffix(" (backward)") in names}
    assert not by_name["regroup-products"]
    assert not by_name["regroup-products (backward)"]
    assert by_name["merge-added-products"]
    assert not by_name.get("merge-added-products (backward)", False)
    assert by_name["merge-shared-input (backward)"]
    assert not by_name.get("merge-shared-input", False)


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        ("float32", "bfloat16", True),
        ("bfloat16", "float16", False),
        ("float16", "bfloat16", True),
        ("bfloat16", "float32", False),
        ("bfloat16", "float8_e4m3fn", True),
        ("float8_e4m3fn", "bfloat16", False),
        ("float8_e4m3fn", "float8_e5m2", True),
        ("float8_e5m2", "float8_e4m3fn", False),
        ("float64", "float32", False),
        ("float64", "bfloat16", False),
        ("float32", "float64", True),
        ("float32", "complex64", True),
        ("complex128", "complex64", False),
        ("float32", "int32", False),
        ("int32", "float32", False),
        ("int64", "int32", False),
    ],
)
def test_conversions_that_round_first_end_a_partial_sum(before: str, after: str, wanted: bool) -> None:
    assert exact(jnp.dtype(before), jnp.dtype(after)) == wanted


FLOATS = (*NARROW, "float32", "float64")
CHAINS: list[tuple[str, ...]] = [
    c for n in (3, 4) for c in itertools.product(FLOATS, repeat=n) if all(a != b for a, b in itertools.pairwise(c))
]


def few_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return numbers of a type around 1, of so few bits that sums of some products are exact in their accumulator."""
    bits = min(int(jnp.finfo(dtype).nmant), 23 if dtype == "float64" else 7)
    return (rng.choice([-1.0, 1.0], shape) * (1 + rng.integers(0, 2**bits, shape) / 2**bits)).astype(dtype)


def rounded_along(total: np.ndarray, chain: tuple[str, ...]) -> list[np.ndarray]:
    """Return a cotangent, passed back through a chain of conversions, with and without each rounding to a narrow type."""
    results = [total.astype(chain[0])]
    if len(chain) > 1:
        *before, own = chain
        results = rounded_along(total.astype(own).astype("float64"), tuple(before))
        if own in NARROW:
            results += rounded_along(total.astype("float32").astype("float64"), tuple(before))
    return results


@pytest.mark.parametrize("first", FLOATS)
def test_cotangents_are_added_up_before_conversions_round_them(first: str) -> None:
    """Each operand of a product with divided columns is converted two or three times."""
    two, three = ([c for c in CHAINS if c[0] == first and len(c) == n] for n in (3, 4))
    chains = [*two, *one_in(5, three)]
    rng = np.random.default_rng(0)

    def products(xs: Any, ys: Any) -> Any:
        for k in range(1, 4):
            xs = [x.astype(c[k]) if k < len(c) else x for x, c in zip(xs, chains, strict=True)]
        return [x @ y for x, y in zip(xs, ys, strict=True)]

    with jax.enable_x64(True):
        xs = [few_bits(rng, (4, 3), first) for _ in chains]
        ys, gs = ([few_bits(rng, shape, c[-1]) for c in chains] for shape in ((3, 8), (4, 8)))
        options: dict[str, Any] = {"search": "captured", "budget": 0, "progress": False}
        pins = [unity.pin(f"ys[{k}]", COLUMNS) for k in range(len(ys))]
        plan = unity.optimize(products, xs, ys, machine=unity.Machine.grid(1, 2), constraints=pins, **options)
        gradients = jax.jit(lambda xs, ys, gs: jax.vjp(lambda xs: plan(xs, ys), xs)[1](gs)[0])(xs, ys, gs)
    for chain, found, g, y in zip(chains, gradients, gs, ys, strict=True):
        total = g.astype("float64") @ y.astype("float64").T
        assert any(np.array_equal(found, expected) for expected in rounded_along(total, chain)), (chain, found, total)


@jax.custom_jvp
def forwarded(x: Any) -> Any:
    return x.astype("float32")


forwarded.defjvp(lambda primals, tangents: (forwarded(*primals), tangents[0].astype("float32")))


def narrowed(x: Any) -> Any:
    return x.astype("float32").astype("float64")


CONVERTING = {
    "alone": narrowed,
    "amid others": lambda x: 2 * narrowed(-x) + 1,
    "checkpointed": jax.checkpoint(narrowed),
    "of slices": lambda x: jax.lax.scan(lambda carry, row: (carry, narrowed(row)), 0.0, x)[1],
    "of a carry": lambda x: jax.lax.scan(lambda carry, _: (narrowed(carry) * 0.5, None), x, None, length=3)[0],
    "of a constant": lambda x: jax.lax.scan(lambda carry, _: (carry + narrowed(x), None), 0 * x, None, length=3)[0],
    "in a branch": lambda x: jax.lax.cond(x[0, 0] > -9, narrowed, lambda x: x, x),
    "by a rule": lambda x: forwarded(x).astype("float64"),
}


@pytest.mark.parametrize("converted", CONVERTING.values(), ids=CONVERTING)
def test_cotangents_are_added_up_before_other_programs_round_them(converted: Any) -> None:
    """The summands are large and cancel: rounded one by one they would leave nothing of the sum."""
    rng = np.random.default_rng(0)
    half = rng.choice([-1.0, 1.0], (3, 4)) * 2.0 ** rng.integers(30, 33, (3, 4))
    x, y = few_bits(rng, (4, 3), "float64"), np.concatenate([half, -half + rng.integers(1, 8, (3, 4))], 1)

    def loss(x: Any, y: Any) -> Any:
        return jnp.sum(converted(x) @ y)

    with jax.enable_x64(True):
        plan = unity.optimize(loss, x, y, machine=unity.Machine.grid(1, 2), budget=0, progress=False, constraints=pinned(y=COLUMNS))
        np.testing.assert_array_equal(jax.jit(jax.grad(plan))(x, y), jax.grad(loss)(x, y))


def test_weights_that_are_stored_wider_cost_no_more() -> None:
    """Their gradients are added up in float32 before they are rounded, as those of narrow weights are, and merged."""
    x = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16)

    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = jax.nn.relu(x @ w.astype("bfloat16"))
        return jnp.mean(x.astype("float32") ** 2)

    pins = pinned(x=ROWS, **{"ws[*]": P()})
    plans = [
        unity.optimize(loss, [jax.ShapeDtypeStruct((1024, 1024), dtype)] * 3, x, machine=MACHINE, progress=False, constraints=pins)
        for dtype in ("float32", "bfloat16")
    ]
    sums = [[c for c in traffic(plan.program.pcg, [0, 1, 2]) if c.elements > 1] for plan in plans]
    assert [[(c.kind, c.nbytes, c.merged) for c in every] for every in sums] == [[("all-reduce", 4 * 1024**2, True)] * 3] * 2


@pytest.mark.parametrize(("reduce_in", "itemsize"), [(None, 4), ("bfloat16", 2), ("float16", 4)])
def test_sums_in_a_narrow_type_are_asked_for_by_name(reduce_in: str | None, itemsize: int, tmp_path: Any) -> None:
    p, x = {"a": jnp.ones((64, 64), jnp.bfloat16)}, jnp.ones((512, 64), jnp.bfloat16)

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ p["a"]).astype(jnp.float32) ** 2)

    options: dict[str, Any] = {"machine": MACHINE, "progress": False, "budget": 0, "constraints": pinned(x=ROWS)}
    plan = unity.optimize(loss, p, x, **options, reduce_in=reduce_in)
    plan.files.save(tmp_path / "plan.json")
    for found in (plan, unity.load(tmp_path / "plan.json", loss, p, x)):
        [gradient] = [c for c in traffic(found.program.pcg, [0]) if c.kind == "all-reduce"]
        assert (gradient.elements, gradient.itemsize) == (64 * 64, itemsize)
        lowered = jax.jit(jax.grad(found)).lower(*found.shard(p, x)).as_text()
        assert f"tensor<64x64x{'f32' if itemsize == 4 else 'bf16'}>" in lowered.split("stablehlo.all_reduce")[1][:600], lowered
        assert found.check().agrees()
    with pytest.raises(unity.UnityError, match="reduce_in='int8'"):
        unity.optimize(loss, p, x, **options, reduce_in="int8")


def test_precisions_follow_their_operands() -> None:
    algorithm = jax.lax.DotAlgorithm(jnp.bfloat16, jnp.float16, jnp.float32, 1, 3)
    swapped = of_swapped_operands(algorithm)
    assert (swapped.lhs_precision_type, swapped.rhs_precision_type) == (jnp.float16, jnp.bfloat16)
    assert (swapped.lhs_component_count, swapped.rhs_component_count) == (3, 1)
    assert of_swapped_operands(swapped) == algorithm
    high, low = jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT
    assert of_swapped_operands((high, low)) == (low, high)
    assert of_swapped_operands(None) is None
