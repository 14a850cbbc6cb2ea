"""Which operators are joined though others read their results too: statistics, random keys, running averages."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from unity.pcg.capture.heavy_operators import SMALL, Uses, light, reduces
from unity.pcg.capture.lossless import keeps

LARGEST = 96  # equations in one composite: a bound on the work of deriving its factors
TINY = 256  # bytes: what random keys are smaller than
FAR = 256  # clusters looked at before two are taken to be connected by a path outside


class Merging:
    """Statistics that several operators read join the one that they are taken for, with all that only serves them.

    So a batch norm is one operator: its mean and variance, the normalization, the running averages, and a bias before it.
    """

    def __init__(self, uses: Uses, parts: Sequence[Sequence[int]], constant: Mapping[int, int]) -> None:
        self.uses, self.constant = uses, constant
        self.members: dict[int, list[int]] = {k: list(part) for k, part in enumerate(parts)}
        self.home = {i: k for k, part in self.members.items() for i in part}

    def run(self) -> list[list[int]]:
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
        return [self.members[k] for k in self.order()]

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
        return keeps(self.uses, members, self.outputs(members), self.constant)

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
        return any(reduces(self.uses.body, self.uses.body.equations[i]) for i in self.members[k])

    def plain(self, k: int) -> bool:
        """Whether a cluster is a composite's stuff, and leaves no table or index to lie wherever it likes."""
        equations = [self.uses.body.equations[i] for i in self.members[k]]
        return all(light(self.uses.body, e) and e.name != "gather" for e in equations)

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
