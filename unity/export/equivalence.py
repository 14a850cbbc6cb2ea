"""Equivalence of two local programs, by hashes of the expressions that their results are, in whatever order equations are.

The exported file is traced again and compared with the plan, so that a file that computes anything else is never written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode
from jax.sharding import NamedSharding

from unity.export.checkpoint_policies import saved_kinds
from unity.export.derivative_rules import rule_of
from unity.export.nested import applied_program, combiner, is_scatter_apply
from unity.export.simplification import simplified
from unity.pcg.ir.program import Atom, Body, Equation, Literal, close, params_key, tensor_type
from unity.pcg.ir.tracing import trace
from unity.pcg.jaxprs.jaxprs import REMATERIALIZED, RULED
from unity.pcg.jaxprs.loops import constants_and_carry
from unity.pcg.jaxprs.shard_maps.rotation import ROTATION
from unity.pcg.jaxprs.trace_contexts import words_of
from unity.pcg.propagation.nested.linear_solves import program_names, solve_program, split_operands
from unity.pcg.propagation.nested.programs import branches, nested_body


class Meaning(NamedTuple):
    """A hash of the expression that computes a value from a program's operands, and whether it has constants alone."""

    name: str
    constant: bool = False


def meanings(body: Body, operands: Sequence[Meaning] | None = None, depth: int = 0) -> list[Meaning]:
    """Return the meanings of a program's results. Must be called inside the program's `shard_map`.

    Args:
        body: the program.
        operands: the meanings of its operands; without them, each operand means itself.
        depth: the nesting depth of the program, which tells its operands from those of the programs around it.
    """
    body = simplified(body)
    env = dict(zip(body.inputs, operands if operands is not None else symbols(len(body.inputs), depth), strict=True))

    def read(atom: Atom) -> Meaning:
        return Meaning(_constant(atom), True) if isinstance(atom, Literal) else env[atom]

    for e in body.equations:
        env.update(zip(e.results, _results(e, body, [read(a) for a in e.operands], depth), strict=True))
    return [read(a) for a in body.outputs]


def symbols(count: int, depth: int) -> list[Meaning]:
    """Return meanings for a program's operands, which differ from each other and from those of other depths."""
    return [Meaning(f"operand {k} at {depth}") for k in range(count)]


def _constant(atom: Literal) -> str:
    if jnp.issubdtype(atom.tensor.dtype, jax.dtypes.extended):
        words = words_of(atom.value)
        return _wrapped(atom.tensor.dtype, Literal(words, tensor_type(words.shape, words.dtype)).key)
    scalar = not atom.tensor.shape and atom.tensor.dtype.kind in "bifu"
    return f"{atom.tensor}={np.asarray(atom.value, atom.tensor.dtype).item()!r}" if scalar else atom.key


def _wrapped(dtype: Any, words: str) -> str:
    """Return the meaning of random keys that are made of words, whether they are a constant or an exported file makes them."""
    return _hash(["keys", dtype, words])


def _hash(parts: Sequence[object]) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:24]


def _results(e: Equation, body: Body, operands: list[Meaning], depth: int) -> list[Meaning]:
    constant = all(o.constant for o in operands)
    if e.name == "pvary" and (constant or not body.tensor(e.operands[0]).floating):
        return operands  # a value without a gradient may be cast to vary anywhere
    if _is_identity(e, body):
        return operands
    if e.name == "reshard" and _is_replicated(e.params["dst_sharding"]):  # of a constant's type, which has no mesh
        return operands
    if e.name == "random_wrap":
        return [Meaning(_wrapped(body.tensor(e.results[0]).dtype, operands[0].name), constant)]
    if e.name in FORWARDING:
        return FORWARDING[e.name](e, operands, depth + 1, constant)
    parts = [o.name for o in operands]
    inner = _scatter_apply if is_scatter_apply(e) else NESTED_CONTENT.get(e.name)
    content = inner(e, operands, depth + 1) if inner is not None else [_parameters(e), *parts]
    return [Meaning(_hash([e.name.removesuffix("_any"), k, *content]), constant) for k in range(len(e.results))]


