"""The choices of every site along one axis: those that its operator allows and its neighbours can use."""

import jax
import jax.numpy as jnp
from hypothesis import given
from small_functions import Function, functions
from small_models import MODELS

from unity.pcg.capture.capture import capture
from unity.pcg.propagation.choices import choices
from unity.pcg.types.factors import facts_of
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, partitioned
from unity.search.space.offers import offered
from unity.search.space.opening import sites_of


def offers(model):
    captured = capture(model.loss, model.params, model.batch)
    opened = sites_of(captured.graph, captured.differentiated, True).sites
    return opened, offered(opened)


@given(functions)
def test_choices_are_distinct_and_include_unused(function: Function) -> None:
    for cs in offers(function)[1]:
        assert len({c.states for c in cs}) == len(cs)
        assert sum(all(s == UNUSED for s in c.states) for c in cs) == 1


@given(functions)
def test_operators_offer_what_their_bodies_allow(function: Function) -> None:
    """Except partial sums without a producer, and repeated work that saves no traffic."""
    opened, found = offers(function)
    for site, cs in zip(opened, found, strict=True):
        if site.kind != "operator":
            continue
        makers = [{c.results[p.index] for c in found[p.source]} for p in site.ports]
        offered_states = {c.states for c in cs}
        for choice in choices(site.node.body):  # pyright: ignore[reportOptionalMemberAccess, reportArgumentType]
            summed = [PARTIAL in m for s, m in zip(choice.operands, makers, strict=True) if s == PARTIAL]
            fed = not summed or any(summed) or any(s.kind == "P" for s in choice.operands)
            if summed and facts_of(site.node.kind).product:  # pyright: ignore[reportOptionalMemberAccess]
                assert all(summed) or choice.states not in offered_states
                continue  # not for what was only contributed
            useless = choice.name == "replicated" and (facts_of(site.node.kind).product or not any(p.gradient for p in site.ports))  # pyright: ignore[reportOptionalMemberAccess, reportArgumentType]
            if fed and not (useless and site.ports):
                assert choice.states in offered_states
            elif not fed:
                assert choice.states not in offered_states


@given(functions)
def test_free_sites_offer_the_states_of_producers_and_users(function: Function) -> None:
    opened, found = offers(function)
    for s, site in enumerate(opened):
        if site.kind != "free" or site.step:
            continue
        own = {c.results[0] for c in found[s]}
        port = site.ports[0]
        made = {c.results[port.index] for c in found[port.source]}
        wanted = {c.operands[p] for u, cs in enumerate(found) for p, q in enumerate(opened[u].ports) if q.source == s for c in cs}
        for state in made | wanted:
            if state == PARTIAL:
                both = PARTIAL in made and PARTIAL in wanted
                assert PARTIAL not in own or (both and not site.whole)
                continue
            barred = state == REPLICATED if not any(site.flows) else False
            barred = barred or (site.whole and (state == REPLICATED or state.outer > 1))
            assert (state in own) == (not barred)


def test_a_fused_dimension_is_split_inside_each_of_its_parts() -> None:
    def loss(w, x):
        q, k, v = jnp.split(x @ w, 3, -1)
        return (jax.nn.softmax(q @ k.T) @ v).sum()

    captured = capture(loss, jax.ShapeDtypeStruct((16, 48), "float32"), jax.ShapeDtypeStruct((8, 16), "float32"))
    opened = sites_of(captured.graph, captured.differentiated, True).sites
    found = offered(opened)
    product = next(s for s, site in enumerate(opened) if site.kind == "operator" and site.node.kind == "dot_general")  # pyright: ignore[reportOptionalMemberAccess, reportArgumentType]
    assert partitioned(1, 3) in {c.results[0] for c in found[product]}


def test_equal_layers_are_offered_the_same() -> None:
    opened, found = offers(MODELS["gpt"](layers=3))
    by_body: dict[str, list] = {}
    for site, cs in zip(opened, found, strict=True):
        if site.kind == "operator":
            by_body.setdefault(site.node.body.key, []).append({c.states for c in cs})  # pyright: ignore[reportOptionalMemberAccess, reportArgumentType]
    layers = [same for same in by_body.values() if len(same) == 3]
    assert len(layers) > 8
    assert all(a == same[0] for same in layers for a in same)


def scanned(step, training=True):
    """Return the choices of the carry of a scan over samples whose sum is taken at the end."""

    def loss(w, xs):
        return jax.lax.scan(lambda total, x: step(w, total, x), 0.0, xs)[0]

    captured = capture(loss, jax.ShapeDtypeStruct((16, 8), "float32"), jax.ShapeDtypeStruct((4, 32, 16), "float32"))
    opened = sites_of(captured.graph, captured.differentiated, training).sites
    carry = next(s for s, site in enumerate(opened) if len(site.ports) == 2 and site.kind == "free")
    return {c.results[0] for c in offered(opened)[carry]}


def test_a_carried_sum_may_be_partial() -> None:
    assert PARTIAL in scanned(lambda w, total, x: (total + jnp.tanh(x @ w).mean(), None))
    assert PARTIAL in scanned(lambda w, total, x: (0.9 * total + jnp.tanh(x @ w).mean(), None))
    assert PARTIAL not in scanned(lambda w, total, x: (jnp.sin(total) + jnp.tanh(x @ w).mean(), None)), "reduced in every step"


def test_values_without_gradient_are_not_replicated_for_use() -> None:
    assert REPLICATED in scanned(lambda w, total, x: (total + jnp.tanh(x @ w).mean(), None))
    assert REPLICATED not in scanned(lambda w, total, x: (total + jnp.tanh(x @ w).mean(), None), training=False)


def test_products_of_weights_alone_may_be_repeated() -> None:
    """Their gradient is then reduced with those of the weights, once, and not on its way."""

    def loss(w, x):
        return jnp.tanh(jnp.einsum("tc,nsc->nts", w["latents"] @ w["query"], x @ w["key"])).mean()

    f = jax.ShapeDtypeStruct
    w = {"latents": f((4, 16), "float32"), "query": f((16, 8), "float32"), "key": f((16, 8), "float32")}
    captured = capture(loss, w, f((8, 32, 16), "float32"))
    opened = sites_of(captured.graph, captured.differentiated, True).sites
    repeated = [
        site.results[0].shape
        for site, cs in zip(opened, offered(opened), strict=True)
        if site.node is not None and site.node.kind == "dot_general" and any(c.name == "replicated" for c in cs)
    ]
    assert repeated == [(4, 8)]
