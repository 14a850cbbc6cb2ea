"""Policies of `jax.checkpoint` as source, from their decisions about the operations inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from unity.base.errors import ExportError
from unity.export.source_code import Code, call
from unity.pcg.analysis.rematerialization import saves
from unity.pcg.ir.nested_programs import bodies
from unity.pcg.ir.program import Body, Equation
from unity.pcg.propagation.solver import nested_body


def decisions(equation: Equation) -> dict[str, set[bool]]:
    """Return the decisions of a checkpoint's policy: for every kind of operation inside, whether its results are saved.

    Every name of `checkpoint_name` is a kind. A set of both decisions means that the policy distinguishes operations of one kind.
    """
    policy = equation.params.get("policy")
    if policy is None:
        return {}
    by_kind: dict[str, set[bool]] = {}
    for e in _equations_within(nested_body(equation)):
        assert e.origin is not None
        answer = policy(e.primitive, *(v.aval for v in e.origin.invars), **e.params)
        if "offload" in repr(answer).lower():
            raise ExportError(equation.source, "jax.checkpoint", "its policy moves values to the host, which is not exported")
        by_kind.setdefault(_kind(e), set()).add(saves(answer))
    return by_kind


def _kind(e: Equation) -> str:
    return f"{e.name}:{e.params['name']}" if e.name == "name" else e.name


def _equations_within(body: Body) -> Iterator[Equation]:
    for e in body.equations:
        yield e
        for program in bodies(e):
            yield from _equations_within(program)


def saved_kinds(equation: Equation) -> str:
    """Return the kinds that the policy saves, as a text that is equal for policies that decide alike."""
    return ", ".join(
        sorted(f"{kind}{sorted(map(str, answers))}" for kind, answers in decisions(equation).items() if True in answers)
    )


def policy_code(equation: Equation) -> Code | None:
    """Return a policy as source, or None if nothing is saved, as without a policy."""
    policy = equation.params.get("policy")
    public = _public_policy(policy)
    if policy is None or public is not None:
        return public
    by_kind = decisions(equation)
    saved = sorted(kind for kind, answers in by_kind.items() if True in answers)
    if not saved:
        return None
    if any(False in by_kind[kind] for kind in saved):
        raise ExportError(equation.source, "jax.checkpoint", f"its policy {policy!r} tells operations of one kind apart")
    if all(kind.startswith("name:") for kind in saved):
        return call("jax.checkpoint_policies.save_only_these_names", *(kind.removeprefix("name:") for kind in saved))
    if any(kind.startswith("name:") for kind in saved):
        raise ExportError(equation.source, "jax.checkpoint", f"its policy {policy!r} saves names and kinds of operations")
    which = f'primitive.name == "{saved[0]}"' if len(saved) == 1 else f"primitive.name in {tuple(saved)!r}".replace("'", '"')
    return Code(f"lambda primitive, *_, **__: {which}")


def _public_policy(policy: Any) -> Code | None:
    public = vars(jax.checkpoint_policies)
    name = next((k for k, v in public.items() if v is policy and not k.startswith("_")), None)
    return Code(f"jax.checkpoint_policies.{name}") if name else None
