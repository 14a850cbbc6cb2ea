"""Collectives in compiled programs: which may wait for devices that never come is what their predicates and groups say."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from unity.exec.compiled.divergence import argument_labels, disagreements

AXES = ("s", "d")
MESHES = [(2, 2), (3, 2)]

# A number that devices look at, and the axes along which it differs: by the devices' places, by what an argument's shards hold, by
# what of it was reduced.
PREDICATES: dict[str, tuple[Callable[..., Any], str]] = {
    "the place along s": (lambda step, same, rows, every: lax.axis_index("s"), "s"),
    "the place along d": (lambda step, same, rows, every: lax.axis_index("d"), "d"),
    "being the first": (lambda step, same, rows, every: (lax.axis_index(AXES) == 0).astype(jnp.int32), "sd"),
    "a stage's turn": (lambda step, same, rows, every: jnp.where(step >= lax.axis_index("s"), step - lax.axis_index("s"), 0), "s"),
    "a replicated argument": (lambda step, same, rows, every: same.astype(jnp.int32), ""),
    "a sliced argument": (lambda step, same, rows, every: rows.sum().astype(jnp.int32), "s"),
    "one that all slice": (lambda step, same, rows, every: every.max().astype(jnp.int32), "sd"),
    "a sum over s": (lambda step, same, rows, every: lax.psum(every.max(), "s").astype(jnp.int32), "d"),
    "a sum over all": (lambda step, same, rows, every: lax.psum(every.max(), AXES).astype(jnp.int32), ""),
    "what all have gathered": (lambda step, same, rows, every: lax.all_gather(every, AXES).max().astype(jnp.int32), ""),
    "what s has gathered": (lambda step, same, rows, every: lax.all_gather(every, "s").max().astype(jnp.int32), "d"),
}


def collectives(x: jax.Array) -> jax.Array:
    """One collective of each kind over each set of axes, each in a scope that names it."""
    for axes in ("s", "d", AXES):
        size, name = lax.axis_size(axes), "".join(axes)
        with jax.named_scope(f"sum_{name}_"):
            x = x + jnp.sin(lax.psum(x, axes))
        with jax.named_scope(f"gather_{name}_"):
            x = x + jnp.sin(lax.all_gather(x, axes).sum(0))
        with jax.named_scope(f"scatter_{name}_"):
            x = x + jnp.sin(jnp.tile(lax.psum_scatter(x, axes, tiled=True), size))
        with jax.named_scope(f"exchange_{name}_"):
            x = x + jnp.sin(lax.all_to_all(x.reshape(size, -1), axes, 0, 0).reshape(-1))
    with jax.named_scope("send_sd_"):  # whoever sends to whom, all devices take part
        return x + jnp.sin(lax.ppermute(x, "d", [(0, 1)]))


def in_cond(number: Any, x: jax.Array) -> jax.Array:
    return lax.cond(number % 2 == 0, collectives, jnp.cos, x)


def in_switch(number: Any, x: jax.Array) -> jax.Array:
    return lax.switch(number, [jnp.cos, collectives, jnp.sinh], x)


def in_while(number: Any, x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda c: c[0] < number, lambda c: (c[0] + 1, collectives(c[1])), (jnp.int32(0), x))[1]


def in_scan_in_cond(number: Any, x: jax.Array) -> jax.Array:
    return lax.cond(number > 0, lambda x: lax.scan(lambda x, _: (collectives(x), None), x, length=3)[0], jnp.cos, x)


CONTROL = {"cond": in_cond, "switch": in_switch, "while": in_while, "scan in cond": in_scan_in_cond}


def flagged(step: Callable[..., Any], shape: tuple[int, int]) -> set[str]:
    """The names of the collectives of a step that may hang. It takes a replicated number, one by rows, and one that all slice."""
    mesh = Mesh(np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape), AXES)
    specs = (P(), P("s"), P(AXES), P())
    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(AXES), check_vma=False))
    sizes = ((), (6,), (24,), (48,))
    given = (jax.ShapeDtypeStruct(n, jnp.float32, sharding=NamedSharding(mesh, s)) for n, s in zip(sizes, specs, strict=True))
    compiled = run.lower(*given).compile()
    found = disagreements(compiled.as_text() or "", argument_labels(compiled))
    assert all(str(one) for one in found)
    return {name for one in found for name in re.findall(r"\b(\w+_(?:s|d|sd))_/", one.op_name)[-1:]}


@pytest.mark.parametrize(
    ("control", "shape"), [*((control, MESHES[0]) for control in CONTROL), *(("cond", shape) for shape in MESHES[1:])]
)
def test_a_collective_may_hang_where_a_predicate_differs_along_its_axes(control: str, shape: tuple[int, int]) -> None:
    kinds = [f"{kind}_{axes}" for kind in ("sum", "gather", "scatter", "exchange") for axes in ("s", "d", "sd")] + ["send_sd"]
    for name, (predicate, differs) in PREDICATES.items():

        def step(same: Any, rows: Any, every: Any, x: Any, predicate: Any = predicate) -> Any:
            def tick(x: jax.Array, t: jax.Array) -> tuple[jax.Array, None]:
                return CONTROL[control](predicate(t, same, rows, every), x), None

            return lax.scan(tick, x, jnp.arange(4))[0]

        wanted = {kind for kind in kinds if set(kind.split("_")[1]) & set(differs)}
        assert flagged(step, shape) == wanted, name


def test_what_comes_out_of_control_flow_differs_as_its_predicate_does() -> None:
    def step(same: Any, rows: Any, every: Any, x: Any) -> Any:
        one = lax.cond(rows.sum() > 1, lambda y: y + 1, lambda y: y * 2, same)
        two = lax.while_loop(lambda c: c < rows.sum(), lambda c: c + 1.0, same)
        for name, number in (("branch", one), ("loop", two)):
            with jax.named_scope(f"{name}_s_"):
                x = lax.cond(number > every[0], lambda x: lax.psum(jnp.sin(x), "s"), jnp.cos, x)
            with jax.named_scope(f"{name}_d_"):
                x = lax.cond(number > 1, lambda x: lax.psum(jnp.sin(x), "d"), jnp.cos, x)
        return x

    assert flagged(step, (2, 2)) == {"branch_s", "loop_s"}


def test_of_arguments_of_which_nothing_is_known_every_device_may_hold_another() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), AXES)

    def step(same: Any, x: Any) -> Any:
        return lax.cond(same > 0, lambda x: lax.psum(x, "s"), jnp.cos, x)

    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P()), out_specs=P(AXES), check_vma=False))
    text = run.lower(*(jax.ShapeDtypeStruct(n, jnp.float32) for n in ((), (8,)))).compile().as_text() or ""
    (found,) = disagreements(text)
    pairs = [(a, b) for a, b in combinations(range(4), 2) if any({a, b} <= set(group) for group in found.groups)]
    assert (found.kind, pairs) == ("all-reduce", [(0, 2), (1, 3)])
    assert disagreements(text, [(0,) * 4, (0,) * 4]) == []
