"""Prices of changes of type: the vectorized pricing follows the steps that run, and says what each of them costs."""

import itertools
import random

import numpy as np
import pytest

from unity.machine.collectives import collective
from unity.machine.machine import Machine
from unity.machine.resharding_tables import Types, _ChangeBook, changes
from unity.pcg.parallel.resharding import absolute, steps
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, misfit, partitioned, slice_count

STATES = (UNUSED, REPLICATED, PARTIAL, partitioned(0), partitioned(1), partitioned(2), partitioned(1, 3))
SHAPE, NBYTES = (24, 36, 48), 10**6
DIRECTIONS = {  # what a step runs forward and backward
    "combine": ("all-gather", None),
    "combine_replicate": ("all-gather", "reduce-scatter"),
    "combine_partition": ("all-to-all", "all-to-all"),
    "reduce": ("all-reduce", None),
    "reduce_partition": ("reduce-scatter", "all-gather"),
    "replicate": (None, "all-reduce"),
    "contribute": (None, None),
    "unreplicate": (None, None),
}


def price(machine, before, after):
    """Seconds forward and backward, step by step."""
    axes = machine.axes
    forward = backward = 0.0
    for step in steps(before, after, axes):
        chosen = [axes[i] for i in step.axes]
        full = NBYTES / min(slice_count(step.before, axes), slice_count(step.after, axes))
        kinds = DIRECTIONS.get(step.kind, (None, "all-gather"))
        if step.kind == "partition":
            chosen = [axes[i] for i in step.axes if step.before[i] == UNUSED]
            full /= np.prod([axes[i].size for i in step.axes if step.before[i] == REPLICATED])
        moved = [step.axes[i] for i in range(len(step.axes)) if axes[step.axes[i]] in chosen]
        turned = any(s.kind == "P" and s.dim > 0 for i in moved for s in (step.before[i], step.after[i]))
        f, b = (collective(machine, kind, chosen, turned)(full) if kind else 0.0 for kind in kinds)
        forward, backward = forward + f, backward + b
    return forward, backward


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 4), (2, 6), (4, 2)])
def test_pricing_all_pairs_at_once_is_pricing_every_step(nodes, per_node):
    machine = Machine.grid(nodes, per_node, "v100")
    axes = machine.axes
    every = [t for t in itertools.product(STATES, repeat=len(axes)) if misfit(SHAPE, t, axes) is None]
    rng = random.Random(0)
    before, after = (tuple(rng.sample(every, min(len(every), 250))) for _ in range(2))
    found = changes(machine, before, after, NBYTES)
    for i, j in itertools.product(range(len(before)), range(len(after))):
        s, t = before[i], after[j]
        if rng.random() > 0.2:
            continue
        ours = price(machine, s, t)
        theirs = [found.forward[i, j], found.backward[i, j]]
        np.testing.assert_allclose(theirs, ours, rtol=1e-12, atol=1e-18, err_msg=f"{s} → {t}")
        places = zip(absolute(s, axes), absolute(t, axes), strict=True)
        made = any(a != b and {a, b} != {UNUSED, REPLICATED} for a, b in places)
        assert found.gathered[i, j] == any(
            step.kind.startswith("combine") and step.kind != "combine_partition" for step in steps(s, t, axes)
        )
        if made:
            assert found.size[i, j] == pytest.approx(1 / slice_count(t, axes))


def test_no_change_costs_nothing():
    machine = Machine.grid(2, 2, "v100")
    types = tuple(t for t in itertools.product(STATES, repeat=2) if misfit(SHAPE, t, machine.axes) is None)
    found = changes(machine, types, types, NBYTES)
    assert not np.diagonal(found.forward).any()
    assert not np.diagonal(found.backward).any()
    assert not np.diagonal(found.size).any()


@pytest.mark.parametrize("most", [0, 10_000, 10**9])
def test_what_is_remembered_is_what_was_priced(monkeypatch, most):
    """Also where there is room for little, and what is asked for first is forgotten."""
    monkeypatch.setattr("unity.machine.resharding_tables.RECENT", most)
    machine = Machine.grid(2, 3, "v100")
    types = [t for t in itertools.product(STATES, repeat=2) if misfit(SHAPE, t, machine.axes) is None]
    sets = [Types.of(types[k::5]) for k in range(5)]
    book, alone = _ChangeBook(machine, 1.0), {}
    for before, after in itertools.product(sets, sets):
        alone[before.key, after.key] = _ChangeBook(machine, 1.0).changes(before, after, NBYTES)
    for before, after in [*itertools.product(sets, sets)] * 2:
        (found, index), (wanted, numbers) = book.changes(before, after, NBYTES), alone[before.key, after.key]
        assert np.array_equal(found[index].forward, wanted[numbers].forward)
        assert np.array_equal(found[index].backward, wanted[numbers].backward)
    assert book.recent.used <= most or len(book.recent) == 1
