"""`unity.kernel`: functions with declared dimensions, outside plans and inside them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas
from small_models import arrays, f

import unity
from unity.pcg.capture.capture import capture
from unity.pcg.ir.graph import Node
from unity.pcg.ir.program import close
from unity.pcg.operators.kernel_primitive import kernel_residuals
from unity.plan.plan import Plan
from unity.search.cost.roofline import dense_work

MACHINE = unity.Machine.grid(1, 8, "a100")
MATMUL = "m k, k n -> m n"


def call(kernel: Any, *operands: Any, like: Any) -> Any:
    shapes = [jax.ShapeDtypeStruct(s.shape, s.dtype) for s in like]
    return pallas.pallas_call(kernel, out_shape=shapes, interpret=True)(*operands)


def product(a: Any, b: Any) -> Any:
    def kernel(a: Any, b: Any, out: Any) -> None:
        out[...] = a[...] @ b[...]

    return call(kernel, a, b, like=[jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype)])[0]


@jax.custom_vjp
def pallas_matmul(a: Any, b: Any) -> Any:
    return product(a, b)


pallas_matmul.defvjp(lambda a, b: (product(a, b), (a, b)), lambda kept, g: (product(g, kept[1].T), product(kept[0].T, g)))

matmul = unity.kernel(MATMUL, split="m n", summed="k", flops=lambda a, b: 2 * a.size * b.shape[1])(pallas_matmul)


def masked(a: Any, b: Any, keep: Any) -> Any:
    rows = jnp.where((keep > 0)[:, None], a @ b, 0)
    return rows, rows.sum(0), keep + 1


rows = unity.kernel("t k, k n, t -> t n, n, t", summed="t", flops=1e12)(masked)


def planned(fn: Any, *args: Any, **options: Any) -> Plan:
    return unity.optimize(fn, *args, machine=MACHINE, budget=20, progress=False, **options)


def agrees(fn: Any, *args: Any, every: int = 6, **options: Any) -> list[Plan]:
    """Return points of the frontier after comparing their values and gradients with the function's."""
    points = planned(fn, *args, **options).frontier[::every]
    wanted = jax.jit(jax.value_and_grad(fn))(*args)
    for point in points:
        found = jax.jit(jax.value_and_grad(point))(*point.shard(*args))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), found, wanted)
    return points


def kernels(plan: Plan) -> list[Node]:
    return [node for node, _ in plan.program.pcg.walk() if node.body is not None and "kernel" in node.body.primitives]


# What is said


@pytest.mark.parametrize(
    ("text", "said", "message"),
    [
        ("m k, k n", {}, "does not name arguments and results"),
        ("m m -> m", {}, "names two dimensions of one array alike"),
        (MATMUL, {"split": "z"}, "no argument has a dimension 'z'"),
        (MATMUL, {"split": "k"}, "result 0 has no dimension 'k'"),
        (MATMUL, {"summed": "m"}, "every result has the dimension 'm'"),
        (MATMUL, {"split": "k", "summed": "k"}, "'k' is in split= and in summed="),
    ],
)
def test_contradicting_dimensions_are_refused(text: str, said: dict, message: str) -> None:
    with pytest.raises(unity.KernelError, match=message):
        unity.kernel(text, **said)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((4, 6), (4, 6)), r"pallas_matmul: 'k' is 6 in argument 0 and 4 in argument 1"),
        (((4, 6), (6,)), r"argument 1 has shape \(6,\).*names 2 dimensions: 'k n'"),
        (((4, 6),), "names 2 arguments; there are 1"),
    ],
)
def test_other_arguments_are_refused(shapes: Any, message: str) -> None:
    with pytest.raises(unity.KernelError, match=message):
        matmul(*map(jnp.ones, shapes))


def test_other_results_are_refused() -> None:
    with pytest.raises(unity.KernelError, match="'n' is 3 in argument or result 1 and 4 in argument or result 2"):
        unity.kernel("m k, k n -> n m", split="m")(jnp.matmul)(jnp.ones((4, 2)), jnp.ones((2, 3)))
    with pytest.raises(unity.KernelError, match="names 1 results; there are 3"):
        unity.kernel("t k, k n, t -> t n", split="t")(masked)(jnp.ones((4, 2)), jnp.ones((2, 3)), jnp.ones(4))


