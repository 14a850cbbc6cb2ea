"""Clustering of equations into operators: a composite is the light work between two heavy operators.

People and rules think in operators such as soft-max, layer norm or dropout, not in the ten primitives that each consists of. An
equation joins the operator of its only user if both are light; statistics join the operator that they are computed for, even if
others read them too. No parallelization is lost: the factors of a composite are derived from its body, and equations stay separate
if joining them would lose a factor that could pay off (`lossless`). Two normalizations that meet in a sum stay two operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from unity.pcg.capture.heavy_operators import SMALL, Reduction, Uses, constants, crosses, light, reduces, reductions
from unity.pcg.capture.lossless import FEW, keeps
from unity.pcg.capture.merging import LARGEST, Merging
from unity.pcg.ir.dead_code import extract
from unity.pcg.ir.program import Body, Equation
from unity.pcg.propagation.choices import choices
from unity.pcg.propagation.specifications import spec_of
from unity.pcg.types.factors import facts_of
from unity.pcg.types.parallel_type import PARTIAL

CUTS = 8  # the most variables at which a tree is cut tentatively
SUMS = 4  # the most sums of several inputs of a tree before its branches are separated: the choices of k are 2 to the power of k
LARGEST_TREE = 8 * LARGEST  # the most equations of a tree before its branches are separated, so that it is not cut within a branch


@dataclass(frozen=True)
class EquationCluster:
    """The equations of one operator, by number, and those of their variables that are read outside."""

    members: tuple[int, ...]
    outputs: tuple[int, ...]


def clusters(body: Body, constant: Mapping[int, int] | None = None) -> list[EquationCluster]:
    """Return the operators of a body: a partition of its equations, except those of constants, producers before users."""
    constant = constants(body) if constant is None else constant
    uses = Uses(body)
    trees = _trees(uses, _varying_equations(body, constant), frozenset(), LARGEST_TREE)
    separate = [part for tree in trees for part in _separate_branches(uses, tree, constant)]
    few = [part for tree in separate for part in _separate_sums(uses, tree, constant)]
    small = [part for tree in few for part in ([tree] if len(tree) <= LARGEST else _trees(uses, tree, frozenset()))]
    lossless = [part for tree in small for part in _lossless_parts(uses, tree, constant)]
    return _with_outputs(uses, Merging(uses, lossless, constant).run())


def restored(body: Body, constant: Mapping[int, int], members: Sequence[Sequence[int]]) -> list[EquationCluster]:
    """Return the operators of a body from the equations of each, which `clusters` returned before.

    Raises:
        ValueError: the members are not a partition of the equations.
    """
    varying = _varying_equations(body, constant)
    if sorted(i for some in members for i in some) != varying:
        raise ValueError(f"a partition of {len(varying)} equations was expected")
    return _with_outputs(Uses(body), members)


def _varying_equations(body: Body, constant: Mapping[int, int]) -> list[int]:
    """Return the equations that do not compute constants."""
    return [i for i, e in enumerate(body.equations) if not (e.results and e.results[0] in constant)]


def _with_outputs(uses: Uses, members: Iterable[Sequence[int]]) -> list[EquationCluster]:
    return [EquationCluster(tuple(some), uses.outputs(some, set(some))) for some in members]


def _trees(uses: Uses, numbers: Sequence[int], cut: frozenset[int], largest: int = LARGEST) -> list[list[int]]:
    """Join every equation to the cluster of its only user, unless its result is in `cut` or the cluster has `largest` equations.

    A cluster is a tree whose root is its last equation.
    """
    body, ends = uses.body, uses.ends
    inside = set(numbers)
    home: dict[int, int] = {}  # equation → the last equation of its cluster
    size: dict[int, int] = {}  # last equation of a cluster → its number of equations
    for i in reversed(numbers):
        e = body.equations[i]
        readers = {u for v in e.results for u in uses.users.get(v, ())}
        homes = {home[u] for u in readers if u in inside}
        leaves = any(v in ends or v in cut for v in e.results) or not readers <= inside
        target = i if leaves or len(homes) != 1 else homes.pop()
        if target != i and (size[target] >= largest or not _may_join(body, e, target)):
            target = i
        home[i] = target
        size[target] = size.get(target, 0) + 1
    members: dict[int, list[int]] = {}
    for i in numbers:
        members.setdefault(home[i], []).append(i)
    return [members[target] for target in sorted(members)]


def _may_join(body: Body, equation: Equation, target: int) -> bool:
    """Return whether an equation may join the cluster whose last equation is `target`."""
    last = body.equations[target]
    if not (light(body, equation) and light(body, last)):
        return False
    if facts_of(last.name).looks_up:  # index arithmetic only: the table must stay an operand with a free choice of its sharding
        return not any(body.tensors[v].floating for v in equation.results)
    return not facts_of(equation.name).looks_up or not body.tensors[equation.results[0]].floating or _small_gather(equation)


def _small_gather(equation: Equation) -> bool:
    """Return whether a gather picks scalars (labels from log-probabilities) rather than rows of an embedding table."""
    return all(n == 1 for n in equation.params["slice_sizes"])


def _separate_branches(uses: Uses, tree: list[int], constant: Mapping[int, int]) -> list[list[int]]:
    """Cut a tree where branches meet that each contain a reduction and read no common input: they are separate operators.

    A residual sum is a separate operator, too, rather than part of the normalization that follows it and alone reads it. So are
    statistics of the rows of a tensor, and of its columns, that meet element by element: together with what follows they would be
    divided either by rows or by columns.
    """
    body = uses.body
    reduced: dict[int, frozenset[Reduction]] = {}  # small variable of the tree → the reductions that it depends on
    inside = set(tree)
    roots = any(body.equations[i].name in ("rsqrt", "sqrt") for i in tree)
    reads: dict[int, frozenset[int]] = {}  # variable of the tree → the inputs that it depends on
    sums: set[int] = set()  # variables of the tree that depend on a reduction
    cut: set[int] = set()
    residual: set[int] = set()
    touched = (a for i in tree for a in (*body.equations[i].operands, *body.equations[i].results))
    sizes = {a: body.tensors[a].nbytes for a in touched if isinstance(a, int)}
    large = {a for a, nbytes in sizes.items() if SMALL * nbytes > max(sizes.values())}

    def disjoint(a: int, b: int) -> bool:
        """Return whether two variables depend on different large inputs, or on different inputs if one has no large ones.

        Two normalizations may so share a gain and stay separate.
        """
        one, other = reads[a], reads[b]
        both = one & large and other & large
        return bool(one and other) and (one & large if both else one).isdisjoint(other & large if both else other)

    def crossing(a: int, b: int) -> bool:
        """Return whether two variables are statistics of the rows and of the columns of one tensor, of the same shape."""
        small = all(SMALL * sizes[v] <= max(sizes.values()) for v in (a, b))
        aligned = body.tensors[a].ndim > 0 and body.tensors[a].shape == body.tensors[b].shape
        return small and aligned and crosses(reduced.get(a, ()), reduced.get(b, ()))

    for i in tree:
        e = body.equations[i]
        operands = {a for a in e.operands if isinstance(a, int) and a not in constant}
        for a in operands & uses.statistics.keys() - reads.keys():  # a statistic from outside of the tree
            reads[a] = uses.statistics[a]
            sums.add(a)
        branches = [a for a in operands if a in sums]
        pairs = [(a, b) for a in branches for b in branches if disjoint(a, b)]
        alone = {a for a in branches if len(branches) > 1 and all(a == b or (a, b) in pairs for b in branches)}
        alone |= {a for a in branches for b in branches if a != b and crossing(a, b)}
        cut |= alone
        shapes = {body.tensors[a] for a in operands}
        if roots and e.name == "add" and len(operands) == 2 and shapes == {body.tensors[e.results[0]]}:
            residual |= {v for v in e.results if uses.is_used_often(v, inside)}
        below = frozenset[int]().union(*({a} if a in alone or a not in reads else reads[a] for a in operands))
        reads.update((v, below) for v in e.results)
        depends = reductions(body, [e]).union(*(reduced.get(a, frozenset()) for a in operands))
        reduced.update((v, depends) for v in e.results if v not in large)
        if set(branches) - alone or _reduces_many(body, e):
            sums.update(e.results)
    return _cut_trees(uses, tree, frozenset(cut | residual), frozenset(residual)) if cut or residual else [tree]


def _reduces_many(body: Body, equation: Equation) -> bool:
    """Return whether an equation reduces floating-point values, except over a short last dimension, as of a box."""
    if not reduces(body, equation) or not body.tensors[equation.results[0]].floating:
        return False
    shape = body.tensor(equation.operands[0]).shape
    return equation.params.get("axes") != (len(shape) - 1,) or shape[-1] > FEW


def _cut_trees(uses: Uses, tree: list[int], cut: frozenset[int], residual: frozenset[int]) -> list[list[int]]:
    """Cut a tree at the branches that normalize or reduce; elementwise work on their results joins the operator that reads it.

    Args:
        uses: the def-use chains of the body.
        tree: the equations of the tree.
        cut: the variables at which branches end.
        residual: those of them at which the tree is cut in any case.
    """

    tensors = uses.body.tensors

    def reduces_own(part: list[int]) -> bool:
        """Return whether a part reduces something, or reads a statistic of something, that is not small beside its result."""
        equations = [uses.body.equations[i] for i in part]
        reduced = {a for e in equations if reduces(uses.body, e) for a in e.operands}
        reduced = reduced.union(*(uses.statistics.get(a, frozenset()) for e in equations for a in e.operands if isinstance(a, int)))
        result = max(tensors[v].nbytes for v in equations[-1].results)
        return any(SMALL * tensors[a].nbytes > result for a in reduced if isinstance(a, int))

    while True:
        parts = _trees(uses, tree, cut, LARGEST_TREE)
        light_ends = {v for part in parts if not reduces_own(part) for v in uses.body.equations[part[-1]].results}
        if cut.isdisjoint(light_ends - residual):
            return parts
        cut -= light_ends - residual


def _separate_sums(uses: Uses, tree: list[int], constant: Mapping[int, int]) -> list[list[int]]:
    """Cut a tree where branches meet that have more than `SUMS` sums of several inputs together.

    The summands, such as two products of each gate of a recurrent cell, may be partial in one sum and partitioned in another. They
    may be scaled, or cast; a sum of sums is one.
    """
    body, inside = uses.body, set(tree)
    read = {a for i in tree for a in body.equations[i].operands if isinstance(a, int) and a not in constant}
    inputs = [a for a in read if uses.maker.get(a) not in inside]
    linear_bytes = {a: body.tensors[a].nbytes for a in inputs}  # variable that is linear in inputs → bytes of the largest one
    sum_of: dict[int, int] = {}  # variable of the tree → the sum that it is, perhaps scaled
    below: dict[int, frozenset[int]] = {}  # variable of the tree → the sums that it depends on, since the last cut
    cut = frozenset[int]()
    for i in tree:
        e = body.equations[i]
        branches = {a: below[a] for a in e.operands if isinstance(a, int) and below.get(a)}
        sums = frozenset[int]().union(*branches.values())
        summands = next((some for some in _summands(body, e, constant) if linear_bytes.keys() >= some), None)
        if len(sums) > SUMS:
            cut, sums, summands = cut | branches.keys(), frozenset(), None
            below |= dict.fromkeys(branches, sums)
        if summands is not None:
            own = {sum_of[a] for a in summands if a in sum_of}
            large = [a for a in summands if SMALL * linear_bytes[a] >= body.tensors[e.results[0]].nbytes]
            if own or len(large) > 1:
                sums = sums - own | {i}
                sum_of |= dict.fromkeys(e.results, i)
            linear_bytes |= dict.fromkeys(e.results, max(linear_bytes[a] for a in summands))
        below |= dict.fromkeys(e.results, sums)
    return _trees(uses, tree, cut, LARGEST_TREE) if cut else [tree]


def _summands(body: Body, equation: Equation, constant: Mapping[int, int]) -> Iterator[set[int]]:
    """Yield the variables in which an equation is linear together: if all of them are partial sums, so is its result.

    Constants are left out: one device adds them to its partial sum.
    """
    spec = spec_of(body, equation)
    for group in () if spec is None else spec.linear:
        variables = {a for a in (equation.operands[k] for k in group) if isinstance(a, int) and a not in constant}
        others = {a for k, a in enumerate(equation.operands) if k not in group}
        if variables and variables.isdisjoint(others):
            yield variables


def _parts_at_statistics(uses: Uses, tree: Sequence[int], constant: Mapping[int, int]) -> list[list[int]] | None:
    """Cut a tree in lossless parts where statistics of what it reads meet; None if they do not, or if a part is not lossless.

    Sums of the differences of neighbouring rows and of neighbouring columns are so computed by two operators, of which each divides
    what the other does not. Any other cut would write differences, or slices, to memory.
    """
    body = uses.body
    statistics = {v for i in tree[:-1] for v in body.equations[i].results} & uses.statistics.keys()
    operands = ({a for a in body.equations[i].operands if isinstance(a, int) and a not in constant} for i in tree)
    met = sorted(set[int]().union(*(some for some in operands if len(some) > 1 and some <= statistics)))
    for v in met[-CUTS:]:
        parts = _trees(uses, tree, frozenset({v}))
        if len(parts) == 2 and _is_nonlinear(uses, parts[0], constant):
            rest = [parts[1]] if _is_nonlinear(uses, parts[1], constant) else _parts_at_statistics(uses, parts[1], constant)
            if rest is not None:
                return [parts[0], *rest]
    return None


def _is_nonlinear(uses: Uses, part: Sequence[int], constant: Mapping[int, int]) -> bool:
    """Return whether a part of a tree is lossless, and no statistic of summands is a summand of what it computes.

    Of two parts, one would otherwise compute a statistic of summands, and the other one of their sum, that may be meant to cancel.
    """
    last = uses.body.equations[part[-1]].results
    if not keeps(uses, part, last, constant):
        return False
    program, _ = extract(uses.body, part, last, constant)
    sizes = [program.tensors[v].nbytes for v in program.inputs]
    large = [k for k, nbytes in enumerate(sizes) if SMALL * nbytes > max(sizes)]
    linear = (c for c in choices(program) if not (c.reduced or c.scatters))
    return not any(c.operands[k] == PARTIAL for c in linear for k in large)


def _lossless_parts(uses: Uses, tree: list[int], constant: Mapping[int, int]) -> list[list[int]]:
    """Divide a tree into lossless parts: at statistics, or into a largest lossless suffix and the parts of the remaining trees.

    The suffix is found by bisection.
    """
    parts: list[list[int]] = []
    pending = [tree]
    while pending:
        members = pending.pop()
        last = uses.body.equations[members[-1]].results
        start, lossy = len(members) - 1, -1
        if keeps(uses, members, last, constant):
            start = 0
        elif (smaller := _parts_at_statistics(uses, members, constant)) is not None:
            parts += smaller
            continue
        while start - lossy > 1:
            middle = (start + lossy) // 2
            if keeps(uses, members[middle:], last, constant):
                start = middle
            else:
                lossy = middle
        part = members[start:]
        for rest in reversed(_trees(uses, members[:start], frozenset())):
            together = sorted(rest + part)
            feeds = all(set(uses.users.get(v, ())) <= set(part) for v in uses.body.equations[rest[-1]].results)
            if feeds and keeps(uses, together, last, constant):
                part = together
            else:
                pending.append(rest)
        parts.append(part)
    return sorted(parts, key=lambda members: members[-1])
