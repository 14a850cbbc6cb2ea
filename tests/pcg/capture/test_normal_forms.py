"""Look-ups at known indices, parts of transposes, products of a tensor with itself, and calls that only forward operands."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import SymbolicZero
from serial_graph import evaluate

from unity.pcg.capture.capture import capture
from unity.pcg.capture.normal_forms import with_known_indices
from unity.pcg.ir.graph import PCG
from unity.pcg.ir.nested_programs import bodies
from unity.pcg.ir.program import Body
from unity.pcg.propagation.choices import choices


def primitives(graph: PCG) -> list[str]:
    return [e.name for node, _ in graph.walk() if node.body is not None for e in node.body.equations]


def batched(graph: PCG) -> list[tuple[int, ...]]:
    """Return the batching dimensions of every look-up."""
    looks = (e for node, _ in graph.walk() if node.body is not None for e in node.body.equations)
    return [e.params["dimension_numbers"].operand_batching_dims for e in looks if e.name.startswith(("gather", "scatter"))]


def is_computed(fn: Callable[[Any, Any], Any]) -> PCG:
    """Check that the captured graph of a function computes it and its gradient; return the graph."""
    rng = np.random.default_rng(0)
    x, i = jnp.asarray(rng.normal(size=(6, 5)), jnp.float32), jnp.asarray(rng.integers(0, 5, (6, 3)))

    def loss(x: Any) -> Any:
        return jnp.sin(fn(x, i)).sum()

    graph = capture(loss, x).graph
    constants = [i] * (len(graph.inputs) - 1)
    got, wanted = jax.value_and_grad(lambda x: evaluate(graph, [x, *constants])[0])(x), jax.value_and_grad(loss)(x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted)
    return graph


NUMBERED: dict[str, Callable[[Any, Any], Any]] = {
    "gather": lambda x, i: x[jnp.arange(6)[:, None], i],
    "fill": lambda x, i: x.at[jnp.arange(6), i[:, 0] + 1].get(mode="fill", fill_value=7),
    "set": lambda x, i: x.at[jnp.arange(6), i[:, 0]].set(0.5),
    "add": lambda x, i: x.at[jnp.arange(6), i[:, 0]].add(x[:, 0], indices_are_sorted=True),
    "drop": lambda x, i: x.at[jnp.arange(6)[:, None], i + 2].mul(2.0, mode="drop"),
}


@pytest.mark.parametrize("kind", NUMBERED)
def test_an_index_that_numbers_the_rows_is_a_batching_dimension(kind: str) -> None:
    assert batched(is_computed(NUMBERED[kind])) == [(0,)]


def test_transformations_read_look_ups_in_their_normal_form() -> None:
    """In scans, remats and branches, too; a second time changes nothing."""
    x, i = jax.ShapeDtypeStruct((6, 5), "float32"), jax.ShapeDtypeStruct((6,), "int32")

    def pick(x: Any, i: Any) -> Any:
        return x[jnp.arange(6), i].sum()

    def fn(x: Any, i: Any) -> Any:
        chosen = lax.cond(i[0] > 0, pick, lambda x, i: x.sum(), x, i)
        return pick(x, i) + chosen + lax.scan(lambda c, _: (c + jax.checkpoint(pick)(x, i), None), jnp.float32(0), None, 3)[0]

    def looks(body: Body) -> list[tuple[int, ...]]:
        own = [e.params["dimension_numbers"].operand_batching_dims for e in body.equations if e.name == "gather"]
        return own + [dims for e in body.equations for inside in bodies(e) for dims in looks(inside)]

    body = capture(fn, x, i).body
    assert looks(body) == [(0,)] * 3
    assert with_known_indices(body) is body


SLICED: dict[str, Callable[[Any, Any], Any]] = {
    "first": lambda x, i: x.take(0, axis=1),
    "last": lambda x, i: x.take(-1, axis=0),
    "rows": lambda x, i: x[jnp.arange(3) + 2],
    "all": lambda x, i: x[jnp.arange(6)] * x,
    "repeated": lambda x, i: x[jnp.broadcast_to(jnp.arange(4), (3, 4))],
    "columns": lambda x, i: jnp.take(x, jnp.arange(2) + 1, axis=1),
    "dynamic": lambda x, i: lax.dynamic_slice_in_dim(x, 5, 3, 0),  # is clamped
}


@pytest.mark.parametrize("kind", SLICED)
def test_a_look_up_at_consecutive_indices_is_a_slice(kind: str) -> None:
    assert {"gather", "dynamic_slice"}.isdisjoint(primitives(is_computed(SLICED[kind])))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, i: x[jnp.arange(6)[::-1]],
        lambda x, i: jnp.take(x, jnp.arange(5) + 2, axis=0, fill_value=0.5),  # out of bounds
        lambda x, i: x[i[:4] % 6, jnp.arange(3)],  # numbers three of five columns
    ],
)
def test_other_look_ups_stay(fn: Callable[[Any, Any], Any]) -> None:
    assert batched(is_computed(fn)) == [()]


TRANSPOSED: dict[str, Callable[[Any, Any], Any]] = {
    "unstacked": lambda x, i: (lambda q, k, v: q @ k.T * v.sum())(*jnp.moveaxis(x.reshape(2, 3, 5), 1, 0)),
    "indexed": lambda x, i: (lambda t: t[0] @ t[1].T + t[2, :, ::2].sum())(x.reshape(2, 3, 5).transpose(1, 2, 0)),
    "reduced": lambda x, i: x.reshape(2, 3, 5).transpose(2, 0, 1).max((0, 2)),
    "twice": lambda x, i: x.reshape(2, 3, 5).transpose(2, 0, 1).transpose(1, 2, 0)[1:],
}


@pytest.mark.parametrize("kind", TRANSPOSED)
def test_parts_of_a_transpose_are_not_transposed(kind: str) -> None:
    assert "transpose" not in primitives(is_computed(TRANSPOSED[kind]))


def test_a_part_in_another_order_is_transposed_alone() -> None:
    graph = is_computed(lambda x, i: x.reshape(2, 3, 5).transpose(2, 0, 1)[1:3])
    assert primitives(graph).index("slice") < primitives(graph).index("transpose")


def test_a_transpose_that_moved_belongs_to_the_part_that_is_transposed() -> None:
    def fn(x: Any, i: Any) -> Any:
        first, other = x.reshape(2, 3, 5).transpose(2, 0, 1), x.reshape(5, 3, 2).transpose(2, 0, 1)
        with jax.named_scope("one"):
            one = first[1:3]
        with jax.named_scope("two"):
            return one.sum() * other[:, 2:].reshape(-1) * jnp.cos(one).mean()

    equations = [e for node, _ in is_computed(fn).walk() if node.body is not None for e in node.body.equations]
    assert [e.scope for e in equations if e.name == "transpose"] == ["one", "two"]


def test_a_product_of_a_tensor_with_itself_divides_by_rows() -> None:
    """Its two factors have types of their own. An inner product reads the tensor once."""
    (gram,) = [n for n, _ in is_computed(lambda x, i: x @ x.T).walk() if n.kind == "dot_general"]
    assert gram.body is not None
    rows = [c for c in choices(gram.body) if [s.kind for s in c.operands] == ["P", "R"]]
    assert len(gram.operands) == 2
    assert rows
    (inner,) = [n for n, _ in is_computed(lambda x, i: jnp.vdot(x, x)).walk() if n.body and "dot_general" in n.body.primitives]
    assert len(inner.operands) == 1


def clusters(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> list[set[str]]:
    graph = capture(fn, *(jax.ShapeDtypeStruct(s, "float32") for s in shapes)).graph
    return [set(node.body.primitives) for node, _ in graph.walk() if node.body is not None]


def test_elementwise_work_on_normalized_branches_joins_the_operator_that_reads_it() -> None:
    """The exponentials of two log-soft-maxes are no operators, though the log-soft-maxes are."""

    def divergence(x: Any, y: Any) -> Any:
        a, b = jax.nn.log_softmax(x), jax.nn.log_softmax(y)
        return ((jnp.exp(a) - jnp.exp(b)) * (a - b)).sum()

    assert {"exp"} not in clusters(divergence, (64, 512), (64, 512))


def test_a_part_that_cannot_join_leaves_the_others_together() -> None:
    """Labels that are shifted along the sequence are apart, and the logits are read once."""

    def loss(logits: Any, y: Any) -> Any:
        labels = y[:, 1:].astype("int32")
        return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]).mean()

    assert any({"gather", "exp"} <= names for names in clusters(loss, (16, 63, 512), (16, 64)))


def test_statistics_of_rows_and_of_columns_are_read_off_at_once_and_added_apart() -> None:
    def loss(x: Any) -> Any:
        return (jax.nn.logsumexp(x, 0) + jax.nn.logsumexp(x, 1)).mean()

    first, last = clusters(loss, (512, 512))
    assert "exp" in first
    assert "exp" not in last


def test_norms_that_two_distances_share_do_not_join_them() -> None:
    def loss(x: Any, y: Any) -> Any:
        def near(a: Any, b: Any) -> Any:
            return jnp.exp(2 * a @ b.T - (a * a).sum(1)[:, None] - (b * b).sum(1)).mean()

        return near(x, x) - near(x, y)

    assert sum("exp" in names for names in clusters(loss, (512, 16), (512, 16))) == 2


def forwarding(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call that forwards all its operands but the first, whose tangents a rule computes from all tangents."""

    @jax.custom_jvp
    def call(*operands: Any) -> Any:
        return operands[1:]

    def derivative(primals: Any, tangents: Any) -> Any:
        zeros = (jnp.zeros_like(p) if isinstance(t, SymbolicZero) else t for p, t in zip(primals, tangents, strict=True))
        return primals[1:], tuple(rule(isinstance(tangents[0], SymbolicZero), *zeros))

    call.defjvp(derivative, symbolic_zeros=True)
    return call


