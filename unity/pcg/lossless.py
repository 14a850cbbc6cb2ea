"""Whether equations may be one operator: it must be possible to partition it wherever each of them alone could be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unity.pcg.body import Atom, Body, Equation, Literal, extract
from unity.pcg.choices import choices
from unity.pcg.solve import nested_body
from unity.pcg.uses import Uses

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
    single: dict[int, set[int]] = {v: set() for v in composite.inputs}
    for i, e in enumerate(composite.equations):
        if any(isinstance(a, int) and a in single for a in e.operands):
            alone, order = extract(composite, [i], e.results, {})
            for choice in choices(alone):
                for v, s in zip(order, choice.operands, strict=True):
                    if v in single and s.kind == "P":
                        single[v].add(s.dim)
    joint: dict[int, set[int]] = {v: set() for v in composite.inputs}
    for choice in choices(composite):
        for v, s in zip(composite.inputs, choice.operands, strict=True):
            joint[v].add(s.dim)
    return all(single[v] <= joint[v] for v in composite.inputs)


SIZELESS = frozenset({"broadcast_in_dim", "squeeze", "expand_dims", "iota"})  # other parameters tell, and results


def pattern(composite: Body) -> str:
    """A composite's content but for its sizes: which are equal, and which are one, is what its factors depend on.

    Where sizes have to be divided by each other (a reshape that splits or merges), or lie among the parameters, they count.
    """
    names: dict[int, str] = {1: "1"}
    numbers: dict[int, int] = {v: k for k, v in enumerate(composite.inputs)}

    def shape(atom: Atom) -> str:
        tensor = composite.tensor(atom)
        return f"{tensor.dtype}{[names.setdefault(n, f's{len(names)}') for n in tensor.shape]}"

    text = [shape(v) for v in composite.inputs]
    for e in composite.equations:
        numbers.update((v, len(numbers) + k) for k, v in enumerate(e.results))
        operands = [shape(a) if isinstance(a, Literal) else numbers[a] for a in e.operands]
        text.append(f"{_sizeless(composite, e)} {operands} {[shape(v) for v in e.results]}")
    return "\n".join([*text, str([a if isinstance(a, Literal) else numbers[a] for a in composite.outputs])])


def _sizeless(composite: Body, equation: Equation) -> str:
    if equation.name in SIZELESS:
        return f"{equation.name} {[equation.params.get(k) for k in ('broadcast_dimensions', 'dimensions', 'dimension')]}"
    if equation.name == "reshape":
        before, after = composite.tensor(equation.operands[0]).shape, composite.tensor(equation.results[0]).shape
        if [n for n in before if n != 1] == [n for n in after if n != 1]:
            return "reshape"
    if equation.name == "custom_jvp_call":
        return f"{equation.name} {nested_body(equation).primitives}"
    return equation.signature
