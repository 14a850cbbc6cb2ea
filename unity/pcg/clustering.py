"""Which equations become one operator: composites are the light work between two heavy operators.

People and rules think in operators such as soft-max, layer norm or dropout, not in the ten primitives each consists of. An
equation joins the operator of its only user, if both are light. Nothing is lost: factors of a composite are derived from
its body, and where joining would lose one, the equations stay apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unity.pcg.body import Body, Equation, extract
from unity.pcg.choices import choices
from unity.pcg.table import TABLE

ALONE = frozenset(
    "dot_general conv_general_dilated scatter scatter-add scatter_add sort top_k scan while cond remat2 checkpoint"
    " reduce_window_sum reduce_window_max reduce_window_min reduce_window cumsum cumprod cummax cummin cumlogsumexp"
    " argmax argmin dynamic_slice dynamic_update_slice optimization_barrier custom_vjp_call custom_vjp_call_jaxpr fft".split()
)
LARGEST = 96  # equations in one composite: a bound on the work of deriving its factors


@dataclass(frozen=True)
class Cluster:
    """Equations (by number) that make one operator."""

    members: tuple[int, ...]


def constants(body: Body) -> Mapping[int, int]:
    """Variables that depend on no input → the equation that makes them. They are computed wherever they are used."""
    found: dict[int, int] = {}
    for i, e in enumerate(body.equations):
        if all(not isinstance(a, int) or a in found for a in e.operands) and e.name not in ("scan", "while", "cond"):
            found.update((v, i) for v in e.results)
    return found


def light(equation: Equation) -> bool:
    """Whether an equation may be part of a composite."""
    if equation.name == "custom_jvp_call":
        return True
    return equation.name not in ALONE and equation.name in TABLE


def clusters(body: Body) -> list[Cluster]:
    """The operators of a body: a partition of its equations (those of constants left out), operands before users."""
    constant = constants(body)
    ends = {a for a in body.outputs if isinstance(a, int)}
    users: dict[int, list[int]] = {}
    home: dict[int, int] = {}  # equation → the last equation of its cluster
    size: dict[int, int] = {}
    for i in range(len(body.equations) - 1, -1, -1):
        e = body.equations[i]
        if e.results and e.results[0] in constant:
            continue
        homes = {home[u] for v in e.results for u in users.get(v, ())}
        target = next(iter(homes)) if len(homes) == 1 and not ends.intersection(e.results) else i
        if target != i and not _may_join(body, e, target, size):
            target = i
        home[i] = target
        size[target] = size.get(target, 0) + 1
        for a in e.operands:
            if isinstance(a, int):
                users.setdefault(a, []).append(i)
    members: dict[int, list[int]] = {}
    for i, target in sorted(home.items()):
        members.setdefault(target, []).append(i)
    return [c for target in sorted(members) for c in _unless_lossy(body, members[target], constant)]


def _may_join(body: Body, equation: Equation, target: int, size: Mapping[int, int]) -> bool:
    last = body.equations[target]
    if not (light(equation) and light(last)) or size[target] >= LARGEST:
        return False
    if last.name == "gather":  # index arithmetic only: a table is an operand that must be free to lie anywhere
        return not any(body.tensors[v].floating for v in equation.results)
    return equation.name != "gather" or not body.tensors[equation.results[0]].floating or _small_gather(body, equation)


def _small_gather(body: Body, equation: Equation) -> bool:
    """Whether a gather picks scalars (labels from log-probabilities) rather than rows of an embedding table."""
    sizes = equation.params["slice_sizes"]
    return all(n == 1 for n in sizes)


def outputs_of(body: Body, members: list[int]) -> list[int]:
    """Variables made in a cluster and used outside of it."""
    inside = set(members)
    used = {a for a in body.outputs if isinstance(a, int)}
    for i, e in enumerate(body.equations):
        if i not in inside:
            used.update(a for a in e.operands if isinstance(a, int))
    return [v for i in members for v in body.equations[i].results if v in used]


LOSSLESS: dict[str, bool] = {}  # by content of the composite


def _unless_lossy(body: Body, members: list[int], constant: Mapping[int, int]) -> list[Cluster]:
    if len(members) > 1:
        part, _ = extract(body, members, body.equations[members[-1]].results, constant)
        if part.key not in LOSSLESS:
            LOSSLESS[part.key] = lossless(part)
        if not LOSSLESS[part.key]:
            return [Cluster((i,)) for i in members]
    return [Cluster(tuple(members))]


def lossless(composite: Body) -> bool:
    """Whether a composite can still be partitioned wherever each of its equations could be, at its operands."""
    single: dict[int, set] = {v: set() for v in composite.inputs}
    for i, e in enumerate(composite.equations):
        touched = [a for a in e.operands if isinstance(a, int) and a in single]
        if touched:
            alone, order = extract(composite, [i], e.results, {})
            for choice in choices(alone):
                for v, s in zip(order, choice.operands, strict=True):
                    if v in single and s.kind == "P":
                        single[v].add(s)
    joint: dict[int, set] = {v: set() for v in composite.inputs}
    for choice in choices(composite):
        for v, s in zip(composite.inputs, choice.operands, strict=True):
            joint[v].add(s)
    return all(single[v] <= joint[v] for v in composite.inputs)


LABELS = (  # the first set that is contained in a composite's primitives names it
    ({"random_bits"}, "dropout"),
    ({"reduce_max", "exp", "reduce_sum", "log"}, "log_softmax"),
    ({"reduce_max", "exp", "reduce_sum"}, "softmax"),
    ({"rsqrt", "reduce_sum"}, "normalization"),
    ({"gather"}, "embedding"),
    ({"erf"}, "gelu"),
    ({"erfc"}, "gelu"),
    ({"tanh", "integer_pow"}, "gelu"),
    ({"logistic"}, "silu"),
    ({"custom_jvp_call"}, "activation"),
    ({"reduce_sum"}, "reduce_sum"),
    ({"reduce_max"}, "reduce_max"),
)


def label(composite: Body) -> str:
    """A name for an operator: the nested call that all of it comes from, what it contains, or its only primitive."""
    names = {e.name for e in composite.equations}
    groups = [e.group for e in composite.equations]
    common = groups[0] if groups else ()
    for g in groups[1:]:
        common = common[: next((k for k, (a, b) in enumerate(zip(common, g, strict=False)) if a != b), min(len(common), len(g)))]
    if common and len(composite.equations) > 1:
        return common[-1].split("#")[0].lstrip("_")
    if len(composite.equations) == 1:
        return composite.equations[0].name
    return next((name for wanted, name in LABELS if wanted <= names), "elementwise")
