"""Sites: a variable for every operator, connected by ports."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from jax import lax
from small_functions import Function, functions
from small_models import MODELS

from unity.machine.machine import CPU, Machine
from unity.pcg.capture.capture import capture
from unity.pcg.types.factors import facts_of
from unity.search.cost.cost import Training
from unity.search.session import Search
from unity.search.space.opening import sites_of


def opened(model, training=True):
    captured = capture(model.loss, model.params, model.batch)
    return captured, sites_of(captured.graph, captured.differentiated, training)


def follows_the_graph(captured, found):
    """Every operator has its own site, whose ports and results are its operands and results."""
    operators = [n for n, _ in captured.graph.walk() if n.kind not in ("input", "scan", "remat")]
    assert sorted(found.of_node[id(n)] for n in operators) == [s for s, site in enumerate(found.sites) if site.kind == "operator"]
    for node in operators:
        site = found.sites[found.of_node[id(node)]]
        assert site.node is node
        assert [p.tensor for p in site.ports] == [v.tensor for v in node.operands]
        assert site.results == node.tensors
    for site in found.sites:
        for port in site.ports:
            assert found.sites[port.source].results[port.index] == port.tensor


@given(functions)
def test_every_operator_is_a_site(function: Function) -> None:
    follows_the_graph(*opened(function))


@pytest.mark.parametrize("name", MODELS)
def test_every_operator_is_a_site_in_scans_and_remats_too(name: str) -> None:
    captured, found = opened(MODELS[name]())
    follows_the_graph(captured, found)
    times = {id(n): t for n, t in captured.graph.walk()}
    for site in found.sites:
        if site.kind == "operator":
            assert site.times == times[id(site.node)]


@given(functions)
def test_all_users_share_one_copy_and_similar_products_another(function: Function) -> None:
    captured, found = opened(function)
    graph = captured.graph
    for node in graph.nodes:
        for p, v in enumerate(node.operands):
            users = [(u, q) for u, q in graph.users[id(v.node)] if u.operands[q] == v]
            alike = [(u, q) for u, q in users if u.kind == node.kind and q == p] if facts_of(node.kind).product else [(node, p)]
            common, own = len(users) + graph.outputs.count(v) > len(alike), len(alike) > 1
            copies = found.operands.get((id(node), p), ())
            assert len(copies) == common + own
            assert len({found.operands.get((id(u), q), ()) for u, q in alike}) == 1
            if common:
                assert {found.operands[id(u), q][0] for u, q in users} == {copies[0]}


@given(functions)
def test_without_training_there_are_no_gradients_and_no_residuals(function: Function) -> None:
    _, found = opened(function, training=False)
    for site in found.sites:
        assert not any(site.flows)
        assert not any(site.stored)
        assert not site.weight
        assert not any(p.gradient or p.kept for p in site.ports)


def test_a_remat_runs_once_more_and_a_scan_once_per_step() -> None:
    _, found = opened(MODELS["gpt_scanned"](layers=3))
    inside = [site for site in found.sites if site.kind == "operator" and site.times == 3]
    assert inside
    assert all(site.again for site in inside)
    assert not any(site.again for site in found.sites if site.times == 1)


def test_a_carry_has_one_type() -> None:
    _, found = opened(MODELS["lstm"]())
    carried = [site for site in found.sites if site.kind == "free" and len(site.ports) == 2]
    assert len(carried) == 2  # h and c
    for site in carried:
        assert site.ports[0].tensor == site.ports[1].tensor == site.results[0]


@pytest.mark.parametrize(("device", "centered"), [("a100", 0), (CPU, 64 * 32 * 4)])
def test_only_on_cpus_the_search_counts_the_centered_values_of_a_norm(device: str, centered: int) -> None:
    def loss(w: Any, x: Any) -> Any:
        y = x @ w
        c = y - y.mean(-1, keepdims=True)
        return jnp.mean((c * lax.rsqrt((c * c).mean(-1, keepdims=True) + 1e-6)) ** 2)

    captured = capture(loss, jax.ShapeDtypeStruct((16, 32), "float32"), jax.ShapeDtypeStruct((64, 16), "float32"))
    machine = Machine.grid(1, 4, "a100")
    machine = replace(machine, device=replace(machine.device, name=device), host=None)
    sites = Search(captured.graph, captured.differentiated, machine, Training()).assembled.opened.sites
    large = [nbytes for site in sites for _, nbytes in site.inner if nbytes > 64 * 4]
    assert sum(large) == centered