def test_captured_tracers_are_refused() -> None:
    def around(a: Any, b: Any) -> Any:
        scale = a.sum()
        return unity.kernel(MATMUL, split="n")(lambda a, b: scale * (a @ b))(a, b)

    with pytest.raises(unity.KernelError, match="uses a value that was computed around it"):
        jax.jit(around)(jnp.ones((4, 2)), jnp.ones((2, 3)))


# Outside of plans


def test_a_kernel_behaves_as_its_function() -> None:
    a, b = arrays((f(4, 6), f(6, 8)))
    plain = unity.kernel(MATMUL, split="m n")(jnp.matmul)

    def loss(product: Any) -> Any:
        return lambda a: (jnp.tanh(product(a, b)) ** 2).sum()

    np.testing.assert_allclose(matmul(a, b), a @ b, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.grad(loss(matmul)))(a), jax.grad(loss(jnp.matmul))(a), rtol=1e-5)
    np.testing.assert_allclose(jax.hessian(loss(plain))(a), jax.hessian(loss(jnp.matmul))(a), rtol=1e-5, atol=1e-6)
    results = rows(a, b, jnp.arange(4))
    assert isinstance(results, tuple)
    jax.tree.map(np.testing.assert_allclose, results, jax.jit(masked)(a, b, jnp.arange(4)))


def test_a_partial_is_called_as_its_function() -> None:
    attention = partial(jax.nn.dot_product_attention, implementation="xla")
    kernel = unity.kernel("b q h d, b k h d, b k h d -> b q h d", split="b h")(attention)
    q, k, v = arrays((f(2, 3, 4, 5), f(2, 6, 4, 5), f(2, 6, 4, 5)))
    assert kernel.__name__ == "dot_product_attention"
    np.testing.assert_allclose(kernel(q, k, v), attention(q, k, v), rtol=1e-5)
    kernel.check(q, k, v)


def test_vmap_adds_a_name() -> None:
    a, b = arrays((f(3, 4, 6), f(6, 3, 8)))
    mapped = jax.vmap(matmul, in_axes=(0, 1))
    np.testing.assert_allclose(mapped(a, b), jnp.einsum("bmk,kbn->bmn", a, b), rtol=1e-5)
    (equation,) = close(jax.make_jaxpr(mapped)(a, b)).equations
    assert str(equation.params["dimensions"]) == "batch0 m k, k batch0 n -> batch0 m n"
    assert equation.params["dimensions"].split == ("batch0", "m", "n")
    assert equation.params["flops"] == 3 * 2 * 4 * 6 * 8


def test_halves_reveal_wrong_dimensions() -> None:
    a, b = arrays((f(4, 6), f(6, 8)))
    matmul.check(a, b)
    rows.check(a, b, jnp.arange(4))
    scaled = unity.kernel(MATMUL, split="m n")(lambda a, b: a @ b / a.shape[0])
    with pytest.raises(unity.KernelError, match="may not be divided along 'm': result 0"):
        scaled.check(a, b)
    unity.kernel("m k -> m k, m", split="m")(lambda x: (x > 0, x.argmax(1).astype(jnp.uint8))).check(a, gradients=False)
    with pytest.raises(unity.KernelError, match="may not be divided along 'k': result 1"):
        unity.kernel("m k -> m k, m k", split="k")(lambda x: (x > 0, x > x.mean(1, keepdims=True))).check(a, gradients=False)
    with pytest.raises(unity.KernelError, match="'m' is 3 here, which has no halves"):
        matmul.check(a[:3], b)


def test_halves_reveal_a_wrong_gradient() -> None:
    @jax.custom_vjp
    def doubled(x: Any) -> Any:
        return 2 * x

    doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g + g.mean(0),))
    said = unity.kernel("b d -> b d", split="b")(doubled)
    with pytest.raises(unity.KernelError, match="the gradient of argument 0, put together from halves"):
        said.check(jnp.ones((4, 3)))
    said.check(jnp.ones((4, 3)), gradients=False)


# In plans


