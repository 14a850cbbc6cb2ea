"""A loaded plan says what the saved one said, whatever it was planned with, without being told again."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import unity
from unity.base.errors import PlanError

GRID = unity.Machine.grid(2, 2, "a100")


def f(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def loss(encoder: Any, decoder: Any, x: Any) -> Any:
    body = lambda h, w: (h + jnp.tanh(h @ w), None)  # noqa: E731
    return jnp.mean(jnp.tanh(lax.scan(body, x, encoder)[0] @ decoder) ** 2)


def whole(encoder: Any, decoder: Any, x: Any) -> Any:
    return jnp.argmax(x @ decoder, -1)


ARGS = f(4, 128, 128), f(128, 128), f(256, 128)
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "the last, from the end": {"argnums": -1},
    "forward": {"training": False},
    "a fraction of slots": {"optimizer_slots": 1.5},
    "many slots": {"optimizer_slots": 5, "argnums": (1, 0)},
    "the leanest": {"objective": "memory", "argnums": (0, 1)},
    "few devices": {"objective": "devices"},
    "a limit": {"memory_limit": 2e6, "argnums": (0, 1)},
    "a pipeline": {"pipeline": unity.PipelineShape(2, 4), "argnums": (0, 1)},
    "packed": {"pack": True, "search": "unity", "budget": 4, "argnums": (0, 1)},
    "rules": {"search": "unity-rules", "budget": 10, "argnums": 1},
    "a constraint": {"constraints": unity.pin("x", jax.sharding.PartitionSpec("node")), "argnums": (0, 1)},
    "another machine": {"machine": unity.Machine.grid(1, 2, "v100"), "argnums": (0, 1)},
}


def planned(fn: Any, **options: Any) -> unity.Plan:
    options = {"machine": GRID, "search": "captured", "progress": False, **options}
    return unity.optimize(fn, *ARGS, **options)


def said(plan: unity.Plan) -> dict[str, Any]:
    out = io.StringIO()
    plan.explain(file=out)
    plan.explain("x", file=out)
    timeline = plan.inspect.memory_timeline()
    moments = plan.shard.shardings({"mu": ARGS[:2]})
    return {
        "figures": (plan.time, plan.memory, plan.inspect.search_seconds, repr(plan)),
        "explain": out.getvalue(),
        "held": (timeline.peak, str(timeline)),
        "simulated": plan.inspect.simulate().makespan,
        "moments": [str(s.spec) for s in jax.tree.leaves(moments)],
        "data": plan.inspect.to_json(),
        "frontier": [(p.time, p.memory) for p in plan.frontier],
    }


WITHOUT_GRADIENTS = ("nothing", "forward", "many slots", "a constraint")
CASES = [*((loss, name) for name in OPTIONS), *((whole, name) for name in WITHOUT_GRADIENTS)]


@pytest.mark.parametrize(("fn", "name"), CASES)
def test_a_loaded_plan_says_what_the_saved_one_said(fn: Any, name: str, tmp_path: Path) -> None:
    plan = planned(fn, **OPTIONS[name])
    plan.files.save(tmp_path / "plan.json")
    assert said(unity.load(tmp_path / "plan.json", fn, *ARGS)) == said(plan)


def test_a_plan_without_a_limit_has_none_when_it_is_read(tmp_path: Path) -> None:
    plans = [planned(loss, memory_limit=float("inf")) for _ in range(2)]  # the second one is read from the cache
    plans[0].files.save(tmp_path / "plan.json")
    for plan in (*plans, unity.load(tmp_path / "plan.json", loss, *ARGS)):
        out = io.StringIO()
        plan.explain("x", file=out)
        assert "with other types of it, in any memory:" in out.getvalue()


def test_other_arguments_than_planned_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    planned(loss, argnums=(0, 1)).files.save(path)
    for same in ((0, 1), (1, 0), [0, -2]):
        unity.load(path, loss, *ARGS, argnums=same)
    with pytest.raises(PlanError, match=r"gradients of args\[0\], args\[1\], but argnums=0 names others"):
        unity.load(path, loss, *ARGS, argnums=0)
    planned(loss, training=False).files.save(path)
    unity.load(path, loss, *ARGS, argnums=())
    with pytest.raises(PlanError, match=r"planned without gradients, but argnums=0 names some"):
        unity.load(path, loss, *ARGS, argnums=0)
