"""The verdict: whether a plan's values and gradients are the function's, up to what rounding explains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.extend import core

from benchmarks.fuzz.noise import perturber

INFINITE = " (infinite in the place of NaN)"  # docs/numerics.md, "Rules and overflow": what a rule may make of a NaN
NAN = " (NaN may be, for an infinity beside a partial sum)"  # docs/numerics.md, "What is promised?"
QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
DRAWS = 6  # perturbed evaluations, before anybody is accused
MORE = 40  # before it is certain, and as many again that break ties of sums; even, since odd and even ones are told apart
TIMES, PART = 12.0, 0.02  # allowed: of an element's own spread; of the largest in the array
COARSE = 2.0  # allowed: of the spread that rounding to float8 has, whose ulps are large and few


@dataclass(frozen=True)
class Difference:
    """One array of a plan that differs from the function's. `where`: "result 0", "gradient of a1"."""

    where: str
    words: str

    @property
    def known(self) -> bool:
        """Whether docs/numerics.md excludes it from what is promised: NaN where the function is infinite."""
        return self.words.endswith(NAN)

    @property
    def of_nan(self) -> bool:
        """Whether it is an infinity where the function has NaN, which docs/numerics.md excludes from what rules promise."""
        return self.words.endswith(INFINITE)

    def __str__(self) -> str:
        return f"{self.where}: {self.words}"


def leaves_of(fn: Callable[..., Any]) -> Callable[..., list[Any]]:
    return lambda *args: [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in jax.tree.leaves(fn(*args))
    ]


