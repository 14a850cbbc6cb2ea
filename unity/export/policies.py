"""What a `jax.checkpoint` saves, said by what its policy decides of the operations inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from unity.export.errors import ExportError
from unity.export.source import Code, call
from unity.pcg.ir.nested_programs import bodies
from unity.pcg.ir.program import Body, Equation
from unity.pcg.propagation.solver import nested_body


def decided(equation: Equation) -> dict[str, set[bool]]:
    """What the policy says of every kind of operation inside; a named value is a kind of its own."""
    policy, found = equation.params.get("policy"), {}
    if policy is None:
        return {}
    for e in _within(nested_body(equation)):
        assert e.origin is not None
        answer = policy(e.primitive, *(v.aval for v in e.origin.invars), **e.params)
        kept = answer if isinstance(answer, bool) else type(answer).__name__ == "_Saveable" or answer is True
        if not isinstance(answer, bool) and "offload" in repr(answer).lower():
            raise ExportError(equation.source, "jax.checkpoint", "its policy moves values to the host, which is not exported")
        found.setdefault(_kind(e), set()).add(bool(kept))
    return found


def _kind(e: Equation) -> str:
    return f"{e.name}:{e.params['name']}" if e.name == "name" else e.name


def _within(body: Body) -> Iterator[Equation]:
    for e in body.equations:
        yield e
        for program in bodies(e):
            yield from _within(program)


def saved(equation: Equation) -> str:
    """The decisions as text, equal for policies that decide alike here."""
    return ", ".join(sorted(f"{kind}{sorted(map(str, kept))}" for kind, kept in decided(equation).items() if True in kept))


def policy_code(equation: Equation) -> Code | None:
    """A policy as source; None if nothing is saved, as without one."""
    policy = equation.params.get("policy")
    known = _known(policy)
    if policy is None or known is not None:
        return known
    found = decided(equation)
    kept = sorted(kind for kind, answers in found.items() if True in answers)
    if not kept:
        return None
    if any(False in found[kind] for kind in kept):
        raise ExportError(equation.source, "jax.checkpoint", f"its policy {policy!r} tells operations of one kind apart")
    if all(kind.startswith("name:") for kind in kept):
        return call("jax.checkpoint_policies.save_only_these_names", *(kind.removeprefix("name:") for kind in kept))
    if any(kind.startswith("name:") for kind in kept):
        raise ExportError(equation.source, "jax.checkpoint", f"its policy {policy!r} saves names and kinds of operations")
    which = f'primitive.name == "{kept[0]}"' if len(kept) == 1 else f"primitive.name in {tuple(kept)!r}".replace("'", '"')
    return Code(f"lambda primitive, *_, **__: {which}")


def _known(policy: Any) -> Code | None:
    public = vars(jax.checkpoint_policies)
    name = next((k for k, v in public.items() if v is policy and not k.startswith("_")), None)
    return Code(f"jax.checkpoint_policies.{name}") if name else None
