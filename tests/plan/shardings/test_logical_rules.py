"""Rules from logical names to mesh axes lead to the specifications, by the resolution of `flax.linen.logical_to_mesh_axes`."""

from __future__ import annotations

from typing import Any

import pytest
from flax.linen.spmd import logical_to_mesh_axes
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from unity.base.errors import PlanError
from unity.plan.shardings.logical_rules import logical_rules

NAMES: Any = {"up": ("embed", "mlp"), "down": ["mlp", "embed"], "norm": P("embed"), "scale": ()}


def test_dimensions_of_one_name_share_a_rule() -> None:
    specs = {"up": P(None, ("node", "device")), "down": P(("node", "device")), "norm": P(), "scale": P()}
    assert logical_rules(specs, NAMES) == (("mlp", ("node", "device")), ("embed", None))


def test_a_name_falls_back_where_its_axis_is_taken() -> None:
    specs = {"up": P(None, "device"), "down": P("device"), "norm": P("device"), "scale": P()}
    assert logical_rules(specs, NAMES) == (("mlp", "device"), ("embed", "device"), ("embed", None))


def test_a_weight_that_differs_from_its_names_is_refused() -> None:
    specs = {"up": P("device"), "down": P(None, "node"), "norm": P(), "scale": P()}
    with pytest.raises(PlanError, match=r"no list of rules .*\['down'\]|no list of rules .*\['norm'\]|no list of rules .*\['up'\]"):
        logical_rules(specs, NAMES)


def test_names_of_another_structure_are_refused() -> None:
    with pytest.raises(PlanError, match=r"with 4 leaves .*, got 1; the first difference is \['down'\]"):
        logical_rules({"up": P(), "down": P(), "norm": P(), "scale": P()}, {"up": ("embed", "mlp")})


AXES = st.sampled_from([None, "a", "b", ("a", "b")])


@given(entries=st.lists(st.tuples(AXES, AXES), min_size=1, max_size=4))
def test_flax_resolves_the_rules_to_the_specifications(entries: list[tuple[Any, Any]]) -> None:
    names = [("x", "y"), ("y", "x"), ("x", "z"), ("z", "y")][: len(entries)]
    specs = [P(*pair) for pair in entries]
    try:
        rules = logical_rules(specs, names)
    except PlanError:
        return
    for spec, dimensions in zip(specs, names, strict=True):
        resolved = logical_to_mesh_axes(dimensions, rules)
        assert resolved is not None
        assert tuple(resolved) == (*spec, None, None)[:2]
