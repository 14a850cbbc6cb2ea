"""Losses over micro-batches: the function's values and gradients, the predicted collectives, less memory, and clear refusals."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from precision import in_64_bits
from serial_graph import evaluate
from small_models import Small, arrays, f, gpt_scanned, i

import unity
from unity.pcg.capture.capture import capture
from unity.pcg.ir.payloads import Remat
from unity.pcg.parallel.stages import Mixed
from unity.plan.plan import Plan
from unity.transforms.micro_batching import leanest_micro_batches
from unity.transforms.micro_batching.micro_batching import micro_batched

SLOW = unity.Device("slow", {"float32": 1e7, "float64": 1e7}, 2**30, 1e7, 1.0, 0.0)  # so that it pays to split small products
MACHINE = unity.Machine.grid(1, 2, SLOW, intra=(1e9, 1e-7), inter=(5e8, 1e-7))
B, D, V = 16, 8, 12
WEIGHTS = {"in": f(D, 3 * D), "out": f(3 * D, V)}
BATCH = {"x": f(B, D), "y": i(B)}
KEY = jax.ShapeDtypeStruct((2,), "uint32")


@pytest.fixture(autouse=True, scope="module")
def in_float64() -> Iterator[None]:
    with in_64_bits():
        yield


def scores(w: Any, x: Any) -> Any:
    return jax.nn.log_softmax(jnp.tanh(x @ w["in"]) @ w["out"])


def mean(w: Any, b: Any) -> Any:
    return -jnp.mean(jnp.take_along_axis(scores(w, b["x"]), b["y"][:, None], 1))


def indexed(w: Any, b: Any) -> Any:
    return -jnp.sum(scores(w, b["x"])[jnp.arange(B), b["y"]])


def several(w: Any, b: Any) -> Any:
    """A function of a mean over the labels that count, of another sum over the samples, and of a term without samples."""
    there = (b["y"] > 2).astype("float64")  # no weight changes their number
    labels = jnp.take_along_axis(scores(w, b["x"]), b["y"][:, None], 1)[:, 0]
    loss = -jnp.sum(labels * there) / jnp.sum(there) + 0.1 * jnp.mean((b["x"] @ w["in"]) ** 2)
    return jnp.sqrt(loss + 0.1 * sum(jnp.sum(x**2) for x in w.values()))


def masked(w: Any, b: Any) -> Any:
    """Dropout, with bits that are drawn for the whole batch outside of loops and inside of one."""
    one, two = jax.random.split(jax.random.wrap_key_data(b["key"]))

    def drop(key: Any, x: Any) -> Any:
        return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0.0)

    @jax.checkpoint
    def step(x: Any, key: Any) -> tuple[Any, None]:
        return x + drop(key, jnp.tanh(x @ w["in"])) @ w["in"].T, None

    x = lax.scan(step, drop(one, b["x"]), jax.random.split(two, 3))[0]
    return mean(w, {"x": x, "y": b["y"]})


def with_class_weights(w: Any, b: Any) -> Any:
    """A class weighs less the more samples of the whole batch have its label."""
    weights = 1 / (1 + jnp.bincount(b["y"], length=V))
    return -jnp.sum(weights[b["y"], None] * jnp.take_along_axis(scores(w, b["x"]), b["y"][:, None], 1))


def with_ramps(w: Any, b: Any) -> Any:
    """Samples weigh the more the later they come, and numbers that no slice is enough for choose their signs."""
    ramp, signs = jnp.linspace(1.0, 2.0, B), jax.random.permutation(jax.random.wrap_key_data(b["key"]), jnp.arange(B) % 3 - 1)
    return jnp.sum(jnp.mean(scores(w, b["x"] * signs[:, None]), 1) * ramp) / jnp.sum(ramp)


def weighted_by_themselves(w: Any, b: Any) -> Any:
    """No gradient flows through the weights of the samples, and their sum is computed first."""
    errors = jnp.mean(scores(w, b["x"]) ** 2, 1)
    return jnp.sum(errors * lax.stop_gradient(errors / jnp.sum(errors)))


def with_a_threshold(w: Any, b: Any) -> Any:
    """A Huber loss with a threshold from the mean error."""
    errors = jnp.mean(jnp.abs(scores(w, b["x"])), 1)
    most = lax.stop_gradient(jnp.mean(errors))
    return jnp.mean(jnp.where(errors < most, errors**2, 2 * most * errors - most**2))


def errors(w: Any, b: Any) -> tuple[Any, Any]:
    """The errors of samples whose label counts, and a mask of these as real numbers."""
    there = (b["y"] > 2).astype("float64")
    return -jnp.take_along_axis(scores(w, b["x"]), b["y"][:, None], 1)[:, 0] * there, there


def with_a_mask_of_a_checkpoint(w: Any, b: Any) -> Any:
    each, there = jax.checkpoint(errors)(w, b)
    return jnp.sum(each) / jnp.sum(there)


def with_sums_of_a_checkpoint(w: Any, b: Any) -> Any:
    total, count = jax.checkpoint(lambda w, b: tuple(map(jnp.sum, errors(w, b))))(w, b)
    return total / count


def with_a_count_of_a_checkpoint(w: Any, b: Any) -> Any:
    """The count is needed to go on with each sample."""

    @jax.checkpoint
    def call(w: Any, b: Any) -> Any:
        each, there = errors(w, b)
        return each, jnp.sum(there)

    each, count = call(w, b)
    return jnp.sum(jnp.sqrt(each**2 + 1) / count)


def with_masks_of_a_scan(w: Any, b: Any) -> Any:
    def step(carry: Any, _: Any) -> Any:
        x, there = carry
        return (x + jnp.tanh(x @ w["in"]) @ w["in"].T * there[:, None], there), there

    (x, there), masks = lax.scan(jax.checkpoint(step), (b["x"], (b["y"] > 2).astype("float64")), None, 3)
    return jnp.sum(jnp.mean(scores(w, x), 1) * there) / jnp.sum(there) + 0.1 * jnp.sum(masks)


def in_chunks(w: Any, b: Any) -> Any:
    """Errors and their number are added up chunk by chunk."""

    def step(sums: Any, part: Any) -> Any:
        return tuple(x + jnp.sum(y) for x, y in zip(sums, errors(w, part), strict=True)), None

    chunks = {"x": b["x"].reshape(4, B // 4, D), "y": b["y"].reshape(4, B // 4)}
    total, count = lax.scan(jax.checkpoint(step), (0.0, 0.0), chunks)[0]
    return total / count


def with_a_mask_of_a_conditional(w: Any, b: Any) -> Any:
    def more(x: Any, there: Any) -> Any:
        return lax.fori_loop(0, 2, lambda _, x: jnp.tanh(x @ w["in"]) @ w["in"].T, x), there, 2 * there

    def less(x: Any, there: Any) -> Any:
        return jnp.tanh(x @ w["in"]) @ w["in"].T, there, there

    x, there, _ = lax.cond(jnp.sum(w["out"]) > 0, more, less, b["x"], (b["y"] > 2).astype("float64"))
    return jnp.sum(jnp.mean(scores(w, x), 1) * there) / jnp.sum(there)


LOSSES: dict[str, Small] = {
    "with a mask of a checkpoint": Small(with_a_mask_of_a_checkpoint, WEIGHTS, BATCH),
    "with sums of a checkpoint": Small(with_sums_of_a_checkpoint, WEIGHTS, BATCH),
    "with a count of a checkpoint": Small(with_a_count_of_a_checkpoint, WEIGHTS, BATCH),
    "with masks of a scan": Small(with_masks_of_a_scan, WEIGHTS, BATCH),
    "in chunks": Small(in_chunks, WEIGHTS, BATCH),
    "with a mask of a conditional": Small(with_a_mask_of_a_conditional, WEIGHTS, BATCH),
    "weighted by themselves": Small(weighted_by_themselves, WEIGHTS, BATCH),
    "with a threshold": Small(with_a_threshold, WEIGHTS, BATCH),
    "indexed": Small(indexed, WEIGHTS, BATCH),
    "several": Small(several, WEIGHTS, BATCH),
    "masked": Small(masked, WEIGHTS, BATCH | {"key": KEY}),
    "with class weights": Small(with_class_weights, WEIGHTS, BATCH),
    "with ramps": Small(with_ramps, WEIGHTS, BATCH | {"key": KEY}),
}
OPTIONS: dict[str, Any] = {"machine": MACHINE, "search": "captured", "pipelines": False, "branches": False, "progress": False}


def planned(model: Small, **options: Any) -> Plan:
    options = {**OPTIONS, "micro_batches": 4, **options}
    return unity.optimize(model.loss, model.params, model.batch, **options)


def assert_equal(ours: Any, theirs: Any) -> None:
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_are_the_function_s_and_collectives_as_predicted(name: str) -> None:
    model = LOSSES[name]
    plan, args = planned(model), (arrays(model.params), arrays(model.batch))
    assert plan.program.micro_batching is not None
    assert plan.program.micro_batching.count == 4
    plan.program.check_derivation()
    assert_equal(jax.jit(jax.value_and_grad(plan))(*plan.shard(*args)), jax.jit(jax.value_and_grad(model.loss))(*args))
    assert plan.check().agrees(0)


def with_rules(w: Any, b: Any) -> Any:
    """Dropout and a mask by position between activations with derivative rules, which need neither."""
    h = jax.nn.relu(b["x"] @ w["in"])
    there = jax.random.bernoulli(jax.random.key(0), 0.8, h.shape) & (jnp.arange(B) < 12)[:, None]
    return jnp.mean(jax.nn.softplus(jnp.where(there, h / 0.8, 0.0) @ w["out"]) ** 2)


def test_masks_beside_derivative_rules_are_those_of_the_whole_batch() -> None:
    model = Small(with_rules, WEIGHTS, BATCH)
    plan, args = planned(model), (arrays(model.params), arrays(model.batch))
    assert_equal(jax.jit(jax.value_and_grad(plan))(*plan.shard(*args)), jax.jit(jax.value_and_grad(model.loss))(*args))


def actions(w: Any, b: Any) -> Any:
    return (b["x"] @ w["out"][:D] + jnp.sum(w["in"])).T


ROW_PICKS: dict[str, Callable[[Any, Any], Any]] = {
    "of any mode": lambda q, i: q[i, jnp.arange(B)],
    "clamped": lambda q, i: q.at[i, jnp.arange(B)].get(mode="clip"),
    "filled": lambda q, i: q.at[i, jnp.arange(B)].get(mode="fill", fill_value=3.0),
    "of a table of NumPy": lambda q, i: q[i, np.arange(B)],
    "several": lambda q, i: q.T[jnp.arange(B)[:, None], jnp.stack([i, i, i - 1], 1)].sum(1),
    "set": lambda q, i: q.at[i, jnp.arange(B)].set(jnp.sin(q[0])),
    "added": lambda q, i: q.T.at[jnp.arange(B)[:, None], jnp.stack([i, i], 1)].add(jnp.sin(q[:2].T)).T,
    "recomputed": jax.checkpoint(lambda q, i: q[i, jnp.arange(B)]),
    "in a loop": lambda q, i: lax.scan(lambda x, k: (x + jnp.sin(k * q)[i, jnp.arange(B)], None), jnp.zeros(B), jnp.arange(3.0))[0],
}


@pytest.mark.parametrize("name", ROW_PICKS)
def test_a_look_up_in_every_row_works_on_each_sample(name: str) -> None:
    """Indices are negative and out of range, too."""

    def loss(w: Any, b: Any) -> Any:
        return jnp.mean(ROW_PICKS[name](actions(w, b), b["y"]) ** 2)

    weights, batch = arrays(WEIGHTS), arrays(BATCH)
    batch["y"] = jnp.arange(-16, 16, 2, dtype="int32")  # of 12 actions
    walk = micro_batched(capture(loss, weights, batch), 4).after.graph
    got, expected = (
        jax.jit(jax.value_and_grad(f))(weights)
        for f in (lambda w: evaluate(walk, jax.tree.leaves((w, batch)))[0], lambda w: loss(w, batch))
    )
    assert_equal(got, expected)


@pytest.mark.parametrize("rows", [np.arange(B) - 1, np.arange(B)[::-1], np.zeros(B, int), np.arange(B // 2)])
def test_a_look_up_in_other_rows_is_refused(rows: Any) -> None:
    def loss(w: Any, b: Any) -> Any:
        return jnp.mean(actions(w, b)[b["y"][: len(rows)], rows] ** 2)

    with pytest.raises(Mixed, match="does not work on each sample by itself"):
        micro_batched(capture(loss, WEIGHTS, BATCH), 4)


def assert_same_results(loss: Callable[..., Any], count: int) -> None:
    """Check the value, the gradients and the further results of a loss over `count` micro-batches."""
    args = arrays(WEIGHTS), arrays(BATCH)
    plan = planned(Small(loss, WEIGHTS, BATCH), micro_batches=count)
    step, expected = jax.value_and_grad(plan, has_aux=True), jax.value_and_grad(loss, has_aux=True)
    assert_equal(jax.jit(step)(*plan.shard(*args)), jax.jit(expected)(*args))


def test_further_results_are_added_up_or_joined_in_the_order_of_the_samples() -> None:
    def loss(w: Any, b: Any) -> Any:
        right = jnp.argmax(scores(w, b["x"]), -1) == b["y"]
        return mean(w, b), {"hidden": b["x"] @ w["in"], "right": jnp.mean(right), "weights": jnp.sum(w["out"])}

    assert_same_results(loss, 8)


def test_counts_by_label_are_added_up() -> None:
    """Labels outside of the table are dropped or clipped, as in one batch."""

    def loss(w: Any, b: Any) -> Any:
        guess, ones = jnp.argmax(scores(w, b["x"]), -1), jnp.ones(B, "int32")
        counts = {
            "bins": jnp.bincount(b["y"], length=7),
            "confusion": jnp.zeros((V, V), "int32").at[b["y"], guess].add(1),
            "segments": jax.ops.segment_sum(ones, b["y"], 7),
            "dropped": jnp.zeros(3, "int8").at[b["y"] - 2].add(100, mode="drop"),
            "clipped": jnp.zeros(3, "uint8").at[b["y"] - 2].add(ones.astype("uint8"), mode="clip"),
            "real": jnp.zeros(V).at[guess].add(1.0),
        }
        return mean(w, b), counts

    assert_same_results(loss, 4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_losses_and_gradients_are_added_up_in_float32(dtype: str) -> None:
    """In bfloat16, 0.25 + 1 / 1024 is 0.25 again."""
    w, x = jnp.eye(4, dtype=dtype), jnp.ones((1024, 4), dtype)
    machine = unity.Machine.grid(1, 1, "a100")
    plan = unity.optimize(lambda w, x: jnp.mean((x @ w) ** 2), w, x, machine=machine, micro_batches=1024, rules=(), progress=False)
    loss, gradient = jax.value_and_grad(plan)(*plan.shard(w, x))
    assert (loss.dtype, loss) == (jnp.dtype(dtype), 1)
    assert gradient.dtype == dtype
    np.testing.assert_allclose(gradient.astype("float32"), jnp.full((4, 4), 0.5), rtol=0.01)


def test_a_result_may_be_read_by_a_sum_that_the_loop_needs() -> None:
    def loss(w: Any, b: Any) -> Any:
        h = b["x"] @ w["in"]
        return jnp.mean((h - lax.stop_gradient(h.mean())) ** 2), {"hidden": h, "total": h.sum()}

    assert_same_results(loss, 4)


def test_gradients_of_further_results_are_refused() -> None:
    def loss(w: Any, b: Any) -> Any:
        return mean(w, b), jnp.mean(jnp.sin(b["x"] @ w["in"]))

    args = arrays(WEIGHTS), arrays(BATCH)
    plan = planned(Small(loss, WEIGHTS, BATCH))
    with pytest.raises(unity.OptionError, match="expected gradients of the plan's first result alone"):
        jax.grad(lambda w: sum(plan(w, plan.shard(*args)[1])))(plan.shard(*args)[0])


def test_second_derivatives_are_the_function_s() -> None:
    def curvature(loss: Callable[..., Any]) -> Callable[..., Any]:
        return lambda w, b: jax.jvp(lambda w: jax.grad(loss)(w, b), (w,), (jax.tree.map(jnp.sin, w),))

    plan, args = planned(Small(mean, WEIGHTS, BATCH)), (arrays(WEIGHTS), arrays(BATCH))
    assert_equal(jax.jit(curvature(plan))(*plan.shard(*args)), jax.jit(curvature(mean))(*args))


def test_an_exported_plan_computes_the_same(tmp_path: Path) -> None:
    model, path = LOSSES["several"], tmp_path / "plan.py"
    args = arrays(model.params), arrays(model.batch)
    plan = planned(model)
    plan.files.export(path)
    fn = runpy.run_path(str(path))["fn"]
    assert_equal(jax.jit(jax.value_and_grad(fn))(*args), jax.jit(jax.value_and_grad(model.loss))(*args))


def test_a_small_gpt_needs_less_memory_as_predicted() -> None:
    model = gpt_scanned(layers=2, b=16, s=8)
    args = arrays(model.params), arrays(model.batch)
    whole, plan = planned(model, micro_batches=None), planned(model, micro_batches=4)
    step = jax.jit(jax.value_and_grad(plan))
    assert_equal(step(*plan.shard(*args)), jax.jit(jax.value_and_grad(model.loss))(*args))
    before, after = whole.check(), plan.check()
    assert after.agrees(0)
    assert after.memory.temporaries < 0.6 * before.memory.temporaries
    assert plan.memory < 0.7 * whole.memory


def wide(w: Any, b: Any) -> Any:
    return jnp.mean(jnp.sin(jnp.tanh(b["x"] @ w) @ w.T) ** 2)


WIDE = Small(wide, f(D, 4 * D), {"x": f(64 * B, D)})


def test_the_least_number_that_suffices_is_chosen_only_where_memory_asks_for_it() -> None:
    fastest = planned(WIDE, micro_batches=None)
    assert planned(WIDE, micro_batches=True).program.pcg.key == fastest.program.pcg.key
    limit = 0.3 * fastest.memory
    plan = planned(WIDE, micro_batches=True, memory_limit=limit)
    assert plan.memory <= limit
    assert plan.program.micro_batching is not None
    fewer = planned(WIDE, micro_batches=plan.program.micro_batching.count // 2, memory_limit=None)
    assert fewer.memory > limit
    assert plan.time < 1.1 * fastest.time


def normalized(w: Any, b: Any) -> Any:
    h = b["x"] @ w["in"]
    return jnp.mean((h - h.mean(0)) ** 2 / (1e-5 + h.var(0))) + mean(w, b)


def contrasted(w: Any, b: Any) -> Any:
    h = b["x"] @ w["in"]
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(h @ h.T)))


@jax.custom_vjp
def doubled(x: Any) -> Any:
    return 2 * x


doubled.defvjp(lambda x: (2 * x, jnp.arange(len(x), dtype=x.dtype)), lambda numbers, g: (g * numbers[:, None],))


def numbered(w: Any, b: Any) -> Any:
    return jnp.mean(scores(w, doubled(b["x"] + jnp.sum(w["in"]))))


def numbered_twice(w: Any, b: Any) -> Any:
    return numbered(w, {"x": b["x"] * jnp.arange(B)[:, None]})


def numbered_inside(w: Any, b: Any) -> Any:
    """A remat whose look-up is brought to its normal form."""
    return jnp.mean(jax.checkpoint(lambda x: doubled(x)[jnp.arange(B), b["y"]])(scores(w, b["x"])))


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.001, 0.001),))


def with_clipped_gradients(w: Any, b: Any) -> Any:
    return jnp.mean(clipped(scores(w, b["x"])) ** 2)


def strided(w: Any, b: Any) -> Any:
    return jnp.sum(scores(w, b["x"])[::2] ** 2)


def paired(w: Any, b: Any) -> Any:
    """Compares neighbours in the batch, in a nested program."""
    return jnp.sum(jax.checkpoint(lambda x: jnp.diff(x.reshape(B // 2, 2, V), axis=1) ** 2)(scores(w, b["x"])))


def converging(w: Any, b: Any) -> Any:
    """A loop that goes on until all samples have converged."""
    y = lax.while_loop(lambda y: jnp.sum(y**2) > 1e-3, lambda y: y / 2, b["x"])
    return jnp.mean(scores(w, b["x"] - y) ** 2)


def normalized_layers(w: Any, b: Any) -> Any:
    """Batch norms. Only the scores could be divided by their columns, and with them a weight."""
    h = b["x"] @ w["in"]
    h = jnp.tanh(h - h.mean(0))
    return jnp.mean((h @ w["out"] - b["t"]) ** 2)


def alternating(w: Any, b: Any) -> Any:
    return jnp.sum(lax.scan(lambda x, _: (x + jnp.repeat(jnp.sin(x[::2]), 2, 0), None), scores(w, b["x"]), None, 3)[0])


def trace(h: Any) -> Any:
    return jnp.sum(jnp.diagonal(h))


def squared(w: Any, b: Any) -> Any:
    return trace((b["x"] @ w["in"])[:, :B]) ** 2


def accumulated(w: Any, b: Any) -> Any:
    """The weight of a sample depends on the labels before it."""
    return jnp.sum(scores(w, b["x"]) * jnp.cumsum(b["y"])[:, None])


@pytest.mark.parametrize(
    ("loss", "count", "reason"),
    [
        (strided, 4, r"slice at .*test_micro_batching.py:\d+ \(strided\).* does not work on each of 4 micro-batches by itself"),
        (paired, 4, r"remat2? at .*test_micro_batching.py:\d+ \(paired\).* does not work on each of 4 micro-batches by itself"),
        (
            alternating,
            4,
            r"scan at .*test_micro_batching.py:\d+ \(alternating\).* does not work on each of 4 micro-batches by itself",
        ),
        (converging, 4, r"while at .*test_micro_batching.py:\d+ \(converging\).* does not work on each sample by itself"),
        (normalized, 4, r"test_micro_batching.py:\d+ \(normalized\).* needs a sum over all samples to go on with each"),
        (contrasted, 4, r"dot_general at .*test_micro_batching.py:\d+ \(contrasted\).* does not work on each sample by itself"),
        (accumulated, 4, r"cumsum at .*test_micro_batching.py:\d+ \(accumulated\).* does not work on each sample by itself"),
        (squared, 4, r"cond in diagonal at .*test_micro_batching.py:\d+ \(trace\).* does not work on each sample by itself"),
        (jax.jit(squared), 4, r"cond in diagonal at .*test_micro_batching.py:\d+ \(trace\)"),
        (numbered, 4, r"custom_vjp_call at .*test_micro_batching.py:\d+ \(numbered\)"),
        (numbered_twice, 4, r"the derivative rule in custom_vjp_call at .*test_micro_batching.py:\d+ \(numbered\)"),
        (numbered_inside, 4, r"the derivative rule in (remat2?|checkpoint) at .*\(numbered_inside\)"),
        (with_clipped_gradients, 4, r"custom_vjp_call at .*\(with_clipped_gradients\).* not known to be linear in its cotangent"),
        (lambda w, b: jnp.sum(w["in"]), 4, "of the sums over the samples exactly one must have a gradient, but none has one"),
        (mean, 3, "3 micro-batches cannot share 16 samples evenly"),
        (mean, 0, "micro_batches=0: expected at least 2, or True to choose their number"),
        (mean, 1, "micro_batches=1: expected at least 2, or True to choose their number"),
        (mean, "4", "expected a number of micro-batches, such as 4, or True to choose it, got str"),
    ],
)
def test_a_number_that_is_impossible_is_refused_with_the_reason(loss: Callable[..., Any], count: Any, reason: str) -> None:
    with pytest.raises(unity.OptionError, match=reason):
        planned(Small(loss, WEIGHTS, BATCH), micro_batches=count)


@pytest.mark.parametrize("count", [2, 4])
def test_no_weight_is_divided_into_micro_batches(count: int) -> None:
    with pytest.raises(unity.OptionError, match=r"\(normalized_layers\).* needs a sum over all samples to go on with each"):
        planned(Small(normalized_layers, WEIGHTS, {"x": f(B, D), "t": f(B, V)}), micro_batches=count)


def test_the_most_micro_batches_divide_all_dimensions_that_samples_are_reshaped_to() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x.reshape(4, B // 4, D) @ w) ** 2)

    assert leanest_micro_batches(capture(loss, f(D, D), f(B, D))).count == 4


def possible(model: Small, limit: float) -> bool:
    """Whether a plan over micro-batches, or without, fits a memory limit."""
    try:
        return planned(model, micro_batches=True, memory_limit=limit).memory <= limit
    except unity.InfeasibleError:
        return False


def test_a_program_that_does_not_decompose_is_reported_where_the_number_is_free() -> None:
    model = Small(contrasted, WEIGHTS, BATCH)
    limit = 0.8 * planned(model, micro_batches=None).memory
    with pytest.warns(UserWarning, match="the plan has none, since dot_general at"):
        possible(model, limit)


def test_an_infeasible_plan_names_micro_batches_as_a_way_out() -> None:
    leanest = planned(WIDE, micro_batches=None, objective="memory")
    with pytest.raises(unity.InfeasibleError, match="micro_batches=True, with at least"):
        planned(WIDE, micro_batches=None, memory_limit=0.3 * leanest.memory)


@pytest.mark.parametrize("together", [False, True], ids=["a teacher", "a teacher beside the samples"])
@pytest.mark.parametrize("rows", [B, 2 * B])
def test_weights_that_are_not_differentiated_may_have_as_many_rows_as_there_are_samples(rows: int, together: bool) -> None:
    def distilled(student: Any, *others: Any) -> Any:
        teacher, x = others[0] if together else others
        for t, s in zip(teacher, student, strict=True):
            x = jnp.tanh(x @ t) + x @ s
        return jnp.mean(x**2)

    square, x = [f(rows, rows)] * 2, f(B, rows)
    args = (square, (square, x)) if together else (square, square, x)
    plan = unity.optimize(distilled, *args, machine=MACHINE, micro_batches=4, search="captured", progress=False)
    values = [arrays(a) for a in args]
    assert_equal(jax.jit(jax.value_and_grad(plan))(*values), jax.value_and_grad(distilled)(*values))


def test_micro_batches_recompute_what_their_checkpoints_say() -> None:
    """The backward pass of a micro-batch follows at once, so that the compiler would merge it with the forward pass."""

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    machine = unity.Machine.grid(1, 8, "a100")
    plan = unity.optimize(
        loss, [f(64, 64)] * 4, f(64, 64), machine=machine, progress=False, objective="memory", micro_batches=8, budget=0
    )
    assert plan.program.recomputing is not None
    remats = [node for graph in plan.program.pcg.graphs() for node in graph.nodes if node.kind == "remat"]
    assert {node.of(Remat).prevent_cse for node in remats} == {True}
    assert plan.check().agrees(), plan.check()
