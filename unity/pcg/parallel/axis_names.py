"""The names of mesh axes that users see: those of the user's mesh, or else the machine's levels.

Inside, a level of the machine is several axes of prime size. Users see a level as one axis, `device`, or as the fewest parts that
tell the types of a program apart, `device_a` and `device_b`. A graph, its tables and its specifications have the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from string import ascii_lowercase
from typing import Any

from msgspec import structs

from unity.pcg.ir.graph import PCG, Node, Value, reserved_axes
from unity.pcg.types.axis import Axis, LevelPart, joined_names
from unity.pcg.types.parallel_type import State, Type, digits, joined_digits, partitioned, show


@dataclass(frozen=True)
class AxisNames:
    """Names of mesh axes for users.

    Attributes:
        axes: the axes of a program's types.
        levels: the names of the machine's levels, outermost first; empty if the axes have the names that users see.
        cuts: the positions at which a part of a level begins that has other states than the axis before.
    """

    axes: tuple[Axis, ...]
    levels: tuple[str, ...] = ()
    cuts: frozenset[int] = frozenset()

    @classmethod
    def of(cls, axes: Sequence[Axis], levels: Sequence[str], apart: Iterable[Collection[int]]) -> AxisNames:
        """Return the fewest names that tell apart these sets of axes, given by position, each from the other axes."""
        members = ([k in some for k in range(len(axes))] for some in apart)
        return cls(tuple(axes), tuple(levels), _cuts(axes, members) if levels else frozenset())

    @classmethod
    def of_every_axis(cls, axes: Sequence[Axis], levels: Sequence[str]) -> AxisNames:
        """Return names that tell all axes apart."""
        return cls.of(axes, levels, ([k] for k in range(len(axes))))

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The axes, by position, that are one axis to users."""
        groups: list[tuple[int, ...]] = []
        for k, axis in enumerate(self.axes):
            if self.levels and k and k not in self.cuts and self.axes[k - 1].level == axis.level:
                groups[-1] = (*groups[-1], k)
            else:
                groups.append((k,))
        return tuple(groups)

    @cached_property
    def shown(self) -> tuple[Axis, ...]:
        """The axes that users see, one for each of `groups`."""
        if not self.levels:
            return self.axes
        count = dict[int, int]()
        for group in self.groups:
            level = self.axes[group[0]].level
            count[level] = count.get(level, 0) + 1
        letters = {level: iter(ascii_lowercase) for level in count}
        shown = list[Axis]()
        for group in self.groups:
            first, size = self.axes[group[0]], self._size(group)
            name, level = self.levels[first.level], first.level
            if count[level] == 1:
                shown.append(Axis(name, size, level, first.reduce_in))
            else:
                part = f"{name}_{next(letters[level])}"
                shown.append(LevelPart(part, size, level, first.reduce_in, whole=name, whole_size=self._level_size(level)))
        return tuple(shown)

    def _size(self, axes: Iterable[int]) -> int:
        return prod(self.axes[k].size for k in axes)

    def _level_size(self, level: int) -> int:
        return prod(axis.size for axis in self.axes if axis.level == level)

    def refined(self, other: AxisNames) -> AxisNames:
        """Return names that tell apart what either program's names do, wherever the machines have the same axes."""
        pairs = {(other.axes[k - 1].name, other.axes[k].name) for k in other.cuts}
        more = {k for k in range(1, len(self.axes)) if (self.axes[k - 1].name, self.axes[k].name) in pairs}
        return replace(self, cuts=self.cuts | more)

    def telling_apart(self, types: Iterable[Type]) -> AxisNames:
        """Return names that tell apart these types, too."""
        return replace(self, cuts=self.cuts | _cuts(self.axes, (joined_digits(t, self.axes) for t in types if t)))

    def type(self, type_: Type) -> Type:
        """Return a type over the axes that users see."""
        if not self.levels:
            return type_
        states = joined_digits(type_, self.axes)
        return tuple(states[group[0]] for group in self.groups)

    def show(self, type_: Type, rank: int) -> str:
        """Format a type: `[node·device_a, -] *device_b`."""
        return show(self.type(type_), self.shown, rank) if self.levels else show(type_, self.axes, rank)

    def graph(self, graph: PCG) -> PCG:
        """Return a parallel graph over the axes that users see, as texts show it, or a serial graph as it is."""
        return graph if not self.levels or not graph.axes else _Renamed(self, self.type, self.names_of).graph(graph)

    def run_type(self, type_: Type) -> Type:
        """Return a type over the axes that users see, with the slices of `type_` at digits that operators follow.

        `type` joins digits that nest, for texts. An operator follows each digit separately, for instance that of a dimension which
        it merges with another one.
        """
        own, taken, states = digits(type_, self.axes), dict[State, int](), list[State]()
        for group in self.groups:
            state, digit = type_[group[0]], own[group[0]]
            if digit is not None:
                if digit.outer != state.outer * taken.get(state, 1):
                    state = partitioned(digit.dim, digit.outer)
                taken[state] = taken.get(state, 1) * self._size(group)
            states.append(state)
        return tuple(states)

    def run_graph(self, graph: PCG) -> PCG:
        """Return a parallel graph over the axes that users see, as devices run it."""
        return graph if not self.levels or not graph.axes else _Renamed(self, self.run_type, self._names_of_groups).graph(graph)

    def joins_digits_in(self, graph: PCG) -> bool:
        """Return whether some axes that are one axis to users have different states in a graph, because their digits nest."""
        inside = [(group[0], k) for group in self.groups for k in group[1:]]
        types = {t for node, _ in graph.walk() for t in node.types if t} if inside else ()
        return any(t[first] != t[k] for t in types for first, k in inside)

    def _names_of_groups(self, axes: Collection[int]) -> list[str]:
        return [axis.name for axis, group in zip(self.shown, self.groups, strict=True) if group[0] in axes]

    def positions(self, names: Iterable[str]) -> tuple[int, ...]:
        """Return the positions of the program's axes with some names."""
        some = set(names)
        return tuple(k for k, axis in enumerate(self.axes) if axis.name in some)

    def listed(self, axes: Collection[int]) -> str:
        """Return axes, given by position, as a list of names: `node·device_a`."""
        return "·".join(self.names_of(axes))

    def listed_of(self, names: Iterable[str]) -> str:
        """Return the program's axes with some names as a list of the names that users see: `node·device_a`."""
        return self.listed(self.positions(names))

    def in_words(self, axes: Collection[int]) -> str:
        """Return axes, given by position, in words: `all 32 devices`, `node (4) × device_a (2 of device's 8)`."""
        if self._size(axes) == self._size(range(len(self.axes))):
            return f"all {self._size(axes)} devices"
        if not self.levels:
            return " × ".join(f"{self.axes[k].name} ({self.axes[k].size})" for k in sorted(axes))
        words = []
        for level, name in enumerate(self.levels):
            chosen = [k for k in sorted(axes) if self.axes[k].level == level]
            part, whole = self._size(chosen), self._level_size(level)
            if part == whole > 1:
                words.append(f"{name} ({whole})")
            elif part > 1:
                names = self.names_of(chosen)
                words.append(f"{'·'.join(names)} ({part} of {name}'s {whole})" if self._are_whole(chosen) else "·".join(names))
        return " × ".join(words)

    def names_of(self, axes: Collection[int]) -> list[str]:
        """Return the names of axes; of a part of an axis that users see, its number of devices, `2 of device's 8`."""
        if self._are_whole(axes):
            return joined_names([axis for axis, group in zip(self.shown, self.groups, strict=True) if group[0] in axes])
        names = []
        for axis, group in zip(self.shown, self.groups, strict=True):
            chosen = [k for k in group if k in axes]
            if chosen:
                names.append(axis.name if len(chosen) == len(group) else f"{self._size(chosen)} of {axis.name}'s {axis.size}")
        return names

    def _are_whole(self, axes: Collection[int]) -> bool:
        """Return whether axes are whole axes that users see."""
        return all(len({k in axes for k in group}) == 1 for group in self.groups)

    @property
    def parts(self) -> str:
        """A sentence about the levels that are seen in parts: `device_a (4) and device_b (2) are parts of device (8)`."""
        by_level = dict[tuple[str, int], list[str]]()
        for axis in self.shown:
            if isinstance(axis, LevelPart):
                by_level.setdefault((axis.whole, axis.whole_size), []).append(f"{axis.name} ({axis.size})")
        return "; ".join(
            f"{', '.join(names[:-1])} and {names[-1]} are parts of {whole} ({size})" for (whole, size), names in by_level.items()
        )


