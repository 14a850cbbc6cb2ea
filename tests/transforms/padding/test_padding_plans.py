"""Plans with padded dimensions: what they store, send and compute, and what is left of them in files."""

import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from precision import in_64_bits

import unity
from unity.base.errors import DerivationError
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.plan.plan import Plan
from unity.plan.plan_family import PlanFamily
from unity.search.cost.cost import Training
from unity.search.session import Search
from unity.transforms.packing import joining_of
from unity.transforms.padding import padding

FOUR = Machine.grid(1, 4)
OPTIONS = {"search": "captured", "pipelines": False, "branches": False, "recompute": False, "progress": False}


@pytest.fixture(autouse=True, scope="module")
def _in_64_bits():
    with in_64_bits():
        yield


def loss(params, tokens):
    """A tied vocabulary of 57 tokens, which 4 devices do not divide, and a layer of 28 units."""
    x = params["table"][tokens]
    x = jax.nn.relu(x @ params["up"]) @ params["down"] + x
    logits = x @ params["table"].T
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1))


def case():
    rng = np.random.default_rng(0)
    shapes = {"table": (57, 1), "up": (1, 28), "down": (28, 1)}
    params = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}
    return params, jnp.asarray(rng.integers(0, 57, (8, 8)), jnp.int32)


def planned(**options):
    return unity.optimize(loss, *case(), machine=FOUR, objective="memory", padding=True, **(OPTIONS | options))


@pytest.fixture(scope="module")
def plan(_in_64_bits):
    return planned(pack=True)


def close(got, wanted):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_the_ends_of_the_frontier_compute_the_function_and_its_gradients(plan):
    args = case()
    wanted = jax.value_and_grad(loss)(*args)
    assert plan.program.padding.sizes == {57: 60}
    assert len(plan.frontier) > 2
    for point in (plan.frontier[0], plan.frontier[-1]):
        value, gradients = jax.jit(jax.value_and_grad(point))(*point.shard(*args))
        close((value, point.shard.unpack(gradients)), wanted)


def test_a_call_pads_weights_that_are_not_stored_so(plan):
    close(plan(*case()), loss(*case()))


def test_what_is_sent_is_what_was_planned(plan, capsys):
    assert plan.check().agrees(0)
    plan.explain()
    text = capsys.readouterr().out
    assert "dimensions padded from 57 to 60, weights stored so" in text
    assert "of size 57" not in text


def test_weights_and_their_state_lie_padded_and_zeros_stay_zeros(plan):
    args = case()
    params, tokens = plan.shard(*args)
    assert {name: x.shape for name, x in params.items()} == {"table": (60, 1), "up": (1, 28), "down": (28, 1)}
    assert params["table"].addressable_shards[0].data.size == 15
    moments = jax.tree.map(jnp.zeros_like, params)
    for _ in range(2):
        gradients = jax.jit(jax.grad(plan))(params, tokens)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g * g, moments, gradients)
        params = jax.tree.map(lambda w, g, m: w - 0.1 * g / (jnp.sqrt(m) + 1e-8), params, gradients, moments)
    assert not params["table"][57:].any()
    whole = plan.shard.unpack(params)
    close(whole, params | {"table": params["table"][:57]})
    close(plan.shard(whole), params)


def test_without_packing_weights_are_stored_as_they_are_and_a_step_pads_what_it_reads():
    """A batch of 4,095 samples, which no two devices share evenly."""
    w, x = jax.ShapeDtypeStruct((512, 512), "float32"), jax.ShapeDtypeStruct((4095, 512), "float32")

    def model(w, x):
        return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)

    plan = unity.optimize(model, w, x, machine=FOUR, padding=True, **OPTIONS)
    assert plan.program.padding is not None
    assert plan.program.padding.sizes == {4095: 4096}
    assert not plan.program.packing
    same = unity.optimize(model, w, x, machine=FOUR, **OPTIONS)
    assert plan.time < 0.9 * same.time
    w, x = jnp.eye(512, dtype="float32"), jnp.linspace(-1.0, 1.0, 4095 * 512, dtype="float32").reshape(4095, 512)
    np.testing.assert_allclose(plan(w, x), model(w, x), rtol=1e-6)


def test_a_saved_plan_is_the_same_and_its_derivation_is_replayed(plan, tmp_path: Path):
    plan.files.save(tmp_path / "plan.json")
    loaded = unity.load(tmp_path / "plan.json", loss, *case())
    assert loaded.program.pcg.key == plan.program.pcg.key
    assert loaded.program.padding is not None
    assert loaded.program.padding.sizes == {57: 60}
    loaded.program.check_derivation()
    other = padding(loaded.program.family.original, {57: 64}, stored=True)
    assert other is not None
    object.__setattr__(loaded.program.padding, "after", other.after)
    with pytest.raises(DerivationError, match="padding"):
        loaded.program.padding.check()


def test_an_exported_plan_computes_the_same(plan, tmp_path: Path):
    args = case()
    plan.files.export(tmp_path / "exported.py")
    fn = runpy.run_path(str(tmp_path / "exported.py"))["fn"]
    close(fn(*plan.shard(*args)), loss(*args))


def test_a_divisible_program_has_no_padding():
    params, x = {"a": jnp.ones((64, 32)), "b": jnp.ones((32, 8))}, jnp.ones((16, 64))
    plan = unity.optimize(lambda p, x: jnp.sum(x @ p["a"] @ p["b"]), params, x, machine=FOUR, padding=True, pack=True, **OPTIONS)
    assert plan.program.padding is None


def test_constraints_exclude_padding():
    plan = planned(pack=True, constraints=unity.pin("args[0]['up']", jax.sharding.PartitionSpec()))
    assert plan.program.padding is None


def test_a_joined_weight_may_be_stored_with_padding():
    """The rows of a table are joined with zeros to a multiple of the devices, and those are padded once more."""

    def squares(table, ids):
        return jnp.sum(table[ids] ** 2)

    rng = np.random.default_rng(0)
    args = jnp.asarray(rng.normal(size=(10, 3))), jnp.asarray([0, 1, 8, 12, 7, 0, 2], jnp.uint8)
    captured = capture(squares, *args, argnums=0)
    joining = joining_of(captured, 4)
    assert joining is not None
    padded = padding(joining.after, {12: 17}, stored=True)
    assert padded is not None
    search = Search(padded.after.graph, captured.differentiated, FOUR, Training())
    family = PlanFamily(squares, captured, search, 0.0, transformations=(joining, padded))
    plan = Plan(family, search.fastest)
    close(jax.value_and_grad(plan)(*args), jax.value_and_grad(squares)(*args))
    stored = plan.shard(*args)
    assert stored[0].shape == (17, 3)
    close(plan(*stored), squares(*args))
    np.testing.assert_array_equal(plan.shard.unpack(stored[0]), args[0])
