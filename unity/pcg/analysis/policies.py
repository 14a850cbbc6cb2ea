"""Answers of checkpoint policies about a value: whether it is saved, and where."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from jax.extend.core import primitives

from unity.pcg.ir.graph import Node

Policies = tuple[Callable[..., Any], ...]  # of a remat and the remats around it: a value that one of them saves is saved
# The primitive that stands for a change of type when a policy decides about it.
COLLECTIVES = {
    "combine": primitives.all_gather_p, "combine_replicate": primitives.all_gather_p, "reduce": primitives.psum_p,
    "reduce_partition": primitives.psum_p, "combine_partition": primitives.all_to_all_p,
}  # fmt: skip


@lru_cache(maxsize=256)
def replacing(policies: Policies) -> Callable[..., Any]:
    """Return a policy that saves only what some policies together offload, or save by a name."""

    def policy(primitive: Any, *operands: Any, **params: Any) -> Any:
        answers = saving_answers(policies, primitive, *operands, **params)
        return answers[0] if answers and (primitive.name == "name" or all(map(offloads, answers))) else False

    return policy


def policies_of(remat: Node, offloads: bool = True) -> Policies:
    """Return the policy of a remat, if it has one. Unless it `offloads`, it saves such values on the device."""
    return () if remat.policy is None else (remat.policy if offloads else on_device(remat.policy),)


@lru_cache(maxsize=256)
def on_device(policy: Any) -> Any:
    """Return a policy that saves on the device what another one offloads; None for None."""
    if policy is None:
        return None
    return lambda primitive, *operands, **params: saves(policy(primitive, *operands, **params))


def saves_collectives(policies: Policies) -> bool:
    """Return whether policies save the result of every change of type that communicates."""
    return all(saving_answers(policies, primitive) for primitive in COLLECTIVES.values())


def save_messages(primitive: Any, *_: Any, **__: Any) -> bool:
    """Policy of the checkpoint around an operator with marked operands (`unity.exec.lowering`): save the halos received."""
    return primitive.name == "ppermute"


def saving_answers(policies: Policies, primitive: Any, *operands: Any, **params: Any) -> list[Any]:
    """Return the answers of the policies that save the result of a primitive, on the device or on the host."""
    answers = (policy(primitive, *operands, **params) for policy in policies)
    return [answer for answer in answers if saves(answer)]


def saves(answer: Any) -> bool:
    """Return whether the answer of a checkpoint policy about a value, a boolean or one of JAX's marks, is to save the value."""
    return bool(answer) and type(answer).__name__ != "RecomputeType"


def offloads(answer: Any) -> bool:
    """Return whether the answer of a checkpoint policy about a value is to save it in the memory of the host."""
    return type(answer).__name__ == "Offloadable"
