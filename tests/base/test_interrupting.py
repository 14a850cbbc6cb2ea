"""Ctrl-C while a plan is searched for gives the best so far, once there is one, and no later call takes that for the best."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import unity
from unity.base.interruption import UntilInterrupted
from unity.planning import device_groups
from unity.search.joint import backtracking
from unity.search.session import Search
from unity.search.substitution import fitting

MACHINE = unity.Machine.grid(1, 8, "v100")


def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.mean((x @ params["a"] @ params["b"]) ** 2)


def plan(**options: Any) -> unity.Plan:
    struct = {"a": (16, 64), "b": (64, 8), "x": (4096, 16)}
    a, b, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in struct.values())
    return unity.optimize(loss, {"a": a, "b": b}, x, machine=MACHINE, progress=False, **options)


pytestmark = pytest.mark.usefixtures("own_cache")


def interrupting(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, after: int = 0) -> None:
    """Ctrl-C is pressed while a function is called once more than so often."""
    original, calls = getattr(where, name), itertools.count()

    def interrupted(*args: Any, **options: Any) -> Any:
        if next(calls) == after:
            raise KeyboardInterrupt
        return original(*args, **options)

    monkeypatch.setattr(where, name, interrupted)


def test_values_end_where_they_are_interrupted() -> None:
    def values(interrupted: bool) -> Any:
        yield 1
        if interrupted:
            raise KeyboardInterrupt
        yield 2

    for interrupted in (False, True):
        some = UntilInterrupted(values(interrupted))
        assert list(some) == ([1] if interrupted else [1, 2])
        assert some.interrupted == interrupted


def test_what_was_found_of_rewritings_is_planned_and_nothing_else_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = plan()
    assert whole.program.rewriting
    monkeypatch.setattr(device_groups, "best_of_equal_stages", lambda *given: pytest.fail("it was interrupted before"))
    monkeypatch.setattr(device_groups, "best_branches", lambda *given: pytest.fail("it was interrupted before"))
    unfound, found = interrupted_after(monkeypatch, 0), interrupted_after(monkeypatch, 1)
    assert not unfound.program.rewriting
    assert found.program.rewriting
    assert unfound.time > found.time == whole.time


def interrupted_after(monkeypatch: pytest.MonkeyPatch, rewritten: int) -> unity.Plan:
    with monkeypatch.context() as context:
        interrupting(context, backtracking, "steps", rewritten)
        return plan(seed=1)  # which the cache does not have


@pytest.mark.parametrize("stage", ["best_of_equal_stages", "best_branches"])
def test_an_interrupted_plan_says_so_and_is_searched_for_again(stage: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    with monkeypatch.context() as context:
        interrupting(context, device_groups, stage)
        first = plan()
    first.explain()
    assert "interrupted" in capsys.readouterr().out
    looked: list[object] = []
    original: Callable[..., Any] = getattr(device_groups, stage)
    monkeypatch.setattr(device_groups, stage, lambda *given: looked.append(given) or original(*given))
    second = plan()
    assert looked
    assert second.time <= first.time
    second.explain()
    assert "interrupted" not in capsys.readouterr().out


def test_before_there_is_a_plan_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupting(monkeypatch, Search, "under")
    with pytest.raises(KeyboardInterrupt):
        plan()


def test_what_is_asked_for_is_not_given_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupting(monkeypatch, device_groups, "best_branches")
    with pytest.raises(KeyboardInterrupt):
        plan(branch_groups=2)


def test_substitutions_give_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(*given: Any) -> Any:
        yield next(improvements(*given))
        raise KeyboardInterrupt

    improvements = fitting.improvements
    monkeypatch.setattr(fitting, "improvements", once)
    assert plan(search="unity-rules").program.family.interrupted
    with pytest.raises(KeyboardInterrupt):  # and not that nothing fits
        plan(search="unity-rules", memory_limit=1e5)
    monkeypatch.setattr(fitting, "improvements", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        plan(search="unity-rules", seed=1)
