"""Maps of loops: which become one loop, when plans have them, that they compute the same, and that the check refuses others."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import one_in
from jax import lax

import unity
from unity.base.errors import DerivationError
from unity.pcg.capture.capture import capture
from unity.pcg.local.interpreter import run_body
from unity.substitutions.language.loop_rules import LOOP_RULES, MAPPED, UNROLLED
from unity.transforms.loops import applicable, loop_rewriting, scans
from unity.transforms.loops.choose import everywhere
from unity.verify.derivations.batched_loops import check_batched_loops

pytestmark = pytest.mark.usefixtures("own_cache")

WIDTH, BATCH, SEQUENCES, STEPS = 4, 2, 3, 5


def recurrent(w, first, seq, reverse=False):
    def step(h, x):
        h = jnp.tanh(h @ w + x)
        return h, jnp.sin(h)

    return lax.scan(step, first, seq, reverse=reverse)


def plain(w, seqs):
    def one(seq):
        h, ys = recurrent(w, jnp.zeros_like(seq[0]), seq * 2)
        return h, ys.sum(0)

    hs, ys = lax.map(one, seqs)
    return jnp.mean(hs**2) + jnp.mean(ys * hs)


def backward(w, seqs):
    return jnp.mean(lax.map(lambda seq: recurrent(w, seq[0], seq, reverse=True)[1], seqs) ** 2)


def shared_slices(w, seqs):
    """All steps of the map read the same sequence, from other states."""
    return jnp.mean(lax.map(lambda seq: recurrent(w, seq[1], seqs[0])[0], seqs) ** 2)


def two_loops(w, seqs):
    def one(seq):
        h, ys = recurrent(w, seq[0], seq)
        g, zs = recurrent(w * 2, h, jnp.cos(ys))
        return g @ w, zs

    g, zs = lax.map(one, seqs)
    return jnp.sum(g) * jnp.mean(zs)


def constants_of_a_step(w, seqs):
    """The loop reads a constant that is another one in each step of the map."""

    def one(seq):
        return lax.scan(lambda h, _: (jnp.tanh(h @ w + seq.sum(0)), None), seq[0], None, length=STEPS)[0]

    return jnp.mean(lax.map(one, seqs) ** 2)


def in_a_scan(w, seqs):
    def step(total, x):
        return total + jnp.mean(lax.map(lambda seq: recurrent(w, x, seq)[0], seqs) ** 2), None

    return lax.scan(step, 0.0, seqs[0])[0]


def beside(w, seqs):
    return plain(w, seqs) + backward(w, seqs)


def computed_outside_too(w, seqs):
    """Results of the map are computed before and after it, too."""
    before = jnp.sin(seqs)

    def one(seq):
        return recurrent(w, seq[0], seq)[0], jnp.sin(seq), seq * 2, seq @ w

    h, a, b, c = lax.map(one, seqs)
    return jnp.mean(h) + jnp.mean(a * before) + jnp.mean(b * (seqs * 2)) + jnp.mean(c * jnp.tanh(seqs @ w))


def equal_results_of_two(w, seqs):
    def one(v):
        return lambda seq: (recurrent(v, seq[0], seq)[0], seq * 2)

    (h, a), (g, b) = lax.map(one(w), seqs), lax.map(one(w * 3), seqs)
    return jnp.mean(h * g) + jnp.mean(a * b)


def map_of_maps(w, seqs):
    return jnp.mean(lax.map(lambda seq: lax.map(lambda x: recurrent(w, x, seq)[0], seq[:2]), seqs) ** 2)


def with_carry(w, seqs):
    return lax.scan(lambda h, seq: (recurrent(w, h, seq)[0], None), seqs[0, 0], seqs)[0].sum()


def repeated_results(w, seqs):
    def one(seq):
        h, _ = recurrent(w, seq[0], seq)
        return h, h

    a, b = lax.map(one, seqs)
    return jnp.sum(a * b)


def checkpointed(w, seqs):
    return jnp.sum(lax.map(jax.checkpoint(lambda seq: recurrent(w, seq[0], seq)[0]), seqs))


def sorted_steps(w, seqs):
    return jnp.sum(lax.map(lambda seq: recurrent(w, seq[0], jnp.sort(seq, 0))[0], seqs))


def rounded_constant(w, seqs):
    """The gradient of the rounded weight would be summed over the sequences in bfloat16."""
    v = lambda: w.astype(jnp.bfloat16)[0]  # noqa: E731

    def one(seq):
        narrow = v()
        return lax.scan(lambda h, x: (jnp.tanh(h * narrow + x), None), seq[0].astype("bfloat16"), seq.astype("bfloat16"))[0]

    return jnp.sum(lax.map(one, seqs).astype("float32"))


def without_loops(w, seqs):
    return jnp.sum(lax.map(lambda seq: jnp.tanh(seq @ w), seqs))


MAPS = [
    plain,
    backward,
    shared_slices,
    two_loops,
    constants_of_a_step,
    in_a_scan,
    beside,
    computed_outside_too,
    equal_results_of_two,
]


def arguments(dtype="float64"):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(0, 0.3, shape), dtype)  # noqa: E731
    return draw(WIDTH, WIDTH), draw(SEQUENCES, STEPS, BATCH, WIDTH)


def mapped(captured):
    """Return the rewriting that takes all maps of loops at once."""
    path, _ = everywhere(captured.body, [MAPPED])
    return loop_rewriting(captured, path)


def total(body):
    return lambda *a: run_body(body, a, [()] * len(body.inputs), [()] * len(body.outputs), ())[0]


@pytest.mark.parametrize("fn", one_in(2, MAPS))
def test_values_and_gradients_are_the_same_and_the_result_is_derived(fn):
    with jax.enable_x64(True):
        args = arguments()
        captured = capture(fn, *args, argnums=(0, 1))
        rewriting = mapped(captured)
        rewriting.check()
        lengths = [e.params["length"] for e in scans(rewriting.after.body)]
        assert SEQUENCES not in lengths
        for a, b in zip(*(_values(body, args) for body in (rewriting.after.body, captured.body)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


def _values(body, args):
    return (total(body)(*args), *jax.grad(total(body), argnums=(0, 1))(*args))


@pytest.mark.parametrize("fn", [with_carry, repeated_results, checkpointed, sorted_steps, rounded_constant, without_loops])
def test_other_loops_stay(fn):
    assert not applicable(capture(fn, *arguments("float32")).body, MAPPED)


def test_sums_of_half_precision_stay():
    assert not applicable(capture(plain, *arguments("float16")).body, MAPPED)


@pytest.mark.parametrize("fn", MAPS)
def test_another_program_is_not_derived(fn):
    def other(w, seqs):
        return fn(w * 2, seqs)

    with jax.enable_x64(True):
        first, second = (capture(f, *arguments(), argnums=(0, 1)) for f in (fn, other))
    with pytest.raises(DerivationError):
        check_batched_loops(first.body, mapped(second).after.body)


def edited(body, edit):
    """Return a program with another form of its first scan."""
    k = next(k for k, e in enumerate(body.equations) if "length" in e.params)
    return replace(body, equations=(*body.equations[:k], edit(body.equations[k]), *body.equations[k + 1 :]))


def with_params(scan, **params):
    return replace(scan, params={**scan.params, **params}, origin=None)


def with_step(scan, change):
    return with_params(scan, jaxpr=change(scan.params["jaxpr"]))


EDITS = {
    "direction": lambda scan: with_params(scan, reverse=not scan.params["reverse"]),
    "exchanged stacks": lambda scan: replace(scan, operands=(*scan.operands[:-2], *scan.operands[:-3:-1]), origin=None),
    "exchanged results": lambda scan: replace(scan, results=scan.results[::-1], origin=None),
    "exchanged outputs of the step": lambda scan: with_step(scan, lambda step: replace(step, outputs=step.outputs[::-1])),
    "one more output": lambda scan: with_step(scan, lambda step: replace(step, outputs=(*step.outputs, step.outputs[0]))),
}


def two_stacks(w, seqs):
    """All dimensions have one size, so that every edit is well-typed."""

    def one(seq):
        def step(h, rows):
            return jnp.tanh(h @ w + rows[0] * jnp.cos(rows[1])), jnp.sin(h)

        h, ys = lax.scan(step, seq[0], (seq * 2, seq @ w))
        return h, ys

    h, ys = lax.map(one, seqs)
    return jnp.mean(h) + jnp.mean(ys * ys)


@pytest.mark.parametrize("edit", EDITS)
def test_a_program_with_one_edit_is_not_derived(edit):
    shapes = jax.ShapeDtypeStruct((4, 4), jnp.float32), jax.ShapeDtypeStruct((4,) * 4, jnp.float32)
    captured = capture(two_stacks, *shapes, argnums=(0, 1))
    after = mapped(captured).after.body
    check_batched_loops(captured.body, after)
    with pytest.raises(DerivationError):
        check_batched_loops(captured.body, edited(after, EDITS[edit]))


def test_the_other_rules_stay_where_the_loops_of_a_map_do_not_fit():
    shapes = jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((8, 20, 16, 256), jnp.float32)
    captured = capture(projected, *shapes)
    path, _ = everywhere(captured.body, tuple(LOOP_RULES.values()))
    whole = loop_rewriting(captured, path)
    assert {"products-before-loop", MAPPED.name, UNROLLED.name} <= {rule.name for rule in whole.applied}
    rolled, least = whole.with_less_memory()
    assert {rule.name for rule in whole.applied} - {rule.name for rule in rolled.applied} == {UNROLLED.name}
    assert {rule.name for rule in least.applied} == {"products-before-loop"}
    for rewriting in (whole, rolled, least):
        rewriting.check()


def projected(w, seqs):
    def one(seq):
        return lax.scan(lambda h, x: (jnp.tanh(h @ w + x @ w), None), jnp.zeros_like(seq[0]), seq)[0]

    return jnp.mean(lax.map(one, seqs) ** 2)


@pytest.mark.parametrize("fn", [plain, two_loops])
def test_other_rules_apply_before_and_after(fn):
    with jax.enable_x64(True):
        args = arguments()
        captured = capture(fn, *args, argnums=(0, 1))
        path, after = everywhere(captured.body, tuple(LOOP_RULES.values()))
        assert MAPPED.name in {a.rule for a in path}
        loop_rewriting(captured, path).check()
        np.testing.assert_allclose(total(after)(*args), fn(*args), rtol=1e-12)


def test_plans_take_the_loops_of_a_map_at_once(tmp_path):
    shapes = jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((8, 20, 16, 256), jnp.float32)
    options = {"machine": unity.Machine.grid(1, 2, "a100"), "progress": False, "budget": 1}
    plan = unity.optimize(plain, *shapes, **options)
    assert "mapped-loops-as-batched-loop" in str(plan.program.loop_rewriting)
    without = unity.optimize(plain, *shapes, constraints=unity.without_rules("mapped-*"), **options)
    assert plan.time < 0.3 * without.time
    plan.program.check_derivation()
    plan.files.save(tmp_path / "plan.json")
    assert unity.load(tmp_path / "plan.json", plain, *shapes).program.pcg.key == plan.program.pcg.key
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(0, 0.05, s.shape), s.dtype) for s in shapes]
    for a, b in zip(*(jax.tree.leaves(jax.jit(jax.value_and_grad(fn))(*args)) for fn in (plan, plain)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)