def test_values_and_gradients_are_the_functions() -> None:
    heavy = unity.kernel(MATMUL, split="m n", summed="k", flops=1e12)(pallas_matmul)
    with jax.enable_x64(True):
        points = agrees(lambda a, b: (jnp.tanh(heavy(a, b)) ** 2).sum(), *arrays((f(32, 16), f(16, 24))), every=2)
    assert all(s.kind in "PS" for point in points for node in kernels(point) for s in node.types[0])


@pytest.mark.parametrize("kernel", [matmul, unity.kernel(MATMUL, split="m n", summed="k")(jnp.matmul)])
def test_a_rule_may_call_a_kernel_with_tangents(kernel: Any) -> None:
    """A kernel is linear in tangents, and transposed by its own rule: that of a Pallas kernel is a `custom_vjp`."""

    @jax.custom_jvp
    def scaled(x: Any, w: Any) -> Any:
        return 2 * kernel(x, w)

    scaled.defjvp(lambda given, change: (scaled(*given), 2 * kernel(change[0], given[1]) + 2 * kernel(given[0], change[1])))
    with jax.enable_x64(True):
        x, w = arrays((f(16, 24), f(24, 8)))
        args = (w * 0.1).astype("float64"), x.astype("float64")
        plain = jax.value_and_grad(lambda w, x: (jnp.tanh(2 * x @ w) ** 2).sum())(*args)
        plans = agrees(lambda w, x: (jnp.tanh(scaled(x, w)) ** 2).sum(), *args, every=1)
        for plan in plans:
            jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9), jax.value_and_grad(plan)(*args), plain)
        whole = [
            n for plan in plans for n in plan.program.pcg.nodes if n.body is not None and "custom_jvp_call" in n.body.primitives
        ]
        assert {s.kind for node in whole for v in node.operands for s in v.type} >= {"P", "R"}


def test_a_plan_with_one_is_not_differentiated_forward() -> None:
    a, b = arrays((f(8, 16), f(16, 8)))
    plan = planned(lambda a, b: (matmul(a, b) ** 2).sum(), a, b)
    with pytest.raises(unity.PlanError, match=r"(?s)differentiated forward.*jax\.vjp of jax\.vjp"):
        jax.jvp(plan, (a, b), (a, b))


def test_results_that_lack_a_name_are_summed() -> None:
    def loss(a: Any, b: Any, keep: Any) -> Any:
        y, total, _ = rows(jnp.tanh(a), b, keep)
        return (y**2).mean() + jnp.tanh(total).sum()

    with jax.enable_x64(True):
        points = agrees(loss, *arrays((f(64, 16), f(16, 8))), np.arange(64) % 3)
    (node,) = kernels(points[0])
    assert [[s.kind for s in t] for t in node.types] == [["P"] * 3, ["S"] * 3]


def layers(params: Any, x: Any) -> Any:
    def layer(h: Any, w: Any) -> Any:
        return h + jnp.tanh(jax.vmap(matmul, (0, None))(h, w["up"])) @ w["down"], None

    return (lax.scan(jax.checkpoint(layer), x, params)[0] ** 2).mean()


def branching(a: Any, b: Any) -> Any:
    return (lax.cond(a.sum() > 0, matmul, lambda a, b: a @ b + 1, a, b) ** 2).sum()


def looping(a: Any, b: Any) -> Any:
    def again(carry: Any) -> Any:
        k, x = carry
        return k + 1, matmul(x, b) + 2

    return (a * lax.while_loop(lambda carry: carry[1].sum() < 1e3, again, (0, lax.stop_gradient(a)))[1]).sum()


@jax.custom_vjp
def ruled(a: Any, b: Any) -> Any:
    return jnp.tanh(matmul(a, b))


ruled.defvjp(lambda a, b: (ruled(a, b), (a, b)), lambda kept, g: (matmul(g, kept[1].T), matmul(kept[0].T, g)))


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (layers, ({"up": f(2, 16, 32), "down": f(2, 32, 16)}, f(8, 4, 16))),
        (branching, (f(16, 8), f(8, 8))),
        (looping, (f(16, 8), f(8, 8))),
        (lambda a, b: (ruled(a, b) ** 2).sum(), (f(16, 8), f(8, 8))),
        (lambda a, b: (matmul(a, b) ** 2).sum(), (f(7, 3), f(3, 5))),
    ],
    ids=["scan, remat, vmap", "cond", "while", "custom_vjp", "nothing to divide"],
)
def test_kernels_run_inside_nested_programs(fn: Any, shapes: Any) -> None:
    with jax.enable_x64(True):
        agrees(fn, *arrays(shapes), every=10)


