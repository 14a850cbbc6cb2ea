"""A plan's step as a user takes it, and what is to be said of the very program that took it: it is compiled once for both."""

from typing import Any

import jax

from unity.exec.compiled.check import Check, compare
from unity.exec.planned_step import compiler_options
from unity.plan.plan import Plan
from unity.plan.step import step_of
from unity.search.cost.cost import Training


def stepped(plan: Plan, *args: Any, argnums: int | tuple[int, ...] = 0) -> tuple[Any, Check]:
    """The value and the gradients with respect to `argnums`, as the function's own weights lie, and the check."""
    sharded = plan.shard(*args)
    lowered = jax.jit(jax.value_and_grad(plan, argnums)).lower(*sharded)
    compiled = lowered.compile(compiler_options=compiler_options())
    value, gradient = compiled(*sharded)
    return (value, plan.shard.unpack(gradient)), compare(step_of(plan, Training()), compiled)
