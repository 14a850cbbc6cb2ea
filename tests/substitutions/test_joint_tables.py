"""Tables looked up by different indices, stacked so that one look-up takes rows of both: the rule, its limits, where it pays."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import by_hand
from jax import lax

import unity
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.pcg.ir.dead_code import used
from unity.pcg.ir.program import Body, program_of
from unity.substitutions.language.axioms import axioms, default_library
from unity.substitutions.language.derivation import Derivation
from unity.substitutions.language.text import parse_rule
from unity.substitutions.language.vocabulary import VOCABULARY
from unity.substitutions.rewriting.forms import planning_form, search_form
from unity.substitutions.rewriting.occurrences import Pattern, occurrences
from unity.substitutions.rewriting.reading import Reading
from unity.substitutions.rewriting.recording import step_of
from unity.substitutions.rewriting.rewriting import rewritten
from unity.verify.derivations import replay
from unity.verify.derivations.canonical_form import canonical_forms
from unity.verify.proofs import bounded
from unity.verify.proofs.first_order import Prover

STACK = "merge-tables"
EIGHT = Machine.grid(1, 8, "v100")
RNG = np.random.default_rng(0)

pytestmark = pytest.mark.usefixtures("own_cache")


def stacking() -> Pattern:
    return Pattern(default_library()[STACK].rule, True)


def test_the_rule_is_proved():
    entry = default_library()[STACK]
    assert entry.status == "proved"
    assert entry.instances > 0
    assert {"embedding-of-first", "embedding-of-second", "embedding-of-samples", "split-of-concat"} <= set(entry.axioms)


@pytest.mark.parametrize(
    "text",
    [
        "embedding(concat(-2, x, y), z) = embedding(x, z)",  # rows of the second
        "embedding(concat(-2, x, y), behind(x, z)) = embedding(y, z)",  # below zero are rows of the first
        "embedding(concat(-2, x, y), behind(y, within(y, z))) = embedding(y, z)",
        "embedding(concat(-2, x, y), within(y, z)) = embedding(x, z)",
    ],
)
def test_what_is_nearly_the_rule_is_refuted(text):
    rule = parse_rule(f"wrong {text}")
    assert bounded.executed(rule, sizes=(1, 2, 3), limit=100).status == "refuted"
    assert Prover(axioms()).prove(rule).status == "open"


def test_indices_that_cannot_be_counted_on_are_refused():
    table, ids = jax.ShapeDtypeStruct((100, 2), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.int8)
    for name in ("within", "behind"):
        with pytest.raises(TypeError, match="more than int8 can number"):
            VOCABULARY[name].run(table, ids)
        with pytest.raises(TypeError, match="takes a table and integers"):
            VOCABULARY[name].run(table, table)


def run(body: Body, *args):
    values = dict(zip(body.inputs, args, strict=True))

    def read(a):
        return values[a] if isinstance(a, int) else a.value

    for e in body.equations:
        found = e.primitive.bind(*map(read, e.operands), **e.params)
        values.update(zip(e.results, found if e.primitive.multiple_results else [found], strict=True))
    return [read(a) for a in body.outputs]


def program(fn, *args) -> Body:
    return search_form(used(program_of(jax.make_jaxpr(fn)(*args))[0]))


def tables(mode, rows=(5, 3), ids=((4,), (4,))):
    """A function that looks up, its arguments, and indices far out of range on both sides."""

    def rows_of(table, ids):
        numbers = lax.GatherDimensionNumbers(offset_dims=(ids.ndim,), collapsed_slice_dims=(0,), start_index_map=(0,))
        return lax.gather(table, ids[..., None], numbers, (1, table.shape[1]), mode=mode)

    def fn(t, u, i, j):
        return rows_of(t, i), rows_of(u, j)

    params = [jnp.asarray(RNG.normal(size=(n, 2)), jnp.float32) for n in rows]
    return fn, (*params, *(jnp.asarray(RNG.integers(-9, 9, s), jnp.int32) for s in ids))


def places(body: Body):
    return list(occurrences(Reading(body), stacking()))


def stepped(body: Body, place) -> Body:
    found = rewritten(body, place)
    assert found is not None
    return found


@pytest.mark.parametrize("mode", ["clip", "promise_in_bounds"])
@pytest.mark.parametrize("ids", [((4,), (4,)), ((4,), (6,)), ((2, 3), (2, 1))])
def test_values_and_gradients_are_kept_out_of_range_too(ids, mode):
    fn, (t, u, i, j) = tables(mode, ids=ids)
    body = program(fn, t, u, i, j)
    found, *_ = places(body)
    new = planning_form(stepped(body, found))
    assert [e.name for e in new.equations].count("gather") == 1

    def total(compute, t, u):
        return sum(jnp.sum(jnp.sin(x + k)) for k, x in enumerate(compute(t, u, i, j)))

    for before, after in zip(fn(t, u, i, j), run(new, t, u, i, j), strict=True):
        np.testing.assert_array_equal(before, after)
    wanted = jax.grad(lambda t, u: total(fn, t, u), (0, 1))(t, u)
    for a, b in zip(jax.grad(lambda t, u: total(lambda *x: run(new, *x), t, u), (0, 1))(t, u), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    step = step_of(canonical_forms(body), found)
    assert step is not None
    replay.check(body, new, Derivation((step,)), default_library())


def test_rows_that_would_be_nan_are_not_moved():
    fn, args = tables("fill")
    assert not places(program(fn, *args))


@pytest.mark.parametrize("mode", ["promise_in_bounds", *by_hand("clip")])
def test_as_many_tables_as_there_are_become_one(mode):
    def fn(tables, ids):
        return [table.at[i].get(mode=mode) for table, i in zip(tables, ids, strict=True)]

    params = [jnp.asarray(RNG.normal(size=(n, 2)), jnp.float32) for n in (5, 3, 7, 9)]
    ids = [jnp.asarray([*RNG.integers(0, len(t), 4), -1, len(t), -len(t) - 1, 2**31 - 1, -(2**31)], jnp.int32) for t in params]
    body = program(fn, params, ids)
    for _ in range(len(params) - 1):
        body = search_form(stepped(body, places(body)[0]))
    assert not places(body)
    new = planning_form(body)
    assert [e.name for e in new.equations].count("gather") == 1
    for before, after in zip(fn(params, ids), run(new, *params, *ids), strict=True):
        np.testing.assert_array_equal(before, after)

    def loss(rows):  # what is read outside matters to what is read inside
        return jnp.sum(jnp.sin(sum(jnp.sin(x + k).sum(0) for k, x in enumerate(rows))))

    def derivatives(compute):
        gradient = jax.grad(lambda p: loss(compute(p)))
        squares = jax.grad(lambda p: sum(jnp.sum(jnp.sin(x)) for x in gradient(p)))(params)
        return gradient(params), jax.jvp(gradient, (params,), ([jnp.cos(p) for p in params],))[1], squares

    found, wanted = derivatives(lambda p: run(new, *p, *ids)), derivatives(lambda p: fn(p, ids))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


ROWS = (30009, 9977, 20009, 5541)  # only all four together divide by eight; alone they do with zeros behind them


def small_dlrm(params, dense, ids, y, mode="clip"):
    bottom = jax.nn.relu(dense @ params["bottom"])
    found = [table.at[ids[:, k]].get(mode=mode) for k, table in enumerate(params["tables"])]
    hidden = jax.nn.relu(jnp.concatenate([bottom, *found], axis=1) @ params["top"])
    return jnp.mean((hidden @ params["out"] - y) ** 2)


def f(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def dlrm_args(rows, samples=512, width=5):
    tables = [f(n, width) for n in rows]
    params = {"bottom": f(13, width), "tables": tables, "top": f(width * (1 + len(rows)), 16), "out": f(16, 1)}
    return params, f(samples, 13), jax.ShapeDtypeStruct((samples, len(rows)), jnp.int32), f(samples, 1)


def stacked(args, fn=small_dlrm, **options):
    """The plan with weights packed, and how often it stacks two tables."""
    plan = unity.optimize(fn, *args, machine=EIGHT, progress=False, branches=False, pack=True, **options)
    applied = {str(w): n for w, n in plan.program.rewriting.applied}
    return plan, applied.get(f"{STACK} (backward)", 0)


def test_tables_are_stacked_where_only_together_they_spread_over_the_devices():
    """Apart, with zeros behind them, they spread as well: the devices' parts are partial sums, to which what is read beside them is
    contributed, so that one sum is taken of all. What stacking saves is time: one gather for four.

    The fastest plan of either spreads them over two devices, as zeroing more of a gradient takes less than a sum over eight; plans
    that spread them over all follow on the frontier.
    """
    args = dlrm_args([16 * (n - n % 8) + n % 8 for n in ROWS])
    plan, times = stacked(args)
    apart, _ = stacked(args, search="captured")
    plain = unity.optimize(small_dlrm, *args, machine=EIGHT, progress=False, branches=False)
    assert times == len(ROWS) - 1
    assert (str(plan.program.joining), str(apart.program.joining)) == (
        "4 weights joined once, in 1 array", "4 weights joined once, in 4 arrays, 4 with zeros behind",
    )  # fmt: skip
    assert plan.time < 0.8 * apart.time
    assert apart.time < 0.97 * plain.time
    assert max(plan.memory, apart.memory) < 0.6 * plain.memory
    spread, one_by_one = (next(p for p in found.frontier if p.memory < 0.15 * plain.memory) for found in (plan, apart))
    assert spread.time < 1.1 * plan.time
    assert spread.time < 0.85 * min(one_by_one.time, plain.time)


@pytest.mark.parametrize("mode", ["promise_in_bounds", *by_hand("clip")])
def test_a_plan_with_stacked_tables_computes_the_same(mode, tmp_path):
    """Padded with ids of -1 and of the table's size, too, and far outside: of a promise, what is read there has no gradient."""
    args = dlrm_args(ROWS)
    fn = partial(small_dlrm, mode=mode)
    plan, times = stacked(args, fn)
    assert times == len(ROWS) - 1
    assert [step.rule for step in plan.program.check_derivation()] == [STACK] * times
    params, dense, y = jax.tree.map(lambda s: jnp.asarray(RNG.normal(size=s.shape) / 4, s.dtype), (args[0], args[1], args[3]))
    ids = np.stack([RNG.integers(-n, n, len(y)) for n in ROWS], 1).astype(np.int32)
    ids[:6], ids[6:12], ids[12:14], ids[14:16] = ROWS, -1 - np.array(ROWS), np.iinfo(np.int32).max, np.iinfo(np.int32).min
    given = params, dense, jnp.asarray(ids), y
    plan.files.save(tmp_path / "plan.json")
    wanted = jax.jit(jax.value_and_grad(fn))(*given)
    for p in (plan, unity.load(tmp_path / "plan.json", fn, *args)):
        value, gradient = jax.jit(jax.value_and_grad(p))(*p.shard(*given))
        np.testing.assert_allclose(value, wanted[0], rtol=1e-5)
        for a, b in zip(jax.tree.leaves(p.shard.unpack(gradient)), jax.tree.leaves(wanted[1]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)
    assert [bool(np.asarray(t)[-1].any()) for t in wanted[1]["tables"]] == [mode == "clip"] * len(ROWS)


def test_tables_that_spread_alone_are_left_apart():
    def fn(params, ids):
        return jnp.mean(jnp.concatenate([table[ids[:, k]] for k, table in enumerate(params)], 1) ** 2)

    args = [jax.ShapeDtypeStruct((65536, 8), jnp.float32)] * 2, jax.ShapeDtypeStruct((4096, 2), jnp.int32)
    captured = capture(fn, *args)
    assert places(search_form(captured.body))
    apart, both = (unity.optimize(fn, *args, machine=EIGHT, progress=False, rules=r) for r in ((), None))
    assert both.time <= apart.time
