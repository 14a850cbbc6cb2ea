"""The arguments of an exported function: their paths, shapes and partitions, and their tree structure."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

from unity.base.errors import ExportError
from unity.export.source_code import Code, call, code, literal, mapping, sequence
from unity.pcg.ir.program import Tensor

INDEX = r"(?<=/)\d+(?=/|$)"  # in a path


@dataclass(frozen=True)
class FileArguments:
    """The leaves of all arguments, in order.

    Attributes:
        names: the names of the arguments.
        paths: the path of each leaf.
        tensors: the tensor of each leaf.
        specs: the partition of each leaf.
        trees: the structure of each argument, with 0 for its leaves.
    """

    names: tuple[str, ...]
    paths: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    specs: tuple[PartitionSpec, ...]
    trees: tuple[Any, ...]

    @property
    def plain(self) -> bool:
        """Whether the arguments consist of dictionaries, lists and tuples alone, and so have a literal."""
        return all(map(is_plain, self.trees))

    def table(self) -> Code:
        """Return the shape, dtype and partition of every path, with equal rows joined whose paths differ in indices only."""
        rows = {p: table_row(t, s) for p, t, s in zip(self.paths, self.tensors, self.specs, strict=True)}
        return mapping([(literal(p).text, c) for p, c in (grouped_rows(rows) if self.plain else rows).items()])

    def structure(self) -> Code:
        """Return the structure of all arguments as a literal."""
        return mapping([(literal(n).text, tree_literal(t)) for n, t in zip(self.names, self.trees, strict=True)])


def arguments_of(fn: Callable[..., Any], in_tree: Any, tensors: Sequence[Tensor], specs: Sequence[PartitionSpec]) -> FileArguments:
    """Return the arguments of a planned function.

    Args:
        fn: the function.
        in_tree: the structure of all arguments.
        tensors: the tensor of each leaf.
        specs: the partition of each leaf.

    Raises:
        ExportError: two leaves have the same path.
    """
    trees = tuple(jax.tree.unflatten(in_tree, [0] * in_tree.num_leaves))
    names = names_of(fn, len(trees))
    key_paths = [path for name, tree in zip(names, trees, strict=True) for path, _ in tree_flatten_with_path({name: tree})[0]]
    paths = tuple(keystr(p, simple=True, separator="/") for p in key_paths)
    repeated = next((p for p in paths if paths.count(p) > 1), None) if len(set(paths)) < len(paths) else None
    if repeated is not None:
        raise ExportError("", f"the argument {repeated}", "two of the leaves have this path")
    return FileArguments(names, paths, tuple(tensors), tuple(specs), trees)


def names_of(fn: Callable[..., Any], count: int) -> tuple[str, ...]:
    """Return the names of a function's positional arguments, or numbered names if its signature does not have them."""
    try:
        names = [p.name for p in inspect.signature(fn).parameters.values() if p.kind <= p.POSITIONAL_OR_KEYWORD][:count]
    except (TypeError, ValueError):
        names = []
    return tuple(names) if len(names) == count else tuple(f"argument{k}" for k in range(count))


def table_row(tensor: Tensor, spec: PartitionSpec) -> Code:
    """Return one row of the table."""
    return sequence([literal(tensor.shape), literal(str(tensor.dtype)), spec_code(spec)])


def spec_code(spec: PartitionSpec) -> Code:
    """Return a partition, without the replicated dimensions at its end."""
    parts = list(spec)
    while parts and parts[-1] is None:
        parts.pop()
    return call("P", *parts)


def grouped_rows(rows: Mapping[str, Code]) -> dict[str, Code]:
    """Join rows whose paths differ in indices only, if all rows of such paths are equal."""
    groups: dict[str, list[str]] = {}
    for path in rows:
        groups.setdefault(re.sub(INDEX, "*", path), []).append(path)
    joined: dict[str, Code] = {}
    for path, row in rows.items():
        pattern = re.sub(INDEX, "*", path)
        alike = len({rows[p].text for p in groups[pattern]}) == 1
        joined[pattern if alike else path] = row
    return joined


def is_plain(tree: Any) -> bool:
    """Return whether a tree consists of values that have a Python literal."""
    if type(tree) is dict:
        return all(isinstance(k, (str, int)) for k in tree) and all(map(is_plain, tree.values()))
    return all(map(is_plain, tree)) if type(tree) in (list, tuple) else tree is None or type(tree) is int


def tree_literal(tree: Any, leaf: Callable[[Any], Code] = code) -> Code:
    """Return a tree as a literal. A list of equal items is written as `[item] * n`."""
    if type(tree) is dict:
        return mapping([(literal(k).text, tree_literal(v, leaf)) for k, v in tree.items()])
    if type(tree) in (list, tuple):
        items = [tree_literal(v, leaf) for v in tree]
        if type(tree) is list and len(items) > 2 and len({i.text for i in items}) == 1:
            one = sequence(items[:1], "[]")
            return Code(f"{one.text} * {len(items)}", 50, one.head, one.items, f"{one.close} * {len(items)}", True)
        return sequence(items, "[]" if type(tree) is list else "()")
    return Code("None") if tree is None else leaf(tree)