def _is_identity(e: Equation, body: Body) -> bool:
    """Return whether an equation leaves its operand as it is, so that JAX's function may leave it out, or the plan's piece have it.

    The pieces of one device may have equal shapes, where a reshape of whole tensors changes theirs.
    """
    if len(e.operands) != 1 or body.tensor(e.operands[0]) != body.tensor(e.results[0]):
        return False
    if e.name == "transpose":
        return list(e.params["permutation"]) == sorted(e.params["permutation"])
    return e.name in ("convert_element_type", "broadcast_in_dim", "squeeze") or (
        e.name == "reshape" and e.params.get("dimensions") is None
    )


def _parameters(e: Equation) -> str:
    if e.name == "pvary":  # a set, in any order
        return str(sorted(e.params["axes"]))
    params: dict[str, Any] = {k: None if _is_replicated(v) else _numbers(v) for k, v in e.params.items() if k != "weak_type"}
    if isinstance(params.get("axis_name"), str):  # one axis by its name, or as a tuple of one
        params["axis_name"] = (params["axis_name"],)
    if e.name == "slice" and set(params["strides"] or ()) <= {1}:
        params["strides"] = None
    if params.get("preferred_element_type") is not None:  # of a primitive of unity's, as the file has it
        params["preferred_element_type"] = np.dtype(params["preferred_element_type"])
    if params.get("mode") != GatherScatterMode.FILL_OR_DROP:  # the value is not used
        params.pop("fill_value", None)
    return params_key(params)


def _numbers(param: object) -> object:
    """Return a parameter with numpy's integers as Python's."""
    if isinstance(param, tuple):
        return tuple(map(_numbers, param))
    if is_dataclass(param) and not isinstance(param, type):
        return (type(param).__name__, *(_numbers(getattr(param, f.name)) for f in fields(param)))
    return int(param) if isinstance(param, np.integer) else param


def _is_replicated(param: object) -> bool:
    """Return whether a parameter is a sharding over no axis."""
    return isinstance(param, NamedSharding) and not any(param.spec)


def _names(values: Sequence[Meaning]) -> list[str]:
    return [v.name for v in values]


def _operands_of_checkpoint(values: Sequence[Meaning]) -> list[str]:
    """Return the operands that are not constants, sorted, since their order has no meaning."""
    return sorted({v.name for v in values if not v.constant})


# The constants of a loop and the operands of branches are hashed where a body reads them. Those that no equation reads are omitted,
# such as a mask that the backward pass of a pipeline stage receives and does not need.


def _scan(e: Equation, operands: list[Meaning], depth: int, constant: bool) -> list[Meaning]:
    """Return the meanings of a scan's results. A carry that no step changes is a constant, which JAX's `lax.scan` makes of it."""
    c, k = constants_and_carry(e.params)
    body, names = nested_body(e), symbols(len(operands) - c, depth)
    step = meanings(body, [*operands[:c], *names], depth)
    fixed = {i for i in range(k) if step[i].name == names[i].name}
    if fixed:
        changing = iter(names)
        names = [operands[c + i] if i in fixed else next(changing) for i in range(len(names))]
        step = meanings(body, [*operands[:c], *names], depth)
    entering = [x for i, x in enumerate(operands[c:]) if i not in fixed]
    leaving = [x for i, x in enumerate(step) if i not in fixed]
    options = [e.params[name] for name in ("length", "reverse", "unroll")]
    content = ["scan", k - len(fixed), *options, "in", *_names(entering), "step", *_names(leaving)]
    numbers = iter(range(len(leaving)))
    return [operands[c + i] if i in fixed else Meaning(_hash([next(numbers), *content]), constant) for i in range(len(step))]


