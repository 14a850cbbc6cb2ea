"""What people call an operator: softmax, layer_norm, gelu, dropout; read off the program that it is."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from unity.pcg.ir.graph import BRANCHES, CONSTRAIN, LOOPS, PARALLELIZATION, STAGES
from unity.pcg.ir.program import Body, Equation
from unity.pcg.operators.kernel_primitive import KERNEL
from unity.pcg.operators.table import TABLE
from unity.pcg.propagation.scan_programs import REMATERIALIZED
from unity.pcg.propagation.solver import nested_body

LAYOUT = frozenset(name for name, entry in TABLE.items() if entry.facts.layout)
CONVERT = frozenset({"convert_element_type", "copy", "stop_gradient", "reduce_precision"})
KEYS = frozenset(name for name, entry in TABLE.items() if entry.facts.key)
SILENT = LAYOUT | CONVERT | {"iota", "slice", "split", "concatenate", "pad"}

CONTAINING = (  # the first set that is contained in a composite's primitives names it
    ({"reduce_max", "exp", "reduce_sum", "log"}, "log_softmax"),
    ({"reduce_max", "exp", "reduce_sum"}, "softmax"),
)
ALSO = (  # tried when neither the structure nor a call's name says more
    ({"gather"}, "gather"),
    ({"erf", "mul"}, "gelu"),
    ({"erfc", "mul"}, "gelu"),
    ({"logistic", "tanh"}, "recurrent_cell"),
    ({"sin", "cos"}, "rotary_embedding"),
    ({"reduce_sum"}, "reduce_sum"),
    ({"reduce_max"}, "reduce_max"),
    ({"dot_general"}, "inner_product"),
    ({"iota", "eq"}, "one_hot"),
)


def calls(body: Body) -> Mapping[str, int]:
    """How many equations come from each nested call."""
    found: dict[str, int] = {}
    for e in body.equations:
        for call in e.group:
            found[call] = found.get(call, 0) + 1
    return found


RESERVED = PARALLELIZATION | LOOPS | {"input", "constant", CONSTRAIN, BRANCHES, STAGES, *REMATERIALIZED}  # kinds that mean more


def label(composite: Body, sizes: Mapping[str, int]) -> str:
    """A name for an operator. `sizes` says how many equations each nested call has in all.

    A function of the user's that is called like a kind of operator that means more is told from it: `combine()`.
    """
    found = _label(composite, sizes)
    meant = found == CONSTRAIN == composite.equations[0].name
    return f"{found}()" if found in RESERVED and not meant else found


def _label(composite: Body, sizes: Mapping[str, int]) -> str:
    equations = composite.equations
    names = {e.name for e in equations}
    if len(equations) == 1:
        return _single(equations[0])
    found = next((name for wanted, name in CONTAINING if wanted <= names), None)
    return found or normalization(composite) or _certain(composite, names) or _call(composite, sizes) or _content(equations, names)


def _certain(composite: Body, names: set[str]) -> str | None:
    """Names for which one primitive is enough, whatever function it came from."""
    if "random_bits" in names:
        return "dropout"
    if any(
        e.name == "gather" and composite.tensor(e.results[0]).floating and prod(e.params["slice_sizes"]) > 1
        for e in composite.equations
    ):
        return "embedding"
    return "random_keys" if names & KEYS and not any(composite.tensor(a).floating for a in composite.outputs) else None


def _single(equation: Equation) -> str:
    """A primitive's own name; a custom derivative is named as the function that it belongs to."""
    if equation.name == KERNEL:
        return equation.params["title"]
    if not equation.name.startswith(("custom_jvp", "custom_vjp")):
        return equation.name
    inner = nested_body(equation)
    groups = {e.group[0] for e in inner.equations if e.group}
    if len(groups) == 1 and all(e.group for e in inner.equations):
        return _spoken(groups.pop())
    return equation.name.removesuffix("_call")


def _spoken(call: str) -> str:
    return call.partition("#")[0].strip("_<>") or "call"


def _call(composite: Body, sizes: Mapping[str, int]) -> str | None:
    """The outermost nested call that is all of the operator, but for casts and changes of shape, and wholly in it."""
    counts = calls(composite)
    loud = [e for e in composite.equations if e.name not in SILENT]
    for e in loud[:1]:
        for call in e.group:
            if counts[call] >= sizes.get(call, 0) and all(call in other.group for other in loud):
                return _spoken(call)
    return None


def _content(equations: tuple[Equation, ...], names: set[str]) -> str:
    found = next((name for wanted, name in ALSO if wanted <= names), None)
    if {"tanh", "mul"} <= names and any(e.name == "integer_pow" and e.params["y"] == 3 for e in equations):
        found = "gelu"  # by its approximation
    if found:
        return found
    inner = {_single(e) for e in equations if e.name == "custom_jvp_call"}
    if len(inner) == 1:
        return inner.pop()
    if "logistic" in names and names - SILENT <= {"logistic", "mul", "add"}:
        return "silu" if "mul" in names else "logistic"
    if names <= LAYOUT:
        return "transpose" if "transpose" in names and "reshape" not in names else "reshape"
    if names <= LAYOUT | CONVERT:
        return "convert_element_type"
    loud = names - SILENT or names - LAYOUT - CONVERT - {"iota"}
    return loud.pop() if len(loud) == 1 else "elementwise"


def normalization(composite: Body) -> str | None:
    """batch_norm, group_norm, layer_norm or rms_norm: division by a root of what was reduced, told apart by what was reduced."""
    names = {e.name for e in composite.equations}
    if "rsqrt" not in names and not ({"sqrt"} & names and "div" in names):
        return None
    sums = [e for e in composite.equations if e.name == "reduce_sum" and _many(composite, e)]
    if not sums:
        scales = "rsqrt" in names and "mul" in names and {"sub", "add"} & names
        return "batch_norm" if scales and _by_channel(composite) else None
    widest = max(sums, key=lambda e: composite.tensor(e.operands[0]).nbytes)
    shape, axes = composite.tensor(widest.operands[0]).shape, sorted(widest.params["axes"])
    if any(0 in e.params["axes"] for e in sums):
        return "batch_norm"
    if _regrouped(composite, shape):
        return "group_norm"
    trailing = axes == list(range(len(shape) - len(axes), len(shape)))
    if trailing and len(axes) < len(shape):
        return "layer_norm" if sum(sorted(e.params["axes"]) == axes for e in sums) > 1 else "rms_norm"
    return "group_norm" if len(axes) < len(shape) else None


def _many(composite: Body, equation: Equation) -> bool:
    tensor = composite.tensor(equation.operands[0])
    return tensor.floating and tensor.ndim > len(equation.params["axes"]) > 0


def _by_channel(composite: Body) -> bool:
    """Whether the root is of something as small as one value for each channel."""
    root = next(e for e in composite.equations if e.name == "rsqrt")
    largest = max((composite.tensors[v].nbytes for v in composite.inputs), default=0)
    return composite.tensor(root.operands[0]).nbytes * 8 <= largest


def _regrouped(composite: Body, shape: tuple[int, ...]) -> bool:
    """Whether what is reduced had its channels split into groups inside the operator."""
    made = (e for e in composite.equations if e.name == "reshape")
    pairs = ((composite.tensor(e.operands[0]).shape, composite.tensor(e.results[0]).shape) for e in made)
    return any(after == shape and len(after) > len(before) > 2 and 1 not in after[1:] for before, after in pairs)
