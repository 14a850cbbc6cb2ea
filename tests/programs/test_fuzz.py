"""The fuzzer finds no fault, with a fresh seed outside of CI. Planted faults it finds, and it excuses rounding."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import CI
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec

import unity
from benchmarks.fuzz import examine
from benchmarks.fuzz.data import drawn
from benchmarks.fuzz.examine import Outcome, judge, reference_of, wrong_plans
from benchmarks.fuzz.lives import checked, simplified
from benchmarks.fuzz.minimize import as_test, minimized, runs
from benchmarks.fuzz.plans import Trial, captured_of
from benchmarks.fuzz.programs import draw_program
from benchmarks.fuzz.run import Tally
from benchmarks.fuzz.sources import source_of
from benchmarks.fuzz.verdict import Reference
from unity.base.errors import UnityError
from unity.exec.compiled.check import Check
from unity.pcg.local import interpreter as walker
from unity.pcg.operators.table import TABLE
from unity.pcg.operators.table.elementwise import elementwise
from unity.pcg.types.factors import Entry
from unity.transforms.micro_batching import micro_batching

AMOUNT = ("--workers", "1", "--plans", "16") if CI else ("--workers", "2", "--minutes", os.environ.get("UNITY_FUZZ_MINUTES", "2.5"))
PAIR = unity.Machine.grid(1, 2)


def test_random_plans_of_random_programs_compute_what_the_programs_do(tmp_path: Path) -> None:
    # A gate must say the same of the same code every time, so it draws the same programs; by hand, every run draws new ones.
    seed, out = 50000 if CI else int(time.time()) % 10**9 * 1000, tmp_path / "fuzz.json"
    command = [sys.executable, "-m", "benchmarks.fuzz", *AMOUNT, "--seed", str(seed)]
    subprocess.run([*command, "--out", str(out)], check=True, cwd=Path(__file__).parents[2])
    tally = Tally.read(out)
    again = "\n".join(f"python -m benchmarks.fuzz --program {row['seed']}" for row in tally.findings)
    assert not tally.findings, f"{json.dumps(tally.findings, indent=1)}\nof {tally.total} plans; each again:\n{again}"
    assert tally.total > 0


def test_equal_seeds_draw_equal_programs() -> None:
    first, second = ([draw_program(seed).to_json() for seed in range(12)] for _ in range(2))
    assert first == second
    assert len({p["source"] for p in first}) > 8


@pytest.mark.parametrize("kind", ["loops", "padding", "recomputation", "micro-batches", "mesh"])
def test_programs_that_are_drawn_for_a_kind_of_plans_have_such_plans(kind: str) -> None:
    assert sum(next(trials_of(kind, seed), None) is not None for seed in range(5)) >= 2


def trials_of(kind: str, seed: int) -> Iterator[Trial]:
    program = draw_program(seed, kinds=(kind,))
    with jax.enable_x64(program.x64), contextlib.suppress(UnityError):
        args = drawn(program)
        captured = captured_of(program.function, args, program.differentiated)
        yield from source_of(kind, random.Random(seed), program, args, captured)(PAIR)


def test_micro_batches_that_are_left_out_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every micro-batch is the first."""
    whole = micro_batching.split
    monkeypatch.setattr(micro_batching, "split", lambda *args: jnp.stack([whole(*args)[0]] * args[2]))
    outcome = Outcome(0)
    for seed in range(10):
        program, trial = draw_program(seed, kinds=("micro-batches",)), next(trials_of("micro-batches", seed), None)
        if program.x64 and trial is not None:
            with jax.enable_x64(True):
                judge([trial], 0, reference_of(program), outcome, lambda at: None)
    assert {finding.fault for finding in outcome.findings} == {"wrong"}


def test_a_wrong_entry_of_the_operator_table_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x, w):
        return jnp.sin(x @ w)

    args = [np.random.default_rng(k).normal(size=(4, 4)) for k in range(2)]
    with jax.enable_x64(True):
        assert wrong_plans(fn, args, PAIR) == []
        monkeypatch.setitem(TABLE, "sin", Entry("sin", elementwise(linear=((0,),)), TABLE["sin"].local))
        jax.clear_caches()
        assert any("wrong" in words for words in wrong_plans(lambda x, w: fn(x, w) * 1, args, PAIR))


def test_a_sum_that_is_not_taken_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walker, "REDUCERS", {**walker.REDUCERS, "sum": lambda x, names: jax.lax.pmax(x, names)})
    with jax.enable_x64(True):
        args = [np.random.default_rng(0).normal(size=(4, 6))]
        assert wrong_plans(lambda x: jax.nn.softmax(x + 0.5), args, PAIR)


