"""Checkpoint policies that save named values, as by hand: products with weights get the names that MaxText gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from unity.pcg.capture.capture import Captured
from unity.pcg.ir.program import Atom, Body, Equation
from unity.pcg.jaxprs.jaxprs import REMATERIALIZED, SCANNED
from unity.pcg.propagation.nested.scan_programs import inside

NAMES = {
    **dict.fromkeys(("query", "key", "value", "qkv", "receptance"), "qkv_proj"),
    "out": "out_proj",
}
CONTEXT = "context"  # what the product named "out_proj" reads
POLICIES = {
    "save_qkv_proj": ("qkv_proj",),
    "save_out_proj": ("out_proj",),
    "save_dot_except_mlp": ("qkv_proj", "out_proj"),
    "save_dot_with_context_except_mlp": ("qkv_proj", CONTEXT, "out_proj"),
}
# primitives through which the name of a weight is the name of their result
FORWARDS = ("convert_element_type", "reshape", "transpose", "squeeze", "slice")


def with_names(captured: Captured) -> Captured:
    """Return a function whose products with the weights of `NAMES` are named, in the steps of scans and in checkpoints, too."""
    weights = [_weight(node.name) for node in captured.graph.inputs]
    return captured.of(_named(captured.body, weights), captured.bodies)


def names_of(captured: Captured) -> frozenset[str]:
    """Return the names of the values of a program, in the steps of scans and in checkpoints, too."""
    return frozenset(_names(captured.body))


def with_policy(captured: Captured, names: Sequence[str]) -> Captured:
    """Return a function whose checkpoints save the values with some names, in the steps of scans, too."""
    return captured.of(_saving(captured.body, jax.checkpoint_policies.save_only_these_names(*names)), captured.bodies)


def _weight(path: str) -> str | None:
    """Return the name of a product with a weight, by the weight's path, such as `params['query']['weight']`."""
    keys = [key.rstrip("]").strip("'") for key in path.split("[")]
    return NAMES.get(keys[-2]) if len(keys) > 1 and keys[-1] == "weight" else None


def _named(body: Body, weights: Sequence[str | None]) -> Body:
    """Return a program with named products.

    Args:
        weights: The name of the products with each input.
    """
    known = {v: name for v, name in zip(body.inputs, weights, strict=True) if name is not None}
    tensors, instead, equations = dict(body.tensors), dict[int, int](), list[Equation]()

    def now(atom: Atom) -> Atom:
        return instead.get(atom, atom) if isinstance(atom, int) else atom

    def add(value: int, name: str, e: Equation) -> int:
        new, (primitive, params) = max(tensors) + 1, _template(name)
        tensors[new] = tensors[value]
        equations.append(Equation(primitive, params, (value,), (new,), e.source, scope=e.scope))
        return new

    for e in body.equations:
        names = [known.get(a) if isinstance(a, int) else None for a in e.operands]
        e = replace(e, operands=tuple(map(now, e.operands)))
        operands = list(zip(e.operands, names, strict=True))
        name = next((name for name in names if name is not None), None)
        program = inside(e)
        if program is not None:
            e = replace(e, params={**e.params, "jaxpr": _named(program, names)}, origin=None)
        product = name if e.name == "dot_general" else None
        if product == "out_proj":
            e = replace(e, operands=tuple(add(a, CONTEXT, e) if isinstance(a, int) and n is None else a for a, n in operands))
        equations.append(e)
        if name is not None and e.name in FORWARDS:
            known[e.results[0]] = name
        elif product is not None:
            instead[e.results[0]] = add(e.results[0], product, e)
    return Body(body.inputs, tuple(map(now, body.outputs)), tuple(equations), tensors)


def _names(body: Body) -> set[str]:
    nested = (inside(e) for e in body.equations)
    own = {e.params["name"] for e in body.equations if e.name == "name"}
    return own.union(*(_names(program) for program in nested if program is not None))


def _saving(body: Body, policy: Any) -> Body:
    """Return a program whose checkpoints have a policy."""

    def changed(e: Equation) -> Equation:
        if e.name in REMATERIALIZED:
            return replace(e, params={**e.params, "policy": policy}, origin=None)
        step = inside(e) if e.name in SCANNED else None
        return e if step is None else replace(e, params={**e.params, "jaxpr": _saving(step, policy)}, origin=None)

    return replace(body, equations=tuple(map(changed, body.equations)))


@cache
def _template(name: str) -> tuple[core.Primitive, Mapping[str, Any]]:
    """Return the primitive and the parameters of a name, as this version of JAX has them."""
    (eqn,) = jax.make_jaxpr(partial(checkpoint_name, name=name))(1.0).eqns
    return eqn.primitive, eqn.params
