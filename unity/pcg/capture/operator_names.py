"""Common names of operators, such as softmax, layer_norm, gelu or dropout, derived from their programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod

from unity.pcg.capture.heavy_operators import multiplies
from unity.pcg.ir.graph import BRANCHES, CONSTRAIN, LOOPS, PARALLELIZATION, STAGES
from unity.pcg.ir.program import Body, Equation
from unity.pcg.operators.kernel_primitive import KERNEL
from unity.pcg.operators.table import TABLE
from unity.pcg.propagation.nested.programs import nested_body
from unity.pcg.propagation.nested.scan_programs import REMATERIALIZED
from unity.pcg.types.factors import Role, facts_of

CUSTOM_DERIVATIVES = ("custom_jvp", "custom_vjp")  # how names of primitives begin that are functions with their own derivatives
LOOKUPS = ("embedding", "gather")  # names of operators that look up rows of a table

BY_PRIMITIVES = (  # the first set that a composite's primitives contain gives its name
    ({"reduce_max", "exp", "reduce_sum", "log"}, "log_softmax"),
    ({"reduce_max", "exp", "reduce_sum"}, "softmax"),
)
FALLBACKS = (  # likewise, if neither the structure nor a call gives a name
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
    """Return the number of equations from each nested call."""
    return Counter(call for e in body.equations for call in e.group)


RESERVED = PARALLELIZATION | LOOPS | {"input", "constant", CONSTRAIN, BRANCHES, STAGES, *REMATERIALIZED}  # kinds of special nodes


def label(composite: Body, sizes: Mapping[str, int]) -> str:
    """Return a name for an operator.

    A user's function with the name of a special kind of node, or of a primitive whose facts would be read off it,
    gets parentheses: `combine()`.

    Args:
        composite: the program of the operator.
        sizes: the number of equations of each nested call in the whole function.
    """
    name = _label(composite, sizes)
    is_constraint = name == CONSTRAIN == composite.equations[0].name
    return f"{name}()" if name in RESERVED and not is_constraint else name


def _label(composite: Body, sizes: Mapping[str, int]) -> str:
    equations = composite.equations
    names = {"mul" if multiplies(e) else e.name for e in equations}
    if len(equations) == 1:
        return name_of_equation(equations[0])
    return (
        next((name for primitives, name in BY_PRIMITIVES if primitives <= names), None)
        or normalization(composite)
        or _by_decisive_primitive(composite, names)
        or _by_call(composite, sizes)
        or _by_content(equations, names)
    )


def _by_decisive_primitive(composite: Body, names: set[str]) -> str | None:
    """Return the name that a single primitive implies, whatever function it came from."""
    if any(facts_of(name).draws for name in names):
        return "dropout"
    if any(
        facts_of(e.name).looks_up and composite.tensor(e.results[0]).floating and prod(e.params["slice_sizes"]) > 1
        for e in composite.equations
    ):
        return "embedding"
    keys = any(facts_of(name).key for name in names)
    return "random_keys" if keys and not any(composite.tensor(a).floating for a in composite.outputs) else None


def name_of_equation(equation: Equation) -> str:
    """Return the name of an equation: its primitive's, or for a custom derivative that of the user's function."""
    if equation.name == KERNEL:
        return equation.params["title"]
    if not equation.name.startswith(CUSTOM_DERIVATIVES):
        return equation.name
    inner = nested_body(equation)
    groups = {e.group[0] for e in inner.equations if e.group}
    if len(groups) == 1 and all(e.group for e in inner.equations):
        return _label_of_function(groups.pop(), (equation,))
    return equation.name.removesuffix("_call")


def _function_name(call: str) -> str:
    return call.partition("#")[0].strip("_<>") or "call"


def _by_call(composite: Body, sizes: Mapping[str, int]) -> str | None:
    """Return the function of the outermost nested call that is the whole operator, casts and changes of shape aside."""
    counts = calls(composite)
    essential = [e for e in composite.equations if facts_of(e.name).role is Role.WORK]
    for e in essential[:1]:
        for call in e.group:
            if counts[call] >= sizes.get(call, 0) and all(call in other.group for other in essential):
                return _label_of_function(call, composite.equations)
    return None


def _label_of_function(call: str, equations: tuple[Equation, ...]) -> str:
    """Return the name of a function, in parentheses if it is that of a primitive or of look-ups, which the function may not be.

    The cost and memory models read facts about an operator by its name.
    """
    name = _function_name(call)
    is_primitive = name in TABLE and not facts_of(name).product and any(e.name == name for e in equations)
    return f"{name}()" if name in LOOKUPS or (name in TABLE and not is_primitive) else name


def _by_content(equations: tuple[Equation, ...], names: set[str]) -> str:
    """Return a name from the primitives of an operator: "elementwise" if they suggest no other one."""
    if {"tanh", "mul"} <= names and any(e.name == "integer_pow" and e.params["y"] == 3 for e in equations):
        return "gelu"  # its approximation
    fallback = next((name for primitives, name in FALLBACKS if primitives <= names), None)
    if fallback:
        return fallback
    inner = {name_of_equation(e) for e in equations if e.name == "custom_jvp_call"}
    if len(inner) == 1:
        return inner.pop()
    if "logistic" in names and _in(names, Role.WORK) <= {"logistic", "mul", "add"}:
        return "silu" if "mul" in names else "logistic"
    if names == _in(names, Role.LAYOUT):
        return "transpose" if "transpose" in names and "reshape" not in names else "reshape"
    if names == _in(names, Role.LAYOUT, Role.CONVERSION):
        return "convert_element_type"
    essential = _in(names, Role.WORK) or _in(names, Role.ARRANGEMENT)
    return essential.pop() if len(essential) == 1 else "elementwise"


def _in(names: set[str], *roles: Role) -> set[str]:
    """Return the primitives with one of these roles."""
    return {name for name in names if facts_of(name).role in roles}


def normalization(composite: Body) -> str | None:
    """Return batch_norm, group_norm, layer_norm or rms_norm for a division by the root of a reduction, or None.

    The reduced dimensions tell them apart.
    """
    names = {e.name for e in composite.equations}
    if "rsqrt" not in names and not ({"sqrt"} & names and "div" in names):
        return None
    sums = [e for e in composite.equations if e.name == "reduce_sum" and _keeps_dimensions(composite, e)]
    if not sums:
        scales = "rsqrt" in names and "mul" in names and {"sub", "add"} & names
        return "batch_norm" if scales and _has_root_by_channel(composite) else None
    widest = max(sums, key=lambda e: composite.tensor(e.operands[0]).nbytes)
    shape, axes = composite.tensor(widest.operands[0]).shape, sorted(widest.params["axes"])
    if any(0 in e.params["axes"] for e in sums):
        return "batch_norm"
    if _splits_channels(composite, shape):
        return "group_norm"
    trailing = axes == list(range(len(shape) - len(axes), len(shape)))
    if trailing and len(axes) < len(shape):
        return "layer_norm" if sum(sorted(e.params["axes"]) == axes for e in sums) > 1 else "rms_norm"
    return "group_norm" if len(axes) < len(shape) else None


def _keeps_dimensions(composite: Body, equation: Equation) -> bool:
    """Return whether a reduction of floats is over some dimensions, but not all."""
    tensor = composite.tensor(equation.operands[0])
    return tensor.floating and tensor.ndim > len(equation.params["axes"]) > 0


def _has_root_by_channel(composite: Body) -> bool:
    """Return whether the operand of the root is small enough to have one value for each channel."""
    root = next(e for e in composite.equations if e.name == "rsqrt")
    largest = max((composite.tensors[v].nbytes for v in composite.inputs), default=0)
    return composite.tensor(root.operands[0]).nbytes * 8 <= largest


def _splits_channels(composite: Body, shape: tuple[int, ...]) -> bool:
    """Return whether a reshape in the operator splits channels into groups, to the reduced shape."""
    reshapes = (e for e in composite.equations if e.name == "reshape")
    pairs = ((composite.tensor(e.operands[0]).shape, composite.tensor(e.results[0]).shape) for e in reshapes)
    return any(after == shape and len(after) > len(before) > 2 and 1 not in after[1:] for before, after in pairs)
