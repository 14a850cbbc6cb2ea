"""Domains: the values that fit, in rank order on interchangeable axes, within the limits."""

import itertools
import random
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from small_functions import Function, function, functions
from small_models import MODELS, Small, f

from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.pcg.propagation.choice import Choice
from unity.pcg.propagation.choices import choices
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, misfit, partitioned
from unity.search.space.configurations import EXACT, IDLE, ORDERED, VALUES, Limits, domain, fits, ranks, shapes_of
from unity.search.space.offers import offered
from unity.search.space.opening import sites_of

STATES = (UNUSED, REPLICATED, PARTIAL, *(partitioned(d, outer) for d in range(3) for outer in (1, 2, 3, 4, 6)))


def listed(model, machine, limits=None):
    captured = capture(model.loss, model.params, model.batch)
    opened = sites_of(captured.graph, captured.differentiated, True).sites
    found = offered(opened)
    order = ranks(opened, found)
    return [(s, cs, r, domain(s, cs, r, machine.axes, limits)) for s, cs, r in zip(opened, found, order, strict=True)]


def test_values_fit_if_they_divide_every_dimension() -> None:
    rng = random.Random(0)
    axes = tuple(Axis(f"a{k}", n, 0) for k, n in enumerate((2, 3, 2, 2)))
    for _ in range(60):
        cs = [Choice(str(k), (rng.choice(STATES),), (rng.choice(STATES),), rng.choice((0, 4, 6, 24)), 1.0) for k in range(4)]
        shapes = [(24, 36, 8), (48, 12, 18)]
        picks = np.array(list(itertools.product(range(4), repeat=4)))
        for pick, good in zip(picks, fits(cs, shapes, picks, axes), strict=True):
            types = [tuple(cs[i].states[k] for i in pick) for k in range(2)]
            degrees = [np.prod([a.size for a, i in zip(axes, pick, strict=True) if i == k]) for k in range(4)]
            divides = all(c.size % d == 0 for c, d in zip(cs, degrees, strict=True))
            assert good == (divides and all(misfit(s, t, axes) is None for s, t in zip(shapes, types, strict=True)))


@pytest.mark.parametrize("shape", [(1, 4), (2, 4), (2, 6)])
@given(functions)
def test_without_limits_a_domain_has_all_values_that_fit(shape: tuple[int, int], function: Function) -> None:
    """In every order on few axes; else with ranks rising along axes of one size on one level, where idle ones may come first for
    a weight."""
    machine = Machine.grid(*shape, "v100")
    axes = machine.axes
    for site, cs, rank, found in listed(function, machine, EXACT):
        order = sorted(range(len(cs)), key=lambda i: (rank[i], cs[i].states))
        every = np.array(list(itertools.product(range(len(cs)), repeat=len(axes))))
        every = every[fits([cs[i] for i in order], shapes_of(site), every, axes)]
        if len(axes) >= ORDERED:
            alike = [i for i, (a, b) in enumerate(itertools.pairwise(axes)) if (a.size, a.level) == (b.size, b.level)]
            idle = [cs[i].name in IDLE for i in order]
            first = [-1 if site.weight and idle[i] else i for i in range(len(cs))]
            every = every[[any(all(n[p[i]] <= n[p[i + 1]] for i in alike) for n in (range(len(cs)), first)) for p in every]]
        assert sorted(map(tuple, found.picks.tolist())) == sorted(map(tuple, every.tolist()))
        assert list(found.choices) == [cs[i] for i in order]


@pytest.mark.parametrize("name", MODELS)
def test_the_widest_limits_that_leave_few_values_are_used(name: str) -> None:
    machine = Machine.grid(8, 8, "v100")
    free = {id(site): found for site, _, _, found in listed(MODELS[name](b=64) if name != "cnn" else MODELS[name](), machine)}
    assert max(len(d) for d in free.values()) > 20
    for found in free.values():
        assert len(found) <= 2 * VALUES
        idle = next(i for i, c in enumerate(found.choices) if c.name == "unused")
        assert (found.picks == idle).all(1).any()


def test_a_domain_knows_whether_it_is_whole() -> None:
    model = function(("dense", "relu", "dense"))
    for shape, whole in (((1, 4), True), ((1, 8), False), ((2, 2), True)):
        machine = Machine.grid(*shape, "v100")
        assert all(d.whole == whole for _, cs, _, d in listed(model, machine) if len(cs) > 1)


@given(functions)
def test_types_are_those_of_the_choices(function: Function) -> None:
    for _, _, _, found in listed(function, Machine.grid(2, 4, "v100")):
        for value in range(len(found)):
            for position, (types, index) in enumerate(found.types):
                assert types[index[value]] == found.type_of(value, position)
                assert found.type_of(value, position) == tuple(found.choices[c].states[position] for c in found.picks[value])
        assert all(len({types[k] for k in range(len(types))}) == len(types) for types, _ in found.types)


def test_equal_domains_have_equal_keys_and_others_not() -> None:
    found = listed(MODELS["gpt"](layers=2), Machine.grid(2, 4, "v100"))
    content = {d.key: (d.picks.tobytes(), [c.states for c in d.choices], shapes_of(s)) for s, _, _, d in found}
    assert all((d.picks.tobytes(), [c.states for c in d.choices], shapes_of(s)) == content[d.key] for s, _, _, d in found)
    narrow = listed(MODELS["gpt"](layers=2), Machine.grid(2, 4, "v100"), (Limits(1, 1, 2.0),))
    assert all(a.key != b.key for (_, _, _, a), (_, _, _, b) in zip(found, narrow, strict=True) if len(a) != len(b))


def test_samples_come_first() -> None:
    """Every operator that follows the samples gives them the first of the interchangeable axes."""
    for site, cs, rank, _ in listed(MODELS["gpt"](), Machine.grid(1, 8, "v100")):
        if site.kind == "input" and not site.weight:
            first = min(rank)
            assert cs[rank.index(first)].results[0] == partitioned(0)


def test_a_staged_choice_is_numbered_like_the_choices_beside_it() -> None:
    """A pipeline lists its choices without moves inside, and a site those with moves: more variables are divided there."""

    def loss(w, x):
        y = (jnp.tanh(x) * w).reshape(8, 4, 12)
        return jnp.concatenate([y[..., :6] * y[..., 6:], y[..., :2]], -1).reshape(32, 8)

    machine = Machine.grid(2, 2, "v100")
    stage = machine.axes[0].name
    site, offers, rank = next(
        (s, cs, r) for s, cs, r, _ in listed(Small(loss, f(8, 48), f(8, 48)), machine) if any(c.moves for c in cs)
    )
    assert site.node is not None
    assert site.node.body is not None
    slots = {c.states: c.inner_slots for c in offers}
    others = [c for c in choices(site.node.body) if c.states in slots]
    assert any(c.inner_slots != slots[c.states] for c in others)
    for staged in others:
        *_, own = domain(replace(site, along=(stage,), staged=staged), offers, rank, machine.axes).choices
        assert (own.states, own.inner_slots) == (staged.states, slots[staged.states])
