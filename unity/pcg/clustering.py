"""Which equations become one operator: composites are the light work between two heavy operators.

People and rules think in operators such as soft-max, layer norm or dropout, not in the ten primitives each consists of. An
equation joins the operator of its only user, if both are light; statistics join the operator that they are taken for, though
others read them too. Nothing is lost: factors of a composite are derived from its body, and where joining would lose one,
the equations stay apart. Two normalizations that meet in a sum stay two operators.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from unity.pcg.body import Atom, Body, Equation, Literal, extract
from unity.pcg.choices import choices
from unity.pcg.solve import nested_body
from unity.pcg.table import TABLE

ALONE = frozenset(
    ["dot_general", "conv_general_dilated", "scatter", "scatter-add", "scatter_add", "sort", "top_k", "scan", "while", "cond", "remat2", "checkpoint", "remat", "reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "argmax", "argmin", "dynamic_slice", "dynamic_update_slice", "optimization_barrier", "custom_vjp_call", "custom_vjp_call_jaxpr", "fft"]
)
LARGEST = 96  # equations in one composite: a bound on the work of deriving its factors
REPEATED = 48  # equations of a constant that are computed again at every use; a larger one is an operator of its own
SMALL = 8  # statistics are smaller than what they are taken of by at least this
TINY = 256  # bytes: what random keys are smaller than
FAR = 256  # clusters looked at before two are taken to be connected by a path outside


@dataclass(frozen=True)
class Cluster:
    """Equations (by number) that make one operator, and their variables that others use."""

    members: tuple[int, ...]
    outputs: tuple[int, ...]


class Uses:
    """Which equations use and make each variable of a body, found once."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.ends = {a for a in body.outputs if isinstance(a, int)}
        self.users: dict[int, list[int]] = {}
        self.maker: dict[int, int] = {}
        for i, e in enumerate(body.equations):
            for a in e.operands:
                if isinstance(a, int):
                    self.users.setdefault(a, []).append(i)
            self.maker.update((v, i) for v in e.results)
        self.statistics = self._statistics()

    def _statistics(self) -> dict[int, frozenset[int]]:
        """Small variables that come from a reduction of something large, and what large variables those are taken of."""
        tensors = self.body.tensors
        found: dict[int, frozenset[int]] = {}
        roots: dict[int, frozenset[int]] = {}  # of a variable used once: what its equation reads
        for e in self.body.equations:
            operands = [a for a in e.operands if isinstance(a, int)]
            below = frozenset[int]().union(*(found.get(a) or roots.get(a) or {a} for a in operands)) if light(e) else frozenset()
            largest = max((tensors[a].nbytes for a in operands), default=0)
            reduces = e.name.startswith("reduce_") and all(SMALL * tensors[v].nbytes <= largest for v in e.results)
            small = any(a in found for a in operands) and all(a in found or SMALL * tensors[a].nbytes <= largest for a in operands)
            small = small or (bool(operands) and all(a in found for a in operands))
            for v in e.results:
                if light(e) and tensors[v].floating and (reduces or (small and tensors[v].nbytes <= largest)):
                    found[v] = below
                elif len(self.users.get(v, ())) == 1 and len(below) <= 8:
                    roots[v] = below
        return found

    def often(self, v: int, inside: set[int]) -> bool:
        """Whether a variable is used more than once in a cluster, as it is or in another precision."""
        users = [u for u in self.users.get(v, ()) if u in inside]
        if len(users) == 1 and self.body.equations[users[0]].name == "convert_element_type":
            return self.often(self.body.equations[users[0]].results[0], inside)
        return len(users) > 1

    def outputs(self, members: Iterable[int], inside: set[int]) -> tuple[int, ...]:
        """Variables made by `members` and used elsewhere. An operator without any still has its last equation's."""
        made = [v for i in members for v in self.body.equations[i].results]
        return tuple(v for v in made if v in self.ends or any(u not in inside for u in self.users.get(v, ())))


def constants(body: Body) -> Mapping[int, int]:
    """Variables that depend on no input and are cheap → the equation that makes them. They are computed wherever they are used."""
    found: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for i, e in enumerate(body.equations):
        if light(e) and e.name not in ("random_bits", "gather") and all(not isinstance(a, int) or a in found for a in e.operands):
            size = 1 + sum(sizes[a] for a in e.operands if isinstance(a, int))
            if size <= REPEATED:
                found.update((v, i) for v in e.results)
                sizes.update((v, size) for v in e.results)
    return found