def ends(call: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Return a function in which twelve values of two dimensions go through a call, which could be divided in 3^12 ways."""
    return lambda x, i: sum(jnp.sin(v) for v in call(x[0], *(k * x for k in range(1, 13))))


def test_a_call_that_forwards_operands_and_tangents_is_removed() -> None:
    graph = is_computed(ends(forwarding(lambda still, first, *rest: rest)))
    assert "custom_jvp_call" not in primitives(graph)
    assert "stop_gradient" not in primitives(graph)


def test_a_tangent_that_a_call_stops_is_stopped_without_it() -> None:
    """The first operand, which nothing reads, has a tangent here, and not in the other call: both as in Equinox' loops."""

    def rule(still: bool, first: Any, *rest: Any) -> Any:
        return [jnp.zeros_like(t) if still or k % 2 else t for k, t in enumerate(rest)]

    graph = is_computed(ends(forwarding(rule)))
    assert "custom_jvp_call" not in primitives(graph)
    assert primitives(graph).count("stop_gradient") == 6
    call = forwarding(rule)
    still = is_computed(lambda x, i: call(jnp.ones(3), x)[0] + x)
    assert primitives(still).count("stop_gradient") == 1


@pytest.mark.parametrize("rule", [lambda still, first, *rest: (2 * t for t in rest), lambda still, first, t, u: (u, t)])
def test_a_call_with_other_tangents_stays(rule: Callable[..., Any]) -> None:
    call = forwarding(rule)
    assert "custom_jvp_call" in primitives(is_computed(lambda x, i: sum(call(x[0], x, 2 * x))))


def test_a_call_stays_if_a_tangent_is_stopped_depending_on_another_that_is_read() -> None:
    @jax.custom_jvp
    def call(x: Any, y: Any) -> Any:
        return x, y

    def derivative(primals: Any, tangents: Any) -> Any:
        x, y = (jnp.zeros_like(p) if isinstance(t, SymbolicZero) else t for p, t in zip(primals, tangents, strict=True))
        return primals, (jnp.zeros_like(x) if isinstance(tangents[1], SymbolicZero) else x, y)

    call.defjvp(derivative, symbolic_zeros=True)
    assert "custom_jvp_call" in primitives(capture(lambda x, y: jnp.stack(call(jnp.sin(x), y)).sum(), *np.ones((2, 3))).graph)


def primitives_of(fn: Callable[..., Any], *arguments: Any) -> list[str]:
    graph = capture(fn, *arguments).graph
    return [name for node, _ in graph.walk() if node.body is not None for name in node.body.primitives]


@pytest.mark.parametrize("precision", [None, (lax.Precision.DEFAULT, lax.Precision.HIGHEST)])
def test_a_product_that_is_only_transposed_has_its_operands_in_the_other_order(precision: Any) -> None:
    """By hand, and by `vmap` of a weight that comes first; batched too. One that is read besides stays."""
    w, x = np.arange(12.0).reshape(4, 3), np.arange(15.0).reshape(5, 3)
    batch = np.arange(30.0).reshape(2, 5, 3), np.arange(24.0).reshape(2, 4, 3)

    def product(w: Any, x: Any) -> Any:
        return jnp.matmul(w, x, precision=precision)

    cases = {
        "by hand": (lambda w, x: jnp.sin(product(w, x.T).T), (w, x), 0),
        "mapped": (lambda w, x: jnp.sin(jax.vmap(lambda x: product(w, x))(x)), (w, x), 0),
        "batched": (lambda x, y: jnp.sin(jnp.swapaxes(product(x, jnp.swapaxes(y, 1, 2)), 1, 2)), batch, 0),
        "read twice": (lambda w, x: (lambda p: jnp.sin(p.T) + p.sum())(product(w, x.T)), (w, x), 1),
    }
    for fn, arguments, transposes in cases.values():
        assert primitives_of(fn, *arguments).count("transpose") == transposes
        np.testing.assert_allclose(evaluate(capture(fn, *arguments).graph, arguments)[0], fn(*arguments), rtol=1e-6)


def test_swapped_operands_swap_what_a_products_algorithm_says_of_them() -> None:
    """It is a named tuple, which no CPU runs."""
    wide, narrow = np.dtype(np.float32), np.dtype(jnp.bfloat16)
    algorithm = lax.DotAlgorithm(narrow, wide, wide, 2, 1)
    w, x = (jax.ShapeDtypeStruct((n, 3), jnp.float32) for n in (4, 5))
    graph = capture(lambda w, x: jnp.sin(lax.dot(w, x.T, precision=algorithm).T), w, x).graph
    (product,) = (e for n, _ in graph.walk() if n.body is not None for e in n.body.equations if e.name == "dot_general")
    assert product.params["precision"] == lax.DotAlgorithm(wide, narrow, wide, 1, 2)
