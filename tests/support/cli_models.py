"""Models to name on the command line, good ones and broken ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import unity


def loss(params: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"]) ** 2)


HIDDEN = 1024


def arguments(hidden: int = HIDDEN) -> tuple[Any, ...]:
    f = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")  # noqa: E731
    return {"a": f(256, hidden), "b": f(hidden, 64)}, f(2048, 256)


def small() -> tuple[Any, ...]:
    return loss, arguments(), {"search": "captured"}


def saved(folder: Path, machine: unity.Machine, name: str = "plan") -> tuple[Path, unity.Plan]:
    """`small` planned, and the plan in a file. The cache is the folder's own."""
    fn, args, options = small()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        plan = unity.optimize(fn, *args, machine=machine, progress=False, **options)
        plan.files.save(folder / f"{name}.json")
    return folder / f"{name}.json", plan


def other() -> tuple[Any, ...]:
    return loss, arguments(512)


def with_options() -> tuple[Any, ...]:
    machine = unity.Machine.grid(1, 4, "v100")
    return loss, arguments(), {"machine": machine, "search": "captured", "optimizer_slots": 0}


def with_argnums() -> tuple[Any, ...]:
    return loss, arguments(), {"argnums": 0, "search": "captured"}


def layered() -> tuple[Any, ...]:
    def step(params: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda c, w: (c + jnp.tanh(c @ w), None), x, params)[0] ** 2)

    return step, (jax.ShapeDtypeStruct((4, 32, 32), "float32"), jax.ShapeDtypeStruct((16, 32), "float32")), {"search": "captured"}


def former_option() -> tuple[Any, ...]:
    return loss, arguments(), {"budget": 2.0, "shardings": "keep"}


def unknown_option() -> tuple[Any, ...]:
    return loss, arguments(), {"speed": "high"}


def fails() -> tuple[Any, ...]:
    raise KeyError("no data")


def does_not_fit() -> tuple[Any, ...]:
    def broken(params: Any, x: Any) -> Any:
        return (params["a"] @ x).sum()

    return broken, arguments()


def looks_at_values() -> tuple[Any, ...]:
    return lambda params, x: params["a"].sum() if x[0, 0] > 0 else x.sum(), arguments()
