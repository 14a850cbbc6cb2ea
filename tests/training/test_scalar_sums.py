"""A sum of sums of arrays, however they are sharded and in whatever order they are added, is one all-reduce of a scalar."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ci_cases import fewer
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend import core
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from unity.training.scalar_sums import with_single_reductions

AXES = ("a", "b", "c")
SPECS = st.permutations(AXES).flatmap(
    lambda names: st.tuples(st.integers(0, 3), st.integers(0, 3)).map(
        lambda ends: PartitionSpec(tuple(names[: min(ends)]) or None, tuple(names[min(ends) : max(ends)]) or None)
    )
)


def mesh() -> Mesh:
    return jax.make_mesh((2, 2, 2), AXES, axis_types=(AxisType.Auto,) * 3)


def placed(specs: list[PartitionSpec]) -> list[jax.Array]:
    values = [np.arange(k, k + 64, dtype=np.float32).reshape(8, 8) for k in range(len(specs))]
    return [jax.device_put(x, NamedSharding(mesh(), spec)) for x, spec in zip(values, specs, strict=True)]


def compiled(fn: Callable[..., Any], arrays: list[jax.Array]) -> tuple[Any, int]:
    """The results of the changed program, and the number of its all-reduces."""
    closed = jax.make_jaxpr(fn)(*arrays)
    jaxpr = closed.jaxpr
    specs: dict[Any, Any] = {v: getattr(x.sharding, "spec", None) for v, x in zip(jaxpr.invars, arrays, strict=True)}
    changed = with_single_reductions(jaxpr, specs, mesh())
    run = jax.jit(core.jaxpr_as_fun(core.ClosedJaxpr(changed, closed.consts))).lower(*arrays).compile()
    text = run.as_text()
    assert text is not None
    return run(*arrays), len(re.findall(r" all-reduce(?:-start)?\(", text))


def added(terms: list[Any], order: list[int]) -> Any:
    """The sum of the terms, two at a time."""
    for k in order:
        first, second = terms.pop(k % len(terms)), terms.pop(0)
        terms.append(first + second)
    return reduce(operator.add, terms)


@settings(max_examples=fewer(10))
@given(specs=st.lists(SPECS, min_size=1, max_size=4), order=st.lists(st.integers(0, 9), max_size=3))
def test_a_sum_of_sums_is_reduced_once(specs: list[PartitionSpec], order: list[int]) -> None:
    def total(*arrays: Any) -> Any:
        return added([*map(jnp.sum, arrays), 3.0], order[: len(arrays)])

    arrays = placed(specs)
    (value,), reductions = compiled(total, arrays)
    assert float(value) == 3 + sum(float(np.asarray(x).astype(np.float64).sum()) for x in arrays)
    assert reductions == any(any(spec) for spec in specs)


def test_a_partial_total_that_is_read_elsewhere_stays() -> None:
    arrays = placed([PartitionSpec("a", "b"), PartitionSpec(None, "c"), PartitionSpec()])

    def totals(x: Any, y: Any, z: Any) -> Any:
        both = jnp.sum(x) + jnp.sum(y)
        return both, both + jnp.sum(z), both + both

    values, _ = compiled(totals, arrays)
    x, y, z = (float(np.asarray(a).sum()) for a in arrays)
    assert list(map(float, values)) == [x + y, x + y + z, 2 * (x + y)]
