"""Whether two local programs are the same: every result is named by what it is computed from, whatever the order of the equations.

The exported file is traced again and compared with the plan so; a file that would compute anything else is never written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
from jax.lax import GatherScatterMode
from jax.sharding import NamedSharding

from unity.export.given import applied, applies, combining
from unity.export.policies import saved
from unity.export.rules import JVP, VJP, rule_of
from unity.export.simplify import simplified
from unity.pcg.ir.program import Atom, Body, Equation, Literal, close, params_key
from unity.pcg.jaxprs.scan_operands import constants_and_carry
from unity.pcg.propagation.linear_solves import named, part_of, parts
from unity.pcg.propagation.solver import branches, nested_body

REMAT = ("checkpoint", "remat", "remat2")


class Meaning(NamedTuple):
    """What a value is computed from, hashed; a constant is computed from nothing that is given."""

    name: str
    constant: bool = False


def meanings(body: Body, given: Sequence[Meaning] | None = None, depth: int = 0) -> list[Meaning]:
    """The meaning of a program's results, in terms of those of its operands. To be called inside of its `shard_map`."""
    body = simplified(body)
    env = dict(zip(body.inputs, given if given is not None else symbols(len(body.inputs), depth), strict=True))

    def read(atom: Atom) -> Meaning:
        return Meaning(_constant(atom), True) if isinstance(atom, Literal) else env[atom]

    for e in body.equations:
        env.update(zip(e.results, _equation(e, body, [read(a) for a in e.operands], depth), strict=True))
    return [read(a) for a in body.outputs]


def symbols(count: int, depth: int) -> list[Meaning]:
    """The operands of a program, which are nothing but different."""
    return [Meaning(f"operand {k} at {depth}") for k in range(count)]


def _constant(atom: Literal) -> str:
    scalar = not atom.tensor.shape and atom.tensor.dtype.kind in "bifu"
    return f"{atom.tensor}={np.asarray(atom.value, atom.tensor.dtype).item()!r}" if scalar else atom.key


def _named(parts: Sequence[object]) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:24]


def _equation(e: Equation, body: Body, operands: list[Meaning], depth: int) -> list[Meaning]:
    constant = all(o.constant for o in operands)
    if e.name == "pvary" and (constant or not body.tensor(e.operands[0]).floating):
        return operands  # what has no gradient may be taken to differ wherever it meets what does
    if e.name == "convert_element_type" and body.tensor(e.operands[0]).dtype == e.params["new_dtype"]:
        return operands
    parts = [o.name for o in operands]
    inner = _application if applies(e) else NESTED.get(e.name)
    content = inner(e, operands, depth + 1) if inner is not None else [_plain(e), *parts]
    return [Meaning(_named([e.name.removesuffix("_any"), k, *content]), constant) for k in range(len(e.results))]


def _plain(e: Equation) -> str:
    if e.name == "pvary":  # in the order of a set
        return str(sorted(e.params["axes"]))
    params: dict[str, Any] = {k: None if _nowhere(v) else _numbers(v) for k, v in e.params.items() if k != "weak_type"}
    if isinstance(params.get("axis_name"), str):  # the name of one axis is a tuple of one
        params["axis_name"] = (params["axis_name"],)
    if e.name == "slice" and set(params["strides"] or ()) <= {1}:
        params["strides"] = None
    if params.get("mode") != GatherScatterMode.FILL_OR_DROP:  # nothing is filled
        params.pop("fill_value", None)
    return params_key(params)


def _numbers(param: object) -> object:
    """A parameter with numpy's integers as Python's, which are written alike."""
    if isinstance(param, tuple):
        return tuple(map(_numbers, param))
    if is_dataclass(param) and not isinstance(param, type):
        return (type(param).__name__, *(_numbers(getattr(param, f.name)) for f in fields(param)))
    return int(param) if isinstance(param, np.integer) else param


def _nowhere(param: object) -> bool:
    """Whether a parameter is a sharding over no axis."""
    return isinstance(param, NamedSharding) and not any(param.spec)


def _names(values: Sequence[Meaning]) -> list[str]:
    return [v.name for v in values]


def _closed_over(values: Sequence[Meaning]) -> list[str]:
    """The operands of a checkpoint in any order: which is first says nothing."""
    return sorted({v.name for v in values if not v.constant})


# The constants of a loop, and what branches read, are named where a body reads them. A body may have more of them that nothing in
# it reads, such as a mask that the backward pass of a pipeline's stage is handed and needs not: these say nothing.


def _scan(e: Equation, operands: list[Meaning], depth: int) -> list[object]:
    c, k = constants_and_carry(e.params)
    given = [*operands[:c], *symbols(len(operands) - c, depth)]
    step = meanings(nested_body(e), given, depth)
    how = [e.params[name] for name in ("length", "reverse", "unroll")]
    return [k, *how, "in", *_names(operands[c:]), "step", *_names(step)]


def _while(e: Equation, operands: list[Meaning], depth: int) -> list[object]:
    a, b = e.params["cond_nconsts"], e.params["body_nconsts"]
    carry = symbols(len(operands) - a - b, depth)
    test = meanings(close(e.params["cond_jaxpr"]), [*operands[:a], *carry], depth)
    step = meanings(close(e.params["body_jaxpr"]), [*operands[a : a + b], *carry], depth)
    return ["in", *_names(operands[a + b :]), "while", *_names(test), "step", *_names(step)]


def _cond(e: Equation, operands: list[Meaning], depth: int) -> list[object]:
    index, *rest = operands
    found: list[object] = [index.name]
    for branch in branches(e):
        found += ["branch", *_names(meanings(branch, rest, depth))]
    return found


def _remat(e: Equation, operands: list[Meaning], depth: int) -> list[object]:
    inside = meanings(nested_body(e), operands, depth)
    return [e.params["prevent_cse"], saved(e), *_closed_over(operands), "inside", *_names(inside)]


def _custom(e: Equation, operands: list[Meaning], depth: int) -> list[object]:
    rule = rule_of(e)
    found: list[object] = [*_names(operands)]
    for program in (rule.value, rule.forward, rule.backward, rule.derivative):
        if program is not None:
            found += ["rule", *_names(meanings(program.body, None, depth))]
    return found


def _reduction(e: Equation, operands: list[Meaning], depth: int) -> list[object]:
    how = {k: _numbers(v) for k, v in e.params.items() if k not in ("jaxpr", "computation", "consts")}
    return [params_key(how), *_names(operands), "by", *_names(meanings(combining(e).body, None, depth))]


def _application(e: Equation, operands: list[Meaning], depth: int) -> list[object]:
    how = {k: _numbers(v) for k, v in e.params.items() if k not in ("update_jaxpr", "update_consts")}
    return [params_key(how), *_names(operands), "by", *_names(meanings(applied(e).body, None, depth))]


def _linear_solve(e: Equation, operands: list[Meaning], depth: int) -> list[object]:
    constants, right = parts(e, operands)
    found: list[object] = [*_names(right)]
    for name in (name for name in named(e) if name != "vecmat"):  # which JAX makes of the first
        given = [*constants[name], *symbols(len(right), depth)]
        found += [name, *_names(meanings(part_of(e, name), given, depth))]
    return found


NESTED = {
    "reduce": _reduction, "reduce_window": _reduction, "custom_linear_solve": _linear_solve,
    "scan": _scan, "while": _while, "cond": _cond, **dict.fromkeys(REMAT, _remat), **dict.fromkeys((*JVP, *VJP), _custom),
}  # fmt: skip