def light(equation: Equation) -> bool:
    """Whether an equation may be part of a composite."""
    return equation.name == "custom_jvp_call" or (equation.name not in ALONE and equation.name in TABLE)


def clusters(body: Body, constant: Mapping[int, int] | None = None) -> list[Cluster]:
    """The operators of a body: a partition of its equations (those of constants left out), operands before users."""
    constant = constants(body) if constant is None else constant
    uses = Uses(body)
    wanted = [i for i, e in enumerate(body.equations) if not (e.results and e.results[0] in constant)]
    trees = [part for tree in _trees(uses, wanted, frozenset()) for part in _apart(uses, tree, constant)]
    whole = [part for tree in trees for part in _lossless_parts(uses, tree, constant)]
    return _Merging(uses, whole, constant).run()


def _trees(uses: Uses, numbers: Sequence[int], cut: frozenset[int]) -> list[list[int]]:
    """Joins every equation to the cluster of its only user; a variable in `cut` ends its cluster. Each has one end, its last."""
    body, ends = uses.body, uses.ends
    inside = set(numbers)
    home: dict[int, int] = {}  # equation → the last equation of its cluster
    size: dict[int, int] = {}
    for i in reversed(numbers):
        e = body.equations[i]
        readers = {u for v in e.results for u in uses.users.get(v, ())}
        homes = {home[u] for u in readers if u in inside}
        leaves = any(v in ends or v in cut for v in e.results) or not readers <= inside
        target = i if leaves or len(homes) != 1 else homes.pop()
        if target != i and not _may_join(body, e, target, size):
            target = i
        home[i] = target
        size[target] = size.get(target, 0) + 1
    members: dict[int, list[int]] = {}
    for i in numbers:
        members.setdefault(home[i], []).append(i)
    return [members[target] for target in sorted(members)]


def _may_join(body: Body, equation: Equation, target: int, size: Mapping[int, int]) -> bool:
    last = body.equations[target]
    if not (light(equation) and light(last)) or size[target] >= LARGEST:
        return False
    if last.name == "gather":  # index arithmetic only: a table is an operand that must be free to lie anywhere
        return not any(body.tensors[v].floating for v in equation.results)
    return equation.name != "gather" or not body.tensors[equation.results[0]].floating or _small_gather(equation)


def _small_gather(equation: Equation) -> bool:
    """Whether a gather picks scalars (labels from log-probabilities) rather than rows of an embedding table."""
    return all(n == 1 for n in equation.params["slice_sizes"])


def _apart(uses: Uses, tree: list[int], constant: Mapping[int, int]) -> list[list[int]]:
    """Cuts a tree where two branches meet that each reduce something, and have nothing in common: they are two operators.

    A residual sum is an operator too, rather than part of the normalization that follows it where nothing else reads it.
    """
    body = uses.body
    inside = set(tree)
    roots = any(body.equations[i].name in ("rsqrt", "sqrt") for i in tree)
    reads: dict[int, frozenset[int]] = {}  # variable made here → inputs that it depends on
    reduces: set[int] = set()  # variables made here that depend on a reduction
    cut: set[int] = set()
    touched = (a for i in tree for a in (*body.equations[i].operands, *body.equations[i].results))
    largest = max(body.tensors[a].nbytes for a in touched if isinstance(a, int))

    def large(a: int) -> frozenset[int]:  # two norms may share a gain and stay two
        return frozenset({a} if SMALL * body.tensors[a].nbytes > largest else ())

    for i in tree:
        e = body.equations[i]
        operands = {a for a in e.operands if isinstance(a, int) and a not in constant}
        for a in operands & uses.statistics.keys() - reads.keys():  # taken outside, of what is read here too
            reads[a] = uses.statistics[a]
            reduces.add(a)
        branches = [a for a in operands if a in reduces]
        apart = [(a, b) for a in branches for b in branches if reads[a] and reads[b] and reads[a].isdisjoint(reads[b])]
        alone = {a for a in branches if len(branches) > 1 and all(a == b or (a, b) in apart for b in branches)}
        cut |= alone
        shapes = {body.tensors[a] for a in operands}
        if roots and e.name == "add" and len(operands) == 2 and shapes == {body.tensors[e.results[0]]}:
            cut |= {v for v in e.results if uses.often(v, inside)}
        below = frozenset[int]().union(*(large(a) if a in alone or a not in reads else reads[a] for a in operands))
        reads.update((v, below) for v in e.results)
        if set(branches) - alone or (e.name.startswith("reduce_") and body.tensors[e.results[0]].floating):
            reduces.update(e.results)
    return _trees(uses, tree, frozenset(cut)) if cut else [tree]