def names_in(graph: PCG, levels: Sequence[str] = (), collectives: Iterable[Collection[int]] = ()) -> AxisNames:
    """Return the fewest names that tell apart the types of a parallel graph, the axes of its collectives, stages and groups.

    Args:
        graph: the graph.
        levels: the names of the machine's levels, outermost first; empty for a mesh of the user's, whose axes have their names.
        collectives: the axes of each collective, by position.
    """
    if not levels:
        return AxisNames(graph.axes)
    number = {axis.name: k for k, axis in enumerate(graph.axes)}
    types = {type_ for node, _ in graph.walk() for type_ in node.types}
    sets = {frozenset(number[name] for name in reserved_axes(node)) for node, _ in graph.walk()}
    return AxisNames.of(graph.axes, levels, sets | set(map(frozenset, collectives))).telling_apart(types)


def _cuts(axes: Sequence[Axis], rows: Iterable[Sequence[Any]]) -> frozenset[int]:
    """Return the positions at which an entry of a row differs from the one before, of the same level."""
    inner = [k for k in range(1, len(axes)) if axes[k].level == axes[k - 1].level]
    return frozenset(k for row in rows for k in inner if row[k] != row[k - 1])


class _Renamed:
    """Graphs over the axes that users see.

    Attributes:
        names: the names of the axes.
        type: converts a type.
        along: returns the names of axes, given by position.
    """

    def __init__(self, names: AxisNames, type_: Callable[[Type], Type], along: Callable[[Collection[int]], list[str]]) -> None:
        self.names, self.type, self.along = names, type_, along
        self.nodes = dict[int, Node]()

    def graph(self, graph: PCG) -> PCG:
        nodes = {id(node): self.node(node) for node in graph.nodes}
        outputs = tuple(Value(nodes[id(v.node)], v.index) for v in graph.outputs)
        return PCG(tuple(nodes[id(node)] for node in graph.inputs), outputs, self.names.shown)

    def node(self, node: Node) -> Node:
        """Return a node over these axes. Those of its operands come before it."""
        if id(node) not in self.nodes:
            self.nodes[id(node)] = replace(
                node,
                operands=tuple(Value(self.nodes[id(v.node)], v.index) for v in node.operands),
                types=tuple(map(self.type, node.types)),
                inside=None if node.inside is None else self.graph(node.inside),
                payload=self.payload(node),
            )
        return self.nodes[id(node)]

    def payload(self, node: Node) -> Any:
        """Return the payload with the names of stages' or groups' axes. An axis that the graph lacks keeps its name."""
        along, payload = reserved_axes(node), node.payload
        if not along or payload is None:
            return payload
        positions = self.names.positions(along)
        lacking = set(along) - {self.names.axes[k].name for k in positions}
        return structs.replace(payload, along=(*self.along(positions), *sorted(lacking)))