def test_stages_of_pipelines_have_kernels() -> None:
    with jax.enable_x64(True):
        args = arrays(({"up": f(4, 16, 32), "down": f(4, 32, 16)}, f(8, 4, 16)))
        agrees(layers, *args, every=10, pipeline=unity.PipelineShape(2, 4))


def test_a_saved_plan_has_the_kernel(tmp_path: Any) -> None:
    def loss(a: Any, b: Any) -> Any:
        return (jnp.tanh(matmul(a, b)) ** 2).sum()

    args = jax.ShapeDtypeStruct((4096, 1024), "float32"), jax.ShapeDtypeStruct((1024, 2048), "float32")
    plan = planned(loss, *args)
    assert plan.check().agrees()
    assert any("kernel" in missing for _, missing in plan.program.check_parallelization().unproved)
    plan.files.save(tmp_path / "plan.json")
    assert unity.load(tmp_path / "plan.json", loss, *args).time == plan.time
    with pytest.raises(unity.PlanError, match=r"test_kernels\.py:\d+ \(loss\): pallas_matmul cannot be exported: it calls a unity"):
        plan.files.export(tmp_path / "plan.py")


def test_flops_are_those_declared() -> None:
    captured = capture(lambda a, b: matmul(a, b).sum(), f(8, 4), f(4, 16))
    (node,) = [n for n in captured.graph.nodes if n.kind == "pallas_matmul"]
    assert node.body is not None
    assert dense_work(node.body) == (2 * 8 * 4 * 16, "float32")


def test_residuals_are_those_of_the_derivative() -> None:
    def exponential(x: Any, y: Any) -> Any:
        return jnp.exp(x), jnp.sin(y)

    x, y, z = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 4), (2,), (4, 2)))
    found = kernel_residuals(exponential, (x, y))
    assert (found.operands, found.results, found.other_nbytes) == ((False, False), (True, False), (2 * 4,))
    assert kernel_residuals(pallas_matmul, (x, z)).operands == (True, True)


def test_kernels_of_one_code_are_told_apart() -> None:
    def times(k: Any) -> Any:
        return unity.kernel("n -> n", split="n")(lambda x: x * k["factor"])

    two, three = times({"factor": 2.0}), times({"factor": 3.0})
    x = jnp.ones(16)
    plan = planned(lambda x: (two(x) * three(x)).sum(), x)
    np.testing.assert_allclose(plan(plan.shard(x)), 16 * 6)


def test_kernels_of_one_name_are_told_apart_by_their_code() -> None:
    """A measurement of one kernel does not apply to another of the same name."""

    def scaled(run: Any, back: Any) -> Any:
        found = jax.custom_vjp(lambda x: run(x))
        found.defvjp(lambda x: (run(x), None), back)
        return unity.kernel("n -> n", split="n")(jax.jit(found))

    runs, rules = (lambda x: 2 * x, lambda x: 3 * x), (lambda _, g: (2 * g,), lambda _, g: (3 * g,))
    keys = [close(jax.make_jaxpr(scaled(run, back))(jnp.ones(4))).key for run in runs for back in rules for _ in range(2)]
    assert [keys.index(key) for key in keys] == [0, 0, 2, 2, 4, 4, 6, 6]


def test_a_missing_derivative_is_reported_with_its_line() -> None:
    @unity.kernel("n -> n", split="n")
    def sine(x: Any) -> Any:
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with pytest.raises(unity.KernelError, match=r"test_kernels\.py:\d+ .*sine cannot be differentiated.*\n.*jax.custom_vjp"):
        planned(lambda x: sine(2 * x).sum(), f(16))
    plan = planned(sine, f(16), training=False)
    x = jnp.arange(16.0)
    np.testing.assert_allclose(plan(plan.shard(x)), jnp.sin(x), rtol=1e-6)
