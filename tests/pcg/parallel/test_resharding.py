"""Changes of type give the right pieces and gradients, by the predicted collectives, along shortest paths."""

import itertools
import math
import random
from collections import Counter

import jax
import networkx as nx
import numpy as np
import pytest
from ci_cases import by_hand
from pieces import differing, dual, join, mesh_of, stack_spec, take

from unity.exec.compiled.hlo import collectives
from unity.machine.collectives import collective
from unity.machine.machine import Machine
from unity.pcg.local.collectives import apply
from unity.pcg.parallel.resharding import SLICING, ReshardingStep, absolute, kind_of, steps
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, Digit, digits, misfit, partitioned, slice_count
from unity.pcg.types.varying_axes import vary

P = partitioned
STATES = (UNUSED, REPLICATED, PARTIAL, P(0), P(1), P(0, 2), P(1, 3))
MESHES = {(2, 3): (12, 18), (2, 2, 2): (16, 24), (3, 2): (12, 18)}


def types(shape, axes, states=STATES):
    return [t for t in itertools.product(states, repeat=len(axes)) if misfit(shape, t, axes) is None]


def pairs(shape, axes):
    found = types(shape, axes)
    return [(s, t) for s in found for t in found if s != t]


# What runs


def promised(step, size, axes):
    """The collectives of one step on a tensor of so many elements: (direction, kind, elements of the full side, axes)."""
    before, after = (size // slice_count(t, axes) for t in (step.before, step.after))
    if step.kind == "partition":
        chosen = tuple(i for i in step.axes if step.before[i] == UNUSED)
        sliced = math.prod(axes[i].size for i in step.axes if step.before[i] == REPLICATED)
        return [("backward", "all-gather", before // sliced, chosen)] if chosen else []
    kinds = {
        "combine": ("all-gather", None),
        "combine_replicate": ("all-gather", "reduce-scatter"),
        "combine_partition": ("all-to-all", "all-to-all"),
        "reduce": ("all-reduce", None),
        "reduce_partition": ("reduce-scatter", "all-gather"),
        "replicate": (None, "all-reduce"),
        "contribute": (None, None),
        "unreplicate": (None, None),
    }[step.kind]
    found = zip(("forward", "backward"), kinds, strict=True)
    return [(direction, kind, max(before, after), step.axes) for direction, kind in found if kind]


def groups(chosen, axes):
    """The devices that communicate with each other over some axes."""
    devices = np.arange(math.prod(a.size for a in axes)).reshape([a.size for a in axes])
    rest = [k for k in range(len(axes)) if k not in chosen]
    found = devices.transpose(*rest, *chosen).reshape(-1, math.prod(axes[k].size for k in chosen))
    return frozenset(frozenset(g) for g in found.tolist())


def change(xs, chosen, axes, mesh):
    """For all pairs of types, stacked pieces of the one to stacked pieces of the other."""

    def changed(piece, before, after):
        for step in steps(before, after, axes):
            piece = apply(step, piece, axes)
        return vary(piece, [a.name for a in differing(after, axes)])[None]

    def local(pieces):
        return [changed(x[0], *pair) for x, pair in zip(pieces, chosen, strict=True)]

    into, out = ([stack_spec(pair[end], axes) for pair in chosen] for end in (0, 1))
    return jax.shard_map(local, mesh=mesh, in_specs=(into,), out_specs=out)(xs)


@pytest.mark.parametrize("batch", [0, *by_hand(1)])
@pytest.mark.parametrize("sizes", MESHES)
def test_steps_give_the_right_pieces_gradients_and_collectives(sizes, batch):
    shape, (mesh, axes) = MESHES[sizes], mesh_of(sizes)
    rng = np.random.default_rng(batch)
    chosen = random.Random(batch).sample(pairs(shape, axes), 40)
    whole, cotangent = (rng.integers(-9, 9, shape).astype(np.float32) for _ in range(2))  # sums of small integers are exact

    def parts(x, type_):
        return np.round(take(x.astype(np.int64), type_, axes, rng)).astype(np.float32)

    def every(xs, gs):
        values, pull = jax.vjp(lambda xs: change(xs, chosen, axes, mesh), xs)
        return values, pull(gs)[0]

    xs = [parts(whole, s) for s, _ in chosen]
    gs = [parts(cotangent, dual(t)) for _, t in chosen]
    compiled = jax.jit(every).lower(xs, gs).compile(compiler_options={"xla_disable_hlo_passes": "cpu-all-reduce-combiner"})
    for (before, after), value, gradient in zip(chosen, *compiled(xs, gs), strict=True):
        np.testing.assert_array_equal(join(np.asarray(value), shape, after, axes, 0), whole, err_msg=f"{before} → {after}")
        found = join(np.asarray(gradient), shape, dual(before), axes, 0)
        np.testing.assert_array_equal(found, cotangent, err_msg=f"gradient of {before} → {after}")
    every_step = [c for s, t in chosen for step in steps(s, t, axes) for c in promised(step, math.prod(shape), axes)]
    wanted = [(kind, elements, groups(over, axes)) for _, kind, elements, over in every_step]
    ran = [(c.kind, c.elements, frozenset(frozenset(g) for g in c.groups)) for c in collectives(compiled.as_text() or "")]
    assert Counter(ran) == Counter(wanted)


def test_keys_change_their_type_too():
    """In slices of the second digit of a dimension, which are not what JAX gathers at once."""
    mesh, axes = mesh_of((2, 4))
    whole, sliced = (UNUSED, UNUSED), (partitioned(0, 4), partitioned(1))
    there_and_back = [*steps(whole, sliced, axes), *steps(sliced, whole, axes)]
    keys = jax.random.split(jax.random.key(0), (8, 4))

    def local(x):
        for step in there_and_back:
            x = apply(step, x, axes)
        return x

    found = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=jax.P(), out_specs=jax.P()))(keys)
    np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(keys))


