"""Lower bounds of a step's time in the simulator, for strategies of which not every operator's configuration is known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, product
from math import prod

import numpy as np

from unity.baselines.flexflow.delta.columns import in_ticks
from unity.baselines.flexflow.mcmc import DeltaOracle
from unity.baselines.flexflow.strategy.configs import ParallelConfig, on_one
from unity.baselines.flexflow.strategy.encoding import WAYS, parse_name
from unity.baselines.flexflow.strategy.operators import OperandEdge, Operators
from unity.baselines.flexflow.strategy.pieces import overlap, slices
from unity.baselines.flexflow.strategy.regions import SharedParts, shared
from unity.baselines.flexflow.strategy.strategy import Strategy

May = Mapping[int, list[ParallelConfig]]  # by operator


@dataclass(eq=False)
class Bound:
    """Lower bounds of a step's time, from what is certain of the first and of the last of an operator's pieces to end.

    Matrices [..., 2, 2] in (max, +): from when the first and the last piece of one operator end at the earliest to the same of
    another. A piece waits for transfers from all pieces that it reads, and what one sends over a link goes one after the other.
    """

    o: Operators
    may: May
    strategy: Strategy = field(init=False)
    _last: DeltaOracle | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.strategy = Strategy(self.o, {k: on_one(self.o.nodes[k]) for k in self.o.numbers})

    def simulated(self, configs: Mapping[int, ParallelConfig]) -> float:
        """Seconds of a step of a strategy: from the one that was asked about before, operator by operator that is another."""
        if self._last is None:
            self._last = DeltaOracle(self.o, configs, overlap=True)
        for k, config in configs.items():
            if self._last.configs[k] != config:
                self._last.propose(k, config)
        return self._last.seconds

    @cached_property
    def path(self) -> tuple[int, ...]:
        """The longest chain of operators that ends where the backward pass begins, each reading the one before."""
        before: dict[int, tuple[int, ...]] = {}
        for k in self.o.numbers:
            makers = [before[e.producer] for e in self.o.incoming[k]]
            before[k] = (*max(makers, key=len, default=()), k)
        return max((before[k] for k in self.o.ends), key=len)

    @cached_property
    def computing(self) -> list[tuple[Array, Array]]:
        """Of each operator's configurations along the path, tasks forward, with what pieces sum up, and backward: [C, 2, 2]."""
        found = []
        for k in self.path:
            ways = [self._computed(k, c) for c in self.may[k]]
            found.append(tuple(np.array(each) for each in zip(*ways, strict=True)))
        return found

    def _computed(self, k: int, config: ParallelConfig) -> tuple[Array, Array]:
        pieces = self._seconds(k, config)
        forward, backward = (min(seconds) * ONE + APART * (1 - ONE) for seconds in zip(*pieces, strict=True))
        for r in self.o.reductions(k, config.degrees):
            if prod(config.degrees[dim] for dim in r.dims) == config.pieces:
                # A ring of all pieces begins when the last of them has ended, and each has the sum when its own task in it ends:
                # these are the tasks that are simulated, so what they take is rounded as there.
                forward = joined(forward, np.full((2, 2), self._ring(config.devices, r.nbytes)))
        return forward, backward

    def _ring(self, devices: Sequence[int], nbytes: float) -> float:
        """Seconds of an all-reduce, rounded as they are simulated."""
        return float(in_ticks(np.array(self.o.topology.collective_seconds("all-reduce", devices, nbytes))))

    def _seconds(self, k: int, config: ParallelConfig) -> list[tuple[float, float]]:
        """By piece: seconds forward and backward, rounded as they are simulated."""
        speeds = np.array([self.o.topology.speeds[d] for d in config.devices])
        forward, backward = (in_ticks(seconds / speeds).tolist() for seconds in self.o.seconds(k, config.degrees))
        return list(zip(forward, backward, strict=True))

    @cached_property
    def between(self) -> list[tuple[Array, Array, Array]]:
        """Of every two neighbours on the path, what is sent.

        Forward and backward, each [C of the maker, C of the reader, 2, 2]; and for how long that keeps each link backward,
        [C of the maker, C of the reader, links].
        """
        found = []
        for producer, user in pairwise(self.path):
            edge = next(e for e in self.o.incoming[user] if e.producer == producer)
            known = dict[tuple[ParallelConfig, ParallelConfig], tuple[Array, Array, Array]]()
            rows = [[self._known(edge, a, b, known) for b in self.may[user]] for a in self.may[producer]]
            found.append(tuple(np.array([[each[part] for each in row] for row in rows]) for part in range(3)))
        return found

    def _known(
        self,
        edge: OperandEdge,
        producer: ParallelConfig,
        user: ParallelConfig,
        known: dict[tuple[ParallelConfig, ParallelConfig], tuple[Array, Array, Array]],
    ) -> tuple[Array, Array, Array]:
        """What is sent; found once for pairs that differ in the names of devices alone, where these are all alike."""
        if not self.alike:
            return self._sent(edge, producer, user)
        n = self.o.topology.devices
        order = list(dict.fromkeys((*producer.devices, *user.devices, *range(n))))
        number = {device: k for k, device in enumerate(order)}
        pair = tuple(ParallelConfig(c.degrees, tuple(number[d] for d in c.devices)) for c in (producer, user))
        if pair not in known:
            known[pair[0], pair[1]] = self._sent(edge, *pair)
        there, back, carried = known[pair[0], pair[1]]
        found = np.zeros_like(carried)
        found[self.ports] = carried[self.ports][list(number[d] for d in range(n))]
        return there, back, found

    @cached_property
    def alike(self) -> bool:
        """Whether every device may stand for every other: all compute as fast, and have one link each, of the same figures."""
        t = self.o.topology
        figures = {(t.links[k].bandwidth, t.links[k].latency) for links in self._own for k in links}
        return self._one_link and len(set.union(*self._own)) == t.devices and len(figures) == len(set(t.speeds)) == 1

    @cached_property
    def _own(self) -> list[set[int]]:
        """By device: all links over which it sends."""
        between, n = self.o.topology.between, self.o.topology.devices
        return [{between[i][j] for j in range(n) if i != j} for i in range(n)]

    @property
    def _one_link(self) -> bool:
        """Whether each device sends over one link, whatever it sends."""
        return all(len(links) == 1 for links in self._own)

    @property
    def ports(self) -> list[int]:
        """By device: the link over which it sends, where it has but one."""
        wiring, n = self.strategy.wiring, self.o.topology.devices
        return [wiring.wire(i, (i + 1) % n) for i in range(n)]

    def _sent(self, edge: OperandEdge, producer: ParallelConfig, user: ParallelConfig) -> tuple[Array, Array, Array]:
        self.strategy.change(edge.producer, producer)
        self.strategy.change(edge.user, user)
        node = self.o.nodes[edge.producer]
        made = slices(node, producer.degrees, len(node.operands) + edge.result)
        read = overlap(made, slices(self.o.nodes[edge.user], user.degrees, edge.position))
        assert len(np.unique(read.first)) == producer.pieces, (
            "a piece that this reader leaves out may begin its backward pass earlier"
        )
        forward, backward = _Sends(), _Sends()
        carried = np.zeros(len(self.strategy.wiring.resources))
        for name, task in self.strategy.transfers(edge).items():
            _, purpose, i, j = parse_name(name)
            way = forward if purpose % WAYS == 0 else backward
            way[(i, j) if way is forward else (j, i)] = task.seconds, task.device
            carried[task.device] += task.seconds if way is backward else 0.0
        every = len(read.first) == producer.pieces * user.pieces
        return (
            _first_and_last(forward, producer.pieces, user.pieces, every, certain=not made.copied),
            _first_and_last(backward, user.pieces, producer.pieces, every, certain=True),
            carried,
        )

    @cached_property
    def synchronizing(self) -> list[Array]:
        """Of each operator's configurations along the path, for how long gradients of its weights keep each link: [C, 2, links];
        of all gradients, and of those that wait for all of its pieces.

        A weight that others on the path read too counts for the first of them; whoever else reads it only makes it more.
        """
        wiring, counted, found = self.strategy.wiring, set[tuple[int, int]](), []
        for k in self.path:
            own = [w for w in self.o.reads[k] if w not in counted]
            counted.update(own)
            loads = np.zeros((len(self.may[k]), 2, len(wiring.resources)))
            for (node, result), (c, config) in product(own, enumerate(self.may[k])):
                position = next(p for user, p in self.o.weights[node, result] if user == k)
                cut = slices(self.o.nodes[k], config.degrees, position)
                for devices, elements in parts_of(shared(((cut, config.devices),))):
                    nbytes = elements * float(self.o.nodes[node].tensors[result].itemsize)
                    seconds, whole = self._ring(devices, nbytes), set(devices) == set(config.devices)
                    for sender, receiver in zip(devices, (*devices[1:], devices[0]), strict=True):
                        loads[c, : 1 + whole, wiring.wire(sender, receiver)] += seconds
            found.append(loads)
        return found

    @cached_property
    def backward(self) -> list[Array]:
        """Of every two neighbours on the path, the backward pass from the later one to the earlier, [C, C of the later, 3, 3]: from
        and to when the first and the last of its pieces have ended, and when the links over which they send are free of gradients
        that the operators after it add up.

        Gradients that wait for all pieces of the later operator are on all its links before whatever the piece sends that waited
        for the last of them; if the earlier operator has no other devices, that piece is among its own. All this where each device
        has one link: of several, the gradients may be on others.
        """
        found = []
        for at, (producer, user) in enumerate(pairwise(self.path)):
            back = self.between[at][1]
            within = np.array([[set(a.devices) <= set(b.devices) for b in self.may[user]] for a in self.may[producer]])
            kept = np.where(within & self._one_link, self.synchronizing[at + 1][:, 1].max(axis=1), APART)
            whole = np.full((*back.shape[:2], 3, 3), APART)
            whole[..., :2, :2] = joined(back, self.computing[at][1][:, None])
            whole[..., 2, 1] = np.where(back[..., 1, 1] > 0, whole[..., 1, 1], APART)
            whole[..., 1, 2] = whole[..., 2, 2] = kept
            found.append(whole)
        return found

    @cached_property
    def working(self) -> dict[int, list[float]]:
        """Of every operator's configurations, the seconds of all its pieces together."""
        return {k: [sum(map(sum, self._seconds(k, c))) for c in self.may[k]] for k in self.o.numbers}

    @cached_property
    def least_work(self) -> dict[int, float]:
        """Of every operator, the least of these."""
        return {k: min(found) for k, found in self.working.items()}

    @cached_property
    def around(self) -> list[Array]:
        """Along the path, from the end of an operator's tasks forward to that of its own backward, whatever follows: [C, 2, 2]."""
        found = [self.computing[-1][1]]
        for at in range(len(self.path) - 2, -1, -1):
            there, back, _ = self.between[at]
            there = joined(there, self.computing[at + 1][0][None])
            least = joined(joined(there, found[0][None]), back).min(axis=1)
            found.insert(0, joined(least, self.computing[at][1]))
        return found