LOSSLESS: dict[str, bool] = {}  # by pattern of the composite


def _keeps(uses: Uses, members: Sequence[int], outputs: Sequence[int], constant: Mapping[int, int]) -> bool:
    if len(members) == 1:
        return True
    part, _ = extract(uses.body, members, outputs, constant)
    key = pattern(part)
    if key not in LOSSLESS:
        LOSSLESS[key] = lossless(part)
    return LOSSLESS[key]


SIZELESS = frozenset(["broadcast_in_dim", "squeeze", "expand_dims", "iota"])  # their other parameters tell them, and their results


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


def _lossless_parts(uses: Uses, tree: list[int], constant: Mapping[int, int]) -> list[list[int]]:
    """The tree if it is lossless; otherwise its largest lossless end (found by bisection), and the parts of the rest."""
    found: list[list[int]] = []
    waiting = [tree]
    while waiting:
        members = waiting.pop()
        last = uses.body.equations[members[-1]].results
        start, lossy = len(members) - 1, -1
        if _keeps(uses, members, last, constant):
            start = 0
        while start - lossy > 1:
            middle = (start + lossy) // 2
            if _keeps(uses, members[middle:], last, constant):
                start = middle
            else:
                lossy = middle
        found.append(members[start:])
        if start:
            waiting += _trees(uses, members[:start], frozenset())
    return sorted(found, key=lambda members: members[-1])


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


