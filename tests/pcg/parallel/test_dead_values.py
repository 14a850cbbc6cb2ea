"""Values that only derivative rules take, and ignore, are not moved: predicted, priced and compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from rerun_models import drawn, enter, named, right
from small_models import MACHINE, Small, arrays, counted, f, random_point
from test_halos import gradient_step

from unity.exec.compiled.check import predicted_elements
from unity.pcg.analysis.residuals import residuals
from unity.pcg.ir.graph import PARALLELIZATION, PCG, Node
from unity.pcg.parallel.parallelize import parallelize
from unity.pcg.parallel.traffic import FORWARD, traffic
from unity.pcg.propagation.nested.derivative_rules import ignored_operands
from unity.search.cost.prediction import predict


@jax.custom_vjp
def product(x: Any, rounded: Any, w: Any, w_rounded: Any) -> Any:
    """Return the product of rounded operands, whose gradient is that of the operands as they were, as in 8 bits."""
    return rounded @ w_rounded


def forward(x: Any, rounded: Any, w: Any, w_rounded: Any) -> Any:
    return rounded @ w_rounded, (x, rounded, w, w_rounded)


def backward(residuals: Any, g: Any) -> Any:
    x, rounded, w, w_rounded = residuals
    return (g @ w_rounded.T).astype(x.dtype), None, (rounded.T @ g).astype(w.dtype), None


product.defvjp(forward, backward)


def layer(x: Any, w: Any) -> Any:
    x = jnp.tanh(x)
    return product(x, jnp.round(x * 8) / 8, w, jnp.round(w * 8) / 8)


def straight(params: Any, x: Any) -> Any:
    for w in params:
        x = x + layer(x, w)
    return (x**2).mean()


def scanned(params: Any, x: Any) -> Any:
    return (lax.scan(lambda x, w: (x + layer(x, w), None), x, params)[0] ** 2).mean()


def checkpointed(params: Any, x: Any) -> Any:
    return (lax.scan(jax.checkpoint(lambda x, w: (x + layer(x, w), None)), x, params)[0] ** 2).mean()


@jax.custom_vjp
def straight_through(x: Any, rounded: Any, w: Any) -> Any:
    """Return a product that reads an operand which the forward rule ignores."""
    return (x + lax.stop_gradient(rounded - x)) @ w


straight_through.defvjp(
    lambda x, rounded, w: (rounded @ w, (rounded, w)),
    lambda residuals, g: (g @ residuals[1].T, None, residuals[0].T @ g),
)


def of_data(params: Any, x: Any) -> Any:
    """Return a loss with a product that is not differentiated, beside one that is."""
    data = straight_through(jnp.sin(x), jnp.round(x * 8) / 8, x.T)
    rows = straight_through(jnp.tanh(x @ params[0]), jnp.round(x), params[1])
    return ((data @ rows) ** 2).mean()


def model(loss: Callable[..., Any]) -> Callable[[], Small]:
    return lambda: Small(loss, f(3, 8, 8), f(8, 8))


LOSSES = {
    "rounded products": straight,
    "scanned rounded products": scanned,
    "checkpointed rounded products": checkpointed,
}
enter({name: model(loss) for name, loss in LOSSES.items()} | {"a product of data": model(of_data)})


def dead_gathers(graph: PCG) -> list[Node]:
    """Return the gathers whose result is an operand of nothing but a product, which ignores its value."""
    gathers = [n for n in graph.nodes if n.kind in PARALLELIZATION and n.kind.startswith("combine")]
    users = {id(n): graph.users[id(n)] for n in gathers}
    return [n for n in gathers if users[id(n)] and all(u.kind == "custom_vjp" and p in (0, 2) for u, p in users[id(n)])]


def test_the_rule_reads_rounded_operands_alone() -> None:
    captured, _ = named("rounded products")
    (call, *_) = [e for node in captured.graph.nodes if node.body for e in node.body.equations if e.name == "custom_vjp_call"]
    assert ignored_operands(call) == {0, 2}


def test_operands_that_the_backward_pass_does_not_read_are_no_residuals() -> None:
    captured, _ = named("rounded products")
    body = next(node.body for node in captured.graph.nodes if node.kind == "custom_vjp")
    assert body is not None
    assert residuals(body, (True,) * 4).operands == (False, True, False, True)


@pytest.mark.parametrize("name", LOSSES)
def test_plans_send_what_is_predicted(name: str) -> None:
    right(name, range(6))


def test_nothing_that_is_sent_is_missing_where_the_program_reads_what_the_rule_ignores() -> None:
    """The program runs where a call is not differentiated."""
    with jax.enable_x64(True):
        params, batch = arrays(f(3, 8, 8)), arrays(f(8, 8))
        for seed in range(6):
            captured, _, _, graph = drawn("a product of data", seed)
            sent, _ = gradient_step(graph, MACHINE, captured, [params, batch])
            assert Counter(sent) <= Counter(predicted_elements(graph, captured.differentiated))


@pytest.mark.parametrize("name", LOSSES)
def test_the_search_counts_at_least_the_cost_of_the_graph(name: str) -> None:
    captured, assembled = named(name)
    for seed in range(40):
        point = random_point(assembled, np.random.default_rng(seed))
        graph = parallelize(captured.graph, assembled.assignment(point))
        assert counted(assembled, point, "time") >= predict(graph, MACHINE, captured.differentiated).time * (1 - 1e-9)


def test_gathers_of_such_operands_are_no_traffic() -> None:
    graphs = [drawn("rounded products", seed)[3] for seed in range(40)]
    assert any(map(dead_gathers, graphs))
    for graph in graphs:
        sent = {id(c.node) for c in traffic(graph, range(3)) if c.direction == FORWARD}
        assert sent.isdisjoint(map(id, dead_gathers(graph)))