ONE, APART = np.eye(2), -1e9  # what is not certain counts as long ago
Array = np.ndarray
_Sends = dict[tuple[int, int], tuple[float, int]]  # by sender and receiver: seconds, and the link


def parts_of(found: SharedParts) -> Iterator[tuple[list[int], int]]:
    """The devices that hold each part of a weight, and its elements."""
    devices = np.split(found.devices, np.cumsum(found.counts)[:-1]) if len(found.counts) else []
    return zip((on.tolist() for on in devices), found.elements.tolist(), strict=True)


def joined(a: Array, b: Array) -> Array:
    """The product of matrices in (max, +), [..., 2, 2]."""
    return (a[..., :, :, None] + b[..., None, :, :]).max(axis=-2)


def _first_and_last(sends: _Sends, senders: int, receivers: int, every: bool, certain: bool) -> Array:
    """`every`: all receivers wait for all senders; `certain`: none is left out."""
    waits = [max((s for (_, to), (s, _) in sends.items() if to == j), default=0.0) for j in range(receivers)]
    over: list[dict[int, float]] = [{} for _ in range(senders)]  # by link: what it sends there
    for (i, _), (seconds, link) in sends.items():
        over[i][link] = over[i].get(link, 0.0) + seconds
    loads = [max(each.values(), default=0.0) for each in over]
    soonest = min((sends.get((i, j), (0.0, 0))[0] for i in range(senders) for j in range(receivers)), default=0.0)
    return np.array([[min(waits), max(loads)], [soonest if every and certain else APART, min(loads) if certain else APART]])
