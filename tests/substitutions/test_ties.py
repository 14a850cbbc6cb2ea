"""Ties and zeros, where JAX chooses among derivatives: rewritten and divided programs have the derivatives of the original ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import one_in
from jax import lax
from operator_cases import CASES
from parallel_cases import Application, is_key

from benchmarks.fuzz.verdict import QUICK
from benchmarks.random_programs import computed
from benchmarks.random_rewritings import run
from unity.pcg.ir.dead_code import used
from unity.pcg.ir.program import program_of
from unity.substitutions.language.axioms import axioms, default_library
from unity.substitutions.language.rule import Rule
from unity.substitutions.language.term import Apply, Term, applications, transform
from unity.substitutions.language.typecheck import tensor
from unity.substitutions.language.vocabulary import FUNCTIONS
from unity.substitutions.rewriting.forms import planning_form, search_form
from unity.substitutions.rewriting.occurrences import occurrences, patterns
from unity.substitutions.rewriting.reading import Reading
from unity.substitutions.rewriting.rewriting import rewritten
from unity.verify.proofs.instances import Types
from unity.verify.proofs.small_instances import SmallInstance, small_instances

TIED = (-1.0, -0.0, 0.0, 0.0, 1.0, 3.0)  # zeros of both signs, and the place where the vocabulary's `clip` bends
DRAWS = 3
LONGEST = 8  # equations of an operator that is divided

# Functions of one tensor that choose, each as a program may have it.
CHOOSERS: dict[str, Callable[[Any], Any]] = {
    "relu": jax.nn.relu,
    "maximum": lambda x: jnp.maximum(x, 0.0),
    "minimum": lambda x: jnp.minimum(x, 0.0),
    "larger than one": lambda x: lax.max(x, jnp.ones((), x.dtype)),
    "abs": jnp.abs,
    "sign": jnp.sign,
    "floor": jnp.floor,
}


def tied(types: Types, seed: int) -> list[np.ndarray]:
    """Arguments full of ties and zeros; indices inside and outside."""
    rng = np.random.default_rng(seed)
    return [rng.choice(TIED, t.shape) if t.dtype.startswith("float") else rng.integers(-1, 4, t.shape) for t in types.values()]


def derivatives(fn: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """The results of a function of floats and indices, gradients of weighted sums of them, and of these gradients."""

    def run(*args: Any) -> list[Any]:
        places = [k for k, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]

        def of(*floats: Any) -> list[Any]:
            given = dict(zip(places, floats, strict=True))
            return fn(*(given.get(k, x) for k, x in enumerate(args)))

        def gradients(*floats: Any) -> list[Any]:
            out, pull = jax.vjp(of, *floats)
            return list(pull([jnp.cos(jnp.arange(x.size, dtype=x.dtype).reshape(x.shape)) for x in out]))

        floats = [args[k] for k in places]
        first, pull = jax.vjp(gradients, *floats)
        second = pull([jnp.sin(1 + jnp.arange(x.size, dtype=x.dtype).reshape(x.shape)) for x in first])
        return [*of(*floats), *first, *second]

    return run


def differing(left: Callable[..., list[Any]], right: Callable[..., list[Any]], types: Types) -> list[str]:
    """Arrays of values and derivatives that differ somewhere at ties; NaN and infinities must be the same."""
    both: Any = jax.jit(lambda *args: (derivatives(left)(*args), derivatives(right)(*args)))
    compiled = both.lower(*tied(types, 0)).compile(compiler_options=QUICK)
    found = []
    for seed in range(DRAWS):
        for k, (a, b) in enumerate(zip(*compiled(*tied(types, seed)), strict=True)):
            if not np.allclose(a, b, rtol=1e-9, atol=1e-9, equal_nan=True):
                found.append(f"draw {seed}, array {k}: {a} and {b}")
    return found


def instances(rule: Rule) -> Iterator[SmallInstance]:
    """The largest of a few instances of a rule, with every function of the vocabulary for a variable one."""
    for instance in small_instances(rule, (), (2, 3), 6)[-1:]:
        free = any(t.operator == "map" and t.attributes[0] not in FUNCTIONS for t in applications(instance.rule.sides))
        for name in FUNCTIONS if free else ("",):
            yield SmallInstance(_with(instance.rule, name) if name else instance.rule, instance.attributes, instance.types)


def _with(rule: Rule, function: str) -> Rule:
    """A rule of any function, of one."""

    def named(term: Term) -> Term:
        if isinstance(term, Apply) and term.operator == "map" and term.attributes[0] not in FUNCTIONS:
            return replace(term, attributes=(function,))
        return term

    return replace(rule, left=transform(rule.left, named), right=transform(rule.right, named))


# Polynomials that are equal have equal derivatives everywhere.
POLYNOMIALS = (
    "matmul conv2d enlarge avgpool add sub mul scale bias concat split transpose merge unmerge sum minus_one ones identity"
    " identity_kernel mean_kernel"
)
RULES = {
    rule.name: rule
    for rule in (*axioms(), *default_library().rules)
    if not rule.parallel and {t.operator for t in applications(rule.sides)} - set(POLYNOMIALS.split())
}


@pytest.mark.parametrize("name", one_in(2, RULES))
def test_both_sides_of_every_rule_that_is_no_polynomial_have_equal_derivatives_at_ties(name: str) -> None:
    with jax.enable_x64(True):
        for instance in instances(RULES[name]):
            left, right = (computed(terms, instance.types) for terms in (instance.rule.left, instance.rule.right))
            assert not differing(left, right, instance.types), instance


def chosen_twice(function: Callable[[Any], Any]) -> Callable[..., list[Any]]:
    """A program in which rules speak of a function: twice, of what is joined, before and after it is split."""

    def fn(x: Any, y: Any) -> list[Any]:
        a, b = jnp.split(function(jnp.concatenate([x, y], -1)), [3], axis=-1)
        c, d = jnp.split(x + function(function(x)), [1], axis=0)
        return [a * a, b, function(c), function(d), jnp.concatenate([function(x), function(y)], 0)]

    return fn


@pytest.mark.parametrize("name", one_in(2, CHOOSERS))
def test_rewritten_programs_have_the_derivatives_of_the_original_ones_at_ties(name: str) -> None:
    fn, types = chosen_twice(CHOOSERS[name]), {"x": tensor((2, 3)), "y": tensor((2, 3))}
    with jax.enable_x64(True):
        structs = [jax.ShapeDtypeStruct((2, 3), np.float64)] * 2
        body = search_form(used(program_of(jax.make_jaxpr(fn)(*structs))[0]))
        reading, looked_for = Reading(body), patterns(default_library().rules)
        found = [(p, rewritten(body, o)) for p in looked_for for o in occurrences(reading, p)]
        assert any("f" in pattern.rule.of_kind("function") for pattern, _ in found)
        assert any(pattern.rule.name == "drop-second-relu" for pattern, _ in found) == (name == "relu")
        for pattern, new in found:
            for one in (new, planning_form(new)) if new is not None else ():
                assert not differing(fn, partial(run, one), types), str(pattern)


CHOOSING = (
    "abs sign max min clamp reduce_max reduce_min argmax argmin cummax cummin sort select_n top_k approx_top_k scatter-max"
    " scatter-min reduce_window_max reduce_window_min select_and_gather_add select_and_scatter_add custom_jvp_call"
)


def chooses(name: str) -> bool:
    """Whether an operator's program is short and has a primitive that chooses."""
    fn, args = CASES[name]
    names = [e.name for e in program_of(jax.make_jaxpr(fn)(*(a() if callable(a) else a for a in args)))[0].equations]
    return len(names) <= LONGEST and not set(CHOOSING.split()).isdisjoint(names)