@dataclass
class Reference:
    """A function at one point: its results, its gradients for random cotangents, and their conditioning.

    Attributes:
        weights: the arguments with a gradient, which is that of the first result; by default all floating ones, of all results.
    """

    fn: Callable[..., Any]
    args: Sequence[Any]
    names: Sequence[str]
    seed: int
    order: int = 1
    weights: Sequence[int] = ()
    cotangents: list[Any] = field(init=False)
    floating: list[int] = field(init=False)
    differentiable: list[int] = field(init=False)

    def __post_init__(self) -> None:
        shapes = jax.eval_shape(leaves_of(self.fn), *self.args)
        floating = [k for k, x in enumerate(self.args) if jnp.issubdtype(x.dtype, jnp.inexact)]
        differentiable = [k for k, s in enumerate(shapes) if jnp.issubdtype(s.dtype, jnp.inexact)]
        self.floating, self.differentiable = (list(self.weights), [0]) if self.weights else (floating, differentiable)
        rng = np.random.default_rng([self.seed, 77])
        self.cotangents = [self._normal(rng, shapes[k]) for k in self.differentiable]
        self.outputs = len(shapes)
        if not self.floating or not self.differentiable:
            self.order = 0

    @staticmethod
    def _normal(rng: np.random.Generator, s: Any) -> Any:
        x = rng.normal(size=s.shape) + (1j * rng.normal(size=s.shape) if jnp.issubdtype(s.dtype, jnp.complexfloating) else 0)
        return np.asarray(x).astype(s.dtype)

    def step(self, fn: Callable[..., Any]) -> Callable[..., list[Any]]:
        """The results of `fn` and its gradients, and gradients of these where the order is 2."""
        run = leaves_of(fn)

        def first(floats: Sequence[Any], args: Sequence[Any], cotangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            def chosen(*floats: Any) -> tuple[list[Any], list[Any]]:
                whole = list(args)
                for k, x in zip(self.floating, floats, strict=True):
                    whole[k] = x
                out = run(*whole)
                return [out[k] for k in self.differentiable], out

            _, pull, out = jax.vjp(chosen, *floats, has_aux=True)
            return out, list(pull(list(cotangents)))

        def step(args: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            floats = [args[k] for k in self.floating]
            if self.order == 0:
                return run(*args)
            if self.order == 1:
                out, gradients = first(floats, args, cotangents)
                return [*out, *gradients]

            def twice(*floats: Any) -> tuple[Any, Any]:
                out, gradients = first(floats, args, cotangents)
                return gradients, out

            gradients, pull, out = jax.vjp(twice, *floats, has_aux=True)
            return [*out, *gradients, *pull([jnp.cos(jnp.arange(g.size).reshape(g.shape)).astype(g.dtype) for g in gradients])]

        return step

    def settle(self) -> None:
        """Lowers the order to what JAX can differentiate of the function itself."""
        while self.order:
            try:
                jax.eval_shape(self.step(self.fn), self.args, self.cotangents)
                return
            except Exception:  # whatever JAX raises: of the function itself
                self.order -= 1

    @cached_property
    def whole(self) -> list[np.ndarray]:
        """Results and gradients of the function."""
        run: Any = jax.jit(self.step(self.fn)).lower(self.args, self.cotangents).compile(compiler_options=QUICK)
        return [plain(x) for x in run(self.args, self.cotangents)]

    @cached_property
    def kinds(self) -> list[Any]:
        return [x.dtype for x in jax.eval_shape(self.step(self.fn), self.args, self.cotangents)]

    @cached_property
    def has_known_gradients(self) -> bool:
        """Whether a gradient depends on no argument, as that of a sum: the compiler may compute it."""
        closed: Any = jax.make_jaxpr(lambda args: self.step(self.fn)(args, self.cotangents))(list(self.args))
        unknown = set(closed.jaxpr.invars)
        for e in closed.eqns:
            if any(not isinstance(v, core.Literal) and v in unknown for v in e.invars):
                unknown.update(e.outvars)
        gradients = closed.jaxpr.outvars[self.outputs :]
        return any(isinstance(v, core.Literal) or v not in unknown for v in gradients)

    def where(self, k: int) -> str:
        """What an array of a step is, in words."""
        if k < self.outputs:
            return f"result {k}"
        k -= self.outputs
        n = len(self.floating)
        return ("gradient of " if k < n else "second derivative of ") + self.names[self.floating[k % n]]

    def perturbed(self, count: int) -> list[list[np.ndarray]]:
        """Results and gradients of so many perturbed evaluations; of `MORE`, as many again that perturb equal sums apart."""
        if len(self._known) < count:
            draws = self.perturber((self.args, self.cotangents), count)
            if count == MORE:
                draws += self.perturber((self.args, self.cotangents), count, apart=True)
            self._known[:] = [[plain(x) for x in one] for one in draws]
        return self._known

    @cached_property
    def perturber(self) -> Callable[..., list[list[Any]]]:
        """Perturbed evaluations of the step, compiled."""
        return perturber(self.step(self.fn), (self.args, self.cotangents), QUICK)

    @cached_property
    def coarse(self) -> bool:
        """Whether the step computes in float8."""
        return "f8_" in str(jax.make_jaxpr(self.step(self.fn))(self.args, self.cotangents))

    @cached_property
    def _known(self) -> list[list[np.ndarray]]:
        return []

    def differences(self, results: Sequence[Any]) -> list[Difference]:
        """Where results of a plan's step differ from the function's by more than rounding explains."""
        found = [k for k, (x, y) in enumerate(zip(results, self.whole, strict=True)) if not near(plain(x), y, self.kinds[k])]
        wrong = []
        for k, (x, dtype) in enumerate(zip(results, self.kinds, strict=True)):
            if x.dtype != dtype:
                wrong.append(Difference(self.where(k), f"{x.dtype} in the place of {dtype}"))
        for count in (DRAWS, MORE):
            if found:
                spread = self.perturbed(count)
                found = [k for k in found if self.words(k, plain(results[k]), spread)]
        return wrong + [Difference(self.where(k), self.words(k, plain(results[k]), self.perturbed(MORE))) for k in found]

    def words(self, k: int, x: np.ndarray, spread: list[list[np.ndarray]]) -> str:
        """What is wrong with an array, in words; nothing if it may be so."""
        y, dtype = self.whole[k], self.kinds[k]
        others = np.stack([one[k] for one in spread])
        if x.shape != y.shape:
            return f"shape {x.shape} in the place of {y.shape}"
        if not jnp.issubdtype(dtype, jnp.inexact):
            free = (others != y).any(0)
            bad = (x != y) & ~free
            return _shown(x, y, bad, "") if bad.any() else ""
        if np.iscomplexobj(y) or np.iscomplexobj(x):
            parts = [self._real(f(x), f(y), f(others), dtype, self.overflows[k]) for f in (np.real, np.imag)]
            return " and ".join(p for p in parts if p)
        return self._real(x, y, others, dtype, self.overflows[k])

    @cached_property
    def without_jit(self) -> list[np.ndarray]:
        """The results and gradients of the function without jit, where XLA simplifies no NaN and no `0 // 0` into a number."""
        return [plain(x) for x in self.step(self.fn)(self.args, self.cotangents)]

    def as_with_jit(self, results: Sequence[Any]) -> list[np.ndarray]:
        """Return results with the elements that the function has without jit replaced by those that it has with jit."""
        return [
            replaced(x, alike(plain(x), z, kind), y)
            for x, y, z, kind in zip(results, self.whole, self.without_jit, self.kinds, strict=True)
        ]

    def with_nans(self, results: Sequence[Any]) -> list[np.ndarray]:
        """Return results with finite elements replaced by NaN where the function has NaN both with and without jit."""
        return [
            replaced(x, np.isnan(y) & np.isnan(z) & np.isfinite(plain(x)), y) if plain(x).shape == y.shape else np.asarray(x)
            for x, y, z in zip(results, self.whole, self.without_jit, strict=True)
        ]

    @cached_property
    def overflows(self) -> list[np.ndarray]:
        """Which elements are NaN because numbers overflow: all arguments are finite, or the element is not NaN in float64."""
        if all(np.isfinite(plain(self.args[k])).all() for k in self.floating):
            return [np.isnan(y) for y in self.whole]
        return [np.isnan(y) & ~np.isnan(wide) for y, wide in zip(self.whole, self._in_float64(), strict=True)]

    def _in_float64(self) -> list[np.ndarray]:
        """The results and gradients in float64; those in the program's own types if it does not take arguments in float64."""

        def wide(x: Any) -> Any:
            return jnp.asarray(x, jnp.float64) if getattr(x, "dtype", None) == jnp.float32 else x

        with jax.enable_x64(True):
            args, cotangents = jax.tree.map(wide, (list(self.args), self.cotangents))
            try:
                run: Any = jax.jit(self.step(self.fn)).lower(args, cotangents).compile(compiler_options=QUICK)
            except (TypeError, ValueError):  # of a loop whose carry would change its type
                return self.whole
            return [plain(x) for x in run(args, cotangents)]

    def _real(self, x: np.ndarray, y: np.ndarray, others: np.ndarray, dtype: Any, overflows: np.ndarray) -> str:
        with np.errstate(all="ignore"):
            classes = classified(y)
            free = (classified(others) != classes).any(0)  # where rounding alone may overflow, or make a NaN
            free |= np.isnan(y) & np.isinf(x) & overflows  # numbers that overflow to both signs are added in any order
            bad = (classified(x) != classes) & ~free
            lost = bad & np.isinf(y) & np.isnan(x)
            made = bad & np.isnan(y) & np.isinf(x)
            if (bad & ~lost & ~made).any():
                return _shown(x, y, bad, " (finite or not)")
            finite = np.isfinite(y) & np.isfinite(x) & ~free
            away = np.abs(np.where(finite, others - y, 0))
            fine, away = away[1::2].max(0) if self.coarse else away.max(0), away.max(0)
            info = jnp.finfo(dtype)
            scale = float(np.max(np.where(np.isfinite(y) & ~free, np.abs(away), 0), initial=0))
            ulps = float(info.eps) * np.abs(y) * (8 if info.bits >= 32 else 2) + 4 * float(info.smallest_subnormal)
            allowed = (
                TIMES * fine + (COARSE * away if self.coarse else 0) + PART * scale + ulps + float(info.tiny) * (info.bits >= 32)
            )
            bad = finite & (np.abs(x - y) > allowed)
            if bad.any():
                return _shown(x, y, bad, f", allowed {np.where(bad, allowed, 0).max():.2g}")
        if made.any():
            return _shown(x, y, made, INFINITE)
        return _shown(x, y, lost, NAN) if lost.any() else ""


def _shown(x: np.ndarray, y: np.ndarray, bad: np.ndarray, more: str) -> str:
    with np.errstate(all="ignore"):
        size = (
            np.abs(np.where(bad, np.nan_to_num(x.astype(float)) - np.nan_to_num(y.astype(float)), -1)) if x.dtype != bool else bad
        )
        where = tuple(int(i) for i in np.unravel_index(int(np.argmax(np.where(bad, size, -1))), bad.shape)) if bad.ndim else ()
    return f"{int(bad.sum())} of {bad.size} elements, at {list(where)} {x[where]} in the place of {y[where]}{more}"


def classified(x: np.ndarray) -> np.ndarray:
    """0 of finite elements, 1 of NaN, 2 and 3 of infinities."""
    return np.where(np.isnan(x), 1, np.where(np.isposinf(x), 2, np.where(np.isneginf(x), 3, 0)))


def plain(x: Any) -> np.ndarray:
    """An array as numpy computes with it: narrow floats as float64."""
    x = np.asarray(x)
    if x.dtype.kind == "V" or x.dtype in (ml_dtypes.bfloat16, np.float16) or "float8" in str(x.dtype):
        return x.astype(np.float64)
    return x.astype(np.float64) if x.dtype == np.float32 else x


def alike(x: np.ndarray, y: np.ndarray, dtype: Any) -> np.ndarray:
    """Whether each element of `x` is that of `y`: equal, both NaN, or numbers that agree in half of their digits."""
    if x.shape != y.shape:
        return np.zeros(x.shape, bool)
    with np.errstate(all="ignore"):
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        if not jnp.issubdtype(dtype, jnp.inexact):
            return same
        return same | (np.isfinite(x) & np.isfinite(y) & (np.abs(x - y) <= float(jnp.finfo(dtype).eps) ** 0.5 * np.abs(y)))


def replaced(x: Any, where: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return an array, in its own type, with the elements of another in some places."""
    x = np.array(x)
    x[where] = y[where].astype(x.dtype)
    return x


def near(x: np.ndarray, y: np.ndarray, dtype: Any) -> bool:
    """Whether arrays are equal up to a few ulps, so that nobody need look closer."""
    if x.shape != y.shape:
        return False
    if not jnp.issubdtype(dtype, jnp.inexact):
        return bool(np.array_equal(x, y))
    with np.errstate(all="ignore"):
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        if same.all():
            return True
        if not (np.isfinite(x) & np.isfinite(y) | same).all():
            return False
        eps = float(jnp.finfo(dtype).eps)
        size = np.abs(np.where(np.isfinite(y), y, 0))
        return bool((same | (np.abs(x - y) <= 8 * eps * size + 0.5 * eps * size.max(initial=0))).all())
