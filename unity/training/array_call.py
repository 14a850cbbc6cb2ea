"""Calls with any arguments as functions of arrays alone: static leaves and Flax NNX modules are separated."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import jax
import numpy as np

from unity.base.errors import PlanError
from unity.pcg.jaxprs.weak_types import struct_of

ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
NUMBERS = (bool, int, float, complex)


@dataclass(frozen=True)
class Structured:
    """A tree of arrays and of static leaves, such as the activation function in an Equinox module.

    Attributes:
        leaves: all leaves.
        places: the numbers of the leaves that are arrays.
        structure: the structure of the tree.
        graph: the static part of modules of Flax NNX, or None if there are none. The tree is then their state.
    """

    leaves: tuple[Any, ...]
    places: tuple[int, ...]
    structure: Any
    graph: Any = None

    @classmethod
    def of(cls, tree: Any, numbers: bool = False) -> Structured:
        """Separate the arrays of a tree from the rest. Modules of Flax NNX continue to share their shared variables.

        Args:
            tree: the tree.
            numbers: whether Python numbers are arrays, as for `jax.jit`. Those in modules of Equinox are static in any case.
        """
        graph = None
        if _has_modules(tree):
            graph, tree = _nnx().split(tree)
        leaves, structure = jax.tree.flatten(tree)
        kinds = (*ARRAYS, *NUMBERS) if numbers else ARRAYS
        flags = [isinstance(leaf, kinds) for leaf in leaves] if _equinox() is None else _flags(tree, kinds)
        return cls(tuple(leaves), tuple(k for k, flag in enumerate(flags) if flag), structure, graph)

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The leaves that are arrays."""
        return tuple(self.leaves[k] for k in self.places)

    @property
    def structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The types of the arrays."""
        return tuple(struct_of(x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)) for x in self.arrays)

    @property
    def types(self) -> tuple[Hashable, ...]:
        """The types of the arrays, in a form that is quick to compute in every step."""
        return tuple(map(_type_of, self.arrays))

    @property
    def keys(self) -> tuple[tuple[Any, ...], ...]:
        """The path of each array, as keys."""
        return tuple(keys for keys, _ in jax.tree.leaves_with_path(self.numbered()))

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of each array, as text."""
        return tuple(f"args{jax.tree_util.keystr(keys)}" for keys in self.keys)

    @property
    def tops(self) -> tuple[Any, ...]:
        """The first key of each array's path: in a tuple of arguments, the number of the argument."""
        return tuple(getattr(keys[0], "idx", getattr(keys[0], "key", None)) for keys in self.keys)

    @property
    def static(self) -> Structured:
        """The tree without its arrays."""
        leaves = list(self.leaves)
        for k in self.places:
            leaves[k] = None
        return replace(self, leaves=tuple(leaves))

    @property
    def key(self) -> Hashable:
        """Everything but the arrays. Equal static leaves of different types, such as 2 and 2.0, differ, as for `jax.jit`."""
        leaves = self.static.leaves
        return self.structure, self.graph, self.places, leaves, tuple(map(type, leaves))

    def tree(self, arrays: Sequence[Any]) -> Any:
        """Return the tree with other arrays. Its modules of Flax NNX are new."""
        tree = self.state(arrays)
        return tree if self.graph is None else _nnx().merge(self.graph, tree)

    def state(self, arrays: Sequence[Any]) -> Any:
        """Return the tree with other arrays. In the place of a module of Flax NNX is its state."""
        leaves = list(self.leaves)
        for k, x in zip(self.places, arrays, strict=True):
            leaves[k] = x
        return jax.tree.unflatten(self.structure, leaves)

    def numbered(self) -> Any:
        """Return the tree with the numbers of the arrays in the arrays' places, and without static leaves."""
        numbers = dict(zip(self.places, range(len(self.places)), strict=True))
        return jax.tree.unflatten(self.structure, [numbers.get(k) for k in range(len(self.leaves))])

    def like(self, tree: Any, values: Sequence[Any]) -> Any:
        """Return values for the arrays as a tree like `tree`. In the place of a module of Flax NNX is a tree like its state."""
        state = self.state(values)
        if self.graph is None:
            return state
        return jax.tree.map_with_path(lambda keys, _: reduce(_child, keys, state), tree, is_leaf=_is_module)

    def write(self, tree: Any, arrays: Sequence[Any]) -> Any:
        """Return the tree with other arrays. Its modules of Flax NNX are those of `tree`, which change in place."""
        if self.graph is None:
            return self.state(arrays)

        def written(part: Any, value: Any) -> Any:
            if _is_module(part):
                _nnx().update(part, value)
            return value if isinstance(part, ARRAYS) else part

        return jax.tree.map(written, tree, self.like(tree, arrays), is_leaf=_is_module)


@dataclass(frozen=True)
class ResultStructure:
    """The structure of the arrays that a call returns: those of the function's results, then next values of arguments.

    Attributes:
        results: the function's results, without arrays.
        changed: the numbers of the arrays among the arguments whose next values are returned.
    """

    results: Structured
    changed: tuple[int, ...]


