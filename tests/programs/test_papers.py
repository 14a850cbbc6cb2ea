"""What the papers' systems find, found here, at small sizes (at the papers' own in `benchmarks/joint.py`)."""

import jax
import jax.numpy as jnp
import pytest

import unity
from unity.machine.hardware import Device
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.pcg.parallel.traffic import traffic
from unity.search.cost.cost import Training
from unity.search.joint.pricing import Prices
from unity.substitutions.language.axioms import default_library
from unity.substitutions.rewriting.forms import planning_form, search_form
from unity.transforms.rewriting import Budget, Rewriter

pytestmark = pytest.mark.usefixtures("own_cache")


def f(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def sent(plan) -> float:
    """Elements that all devices together send in one step, by rings."""
    rounds = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}
    sizes = [plan.inspect.machine.axes[k].size for k in range(len(plan.inspect.machine.axes))]
    total = 0
    for c in traffic(plan.program.pcg, plan.program.family.captured.differentiated):
        n = 1
        for k in c.axes:
            n *= sizes[k]
        total += rounds[c.kind] * (n - 1) * c.elements * c.count * (plan.inspect.machine.devices // n)
    return total


def test_unity_figures_1_and_2():
    """A 2-layer MLP (b 64, h 512, ci 784, co 10) on 2 devices: data parallelism sends 813,056 elements, Unity's plan 131,072.

    Cheaper still: the first weight's columns and the second's rows, whose only sum is of [b, co], as a gradient's is of nothing.
    """

    def mlp(params, x):
        return jnp.sum(jax.nn.relu(x @ params["1"]) @ params["2"])

    args = {"1": f(784, 512), "2": f(512, 10)}, f(64, 784)
    # so slow that two devices are worth it, on a link where bytes count and messages do not
    slow = Device("slow", {"float32": 1e9}, 10**9, 1e12, 1.0, 0.0)
    machine = Machine.grid(1, 2, slow, intra=(1e9, 0.0), inter=(1e9, 0.0))
    plan = unity.optimize(mlp, *args, machine=machine, progress=False)
    assert 0 < sent(plan) <= 131_072
    assert sent(plan) <= 2 * 2 * 64 * 10


def rewritten(fn, args, machine, programs=60):
    """The names of the rules that the joint search applies."""
    captured = capture(fn, *args)
    found, _ = Rewriter(default_library(), Budget(programs)).best(captured, Prices(machine, Training()), lambda stage: None)
    return [] if found is None else [str(way) for way, _ in found.applied]


MERGED = "merge-shared-input (backward)"


def heads(params, x):
    q, k, v = (x @ params[n] for n in "qkv")
    return jnp.sum((q * k + v) ** 2)


def test_products_of_one_operand_are_merged_where_it_pays_and_left_where_it_does_not():
    machine = Machine.grid(1, 1, "v100")
    many_samples = {n: f(512, 16) for n in "qkv"}, f(65536, 512)
    assert rewritten(heads, many_samples, machine).count(MERGED) >= 1
    many_weights = {n: f(4096, 4096) for n in "qkv"}, f(8, 4096)
    assert MERGED not in rewritten(heads, many_weights, machine)


def test_two_products_of_one_operand_are_added_as_weights():
    found = rewritten(
        lambda p, x: jnp.mean((x @ p["a"] + x @ p["b"]) ** 2),
        ({"a": f(2048, 2048), "b": f(2048, 2048)}, f(8192, 2048)),
        Machine.grid(1, 2, "v100"),
    )
    assert found == ["merge-added-products", "add-weights-of-a-repeated-input"]


def test_a_low_rank_product_is_reassociated():
    def fn(p, x):
        return jnp.mean((x @ p["a"] @ p["b"]) ** 2)

    wide = {"a": f(256, 1024), "b": f(1024, 8)}, f(8192, 256)
    narrow = {"a": f(256, 8), "b": f(8, 1024)}, f(8192, 256)
    for machine in (Machine.grid(1, 1, "v100"), Machine.grid(1, 8, "v100")):
        assert rewritten(fn, wide, machine) == ["regroup-products"]
        assert rewritten(fn, narrow, machine) == []


def test_transposes_and_reshapes_are_cancelled():
    def fn(p, x):
        y = jnp.transpose((x @ p).reshape(64, 32, 8, 16), (0, 2, 1, 3))
        return jnp.mean(jnp.transpose(y, (0, 2, 1, 3)).reshape(64 * 32, 128) ** 2)

    captured = capture(fn, f(64, 128), f(64, 32, 64))
    assert [e.name for e in captured.body.equations].count("transpose") == 2
    assert "transpose" not in [e.name for e in planning_form(search_form(captured.body)).equations]


def test_convolutions_of_one_image_are_merged():
    """TASO's example: an Inception module's 1x1 convolutions of one input."""

    def fn(p, x):
        def conv(w):
            return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

        return jnp.mean(jnp.concatenate([conv(w) for w in p], -1) ** 2)

    args = [f(1, 1, 32, 8), f(1, 1, 32, 8)], f(64, 32, 32, 32)
    assert any(rule.startswith("merge-shared-image") for rule in rewritten(fn, args, Machine.grid(1, 1, "v100")))


def test_two_tables_looked_up_by_the_same_indices_become_one():
    def fn(p, ids):
        return jnp.mean(jnp.concatenate([p["a"][ids], p["b"][ids]], -1) ** 2)

    args = {"a": f(100, 32), "b": f(100, 32)}, jax.ShapeDtypeStruct((65536,), jnp.int32)
    found = rewritten(fn, args, Machine.grid(1, 8, "v100"))
    assert any(rule.startswith(("widen-table-before-concat", "merge-look-ups-before-concat")) for rule in found)


def test_unity_figure_11b():
    """What two groups of devices have of a sum is joined over them, which moves nothing, and added up by one collective."""

    def fn(params, x):
        first = jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"])
        return jnp.sum((first + jnp.sin(x @ params["c"]) @ params["d"]) ** 2)

    samples, width = 64, 32
    params = {"a": f(width, 256), "b": f(256, width), "c": f(width, 256), "d": f(256, width)}
    machine = Machine.grid(1, 2, "v100")
    plan = unity.optimize(fn, params, f(samples, width), machine=machine, branch_groups=2, search="captured", progress=False)
    forward = traffic(plan.program.pcg)
    assert {c.kind for c in forward} <= {"all-reduce", "reduce-scatter"}
    assert sum(c.elements for c in forward if c.elements > 1) <= samples * width


def test_unity_figure_16b():
    """Every device holds an equal part of many large tables. What is looked up in them and joined is never gathered: each sample's
    parts go to its device in one all-to-all, and their gradients go back in another."""

    def fn(params, ids, y):
        rows = [table[ids[:, k]] for k, table in enumerate(params["tables"])]
        hidden = jax.nn.relu(jnp.concatenate(rows, axis=1) @ params["in"])
        return jnp.mean((hidden @ params["out"] - y) ** 2)

    tables, rows, width, samples = 8, 1_000_000, 64, 8192
    params = {"tables": [f(rows, width)] * tables, "in": f(tables * width, 256), "out": f(256, 1)}
    ids = jax.ShapeDtypeStruct((samples, tables), jnp.int32)
    machine = Machine.grid(1, 8, "v100")
    plan = unity.optimize(fn, params, ids, f(samples, 1), machine=machine, progress=False)
    joined = 4 * samples * tables * width
    found = [c for c in traffic(plan.program.pcg, plan.program.family.captured.differentiated) if c.nbytes >= joined / 64]
    assert sorted((c.kind, c.direction, c.nbytes) for c in found if c.kind != "all-reduce") == [
        ("all-to-all", "backward", joined // 8),
        ("all-to-all", "forward", joined // 8),
    ]
    assert [c.nbytes for c in found if c.kind == "all-reduce"] == [4 * tables * width * 256]  # the dense weights' gradients
    whole = 4 * rows * width * tables
    assert plan.memory < 1.1 * 4 * whole / 8  # tables, gradients and two optimizer slots, on eight devices
