"""Policies of `jax.checkpoint` as source, from their decisions about the operations inside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import jax

from unity.base.errors import ExportError
from unity.export.simplification import simplified
from unity.export.source_code import Code, call
from unity.pcg.analysis.policies import offloads, saves
from unity.pcg.ir.nested_programs import bodies
from unity.pcg.ir.program import Body, Equation
from unity.pcg.propagation.nested.programs import nested_body

# Whether a result is saved; of one that is offloaded, the memory that it is moved from, and the memory that it is moved to.
Decision: TypeAlias = bool | tuple[str, str]


def decisions(equation: Equation) -> dict[str, set[Decision]]:
    """Return the decisions of a checkpoint's policy for every kind of operation inside.

    Every name of `checkpoint_name` is a kind. Several decisions mean that the policy distinguishes operations of one kind.
    """
    policy = equation.params.get("policy")
    by_kind: dict[str, set[Decision]] = {}
    for e in _equations_within(nested_body(equation)) if policy is not None else ():
        by_kind.setdefault(_kind(e), set()).add(_decision(policy, e))
    return by_kind


def _decision(policy: Any, e: Equation) -> Decision:
    """Return the decision of a policy about an operation."""
    assert e.origin is not None
    answer = policy(e.primitive, *(v.aval for v in e.origin.invars), **e.params)
    return (answer.src, answer.dst) if offloads(answer) else saves(answer)


def _kind(e: Equation) -> str:
    return f"{e.name}:{e.params['name']}" if e.name == "name" else e.name


def _equations_within(body: Body) -> Iterator[Equation]:
    """Yield the equations of a program that matter to its results, nested ones included.

    A plan and its file differ in others, which no policy saves: JAX leaves half of a 64-bit counter unused where it draws bits.
    """
    for e in simplified(body).equations:
        yield e
        for program in bodies(e):
            yield from _equations_within(program)


def saved_kinds(equation: Equation) -> str:
    """Return the kinds that the policy saves, as a text that is equal for policies that decide alike."""
    return ", ".join(sorted(f"{kind}{sorted(map(str, answers))}" for kind, answers in decisions(equation).items() if any(answers)))


def policy_code(equation: Equation) -> Code | None:
    """Return a policy as source, or None if nothing is saved, as without a policy."""
    policy = equation.params.get("policy")
    public = _public_policy(policy)
    if policy is None or public is not None:
        return public
    by_kind = {kind: answers for kind, answers in decisions(equation).items() if any(answers)}
    if not by_kind:
        return None
    if any(isinstance(answer, tuple) for answers in by_kind.values() for answer in answers):
        return _offloading_code(equation, by_kind)
    saved = sorted(by_kind)
    if any(False in by_kind[kind] for kind in saved):
        raise ExportError(equation.source, "jax.checkpoint", f"its policy {policy!r} tells operations of one kind apart")
    if all(kind.startswith("name:") for kind in saved):
        return call("jax.checkpoint_policies.save_only_these_names", *(kind.removeprefix("name:") for kind in saved))
    if any(kind.startswith("name:") for kind in saved):
        raise ExportError(equation.source, "jax.checkpoint", f"its policy {policy!r} saves names and kinds of operations")
    which = f'primitive.name == "{saved[0]}"' if len(saved) == 1 else f"primitive.name in {tuple(saved)!r}".replace("'", '"')
    return Code(f"lambda primitive, *_, **__: {which}")


def _offloading_code(equation: Equation, by_kind: Mapping[str, set[Decision]]) -> Code:
    """Return a policy that offloads values, as the public policy of JAX's that decides alike.

    Args:
        equation: The checkpoint.
        by_kind: The decisions about the kinds of operations that the policy saves.

    Raises:
        ExportError: no public policy decides alike.
    """
    policy = equation.params["policy"]
    (src, dst), *others = {answer for answers in by_kind.values() for answer in answers if isinstance(answer, tuple)}
    products = jax.checkpoint_policies.offload_dot_with_no_batch_dims(src, dst)
    if not others and all(_decision(policy, e) == _decision(products, e) for e in _equations_within(nested_body(equation))):
        return call("jax.checkpoint_policies.offload_dot_with_no_batch_dims", src, dst)
    if others or not all(kind.startswith("name:") and len(answers) == 1 for kind, answers in by_kind.items()):
        why = f"its policy {policy!r} offloads other values than names, or than products without batch dimensions"
        raise ExportError(equation.source, "jax.checkpoint", why)
    names = {kind.removeprefix("name:"): answers != {True} for kind, answers in sorted(by_kind.items())}
    return call(
        "jax.checkpoint_policies.save_and_offload_only_these_names",
        names_which_can_be_saved=[name for name, offloaded in names.items() if not offloaded],
        names_which_can_be_offloaded=[name for name, offloaded in names.items() if offloaded],
        offload_src=src,
        offload_dst=dst,
    )


def _public_policy(policy: Any) -> Code | None:
    public = vars(jax.checkpoint_policies)
    name = next((k for k, v in public.items() if v is policy and not k.startswith("_")), None)
    return Code(f"jax.checkpoint_policies.{name}") if name else None
