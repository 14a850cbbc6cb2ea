"""Whether equations may be one operator: it must be possible to partition it wherever each of them alone could be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from unity.pcg.capture.heavy_operators import Uses
from unity.pcg.ir.dead_code import extract
from unity.pcg.ir.program import Atom, Body, Equation, Literal, Tensor
from unity.pcg.propagation.choices import choices, operand_states
from unity.pcg.propagation.relaxation import Relaxed
from unity.pcg.propagation.solver import nested_body
from unity.pcg.types.factors import TABLE, facts_of

LOSSLESS: dict[str, bool] = {}  # by pattern of the composite


def keeps(uses: Uses, members: Sequence[int], outputs: Sequence[int], constant: Mapping[int, int]) -> bool:
    """Whether some equations of a body are lossless as one operator; those of constants are copied in."""
    if len(members) == 1:
        return True
    part, _ = extract(uses.body, members, outputs, constant)
    key = pattern(part)
    if key not in LOSSLESS:
        LOSSLESS[key] = lossless(part)
    return LOSSLESS[key]


def lossless(composite: Body) -> bool:
    """Whether every dimension of a composite's operands can still be partitioned that each of its equations alone could.

    At which digit may differ: a bias added before a split into query, key and value is partitioned as the split is.
    """
    inputs = set(composite.inputs)
    reading = (e for e in composite.equations if inputs.intersection(_variables(e)))
    missing = {(v, dim) for e in reading for v, dim in _alone(composite, e) if v in inputs}
    relaxed = Relaxed(composite)
    if not all(relaxed.may_partition(v, dim) for v, dim in missing):
        return False
    joint = operand_states(composite)
    while missing:
        states = next(joint, None)
        if states is None:
            return False
        missing.difference_update((v, s.dim) for v, s in zip(composite.inputs, states, strict=True))
    return True


def _variables(equation: Equation) -> list[int]:
    return [a for a in equation.operands if isinstance(a, int)]


def _alone(composite: Body, equation: Equation) -> list[tuple[int, int]]:
    """The variables and dimensions that an equation alone may have partitioned among its operands."""
    order = tuple(dict.fromkeys(_variables(equation)))
    atoms = tuple(order.index(a) if isinstance(a, int) else a.key for a in equation.operands)
    tensors = {v: composite.tensors[v] for v in (*order, *equation.results)}
    alone = Body(order, equation.results, (equation,), tensors)
    asked = _Asked(TABLE.version, equation.signature, equation.identity, atoms, tuple(tensors.values()), alone)
    return [(order[k], dim) for k, dim in _dimensions(asked)]


@dataclass(frozen=True)
class _Asked:
    """A body of one equation, and all that its choices depend on."""

    table: int  # its version
    signature: str
    identity: tuple[int, ...]
    atoms: tuple[int | str, ...]
    tensors: tuple[Tensor, ...]
    body: Body = field(compare=False)


@lru_cache(maxsize=16384)
def _dimensions(asked: _Asked) -> frozenset[tuple[int, int]]:
    """Operands, by position, and the dimensions along which they may be partitioned: asked for in many bodies, found once."""
    return frozenset((k, s.dim) for c in choices(asked.body) for k, s in enumerate(c.operands) if s.kind == "P")


def pattern(composite: Body) -> str:
    """A composite's content but for its sizes: which are equal, and which are one, is what its factors depend on.

    Where sizes have to be divided by each other (a reshape that splits or merges), or lie among the parameters, they count.
    """
    names: dict[int, str] = {1: "1"}
    numbers: dict[int, int] = {v: k for k, v in enumerate(composite.inputs)}

    def shape(atom: Atom) -> str:
        tensor = composite.tensor(atom)
        return f"{_text(tensor.dtype)}{[names.setdefault(n, f's{len(names)}') for n in tensor.shape]}"

    text = [shape(v) for v in composite.inputs]
    for e in composite.equations:
        numbers.update((v, len(numbers) + k) for k, v in enumerate(e.results))
        operands = [shape(a) if isinstance(a, Literal) else numbers[a] for a in e.operands]
        text.append(f"{_sizeless(composite, e)} {operands} {[shape(v) for v in e.results]}")
    return "\n".join([*text, str([a if isinstance(a, Literal) else numbers[a] for a in composite.outputs])])


@lru_cache(maxsize=256)
def _text(dtype: Any) -> str:
    """numpy takes longer to say a type than all the rest of a pattern takes."""
    return str(dtype)


def _sizeless(composite: Body, equation: Equation) -> str:
    if facts_of(equation.name).sizes_follow:
        return f"{equation.name} {[equation.params.get(k) for k in ('broadcast_dimensions', 'dimensions', 'dimension')]}"
    if equation.name == "reshape":
        before, after = composite.tensor(equation.operands[0]).shape, composite.tensor(equation.results[0]).shape
        if [n for n in before if n != 1] == [n for n in after if n != 1]:
            return "reshape"
    if equation.name == "custom_jvp_call":
        return f"{equation.name} {nested_body(equation).primitives}"
    return equation.signature
