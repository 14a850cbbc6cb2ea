"""Plans with rules of loops: when they are taken, what the plan and its file say of them, and that they run as the function."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import unity
from unity.base.errors import ConstraintError, PlanError
from unity.plan.files.plan_file import sealed
from unity.substitutions.language.library import Library

pytestmark = pytest.mark.usefixtures("own_cache")

MACHINE = unity.Machine.grid(1, 8, "a100")


def f(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def lstm(params, xs):
    def step(state, x):
        h, c = state
        i, g, o, u = jnp.split(x @ params["x"] + h @ params["h"], 4, -1)
        c = jax.nn.sigmoid(g) * c + jax.nn.sigmoid(i) * jnp.tanh(u)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

    zero = jnp.zeros_like(xs[0, :, : params["h"].shape[0]])
    return jnp.mean(lax.scan(step, (zero, zero), xs)[0][0] ** 2)


def hoisted(params, xs):
    def step(state, x):
        h, c = state
        i, g, o, u = jnp.split(x + h @ params["h"], 4, -1)
        c = jax.nn.sigmoid(g) * c + jax.nn.sigmoid(i) * jnp.tanh(u)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

    zero = jnp.zeros_like(xs[0, :, : params["h"].shape[0]])
    return jnp.mean(lax.scan(step, (zero, zero), xs @ params["x"])[0][0] ** 2)


def arguments(batch=64, width=512, steps=20):
    return {"x": f(width, 4 * width), "h": f(width, 4 * width)}, f(steps, batch, width)


def planned(fn, *args, without=(), **options):
    """Return a plan without rules for fewer rounds (`test_unrolling.py`), and without the other rules that match the names.

    Steps recompute nothing (`test_recomputing.py`).
    """
    excluded = unity.without_rules("unrolled-loop", "written-out-loop", *without)
    fixed = {"machine": MACHINE, "progress": False, "constraints": excluded, "recompute": False}
    return unity.optimize(fn, *args, **fixed | options)


def test_the_product_of_the_inputs_is_taken_before_the_loop_where_that_is_cheaper():
    plan = planned(lstm, *arguments())
    assert plan.program.loop_rewriting is not None
    assert {rule.name: n for rule, n in plan.program.loop_rewriting.applied.items()} == {"products-before-loop": 1}
    without = planned(lstm, *arguments(), without=["products-before-loop"])
    assert without.program.loop_rewriting is None
    by_hand = planned(hoisted, *arguments())
    assert plan.time < 0.95 * without.time
    assert abs(plan.time - by_hand.time) < 0.02 * by_hand.time


def errors(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)


def decoder(params, tokens, labels):
    def step(h, slices):
        token, label = slices
        h = jnp.tanh(params["table"][token] + h @ params["h"])
        return h, errors(h @ params["out"], label)

    return jnp.mean(lax.scan(step, jnp.zeros_like(params["table"][tokens[0]]), (tokens, labels))[1])


def decoder_by_hand(params, tokens, labels):
    def step(h, row):
        h = jnp.tanh(row + h @ params["h"])
        return h, h

    states = lax.scan(step, jnp.zeros_like(params["table"][tokens[0]]), params["table"][tokens])[1]
    return jnp.mean(errors(states @ params["out"], labels))


def test_the_embedding_the_output_layer_and_its_loss_leave_the_loop_where_that_is_cheaper():
    ids = jax.ShapeDtypeStruct((20, 64), jnp.int32)
    args = {"table": f(4096, 256), "h": f(256, 256), "out": f(256, 4096)}, ids, ids
    plan = planned(decoder, *args)
    assert (rewriting := plan.program.loop_rewriting) is not None
    assert {rule.name: n for rule, n in rewriting.applied.items()} == {"look-ups-before-loop": 1, "products-after-loop": 1}
    plan.program.check_derivation()
    for rule in ("look-ups-before-loop", "products-after-loop"):
        assert plan.time < 0.9 * planned(decoder, *args, without=[rule]).time
    by_hand = planned(decoder_by_hand, *args)
    assert abs(plan.time - by_hand.time) < 0.02 * by_hand.time


def test_a_plan_with_rules_of_loops_is_not_slower_than_one_without_where_a_step_has_many_rows():
    args = arguments(batch=49152, width=64, steps=4)
    plan = planned(lstm, *args, constraints=())
    without = planned(lstm, *args, constraints=unity.without_rules("*-before-loop"))
    assert plan.time <= without.time


def test_only_the_rules_of_the_library_are_applied():
    for options in ({"rules": ()}, {"rules": Library(())}, {"search": "captured"}, {"budget": 0}):
        assert planned(lstm, *arguments(), **options).program.transformations == ()
    with pytest.raises(ConstraintError, match="products-before-loop"):
        planned(lstm, *arguments(), constraints=unity.without_rules("product-before-loop"))


def test_a_pinned_operator_keeps_the_dimensions_of_one_step():
    pinned = planned(lstm, *arguments(), constraints=unity.pin("dot_general", P("device")))
    assert pinned.program.loop_rewriting is None


def test_a_plan_explains_the_rules_of_loops_and_checks_them(capsys):
    plan = planned(lstm, *arguments())
    plan.program.check_derivation()
    plan.explain()
    said = capsys.readouterr().out
    assert "1 × products-before-loop:  scan(c, x in xs: step(c, dot(x, w)))" in said
    (use,) = plan.program.transformations[0].uses
    (line,) = use.lines
    assert line.startswith(__file__)


def test_a_file_keeps_the_rules_of_loops_and_refuses_others(tmp_path):
    path, plan = tmp_path / "plan.json", planned(lstm, *arguments())
    plan.files.save(path)
    again = unity.load(path, lstm, *arguments())
    assert again.program.transformations[0].record == plan.program.transformations[0].record
    assert again.program.pcg.key == plan.program.pcg.key
    data = json.loads(path.read_text())
    (record,) = data["transformations"]
    (application,) = record["applications"]
    for wrong, message in (
        ([], "another graph"),
        ([{**application, "rule": "no-rule"}], "does not have"),
        ([{**application, "step": "0" * 32}], "does not apply"),
        ([{**application, "rule": "invariants-before-loop"}], "does not apply"),
        ([application, application], "does not apply"),
    ):
        path.write_text(json.dumps(sealed({**data, "transformations": [{**record, "applications": wrong}]})))
        with pytest.raises(PlanError, match=message):
            unity.load(path, lstm, *arguments())
    plan.files.save(path)
    with pytest.raises(PlanError, match="products-before-loop"):
        unity.load(path, lstm, *arguments(), rules=())


def test_a_plan_computes_the_function_and_its_gradients():
    shapes = arguments(batch=8, width=32, steps=6)
    plan = planned(lstm, *shapes)
    assert plan.program.loop_rewriting is not None
    rng = np.random.default_rng(0)
    given = jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape), s.dtype) / 4, shapes)
    loss, gradients = jax.jit(jax.value_and_grad(plan))(*given)
    expected, others = jax.jit(jax.value_and_grad(lstm))(*given)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-7)


def test_an_exported_plan_has_the_product_before_the_loop(tmp_path):
    path = tmp_path / "exported.py"
    planned(lstm, *arguments()).files.export(path)
    lines = path.read_text().splitlines()
    products = [k for k, line in enumerate(lines) if " @ " in line]
    step, loop = (next(k for k, line in enumerate(lines) if text in line) for text in ("def step(", "lax.scan("))
    assert len(products) == 2
    assert products[0] < step < products[1] < loop


def in_two_directions(params, xs):
    def loop(w, reverse):
        def step(h, x):
            return (h := jnp.tanh(x @ w["x"] + h @ w["h"])), h

        return lax.scan(step, jnp.zeros_like(xs[0]), xs, reverse=reverse)[1]

    return jnp.mean(loop(params[0], False) * loop(params[1], True))


def test_loops_in_two_directions_become_one_where_that_is_cheaper(tmp_path, capsys):
    args = [{"x": f(256, 256), "h": f(256, 256)}] * 2, f(20, 64, 256)
    options = {"machine": unity.Machine.grid(1, 2, "a100"), "budget": 1}
    plan = planned(in_two_directions, *args, **options)
    assert (rewriting := plan.program.loop_rewriting) is not None
    assert {rule.name: n for rule, n in rewriting.applied.items()} == {"products-before-loop": 2, "equal-loops-as-batched-loop": 2}
    plan.program.check_derivation()
    without = planned(in_two_directions, *args, **options, without=["equal-loops-*"])
    assert plan.time < 0.9 * without.time
    plan.explain()
    assert "2 × equal-loops-as-batched-loop:  scan(" in capsys.readouterr().out
    plan.files.save(tmp_path / "plan.json")
    again = unity.load(tmp_path / "plan.json", in_two_directions, *args)
    assert again.program.pcg.key == plan.program.pcg.key
    plan.files.export(tmp_path / "exported.py")
    assert (tmp_path / "exported.py").read_text().count("lax.scan(") == 1
    given = jax.tree.map(lambda s: jnp.asarray(np.random.default_rng(0).normal(size=s.shape), s.dtype) / 16, args)
    for a, b in zip(*(jax.tree.leaves(jax.jit(jax.value_and_grad(fn))(*given)) for fn in (plan, in_two_directions)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-7)