def rounded(x: Any) -> Any:
    return np.round(np.asarray(x)) if not is_key(x) and jnp.issubdtype(x.dtype, jnp.floating) else x


class Rounded:
    """Random numbers whose normal ones are whole, so that parts of a partial sum add up to it exactly, ties included."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rng, name)

    def normal(self, size: Any) -> np.ndarray:
        return np.round(3 * self.rng.normal(size=size))


@pytest.mark.parametrize("name", one_in(3, [name for name in CASES if chooses(name)]))
def test_divided_operators_have_the_derivatives_of_whole_ones_at_ties(name: str) -> None:
    fn, args = CASES[name]
    application = Application(fn, [rounded(a() if callable(a) else a) for a in args], (2,))
    application.rng = Rounded(application.rng)
    application.cotangents = [rounded(c) for c in application.cotangents]
    application.check()


@pytest.mark.parametrize("function", [jnp.sqrt, jnp.log, jnp.cbrt, lambda x: 1 / x], ids=["sqrt", "log", "cbrt", "reciprocal"])
@pytest.mark.parametrize("parts", [(slice(2),), (slice(2, None),), (slice(2), slice(2, None))], ids=["first", "last", "both"])
def test_no_rewriting_differentiates_functions_of_elements_that_nothing_reads(
    function: Callable[[Any], Any], parts: tuple[slice, ...]
) -> None:
    """The function is applied to what is not zero, and its derivative at the zeros is infinite."""

    def fn(x: Any, y: Any) -> list[Any]:
        return [function(x[part] @ y if k else x[part]) for k, part in enumerate(parts)]

    x, y = np.ones((4, 2)), np.ones((2, 2))
    x[2:] = 0.0 if len(parts) == 1 and parts[0].start is None else 1.0
    x[:2] = 0.0 if len(parts) == 1 and parts[0].start else 1.0
    with jax.enable_x64(True):
        body = search_form(used(program_of(jax.make_jaxpr(fn)(x, y))[0]))
        before, reading = derivatives(fn)(x, y), Reading(body)
        assert all(np.isfinite(a).all() for a in before)
        for pattern in patterns(default_library().rules):
            for occurrence in occurrences(reading, pattern):
                new = rewritten(body, occurrence)
                for one in (new, planning_form(new)) if new is not None else ():
                    for a, b in zip(before, derivatives(partial(run, one))(x, y), strict=True):
                        np.testing.assert_allclose(b, a, rtol=1e-9, atol=1e-9, err_msg=str(pattern))


def test_a_part_that_is_computed_but_not_differentiated_stays_so() -> None:
    """The derivative is infinite at the zeros, which the program reads, but through a stopped gradient."""

    def fn(x: Any) -> list[Any]:
        return [jnp.sqrt(x[:2]), lax.stop_gradient(jnp.sqrt(x[2:]))]

    x = np.array([1.0, 1.0, 0.0, 0.0])
    with jax.enable_x64(True):
        body = search_form(used(program_of(jax.make_jaxpr(fn)(x))[0]))
        before, reading = derivatives(fn)(x), Reading(body)
        for pattern in patterns(default_library().rules):
            for occurrence in occurrences(reading, pattern):
                new = rewritten(body, occurrence)
                for one in (new, planning_form(new)) if new is not None else ():
                    for a, b in zip(before, derivatives(partial(run, one))(x), strict=True):
                        np.testing.assert_allclose(b, a, rtol=1e-9, atol=1e-9, err_msg=str(pattern))


def test_rules_apply_to_both_parts_of_a_split() -> None:
    def fn(x: Any) -> list[Any]:
        return [jnp.sqrt(x[:2]), jnp.sqrt(x[2:])]

    body = search_form(used(program_of(jax.make_jaxpr(fn)(np.ones(4, np.float32)))[0]))
    reading = Reading(body)
    assert any(o.pattern.dropped for p in patterns(default_library().rules) for o in occurrences(reading, p))