CANCELLING = np.resize([1e8, -1e8], 64) + np.random.default_rng(0).normal(size=64)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("data", [np.random.default_rng(1).normal(size=64), CANCELLING * 1e-5], ids=["normal", "cancelling"])
def test_sums_in_another_order_are_rounding_and_lost_terms_are_not(dtype: str, data: np.ndarray) -> None:
    with jax.enable_x64(True):
        x = jnp.asarray(data, dtype)
        reference = Reference(lambda x: jnp.tanh(jnp.sum(x) / 64), [x], ["x"], 0)
        ends = slice(None, None, -1) if dtype in ("bfloat16", "float16") else slice(1, None, 2)
        halves = slice(0, 0) if dtype in ("bfloat16", "float16") else slice(None, None, 2)
        reversed_ = reference.step(lambda x: jnp.tanh((jnp.sum(x[halves]) + jnp.sum(x[ends])) / 64))
        lost = reference.step(lambda x: jnp.tanh((jnp.sum(x) - x[5] - 1) / 64))
        assert reference.differences(jax.jit(reversed_)(reference.args, reference.cotangents)) == []
        assert reference.differences(jax.jit(lost)(reference.args, reference.cotangents))


def test_float8_sums_rounded_once_are_right_and_repeated_terms_are_not() -> None:
    def chain(x, dtype, times=1):
        y = x.astype("float8_e4m3fn").astype(dtype)
        return (y[0] * times + y[1] + y[2]).astype("float8_e4m3fn").astype(x.dtype)

    with jax.enable_x64(True):
        reference = Reference(lambda x: chain(x, "float8_e4m3fn"), [jnp.array([1.0, 0.15625, -0.9375])], ["x"], 0)
        once = jax.jit(reference.step(lambda x: chain(x, "float32")))(reference.args, reference.cotangents)
        repeated = jax.jit(reference.step(lambda x: chain(x, "float32", 3)))(reference.args, reference.cotangents)
        assert float(once[0]) == 0.21875
        assert float(reference.whole[0]) == 0.1875
        assert reference.differences(once) == []
        assert [d.where for d in reference.differences(repeated)] == ["result 0", "gradient of x"]


def test_remainders_may_jump_only_where_operands_are_nearly_equal() -> None:
    def remainder(x, wrong):
        y = jnp.sin(x)
        return lax.rem(y * (1 - jnp.float32(wrong)), jnp.roll(y, 1))

    x = jnp.array([1.1, 1.1, 0.3, 2.7], jnp.float32)
    reference = Reference(lambda x: remainder(x, 0.0), [x], ["x"], 0)
    for wrong, found in ((np.array([0, 2e-7, 0, 0]), []), (np.array([0, 0, 0, 0.1]), ["result 0"])):
        results = jax.jit(reference.step(lambda x, by=wrong: remainder(x, by)))(reference.args, reference.cotangents)
        assert not np.allclose(results[0], reference.whole[0], 1e-4)
        assert [d.where for d in reference.differences(results) if d.where.startswith("result")] == found


@pytest.mark.parametrize(
    ("of", "excused"),
    [(lambda x: x, False), (jnp.sin, False), (lambda x: x + np.float32(0.3), True)],
    ids=["given", "sines", "sums"],
)
def test_only_ties_of_sums_are_an_excuse(of: Callable[..., Any], excused: bool) -> None:
    """The gradient of a maximum is shared by what is equal: but devices may add equal summands in unlike orders."""
    x = jnp.array([1.0, 1.3, 1.3, 0.5])
    reference = Reference(lambda x: jnp.max(of(x)), [x], ["x"], 0)
    shared = reference.differences(jax.jit(reference.step(lambda x: jnp.max(of(x))))(reference.args, reference.cotangents))
    first = reference.differences(jax.jit(reference.step(lambda x: of(x)[jnp.argmax(x)]))(reference.args, reference.cotangents))
    assert shared == []
    assert [d.where for d in first] == ([] if excused else ["gradient of x"])


def test_sums_of_two_arrays_that_tie_may_differ() -> None:
    x = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")
    args = [jnp.array(x), jnp.array(x), jnp.array(x.T)]
    reference = Reference(lambda x, y, w: jnp.maximum(x @ w, y @ w).sum(), args, ["x", "y", "w"], 0)
    first = reference.step(lambda x, y, w: jnp.where(x @ w >= y @ w, x @ w, y @ w).sum())
    assert reference.differences(jax.jit(first)(reference.args, reference.cotangents)) == []