class _Merging:
    """Statistics that several operators read join the one that they are taken for, with all that only serves them.

    So a batch norm is one operator: its mean and variance, the normalization, the running averages, and a bias before it.
    """

    def __init__(self, uses: Uses, parts: Sequence[Sequence[int]], constant: Mapping[int, int]) -> None:
        self.uses, self.constant = uses, constant
        self.members: dict[int, list[int]] = {k: list(part) for k, part in enumerate(parts)}
        self.home = {i: k for k, part in self.members.items() for i in part}

    def run(self) -> list[Cluster]:
        self.join_keys()
        before = dict(self.members)
        grown: dict[int, list[int]] = {}  # cluster → those that were merged into it
        for k in sorted(self.members):
            if k in self.members and self.statistic(k):
                parts = [*grown.pop(k, []), *self.absorbed(k)]
                user = next((u for u in sorted(self.following(k)) if self.joins(k, u)), None)
                if user is not None:
                    grown.setdefault(user, []).extend([*parts, k])
                elif parts:
                    grown[k] = parts
        for k, parts in grown.items():
            parts += self.absorbed(k)
            for maker in sorted(self.makers(k), reverse=True):
                if maker not in grown and self.following(maker) == {k} and not self.reduces(maker) and self.plain(maker):
                    together = sorted(self.members[k] + self.members[maker])
                    parts += [maker] if self.keeps(together) and self.merge(maker, k) else []
        for k, parts in grown.items():
            if not self.keeps(self.members[k]):
                self.undo(k, parts, before)
        return [Cluster(tuple(self.members[k]), self.outputs(self.members[k])) for k in self.order()]

    def join_keys(self) -> None:
        """Random keys and the like, split and sliced at every use, become one operator."""
        for k in sorted(self.members):
            users = sorted(self.following(k)) if self.tiny(k) else []
            user = next((u for u in users if self.tiny(u) and not self.connected(k, u)), None)
            if user is not None:
                self.merge(k, user)

    def tiny(self, k: int) -> bool:
        """Whether a cluster makes integers only, and few."""
        tensors, equations = self.uses.body.tensors, [self.uses.body.equations[i] for i in self.members[k]]
        made = [tensors[v] for e in equations for v in e.results]
        return self.plain(k) and all(not t.floating and t.nbytes <= TINY for t in made)

    def keeps(self, members: Sequence[int]) -> bool:
        return _keeps(self.uses, members, self.outputs(members), self.constant)

    def absorbed(self, k: int) -> list[int]:
        """Merges into a cluster the small ones that follow it alone: what a mean is squeezed and averaged by."""
        done: list[int] = []
        while True:
            small = (u for u in sorted(self.following(k)) if self.averages(k, u) and not self.connected(k, u))
            user = next((u for u in small if not self.reduces(u) and self.merge(u, k)), None)
            if user is None:
                return done
            done.append(user)

    def undo(self, k: int, parts: list[int], before: Mapping[int, list[int]]) -> None:
        """A merger that would lose something comes apart again."""
        for part in (k, *parts):
            self.members[part] = before[part]
            self.home.update(dict.fromkeys(before[part], part))

    def outputs(self, members: Sequence[int]) -> tuple[int, ...]:
        return self.uses.outputs(members, set(members))

    def following(self, k: int) -> set[int]:
        """The clusters that read what this one makes."""
        made = (v for i in self.members[k] for v in self.uses.body.equations[i].results)
        return {self.home[u] for v in made for u in self.uses.users.get(v, ()) if u in self.home} - {k}

    def reads(self, k: int) -> set[int]:
        body, inside = self.uses.body, set(self.members[k])
        operands = {a for i in inside for a in body.equations[i].operands if isinstance(a, int) and a not in self.constant}
        return {a for a in operands if self.uses.maker.get(a) not in inside}

    def makers(self, k: int) -> set[int]:
        """The clusters whose results this one reads."""
        return {self.home[self.uses.maker[v]] for v in self.reads(k) if v in self.uses.maker}

    def nbytes(self, variables: Iterable[int]) -> int:
        return sum(self.uses.body.tensors[v].nbytes for v in variables)

    def reduces(self, k: int) -> bool:
        return any(self.uses.body.equations[i].name.startswith("reduce_") for i in self.members[k])

    def plain(self, k: int) -> bool:
        """Whether a cluster is a composite's stuff, and leaves no table or index to lie wherever it likes."""
        equations = [self.uses.body.equations[i] for i in self.members[k]]
        return all(light(e) and e.name != "gather" for e in equations)

    def statistic(self, k: int) -> bool:
        """Whether a cluster reduces something large to something small."""
        if not self.reduces(k) or not self.plain(k):
            return False
        made = self.nbytes(self.outputs(self.members[k]))
        tensors = self.uses.body.tensors
        return any(tensors[v].nbytes >= SMALL * made for v in self.reads(k) if tensors[v].floating)

    def averages(self, k: int, user: int) -> bool:
        """Whether all that `user` reads and makes is small beside what is normalized: running averages, as a rule."""
        touched = self.reads(user) | {v for i in self.members[user] for v in self.uses.body.equations[i].results}
        largest = max((self.nbytes([v]) for v in self.reads(k)), default=0)
        return self.plain(user) and SMALL * self.nbytes(touched) <= largest

    def joins(self, k: int, user: int) -> bool:
        """Merges a statistic into a cluster that reads the same large input, if no path between them leads outside."""
        made = self.nbytes(self.outputs(self.members[k]))
        common = self.reads(k) & self.reads(user)
        if not any(self.nbytes([v]) >= SMALL * made for v in common) or not self.plain(user) or self.connected(k, user):
            return False
        return self.merge(k, user)

    def merge(self, k: int, into: int) -> bool:
        """Merges two clusters, unless that makes too large a one."""
        members = sorted(self.members[k] + self.members[into])
        if len(members) > LARGEST:
            return False
        self.members[into] = members
        self.home.update(dict.fromkeys(self.members.pop(k), into))
        return True

    def connected(self, k: int, user: int) -> bool:
        """Whether a path from one cluster to another leads over a third (or might)."""
        end = self.members[user][-1]
        seen: set[int] = set()
        waiting = list(self.following(k) - {user})
        while waiting:
            c = waiting.pop()
            if c == user or len(seen) > FAR:
                return True
            if c not in seen and self.members[c][0] < end:
                seen.add(c)
                waiting += self.following(c)
        return False

    def order(self) -> list[int]:
        """Operands before users; otherwise as the equations were."""
        after = {k: self.following(k) for k in self.members}
        missing = dict.fromkeys(self.members, 0)
        for users in after.values():
            for u in users:
                missing[u] += 1
        ready = [(self.members[k][-1], k) for k, n in missing.items() if n == 0]
        heapq.heapify(ready)
        found = []
        while ready:
            _, k = heapq.heappop(ready)
            found.append(k)
            for u in after[k]:
                missing[u] -= 1
                if missing[u] == 0:
                    heapq.heappush(ready, (self.members[u][-1], u))
        return found
