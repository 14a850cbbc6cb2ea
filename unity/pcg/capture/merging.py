"""Merging of clusters across shared results: statistics, random keys and running averages."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from unity.pcg.capture.heavy_operators import SMALL, Uses, crosses, light, reduces, reductions
from unity.pcg.capture.lossless import keeps
from unity.pcg.types.factors import facts_of

LARGEST = 96  # the most equations of a composite, which bounds the work of deriving its factors
TINY = 256  # the most bytes of a random key
FAR = 256  # the most clusters visited in search of a path between two, before one is assumed


class Merging:
    """The merging of statistics into the operator that they are computed for, even if several operators read them.

    The producers and users that serve the statistics alone join, too. So a batch norm is one operator: its mean and variance, the
    normalization, the running averages, and a bias before it.

    uses: the def-use chains of the body.
    constant: the equations of constants, by variable.
    members: the equations of each cluster.
    home: the cluster of each equation.
    """

    def __init__(self, uses: Uses, parts: Sequence[Sequence[int]], constant: Mapping[int, int]) -> None:
        self.uses, self.constant = uses, constant
        self.members: dict[int, list[int]] = {k: list(part) for k, part in enumerate(parts)}
        self.home = {i: k for k, part in self.members.items() for i in part}

    def run(self) -> list[list[int]]:
        """Merge clusters, undo mergers that are not lossless, and return the equations of each cluster, producers first."""
        self.merge_keys()
        self.merge_crossing()
        before = dict(self.members)
        grown: dict[int, list[int]] = {}  # cluster → the clusters merged into it
        for k in sorted(self.members):
            if k in self.members and self.is_statistic(k):
                parts = [*grown.pop(k, []), *self.absorb_averages(k)]
                user = next((u for u in sorted(self.users(k)) if self.merge_statistic(k, u)), None)
                if user is not None:
                    grown.setdefault(user, []).extend([*parts, k])
                elif parts:
                    grown[k] = parts
        for k, parts in grown.items():
            parts += self.absorb_averages(k)
            for producer in sorted(self.producers(k), reverse=True):
                serves_alone = producer not in grown and self.users(producer) == {k}
                if serves_alone and not self.reduces(producer) and self.is_light(producer):
                    together = sorted(self.members[k] + self.members[producer])
                    parts += [producer] if self.is_lossless(together) and self.merge(producer, k) else []
        for k, parts in grown.items():
            if not self.is_lossless(self.members[k]):
                self.undo(k, parts, before)
        return [self.members[k] for k in self.order()]

    def merge_keys(self) -> None:
        """Merge clusters of tiny integers, such as random keys that are split and sliced at every use."""
        for k in sorted(self.members):
            users = sorted(self.users(k)) if self.is_tiny(k) else []
            user = next((u for u in users if self.is_tiny(u) and not self.has_outer_path(k, u)), None)
            if user is not None:
                self.merge(k, user)

    def merge_crossing(self) -> None:
        """Merge statistics of the rows and of the columns of one large tensor, which one reading of it gives."""
        statistics = [k for k in sorted(self.members) if self.is_statistic(k)]
        shapes = {k: reductions(self.uses.body, map(self.uses.body.equations.__getitem__, self.members[k])) for k in statistics}
        for n, k in enumerate(statistics):
            for other in statistics[n + 1 :]:
                if not crosses(shapes[k], shapes[other]) or not self.users(k) & self.users(other) or other in self.users(k):
                    continue
                result = self.nbytes(self.outputs(self.members[k]))
                shared = any(self.nbytes([v]) >= SMALL * result for v in self.reads(k) & self.reads(other))
                together = sorted(self.members[k] + self.members[other])
                if shared and not self.has_outer_path(k, other) and self.is_lossless(together) and self.merge(k, other):
                    break

    def is_tiny(self, k: int) -> bool:
        """Return whether all results of a cluster's equations are small arrays of integers."""
        results = [self.uses.body.tensors[v] for v in self.results(k)]
        return self.is_light(k) and all(not t.floating and t.nbytes <= TINY for t in results)

    def is_lossless(self, members: Sequence[int]) -> bool:
        """Return whether no parallelization is lost if these equations are one operator."""
        return keeps(self.uses, members, self.outputs(members), self.constant)

    def absorb_averages(self, k: int) -> list[int]:
        """Merge small users into a statistic's cluster, such as the squeeze and running average of a mean; return these users."""
        merged: list[int] = []
        while True:
            small = (u for u in sorted(self.users(k)) if self.is_average(k, u) and not self.has_outer_path(k, u))
            user = next((u for u in small if not self.reduces(u) and self.merge(u, k)), None)
            if user is None:
                return merged
            merged.append(user)

    def undo(self, k: int, parts: list[int], before: Mapping[int, list[int]]) -> None:
        """Restore cluster `k` and the clusters merged into it to their members `before`."""
        for part in (k, *parts):
            self.members[part] = before[part]
            self.home.update(dict.fromkeys(before[part], part))

    def outputs(self, members: Sequence[int]) -> tuple[int, ...]:
        """Return the results of equations that others read."""
        return self.uses.outputs(members, set(members))

    def results(self, k: int) -> list[int]:
        """Return the results of a cluster's equations."""
        return [v for i in self.members[k] for v in self.uses.body.equations[i].results]

    def users(self, k: int) -> set[int]:
        """Return the clusters that read results of this one."""
        return {self.home[u] for v in self.results(k) for u in self.uses.users.get(v, ()) if u in self.home} - {k}

    def reads(self, k: int) -> set[int]:
        """Return the variables that a cluster reads from outside, constants excluded."""
        body, inside = self.uses.body, set(self.members[k])
        operands = {a for i in inside for a in body.equations[i].operands if isinstance(a, int) and a not in self.constant}
        return {a for a in operands if self.uses.maker.get(a) not in inside}

    def producers(self, k: int) -> set[int]:
        """Return the clusters whose results this one reads."""
        return {self.home[self.uses.maker[v]] for v in self.reads(k) if v in self.uses.maker}

    def nbytes(self, variables: Iterable[int]) -> int:
        return sum(self.uses.body.tensors[v].nbytes for v in variables)

    def reduces(self, k: int) -> bool:
        """Return whether a cluster contains a reduction."""
        return any(reduces(self.uses.body, self.uses.body.equations[i]) for i in self.members[k])

    def is_light(self, k: int) -> bool:
        """Return whether a cluster may join others: it has light equations only, and no gather, whose table is placed freely."""
        equations = [self.uses.body.equations[i] for i in self.members[k]]
        return all(light(self.uses.body, e) and not facts_of(e.name).looks_up for e in equations)

    def is_statistic(self, k: int) -> bool:
        """Return whether a cluster reduces something large to something small."""
        if not self.reduces(k) or not self.is_light(k):
            return False
        result = self.nbytes(self.outputs(self.members[k]))
        tensors = self.uses.body.tensors
        return any(tensors[v].nbytes >= SMALL * result for v in self.reads(k) if tensors[v].floating)

    def is_average(self, k: int, user: int) -> bool:
        """Return whether all operands and results of `user`, such as a running average, are small beside those of `k`."""
        touched = self.reads(user).union(self.results(user))
        largest = max((self.nbytes([v]) for v in self.reads(k)), default=0)
        return self.is_light(user) and SMALL * self.nbytes(touched) <= largest

    def merge_statistic(self, k: int, user: int) -> bool:
        """Merge a statistic into a user that reads the same large operand; return whether that is possible.

        An operand that is small beside the largest one does not count: distances of three pairs of sets share the norms of a set.
        """
        result = self.nbytes(self.outputs(self.members[k]))
        largest = max((self.nbytes([v]) for v in self.reads(k)), default=0)
        common = [self.nbytes([v]) for v in self.reads(k) & self.reads(user)]
        if not any(nbytes >= SMALL * result and SMALL * nbytes > largest for nbytes in common):
            return False
        if not self.is_light(user) or self.has_outer_path(k, user):
            return False
        return self.merge(k, user)

    def merge(self, k: int, into: int) -> bool:
        """Merge cluster `k` into another one, unless the result is too large; return whether it is merged."""
        members = sorted(self.members[k] + self.members[into])
        if len(members) > LARGEST:
            return False
        self.members[into] = members
        self.home.update(dict.fromkeys(self.members.pop(k), into))
        return True

    def has_outer_path(self, k: int, user: int) -> bool:
        """Return whether a path from one cluster to another leads through a third. If the search is too long, assume one."""
        end = self.members[user][-1]
        visited: set[int] = set()
        pending = list(self.users(k) - {user})
        while pending:
            c = pending.pop()
            if c == user or len(visited) > FAR:
                return True
            if c not in visited and self.members[c][0] < end:
                visited.add(c)
                pending += self.users(c)
        return False

    def order(self) -> list[int]:
        """Return the clusters, producers before users, and otherwise in the order of their last equations."""
        users_of = {k: self.users(k) for k in self.members}
        unordered_producers = dict.fromkeys(self.members, 0)
        for users in users_of.values():
            for u in users:
                unordered_producers[u] += 1
        ready = [(self.members[k][-1], k) for k, n in unordered_producers.items() if n == 0]
        heapq.heapify(ready)
        order = []
        while ready:
            _, k = heapq.heappop(ready)
            order.append(k)
            for u in users_of[k]:
                unordered_producers[u] -= 1
                if unordered_producers[u] == 0:
                    heapq.heappush(ready, (self.members[u][-1], u))
        return order