def test_where_the_function_is_finite_a_plan_must_be() -> None:
    x = jnp.array([60000.0, -60000.0, 100.0], jnp.float16)
    reference = Reference(lambda x: jnp.sum(x * 1), [x], ["x"], 0)
    overflowing = reference.step(lambda x: (x[0] + x[0]) - x[0] - x[0] + x[2])
    (difference, *_) = reference.differences(jax.jit(overflowing)(reference.args, reference.cotangents))
    assert "finite or not" in difference.words


@pytest.mark.parametrize("beside", [1.0, np.inf])
def test_numbers_that_overflow_may_be_added_in_any_order(beside: float) -> None:
    x = jnp.array([3e38, 3e38, -3e38, -3e38, beside], jnp.float32)
    reference = Reference(lambda x: (x[0] + x[1]) + (x[2] + x[3]), [x], ["x"], 0)
    one_by_one = jax.jit(reference.step(lambda x: ((x[0] + x[1]) + x[2]) + x[3]))(reference.args, reference.cotangents)
    assert np.isnan(reference.whole[0])
    assert np.isinf(one_by_one[0])
    assert reference.differences(one_by_one) == []


def test_nan_for_an_infinity_is_known_and_for_any_other_value_is_wrong() -> None:
    @jax.custom_vjp
    def lossy(x, nan):
        return jnp.sqrt(x)

    lossy.defvjp(
        lambda x, nan: (lossy(x, nan), (x, nan)), lambda kept, c: (jnp.where(kept[1], jnp.nan, c / 2 / jnp.sqrt(kept[0])), None)
    )
    x = jnp.array([0.0, 1.1, 2.3])
    reference = Reference(jnp.sqrt, [x], ["x"], 0)
    for nan, known in ((x == 0, True), (x < 2, False)):
        step = reference.step(lambda x, nan=nan: lossy(x, nan))
        (difference,) = reference.differences(jax.jit(step)(reference.args, reference.cotangents))
        assert difference.known == known
    (result,) = reference.differences([np.array([np.nan, *reference.whole[0][1:]], "float32"), np.float32(reference.whole[1])])
    assert not result.known
    reference = Reference(lambda x: x / 0.0, [x[1:]], ["x"], 0, 0)
    assert [d.known for d in reference.differences([np.array([np.nan, np.inf], "float32")])] == [True]


def quotient(x: jax.Array) -> jax.Array:
    """With jit the quotient is 1, as some versions of XLA simplify it; without, that of zeros is -1."""
    return jnp.ones_like(x) if isinstance(x, Tracer) else lax.div(x, x)


def masked(x: jax.Array) -> jax.Array:
    """With jit the product is 0 where the mask is, as XLA simplifies it; without, it is NaN where `x` is infinite as well."""
    return jnp.where(x < 5, x, 0) if isinstance(x, Tracer) else x * (x < 5).astype(x.dtype)


def subtracted(x: jax.Array) -> jax.Array:
    """NaN where `x` is infinite, with and without jit."""
    return jnp.where(x < 9, x, lax.optimization_barrier(x) - x)


INFINITE = jnp.array([jnp.inf, 1.0, 7.0], jnp.float32)


@pytest.mark.parametrize(
    ("fn", "x", "results", "excused"),
    [
        (quotient, jnp.array([0, 3, 4]), [-1, 1, 1], True),
        (quotient, jnp.array([0, 3, 4]), [7, 1, 1], False),
        (quotient, jnp.array([0, 3, 4]), [-1, 1, -1], False),
        (masked, INFINITE, [np.nan, 1, 0], True),
        (masked, INFINITE, [3, 1, 0], False),
        (masked, INFINITE, [np.inf, 1, 0], False),
        (masked, INFINITE, [np.nan, np.nan, 0], False),
        (masked, INFINITE, [np.nan, 2, 0], False),
        (subtracted, INFINITE, [0, 1, 7], True),
        (subtracted, INFINITE, [np.inf, 1, 7], False),
        (subtracted, INFINITE, [0, np.nan, 7], False),
        (subtracted, INFINITE, [0, 2, 7], False),
    ],
)
def test_only_what_xla_simplifies_is_excused(fn: Callable[..., Any], x: jax.Array, results: list[float], excused: bool) -> None:
    """The plan is the function, but for the results with jit."""
    reference = Reference(fn, [x], ["x"], 0, 0)
    wrong = [np.array(results, x.dtype)]
    assert [d for d in reference.differences(wrong) if not d.known]
    assert simplified(Trial("searched", PAIR, cast(Any, fn)), reference, wrong) == excused