# Which steps


@pytest.mark.parametrize("sizes", MESHES)
def test_steps_lead_from_one_type_to_the_other(sizes):
    shape, axes = MESHES[sizes], tuple(Axis(f"a{k}", n, k % 2) for k, n in enumerate(sizes))
    every = pairs(shape, axes)
    for before, after in random.Random(0).sample(every, min(len(every), 3000)):
        now = absolute(before, axes)
        for step in steps(before, after, axes):
            assert step.before == now
            changed = tuple(i for i, (s, t) in enumerate(zip(step.before, step.after, strict=True)) if s != t)
            assert changed == step.axes
            assert all(kind_of(step.before[i], step.after[i]) == step.kind for i in changed)
            now = step.after
            assert aligned(now, shape, axes), step
        assert now == absolute(after, axes)


def test_nothing_to_do_takes_no_steps():
    axes = (Axis("a", 2, 0), Axis("b", 2, 1))
    assert all(steps(t, t, axes) == () for t in types((16, 24), axes))


def test_a_change_along_one_axis_is_one_operator():
    axes = (Axis("a", 2, 0),)
    for before, after in pairs((12, 12), axes):
        held, given = digits(before, axes)[0], digits(after, axes)[0]
        # reduced, then replicated; or gathered, then sliced where the old place is in the new one's way
        two = (before, after) == ((PARTIAL,), (REPLICATED,)) or (held and given and held.overlaps(given))
        assert len(steps(before, after, axes)) == 1 + bool(two), (before, after)


def aligned(type_, shape, axes):
    """Whether a tensor can be sliced at all places of an absolute type at once."""
    found = [d for d in digits(type_, axes) if d is not None]
    fit = all(shape[d.dim] % (d.outer * d.size) == 0 for d in found)
    return fit and not any(a.overlaps(b) for a, b in itertools.combinations(found, 2))


def seconds(machine, step, nbytes, training):
    return sum(
        collective(machine, kind, [machine.axes[i] for i in over])(n)
        for direction, kind, n, over in promised(step, nbytes, machine.axes)
        if training or direction == "forward"
    )


def shortest(machine, shape, nbytes, training, directly):
    """For all pairs of types, seconds of the steps, and of the shortest path. `directly`: places are old or new ones only."""
    axes = machine.axes
    named = types(shape, axes, (UNUSED, REPLICATED, PARTIAL, P(0), P(1), P(0, 2)))
    ends = {t: absolute(t, axes) for t in named}
    places = [sorted({t[k] for t in ends.values()}) for k in range(len(axes))]
    graph = nx.DiGraph()
    for s in (nodes := [t for t in itertools.product(*places) if aligned(t, shape, axes)]):
        for t in nodes:
            kinds = {kind_of(a, b) for a, b in zip(s, t, strict=True) if a != b}
            if len(kinds) == 1 and "" not in kinds and placed_freely(s, t, axes):
                step = ReshardingStep(kinds.pop(), tuple(i for i in range(len(axes)) if s[i] != t[i]), s, t)
                graph.add_edge(s, t, weight=seconds(machine, step, nbytes, training))
    found = {}
    for s, t in ((s, t) for s in named for t in named if s != t):
        allowed = graph
        if directly:
            near = [{a, b, UNUSED, REPLICATED} for a, b in zip(ends[s], ends[t], strict=True)]
            allowed = graph.subgraph([n for n in nodes if all(x in k for x, k in zip(n, near, strict=True))])
        best = nx.dijkstra_path_length(allowed, ends[s], ends[t])
        found[s, t] = (sum(seconds(machine, step, nbytes, training) for step in steps(s, t, axes)), best)
    return found


def placed_freely(before, after, axes):
    """Whether no axis is given a place that any axis still holds."""
    held = [d for d in digits(before, axes) if d is not None]
    new = [d for d, s, t in zip(digits(after, axes), before, after, strict=True) if d is not None and s != t]
    return not any(a.overlaps(b) for a in held for b in new)


@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_steps_are_not_much_worse_than_the_shortest_path(nodes, training):
    """Many bytes. Detours are left out: a slice made for a moment only, so that another gather is smaller."""
    machine = Machine.grid(nodes, 4 // nodes, "v100")
    found = shortest(machine, (16, 16), 1 << 28, training, directly=True)
    ratios = sorted(mine / best for mine, best in found.values() if best > 0)
    assert all(mine == 0 for mine, best in found.values() if best == 0)
    assert ratios[0] > 1 - 1e-9, "the search is wider than the steps"
    assert ratios[-1] < 2
    assert sum(r > 1.001 for r in ratios) < 0.15 * len(ratios)


@pytest.mark.parametrize("nodes", [1, 2])
def test_detours_would_gain_less_than_the_size_of_an_axis(nodes):
    machine = Machine.grid(nodes, 6 // nodes, "v100")
    found = shortest(machine, (12, 12), 12**7, True, directly=False)
    assert max(mine / best for mine, best in found.values() if best > 0) < 3


def test_places_that_do_not_divide_each_other_overlap():
    assert Digit(0, 1, 2).overlaps(Digit(0, 3, 2))
    assert not Digit(0, 1, 2).overlaps(Digit(0, 4, 3))
    assert not Digit(0, 1, 2).overlaps(Digit(1, 1, 2))
    assert Digit(0, 2, 3).overlaps(Digit(0, 2, 3))
    assert set(SLICING) == {"partition", "reduce_partition", "combine_partition"}