def _while(e: Equation, operands: list[Meaning], depth: int) -> list[object]:
    a, b = e.params["cond_nconsts"], e.params["body_nconsts"]
    carry = symbols(len(operands) - a - b, depth)
    test = meanings(close(e.params["cond_jaxpr"]), [*operands[:a], *carry], depth)
    step = meanings(close(e.params["body_jaxpr"]), [*operands[a : a + b], *carry], depth)
    return ["in", *_names(operands[a + b :]), "while", *_names(test), "step", *_names(step)]


def _cond(e: Equation, operands: list[Meaning], depth: int, constant: bool) -> list[Meaning]:
    """Return the meanings of a conditional's results. JAX's `lax.cond` has no result for an operand that all branches return."""
    index, *rest = operands
    ends = [meanings(branch, rest, depth) for branch in branches(e)]
    forwarded = {k: x for k, (x, *others) in enumerate(zip(*ends, strict=True)) if x in rest and all(y == x for y in others)}
    content = ["cond", index.name]
    for results in ends:
        content += ["branch", *(x.name for k, x in enumerate(results) if k not in forwarded)]
    numbers = iter(range(len(ends[0])))
    return [forwarded[k] if k in forwarded else Meaning(_hash([next(numbers), *content]), constant) for k in range(len(ends[0]))]


def _rotation(e: Equation, operands: list[Meaning], depth: int, constant: bool) -> list[Meaning]:
    """Return the meaning of a rotation as `jnp.roll`, which a file calls and which JAX traces as slices that it joins."""
    assert e.origin is not None
    x: Any = e.origin.invars[0].aval
    roll = partial(jnp.roll, shift=e.params["shift"], axis=e.params["dimension"])
    return meanings(trace(roll, [jax.ShapeDtypeStruct(x.shape, x.dtype)]), operands, depth)


def _remat(e: Equation, operands: list[Meaning], depth: int) -> list[object]:
    inside = meanings(nested_body(e), operands, depth)
    return [e.params["prevent_cse"], saved_kinds(e), *_operands_of_checkpoint(operands), "inside", *_names(inside)]


def _custom(e: Equation, operands: list[Meaning], depth: int) -> list[object]:
    rule = rule_of(e)
    content: list[object] = [rule.once, *_names(operands)]
    for program in (rule.value, rule.forward, rule.backward, rule.derivative):
        if program is not None:
            content += ["rule", *_names(meanings(program.body, None, depth))]
    partial = {some: [p and _names(meanings(p.body, None, depth)) for p in pair] for some, pair in rule.partial.items()}
    if any(own != of_zeros for own, of_zeros in partial.values()):
        content += ["partial", *((some, own) for some, (own, _) in partial.items())]
    return content


def _reduction(e: Equation, operands: list[Meaning], depth: int) -> list[object]:
    parameters = {k: _numbers(v) for k, v in e.params.items() if k not in ("jaxpr", "computation", "consts")}
    return [params_key(parameters), *_names(operands), "by", *_names(meanings(combiner(e).body, None, depth))]


def _scatter_apply(e: Equation, operands: list[Meaning], depth: int) -> list[object]:
    parameters = {k: _numbers(v) for k, v in e.params.items() if k not in ("update_jaxpr", "update_consts")}
    return [params_key(parameters), *_names(operands), "by", *_names(meanings(applied_program(e).body, None, depth))]


def _linear_solve(e: Equation, operands: list[Meaning], depth: int) -> list[object]:
    constants, right = split_operands(e, operands)
    content: list[object] = [*_names(right)]
    for name in (name for name in program_names(e) if name != "vecmat"):  # JAX derives it from the first
        part_operands = [*constants[name], *symbols(len(right), depth)]
        content += [name, *_names(meanings(solve_program(e, name), part_operands, depth))]
    return content


NESTED_CONTENT = {
    "reduce": _reduction, "reduce_window": _reduction, "custom_linear_solve": _linear_solve,
    "while": _while, **dict.fromkeys(REMATERIALIZED, _remat), **dict.fromkeys(RULED, _custom),
}  # fmt: skip

# Of these, JAX's functions return operands directly that they hand on unchanged, or are written in other primitives.
FORWARDING = {"scan": _scan, "cond": _cond, ROTATION: _rotation}
