"""The arguments of an exported function: their paths, shapes and partitions, and the structure that they come in."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

from unity.export.errors import ExportError
from unity.export.source import Code, call, code, literal, mapping, sequence
from unity.pcg.ir.program import Tensor

NUMBER = r"(?<=/)\d+(?=/|$)"  # in a path: an index, which is left open where all are alike


@dataclass(frozen=True)
class Arguments:
    """The leaves of all arguments, in order: their paths, tensors and partitions."""

    names: tuple[str, ...]  # of the arguments
    paths: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    specs: tuple[PartitionSpec, ...]
    trees: tuple[Any, ...]  # what every argument is, with 0 for its leaves

    @property
    def plain(self) -> bool:
        """Whether they are made of dictionaries, lists and tuples alone, and so can be written down."""
        return all(map(is_plain, self.trees))

    def table(self) -> Code:
        """Every path with its shape, type and partition; those alike but for numbers together, if they can be told apart so."""
        rows = {p: entry(t, s) for p, t, s in zip(self.paths, self.tensors, self.specs, strict=True)}
        return mapping([(literal(p).text, c) for p, c in (grouped(rows) if self.plain else rows).items()])

    def structure(self) -> Code:
        """What all arguments are made of."""
        return mapping([(literal(n).text, skeleton(t)) for n, t in zip(self.names, self.trees, strict=True)])


def arguments_of(fn: Callable[..., Any], in_tree: Any, tensors: Sequence[Tensor], specs: Sequence[PartitionSpec]) -> Arguments:
    """The arguments of a planned function. `in_tree` is the structure of them all."""
    trees = tuple(jax.tree.unflatten(in_tree, [0] * in_tree.num_leaves))
    names = names_of(fn, len(trees))
    found = [path for name, tree in zip(names, trees, strict=True) for path, _ in tree_flatten_with_path({name: tree})[0]]
    paths = tuple(keystr(p, simple=True, separator="/") for p in found)
    twice = next((p for p in paths if paths.count(p) > 1), None) if len(set(paths)) < len(paths) else None
    if twice is not None:
        raise ExportError("", f"the argument {twice}", "two of the leaves have this path")
    return Arguments(names, paths, tuple(tensors), tuple(specs), trees)


def names_of(fn: Callable[..., Any], count: int) -> tuple[str, ...]:
    """The names of a function's arguments, as far as it tells."""
    try:
        found = [p.name for p in inspect.signature(fn).parameters.values() if p.kind <= p.POSITIONAL_OR_KEYWORD][:count]
    except (TypeError, ValueError):
        found = []
    return tuple(found) if len(found) == count else tuple(f"argument{k}" for k in range(count))


def entry(tensor: Tensor, spec: PartitionSpec) -> Code:
    """One row of the table."""
    return sequence([literal(tensor.shape), literal(str(tensor.dtype)), spec_code(spec)])


def spec_code(spec: PartitionSpec) -> Code:
    """A partition, without the dimensions at its end that are whole."""
    parts = list(spec)
    while parts and parts[-1] is None:
        parts.pop()
    return call("P", *parts)


def grouped(rows: Mapping[str, Code]) -> dict[str, Code]:
    """Rows that differ in numbers of their path only as one, if all with such a path are alike."""
    groups: dict[str, list[str]] = {}
    for path in rows:
        groups.setdefault(re.sub(NUMBER, "*", path), []).append(path)
    found: dict[str, Code] = {}
    for path, row in rows.items():
        pattern = re.sub(NUMBER, "*", path)
        alike = len({rows[p].text for p in groups[pattern]}) == 1
        found[pattern if alike else path] = row
    return found


def is_plain(tree: Any) -> bool:
    """Whether a tree is made of what Python has literals for."""
    if type(tree) is dict:
        return all(isinstance(k, (str, int)) and is_plain(v) for k, v in tree.items())
    return tree is None or type(tree) is int or (type(tree) in (list, tuple) and all(map(is_plain, tree)))


def skeleton(tree: Any, leaf: Callable[[Any], Code] = code) -> Code:
    """A tree as a literal; several equal items of a list are one, repeated."""
    if type(tree) is dict:
        return mapping([(literal(k).text, skeleton(v, leaf)) for k, v in tree.items()])
    if type(tree) in (list, tuple):
        items = [skeleton(v, leaf) for v in tree]
        if type(tree) is list and len(items) > 2 and len({i.text for i in items}) == 1:
            one = sequence(items[:1], "[]")
            return Code(f"{one.text} * {len(items)}", 50, one.head, one.items, f"{one.close} * {len(items)}", True)
        return sequence(items, "[]" if type(tree) is list else "()")
    return Code("None") if tree is None else leaf(tree)