@pytest.mark.parametrize(("k", "excused"), [(0, True), (1, False)])
def test_an_infinity_is_excused_where_nan_comes_of_numbers_that_overflow(k: int, excused: bool) -> None:
    """The function is -1e60 and NaN in float64, and NaN twice in float32."""

    def overflowing(x: jax.Array) -> jax.Array:
        large = lax.optimization_barrier(x * 1e30)
        return large * 1e30 - large * 2e30

    reference = Reference(overflowing, [jnp.array([1.0, jnp.inf], jnp.float32)], ["x"], 0, 0)
    results = np.full(2, np.nan, "float32")
    results[k] = -np.inf
    assert (not reference.differences([results])) == excused


def test_a_number_in_the_place_of_nan_is_wrong_if_the_plan_has_it_without_jit() -> None:
    reference = Reference(subtracted, [INFINITE], ["x"], 0, 0)
    finite = Trial("searched", PAIR, cast(Any, jnp.nan_to_num))
    assert not simplified(finite, reference, [np.array([0, 1, 7], "float32")])


def test_a_plan_that_does_not_run_without_jit_is_found_wrong_and_the_next_one_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(x: jax.Array) -> jax.Array:
        raise FloatingPointError("not without jit")

    reference, outcome = Reference(subtracted, [INFINITE], ["x"], 0, 0), Outcome(0)
    trials = [Trial("searched", PAIR, cast(Any, fn)) for fn in (raises, subtracted)]
    monkeypatch.setattr(examine, "run", lambda trials, reference: [[np.array([0, 1, 7], "float32")] for _ in trials])
    judge(trials, 0, reference, outcome, lambda at: None)
    assert [(f.fault, f.kind) for f in outcome.findings] == [("crash", "eager"), ("wrong", "searched")]
    assert outcome.plans["searched"] == 2
    assert outcome.known["searched"] == 1


@pytest.mark.parametrize(
    ("fn", "known"), [(lambda x: jnp.fft.ifft(jnp.fft.fft(x)).real.sum(), True), (lambda x: (x * x).sum(), False)]
)
def test_a_gradient_that_depends_on_no_argument_is_known(fn: Callable[..., Any], known: bool) -> None:
    assert Reference(fn, [jnp.ones(4)], ["x"], 0).has_known_gradients == known


def test_collectives_of_the_forward_pass_are_missed_though_a_gradient_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x):
        return jnp.sum(x)

    x = jnp.ones((8, 4))
    plan = unity.optimize(fn, x, machine=PAIR, constraints=[unity.pin("x", PartitionSpec("device"))], progress=False)
    trial, reference = Trial("searched", PAIR, plan), Reference(fn, [x], ["x"], 0)
    assert reference.has_known_gradients
    assert checked(trial, reference) == ""
    total = replace(plan.check().total, compiled=0)
    monkeypatch.setattr(Check, "total", total)
    assert "-100.0%" in checked(trial, reference)


def test_minimizing_leaves_what_fails() -> None:
    """Failing stands for having a maximum; what is left is not much more than that."""
    program = next(p for p in map(draw_program, range(400)) if "jnp.max(" in p.source and len(p.body.steps) > 3)
    smaller = minimized(program, lambda p: "jnp.max(" in p.source, 60)
    assert runs(smaller)
    assert len(smaller.body.steps) <= 2
    text = as_test(smaller, "it", 1, 2, "nothing")
    compile(text, "test", "exec")


def test_what_is_drawn_runs() -> None:
    """Most programs are some that JAX can run and differentiate, of all kinds of operations."""
    orders, kinds = [], set()
    for seed in range(60):
        program = draw_program(seed)
        with jax.enable_x64(program.x64):
            orders.append(reference_of(program).order)
        kinds |= set(program.kinds)
    assert orders.count(1) > 30
    assert len(kinds) > 25
    assert json.dumps(Outcome(0).to_json())


def test_cotangents_are_added_up_before_reduce_precision_rounds_them() -> None:
    def fn(x, y):
        return jnp.sum(lax.reduce_precision(x * 1, 8, 7), 0) * y

    with jax.enable_x64(True):
        args = [np.random.default_rng(0).normal(size=(4, 6)), np.random.default_rng(1).normal(size=(8, 1))]
        assert wrong_plans(fn, args, PAIR) == []