class ArrayCall:
    """A call as a function from arrays to arrays: to those of its results, and the next values of the arrays in Flax NNX modules.

    Attributes:
        arguments: the positional arguments, and a dict of the keyword arguments if there are any.
        donated: the numbers of the donated arguments.
        inputs: the arguments, with arrays separated from the rest.
        form: the form of the results, once the call is traced.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        numbers: bool = False,
        donated: Collection[int] = (),
    ) -> None:
        """Separate the arrays of a call's arguments from the rest.

        Args:
            fn: the function.
            args: its positional arguments.
            kwargs: its keyword arguments.
            numbers: whether Python numbers among them are arrays, as for `jax.jit`.
            donated: the numbers of the donated arguments. All arrays of their modules are returned, changed or not, because their
                memory is lost.
        """
        self.fn, self._named = fn, bool(kwargs)
        self.arguments = (*args, kwargs) if kwargs else args
        self.inputs = Structured.of(self.arguments, numbers)
        self.donated = frozenset(k for k in donated if k < len(args))
        self.form = ResultStructure(Structured.of(()), ())

    @property
    def key(self) -> Hashable:
        """Everything but the arrays, and whether the last of the arguments is the dict of the keyword arguments."""
        return self._named, self.inputs.key

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        """Call the function with these arrays in its arguments.

        Raises PlanError if it changes the static part of a module of Flax NNX.
        """
        tree = self.inputs.tree(arrays)
        *args, kwargs = tree if self._named else (*tree, {})
        results = Structured.of(self.fn(*args, **kwargs), numbers=True)
        if self.inputs.graph is None:
            self.form = ResultStructure(results.static, ())
            return results.arrays
        modules = Structured.of(tree)
        if modules.key != self.inputs.key:
            raise PlanError(
                f"{getattr(self.fn, '__name__', 'the function')} changes more of a module than its arrays, such as its mode, an"
                " attribute or the number of its variables, which is not returned: do so outside of it. (docs: training#errors)"
            )
        after = modules.arrays
        pairs = enumerate(zip(self.inputs.tops, arrays, after, strict=True))
        changed = tuple(k for k, (top, x, y) in pairs if x is not y or top in self.donated)
        self.form = ResultStructure(results.static, changed)
        return (*results.arrays, *(after[k] for k in changed))

    def finish(self, arrays: Sequence[Any], form: ResultStructure) -> Any:
        """Return the function's result from the arrays that a call returned, and change the modules among the arguments.

        Args:
            arrays: the arrays.
            form: their form.
        """
        n = len(form.results.places)
        if form.changed:
            after = list(self.inputs.arrays)
            for k, x in zip(form.changed, arrays[n:], strict=True):
                after[k] = x
            self.inputs.write(self.arguments, after)
        return form.results.tree(arrays[:n])

    @property
    def argument_trees(self) -> list[Any]:
        """The numbers of the arrays as a tree like each argument; one tree for all if modules may share variables."""
        tree = self.inputs.numbered()
        return [tree] if self.inputs.graph is not None else list(tree)


def next_values(inputs: Structured, form: ResultStructure, structs: Sequence[Any], results: Sequence[Any]) -> dict[int, int]:
    """Pair the arrays among a step's results with the arrays among its arguments that they are sharded like, by number.

    These are the arrays of modules, and every part of the result that has the structure and the types of an argument, such as its
    next value or its gradient.

    Args:
        inputs: the arguments.
        form: the form of the results.
        structs: the types of the arrays among the arguments.
        results: the types of the arrays among the results.
    """
    n = len(form.results.places)
    pairs = {n + k: array for k, array in enumerate(form.changed)}
    if inputs.graph is not None:
        return pairs
    for most in (1, n):  # each argument has a next value before any has more parts
        for argument in inputs.numbered():
            for part in _parts_like(argument, form.results.numbered(), structs, results, pairs)[:most]:
                pairs.update(zip(part, jax.tree.leaves(argument), strict=True))
    return pairs


def _parts_like(
    argument: Any, tree: Any, structs: Sequence[Any], results: Sequence[Any], paired: Collection[int]
) -> list[list[int]]:
    """Return the parts of a tree of result numbers that have the structure and types of an argument, and are not paired yet."""
    structure, own = jax.tree.structure(argument), [structs[k] for k in jax.tree.leaves(argument)]
    parts = jax.tree.leaves(tree, is_leaf=lambda part: jax.tree.structure(part) == structure)
    numbers = [jax.tree.leaves(part) for part in parts if jax.tree.structure(part) == structure]
    free = [part for part in numbers if not any(k in paired for k in part)]
    return [part for part in free if all(_alike(x, results[k]) for x, k in zip(own, part, strict=True))]


def _type_of(x: Any) -> Hashable:
    has_jax_type = isinstance(x, jax.Array | jax.ShapeDtypeStruct)  # unlike a NumPy array
    struct = x if has_jax_type else struct_of(jax.typeof(x))
    return struct.shape, struct.dtype, getattr(struct, "weak_type", False)


def _alike(one: Any, other: Any) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def _nnx() -> Any:
    return sys.modules.get("flax.nnx")


def _equinox() -> Any:
    return sys.modules.get("equinox")


def _flags(tree: Any, kinds: tuple[type, ...]) -> list[bool]:
    """Return whether each leaf is an array: of these kinds, or of `ARRAYS` inside of a module of Equinox."""
    is_module = lambda x: isinstance(x, _equinox().Module)  # noqa: E731
    flags = []
    for part in jax.tree.leaves(tree, is_leaf=is_module):
        here = ARRAYS if is_module(part) else kinds
        flags += [isinstance(leaf, here) for leaf in jax.tree.leaves(part)]
    return flags


def _has_modules(tree: Any) -> bool:
    """Return whether a tree has modules of Flax NNX. Without an import of Flax NNX there are none."""
    return _nnx() is not None and any(map(_is_module, jax.tree.leaves(tree, is_leaf=_is_module)))


def _is_module(x: Any) -> bool:
    return isinstance(x, _nnx().Pytree)


def _child(state: Any, key: Any) -> Any:
    """Return a part of a module's state, empty if the module shares all of its variables with an earlier one."""
    name = next(getattr(key, kind) for kind in ("idx", "key", "name") if hasattr(key, kind))
    return state[name] if name in state else type(state)({})
