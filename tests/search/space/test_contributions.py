"""No value is contributed to partial sums that it was computed from; other values are, as before."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.pcg.ir.program import close
from unity.pcg.propagation.choices import choices
from unity.pcg.types.parallel_type import PARTIAL, Type
from unity.plan.plan import Plan
from unity.plan.plan_family import PlanFamily
from unity.search.cost.assembly import Assembled
from unity.search.cost.cost import Training
from unity.search.session import Candidate, Search
from unity.search.solver.minimizer import Minimizer

TWO = Machine.grid(1, 2, "v100")
Fn = Callable[[Any, Any], Any]


def recomputed(x: Any, w: Any) -> Any:
    y = x @ w
    return jax.checkpoint(lambda y, m: jnp.exp(y - m))(y, y.max(-1, keepdims=True))


def negated(x: Any, w: Any) -> Any:
    y = x @ w
    return jnp.exp(lax.optimization_barrier(-lax.optimization_barrier(y.max(-1, keepdims=True))) + y)


def shifted(x: Any, w: Any) -> Any:
    """The largest of the numbers is subtracted from what they and another value add up to, which is read twice."""
    y = x @ w
    z = y + x[:, :1]
    return z - y.max(-1, keepdims=True), z @ w.T


def labelled(x: Any, w: Any) -> Any:
    y = x @ w
    return jax.nn.logsumexp(y, -1) - y[:, 0]


def straight_through(x: Any, w: Any) -> Any:
    y = lax.stop_gradient(x @ w)
    return y + lax.optimization_barrier(jnp.round(y) - y)


def residual(x: Any, w: Any) -> Any:
    return x + jnp.tanh(x @ w) @ w.T


X, W = (jnp.asarray(np.random.default_rng(0).normal(size=size) * 1e15, jnp.float32) for size in ((4, 6), (6, 8)))


def family(fn: Fn) -> PlanFamily:
    captured = capture(fn, X, W)
    return PlanFamily(fn, captured, Search(captured.graph, captured.differentiated, TWO, Training(False)), 0.0)


def contributes(assembled: Assembled) -> bool:
    """Return whether some operator may add a whole value to the partial sums of another operator's result."""

    def types(site: int, position: int) -> list[Type]:
        return [assembled.domains[site].type_of(v, position) for v in range(len(assembled.domains[site]))]

    for (s, p), edge in zip(assembled.ports, assembled.problem.edges, strict=True):
        ports = assembled.opened.sites[s].ports
        others = [
            q for q, port in enumerate(ports) if q != p and PARTIAL in {t for (t,) in types(port.source, assembled.position(port))}
        ]
        summed = np.any([[PARTIAL in t for t in types(s, q)] for q in others], axis=0) if others else np.False_
        whole = np.array([PARTIAL not in t for t in types(edge.first, assembled.position(ports[p]))])
        contributed = summed & np.array([PARTIAL in t for t in types(s, p)])
        if np.isfinite(edge.cost.time.min(0)[np.ix_(whole, contributed & np.ones(len(types(s, p)), bool))]).any():
            return True
    return False


@pytest.mark.parametrize("fn", [recomputed, negated, labelled, straight_through])
def test_what_a_sum_was_added_up_for_is_not_contributed_to_its_summands(fn: Fn) -> None:
    assert not contributes(family(fn).search.assembled)


def test_a_residual_is_contributed_to_the_partial_sums_of_a_product() -> None:
    assert contributes(family(residual).search.assembled)


@pytest.mark.parametrize("fn", [recomputed, negated, shifted])
def test_a_plan_with_the_most_partial_sums_cancels_where_the_function_does(fn: Fn) -> None:
    """The largest of numbers of about 1e30 minus itself is 0; with summands of it, it was 1e23."""
    plans = family(fn)
    assembled, costs = plans.search.assembled, []
    for domain, cost in zip(assembled.domains, assembled.costs, strict=True):
        sums = [sum(s == PARTIAL for p in range(len(domain.types)) for s in domain.type_of(v, p)) for v in range(len(domain))]
        costs.append(replace(cost, forward=cost.forward - np.array(sums)))
    biased = replace(assembled, costs=tuple(costs), port_costs={})
    assignment = assembled.assignment(Minimizer(biased.problem).at([0.0])[0])
    assert any(PARTIAL in t for types in assignment.results.values() for t in types)
    found, wanted = (np.exp(jax.tree.leaves(jax.jit(f)(X, W))[0]) for f in (Plan(plans, Candidate(0.0, 0.0, assignment)), fn))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("fn", [jnp.round, jnp.tanh])
def test_inside_of_an_operator_none_is_contributed_either(fn: Callable[[Any], Any]) -> None:
    body = close(jax.make_jaxpr(lambda x: x - fn(x.sum(1, keepdims=True)))(jax.ShapeDtypeStruct((4, 8), "float32")))
    assert not any(PARTIAL in c.operands for c in choices(body))
