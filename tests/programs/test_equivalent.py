"""Equivalent programs compute the same, and have equally fast plans."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import by_hand, fewer, one_in
from compiler_options import QUICK
from hypothesis import given, settings
from hypothesis import strategies as st
from serial_graph import evaluate
from small_models import random_point
from stepped import stepped

from benchmarks.equivalent import CLASSES
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.pcg.ir.graph import PCG
from unity.pcg.propagation.choices import choices
from unity.plan.plan import Plan
from unity.plan.plan_family import PlanFamily
from unity.search.cost.assembly import assemble
from unity.search.cost.cost import Training
from unity.search.session import Candidate, Search

EIGHT = Machine.grid(1, 8, "a100")

EXACT, NARROW, SINGLE = {"rtol": 1e-8, "atol": 1e-11}, {"rtol": 2e-2, "atol": 1e-2}, {"rtol": 1e-3, "atol": 1e-6}
LESS_EXACT: dict[
    str, dict[str, Any]
] = {  # whose forms round to bfloat16 in other places, or take a soft-max in float32 whatever the scores are
    **dict.fromkeys(["casts of weights", "casts of rows", "mean of a cast"], NARROW),
    **dict.fromkeys(["attention", "causal attention", "grouped queries"], SINGLE),
}


@pytest.mark.parametrize("name", one_in(4, CLASSES))
def test_forms_of_a_class_have_the_same_values_and_gradients(name: str) -> None:
    """Gradients are those of the class's own arguments, through what makes a form's arguments of them."""
    forms = CLASSES[name].forms

    def every(*arguments: Any) -> dict[str, Any]:
        return {
            name: jax.value_and_grad(lambda *whole, form=form: form.run(*form.pack(*whole)))(*arguments)
            for name, form in forms.items()
        }

    with jax.enable_x64(True):
        arguments = CLASSES[name].arrays()
        first, *others = jax.jit(every).lower(*arguments).compile(QUICK)(*arguments).values()
        assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(first))
        for other in others:
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **LESS_EXACT.get(name, EXACT)), other, first)


def test_there_are_classes_of_all_kinds() -> None:
    assert len(CLASSES) >= 60
    assert all(2 <= len(c.forms) <= 6 and c.differences.keys() < c.forms.keys() for c in CLASSES.values())


def f(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def primitives(graph: PCG) -> Counter[str]:
    return Counter(name for node, _ in graph.walk() if node.body is not None for name in node.body.primitives)


def fastest(fn: Callable[..., Any], *args: Any, machine: Machine = EIGHT) -> float:
    captured = capture(fn, *args)
    return Search(captured.graph, captured.differentiated, machine, Training()).fastest.time


def convolved(w: Any, x: Any) -> Any:
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME")


def cumulated(w: Any, x: Any) -> Any:
    return jnp.cumsum(x * w, 0)


def sliced(w: Any, x: Any) -> Any:
    return jax.lax.dynamic_slice(x * w, (1, 0), (2, 4))


def sorted_rows(w: Any, x: Any) -> Any:
    return jnp.sort(x * w, 0)


def scattered(w: Any, x: Any) -> Any:
    return x.at[jnp.array([1, 0])].add(w)


def looped(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda h, x: (jnp.tanh(h + w * x), h), jnp.ones(4), x)[1]


def recomputed(w: Any, x: Any) -> Any:
    return jax.checkpoint(lambda w, x: jnp.sin(w * x))(w, x)


def branched(w: Any, x: Any) -> Any:
    return jax.lax.cond(w[0] > 0, lambda: x * w, lambda: x - w)


TWICE = {
    "dot_general": (jnp.matmul, f(4, 4), f(4, 4)),
    "conv_general_dilated": (convolved, f(2, 2, 3, 3), f(2, 2, 4, 4)),
    "cumsum": (cumulated, f(4), f(4, 4)),
    "dynamic_slice": (sliced, f(4), f(4, 4)),
    "sort": (sorted_rows, f(4), f(4, 4)),
    "scatter-add": (scattered, f(2, 4), f(4, 4)),
    "scan": (looped, f(4), f(4, 4)),
    "remat": (recomputed, f(4), f(4, 4)),
    "cond": (branched, f(4), f(4, 4)),
}


@pytest.mark.parametrize("kind", TWICE)
def test_what_is_written_twice_is_computed_once(kind: str) -> None:
    """Products, loops and other heavy work too: a plan has them as often as where their result has a name."""
    fn, w, x = TWICE[kind]
    twice = capture(lambda w, x: (jnp.tanh(fn(w, x)) * fn(w, x)).sum(), w, x).graph

    def named(w: Any, x: Any) -> Any:
        value = fn(w, x)
        return (jnp.tanh(value) * value).sum()

    assert twice.key == capture(named, w, x).graph.key


def test_functions_with_other_rules_of_the_same_text_stay_two() -> None:
    """Two functions that compute the same may have other derivatives, which what they close over tells apart."""

    class Scale:
        def __init__(self, by: float) -> None:
            self.by = by

    def scaled(scale: Scale) -> Callable[[Any], Any]:
        fn = jax.custom_vjp(jnp.sin)
        fn.defvjp(lambda x: (jnp.sin(x), ()), lambda _, g: (scale.by * g,))
        return fn

    one, other = scaled(Scale(2.0)), scaled(Scale(3.0))
    graph = capture(lambda x: (one(x) * other(x)).sum(), f(4)).graph
    assert primitives(graph)["custom_vjp_call"] == 2


@given(st.permutations(range(4)), st.permutations(range(4)), st.integers(0, 3), st.integers(0, 3), st.booleans(), st.integers(0, 1))
@settings(max_examples=fewer(25), deadline=None)
def test_products_of_transposes_are_what_they_were(
    one: list[int], other: list[int], contracted: int, batched: int, several: bool, seed: int
) -> None:
    """Of every order of dimensions: values and gradients, and no transpose is left that the order of the result allows."""
    rng = np.random.default_rng(seed)
    sizes = np.array([2, 3, 4, 5])
    dims = ((contracted,), (contracted,)), (((batched,), (batched,)) if several and batched != contracted else ((), ()))

    def fn(x: Any, y: Any) -> Any:
        return jax.lax.dot_general(x.transpose(one), y.transpose(other), dims)

    x, y = (rng.normal(size=sizes[np.argsort(order)]) for order in (one, other))
    with jax.enable_x64(True):
        graph = capture(lambda x, y: jnp.sin(fn(x, y)).sum(), x, y).graph
        left = primitives(graph)["transpose"]
        fixed = {contracted, batched} if dims[1][0] else {contracted}
        for order in (one, other):
            free = [order[d] for d in range(4) if d not in fixed]
            left -= free != sorted(free)
        assert left == 0
        run = lambda x, y: evaluate(graph, [x, y])[0]  # noqa: E731
        wanted = jax.value_and_grad(lambda x, y: jnp.sin(fn(x, y)).sum(), (0, 1))(x, y)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), jax.value_and_grad(run, (0, 1))(x, y), wanted)


@pytest.mark.parametrize("spec", ["bd,bd->b", "bd,bd->", "bd,bd->d", "dbc,dbc->bc"])
def test_inner_products_cost_what_products_and_sums_cost(spec: str) -> None:
    """A product without free dimensions is light work, and read together with what is around it."""
    operand, _, result = spec.partition("->")
    summed = tuple(k for k, letter in enumerate(operand.split(",")[0]) if letter not in result)
    x = f(*(512,) * (len(operand) // 2))

    def time(form: Callable[[Any, Any], Any]) -> float:
        return fastest(lambda w, x: jnp.tanh(form(jnp.sin(w * x), jnp.cos(x * w))).sum(), f(512), x)

    by_product, by_sum = time(lambda a, b: jnp.einsum(spec, a, b)), time(lambda a, b: (a * b).sum(summed))
    assert by_product == pytest.approx(by_sum, rel=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spec", ["bd,b->bd", "bd,d->bd", "bd,bd->bd", "bd,->bd"])
def test_products_that_sum_nothing_cost_what_multiplications_cost(spec: str, dtype: str) -> None:
    """XLA compiles them to multiplications, which are fused with what is around them."""
    kept = spec.split(",")[1].partition("->")[0]
    dropped = [k for k, letter in enumerate("bd") if letter not in kept]

    def time(form: Callable[[Any, Any], Any]) -> float:
        def loss(w: Any, x: Any) -> Any:
            x = jnp.sin(w * x)
            return jnp.tanh(form(x, jnp.cos(x).sum(dropped))).sum()

        return fastest(loss, f(512), f(512, 512, dtype=dtype))

    by_product, by_hand = time(lambda a, b: jnp.einsum(spec, a, b)), time(lambda a, b: a * jnp.expand_dims(b, dropped))
    assert by_product == pytest.approx(by_hand, rel=1e-6)


def test_an_associative_scan_is_one_operator() -> None:
    """It strides through its operand, which a partition would not survive; its steps apart would each go through memory."""
    equivalence = CLASSES["linear recurrence"]
    graph = capture(equivalence.forms["associative"].run, *equivalence.structs("associative")).graph
    assert sum("slice" in node.body.primitives for node, _ in graph.walk() if node.body is not None) == 1


@pytest.mark.parametrize("size", [256, 1024, 4096])
def test_the_sum_of_many_weights_squares_is_as_many_operators(size: int) -> None:
    """However small they are beside the samples: joined to one operator, its choices would multiply with every weight."""

    def loss(w: list[Any], x: Any) -> Any:
        for v in w:
            x = jnp.tanh(x @ v)
        return x.mean() + sum((v * v).sum() for v in w)

    graph = capture(loss, [f(64, 64)] * 6, f(size, 64)).graph
    assert max(len(choices(n.body)) for n, _ in graph.walk() if n.body is not None) < 10
    assert sum("reduce_sum" in n.body.primitives for n, _ in graph.walk() if n.body is not None) == 7


SAME_PLAN = (
    "cross-entropy of sequences", "squared error", "absolute error", "Huber loss", "binary cross-entropy", "weight decay",
    "soft-max", "linear attention", "layer norm", "RMS norm", "unit vectors", "tied embedding", "dot interaction", "dense layer",
    "bilinear form", "gelu", "silu", "relu", "dropout", "casts of weights", "mean of a cast", "group norm", "global pooling",
)  # fmt: skip


@pytest.mark.parametrize("name", one_in(2, SAME_PLAN))
def test_the_plan_does_not_depend_on_the_form(name: str) -> None:
    times = {form: fastest(c.run, *CLASSES[name].structs(form)) for form, c in CLASSES[name].forms.items()}
    assert max(times.values()) <= 1.03 * min(times.values()), times


def inner_products(w: Any, x: Any) -> Any:
    h = x @ w
    return jnp.tanh(h * jax.lax.rsqrt(jnp.einsum("bd,bd->b", h, h) + 1e-5)[:, None]).mean() + jnp.vdot(w, w)


def transposed(w: Any, x: Any) -> Any:
    return jnp.tanh((w.T @ x.T).T @ w.T).mean() + jnp.square(x @ w).mean() * jnp.abs(x @ w).mean()


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("fn", [inner_products, transposed])
def test_plans_compute_what_the_function_does(fn: Callable[..., Any], dtype: str) -> None:
    """Whatever is split: the fastest plan, with the collectives that are predicted, and some drawn at random."""
    machine, rng = Machine.grid(2, 2, "a100"), np.random.default_rng(0)
    close: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12} if dtype == "float64" else {"rtol": 0.05, "atol": 0.05}

    def compare(one: Any, other: Any) -> None:
        np.testing.assert_allclose(np.asarray(one, "float64"), np.asarray(other, "float64"), **close)

    with jax.enable_x64(True):
        w, x = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((8, 16), (32, 8)))
        wanted = jax.value_and_grad(fn)(w, x)
        captured = capture(fn, w, x)
        searched = Search(captured.graph, captured.differentiated, machine, Training())
        assembled = assemble(captured.graph, captured.differentiated, machine, Training())
        drawn = (assembled.assignment(random_point(assembled, np.random.default_rng(seed))) for seed in (0, *by_hand(1, 2, 3)))
        for candidate in (searched.fastest, *(Candidate(0.0, 0.0, a) for a in drawn)):
            plan = Plan(PlanFamily(fn, captured, searched, 0.0), candidate)
            found, checked = stepped(plan, w, x)
            jax.tree.map(compare, found, wanted)
            assert plan.program.check_parallelization()
            assert candidate is not searched.fastest or checked.agrees()
