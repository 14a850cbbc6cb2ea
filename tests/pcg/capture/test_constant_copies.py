"""Constants of an operator have a copy for every reader, so that they restrict no partition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import fewer
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from serial_graph import evaluate

from unity.pcg.capture.capture import capture
from unity.pcg.ir.graph import PCG
from unity.pcg.propagation.choices import operand_states

N = 6
Numbering = Callable[[int, int], Any]


def counted(rank: int, dim: int) -> Any:
    """The numbers of the elements along one dimension, as an array of its own of the whole shape."""
    return lax.broadcasted_iota(jnp.int32, (N,) * rank, dim)


def numbered(rank: int, dim: int) -> Any:
    """The same by one `arange`, which all dimensions read."""
    return jnp.expand_dims(jnp.arange(N, dtype=jnp.int32), [d for d in range(rank) if d != dim])


def moved(rank: int, dim: int) -> Any:
    """The same by functions of one `arange`."""
    numbers = jnp.arange(N, dtype=jnp.int32)
    return jnp.expand_dims((numbers + dim) - dim, [d for d in range(rank) if d != dim])


COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "from": lambda a, b: a >= b, "near": lambda a, b: abs(a - b) < 3, "odd": lambda a, b: (a + b) % 2 == 1, "same": jnp.equal,
}  # fmt: skip
JOINS: dict[str, Callable[[Any, Any], Any]] = {"and": jnp.logical_and, "or": jnp.logical_or, "xor": jnp.logical_xor}


@st.composite
def masks(draw: st.DrawFn) -> tuple[int, Callable[[Numbering], Any]]:
    """A rank, and a mask of comparisons of the numbers along some dimensions, as a function of how these are numbered."""
    rank = draw(st.integers(2, 3))
    terms = draw(
        st.lists(
            st.tuples(st.sampled_from(sorted(COMPARISONS)), st.integers(0, rank - 1), st.integers(0, rank - 1)),
            min_size=1, max_size=3,
        )
    )  # fmt: skip
    joins = draw(st.lists(st.sampled_from(sorted(JOINS)), min_size=len(terms) - 1, max_size=len(terms) - 1))

    def mask(number: Numbering) -> Any:
        first, *others = (COMPARISONS[name](number(rank, a), number(rank, b)) for name, a, b in terms)
        for name, other in zip(joins, others, strict=True):
            first = JOINS[name](first, other)
        return first

    return rank, mask


def masked(mask: Callable[[Numbering], Any], number: Numbering) -> Callable[[Any], Any]:
    return lambda x: jnp.tanh(jnp.where(mask(number), x, -1.0))


def divided(graph: PCG) -> set[int]:
    """The dimensions in which the only operator of a graph, with one operand, can be partitioned."""
    (body,) = (node.body for node, _ in graph.walk() if node.body is not None)
    return {s.dim for (s,) in operand_states(body) if s.kind == "P"}


@given(masks())
@settings(max_examples=fewer(20), deadline=None, derandomize=True)
def test_a_mask_restricts_no_partition_however_its_elements_are_numbered(drawn: tuple[int, Callable[[Numbering], Any]]) -> None:
    """One operator applies it, which divides every dimension."""
    rank, mask = drawn
    for number in (counted, numbered, moved):
        graph = capture(masked(mask, number), jax.ShapeDtypeStruct((N,) * rank, "float32")).graph
        assert divided(graph) == set(range(rank))


@pytest.mark.parametrize("number", [numbered, moved])
def test_copies_compute_what_the_constant_did(number: Numbering) -> None:
    x, k = np.linspace(-2, 2, N * N, dtype="float32").reshape(N, N), np.arange(N)
    fn = masked(lambda number: (number(2, 0) >= number(2, 1)) & (number(2, 0) - number(2, 1) < 3), number)
    expected = np.tanh(np.where((k[:, None] >= k) & (k[:, None] - k < 3), x, -1))
    np.testing.assert_allclose(evaluate(capture(fn, x).graph, [x])[0], expected, rtol=1e-6)


@pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.checkpoint, lambda f: lambda x: lax.scan(lambda x, _: (f(x), None), x, None, 2)[0]]
)
def test_constants_have_copies_inside_of_regions(wrap: Callable[..., Any]) -> None:
    def attended(x: Any) -> Any:
        k = jnp.arange(x.shape[0])
        return jax.nn.softmax(jnp.where(k[:, None] >= k, x, -1e30))

    graph = capture(wrap(attended), jax.ShapeDtypeStruct((8, 8), "float32")).graph
    assert divided(graph) == {0, 1}


@pytest.mark.parametrize("wrap", [jax.checkpoint, lambda f: lambda x, c: lax.scan(lambda x, _: (f(x, c), None), x, None, 2)[0]])
def test_regions_share_a_constant(wrap: Callable[..., Any]) -> None:
    """Each has it as an operand, so that one array serves all of them."""

    def layers(x: Any) -> Any:
        c = jnp.sin(jnp.arange(64.0)).reshape(8, 8)
        for _ in range(3):
            x = wrap(lambda x, c: jnp.tanh(x @ c))(x, c)
        return x

    graph = capture(layers, jax.ShapeDtypeStruct((8, 8), "float32")).graph
    assert sum(node.kind == "constant" for node in graph.nodes) == 1


WRITTEN = {
    "linspace": lambda: jnp.linspace(0.0, 1.0, N),
    "an array": lambda: np.linspace(0.0, 1.0, N, dtype=np.float32),
    "joined": lambda: jnp.concatenate([jnp.zeros(2), jnp.ones(N - 2)]),
    "padded": lambda: jnp.pad(jnp.ones(N - 2), (1, 1)),
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_an_array_that_is_written_into_the_program_divides_with_what_it_meets(kind: str) -> None:
    """Else the work before and after it would be two operators."""

    def fn(x: Any) -> Any:
        return jnp.sin(jnp.cos(x) * WRITTEN[kind]()).sum(0)

    x = np.arange(4.0 * N, dtype=np.float32).reshape(4, N)
    graph = capture(fn, x).graph
    (body,) = (n.body for n, _ in graph.walk() if n.body is not None)
    assert {s.dim for (s,) in operand_states(body) if s.kind == "P"} == {0, 1}
    np.testing.assert_allclose(evaluate(graph, [x])[0], fn(x), rtol=1e-6)


def large() -> Any:
    return jnp.concatenate([jnp.zeros(1), jnp.ones((64, 64, 64)).sum((0, 1))[:-1]])


def roots() -> Any:
    return jnp.concatenate([jnp.sqrt(jnp.arange(32.0)), jnp.ones(32)])


@pytest.mark.parametrize("constant", [large, roots])
def test_what_is_large_or_rounds_as_the_host_does_is_not_evaluated(constant: Callable[[], Any]) -> None:
    body = capture(lambda x: jnp.sin(x) * constant(), np.ones((4, 64), np.float32)).body
    graph = capture(lambda x: jnp.sin(x) * constant(), np.ones((4, 64), np.float32)).graph
    assert "concatenate" in {name for n, _ in graph.walk() if n.body is not None for name in n.body.primitives}, body


def test_an_array_is_evaluated_as_it_would_run() -> None:
    """In 64 bits if the program has them, though they are off by then, and with NaN where the user looks for NaN."""

    def fn(x: Any) -> Any:
        return jnp.sin(x) * jnp.linspace(0.0, 1.0, N) + jnp.pad(jnp.where(jnp.arange(N - 2) < 1, jnp.nan, 0.0), (1, 1))

    with jax.enable_x64(True):
        x = np.ones((4, N))
        captured = capture(fn, x)
    with jax.debug_nans(True):
        graph = captured.of(captured.body).graph if hasattr(captured, "of") else captured.graph
    with jax.enable_x64(True):
        np.testing.assert_array_equal(evaluate(graph, [x])[0], fn(x))
