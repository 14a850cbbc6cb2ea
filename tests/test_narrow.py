"""Narrow numbers: a plan rounds no more often than the function, and what is finite in the function is finite in the plan."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operator_cases import CASES
from parallel_cases import Application, Combination, fits
from pieces import dual, indices, normal, places

from unity.pcg.accumulation import held
from unity.pcg.choices import choices
from unity.pcg.state import PARTIAL, REPLICATED, Type

NARROW = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
LARGE = 100.0  # of the parts of a partial sum, as a multiple of the sum


class Narrow(Application):
    """An operator on narrow numbers whose partial sums are much larger than the sums."""

    def __init__(self, name: str, dtype: Any) -> None:
        fn, args = CASES[name]
        args = [a() if callable(a) else a for a in args]
        super().__init__(fn, [_cast(a, dtype) for a in args], (2,))
        self.dtype = dtype

    @property
    def summing(self) -> list[Combination]:
        """Choices by which something is a partial sum that is not one before, forward or backward."""
        found = [Combination((c,)) for c in choices(self.body)]
        return [c for c in found if fits(self.body, c, self.axes) and any(s in (PARTIAL, REPLICATED) for s in c.choices[0].states)]

    def data(self, c: Combination) -> list[Any]:
        """Operands, the first of which cancels between devices along what the axis divides."""
        given, done = list(self.args), False
        for k, (x, t) in enumerate(zip(given, c.operands, strict=True)):
            if t[0].kind == "P" and t[0].outer == 1 and not done and _real(x):
                first, second = np.split(np.asarray(x, np.float64), 2, axis=t[0].dim)
                given[k] = np.concatenate([LARGE * first, second - LARGE * first], axis=t[0].dim).astype(x.dtype)
                done = True
        return given

    def parts(self, whole: Any, type_: Type, rng: np.random.Generator) -> np.ndarray:
        """Stacked pieces as devices hold them; of a partial sum large ones that cancel."""
        kind = np.asarray(whole).dtype
        own = held(kind, type_, self.axes)
        at = places(type_, self.axes)
        if type_[0] != PARTIAL or not _real(whole):
            return np.stack([np.asarray(whole)[_index(whole.shape, type_, self.axes, p)] for p in at]).astype(own)
        first = (LARGE * normal(rng, whole.shape, np.dtype(np.float64))).astype(own)
        return np.stack([first, np.asarray(whole, own) - first])


    def errors(self) -> list[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
        """Of every result and gradient of every choice: its name, and what the function, the plan and float64 say."""
        rng = np.random.default_rng(1)
        every = self.summing
        if not every:
            return []
        data = [self.data(c) for c in every]
        operands = [[self.parts(x, t, rng) for x, t in zip(d, c.operands, strict=True)] for d, c in zip(data, every, strict=True)]
        types = [[dual(c.results[i]) for i in self.differentiable] for c in every]
        given = [[self.parts(g, t, rng) for g, t in zip(self.cotangents, ts, strict=True)] for ts in types]
        whole = [self.cotangents] * len(every)
        run = jax.jit(lambda d, g: self.steps(lambda xs: [jax.tree.leaves(self.fn(*x)) for x in xs], d, g))
        quick: Any = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
        plan = jax.jit(lambda d, g: self.steps(partial(self.on_pieces, every), d, g)).lower(operands, given)
        ours, theirs = plan.compile(compiler_options=quick)(operands, given), run(data, whole)
        right = run([[_wide(x) for x in d] for d in data], [[_wide(g) for g in w] for w in whole])
        found = []
        for k, c in enumerate(every):
            ends = [(f"{c}: result {i}", t) for i, t in enumerate(c.results)]
            ends += [(f"{c}: gradient {i}", dual(c.operands[i])) for i in self.floating]
            columns = ([*r[0][k], *r[1][k]] for r in (ours, theirs, right))
            for (name, t), a, b, r in zip(ends, *columns, strict=True):
                if _real(b):
                    found.append((name, np.asarray(b), _summed(np.asarray(a), np.asarray(b), t, self.axes), np.asarray(r)))
        return found


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
    """The tensor that stacked pieces make up, a partial sum rounded when all is added."""
    at = places(type_, axes)
    if type_[0] == PARTIAL:
        return stacked.sum(0).astype(like.dtype)
    whole = np.zeros(like.shape, like.dtype)
    for piece, p in zip(stacked, at, strict=True):
        whole[_index(like.shape, type_, axes, p)] = piece
    return whole


def check(found: list[tuple[str, np.ndarray, np.ndarray, np.ndarray]]) -> None:
    """A plan may err by as much as the function, and by its own rounding of results; what is finite stays so."""
    for name, function, plan, right in found:
        eps = float(jnp.finfo(function.dtype).eps)
        function, plan, right = (x.astype(np.float64) for x in (function, plan, right))
        finite = np.isfinite(function)
        assert np.isfinite(plan[finite]).all(), f"{name}: {function[finite]} became {plan[finite]}"
        good = finite & np.isfinite(right)
        if good.any():
            allowed = 2 * np.abs(function - right)[good].max() + 2 * eps * max(np.abs(right[good]).max(), np.abs(function[good]).max())
            assert np.abs(plan - right)[good].max() <= allowed + 1e-30, f"{name}: {np.abs(plan - right)[good].max()} > {allowed}"


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", sorted(CASES))
def test_what_is_summed_over_devices_is_rounded_once(name: str, dtype: str) -> None:
    with jax.enable_x64(True), np.errstate(all="ignore"):
        try:
            operator = Narrow(name, jnp.dtype(dtype))
            found = operator.errors()
        except (TypeError, NotImplementedError, ValueError) as error:
            pytest.skip(f"JAX has no such operator for {dtype}: {error}")
        check(found)
