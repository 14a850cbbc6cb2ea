"""Checks of a call's arguments against those that a plan was made for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from reprlib import repr as short_repr
from types import FunctionType
from typing import Any, NoReturn

import jax

from unity.base.errors import PlanError
from unity.base.formatting import with_article
from unity.pcg.capture.capture import Captured
from unity.pcg.capture.packed_arguments import Packing

SHOWN = 5  # arguments that an error names


def checked(name: str, captured: Captured, packing: Packing, args: tuple[Any, ...]) -> list[Any]:
    """Return the leaves of a call's arguments, with weights packed as the plan packs them.

    Raises PlanError, naming the function by `name`, if the structure, a shape or a type differs from those of `captured`, or if the
    types of its program are not enabled.
    """
    if not jax.config.read("jax_enable_x64") and captured.needs_64:
        refuse_narrow(name)
    leaves, tree = jax.tree.flatten(args)
    if tree != captured.in_tree:
        shapes = [node.tensors[0].struct for node in captured.graph.inputs[: len(captured.paths)]]
        planned = jax.tree.unflatten(captured.in_tree, shapes)
        problem = f"{name} is called with arguments of another structure than it was planned for"
        refuse_others(problem, list(differences(planned, args, "args")))
    tensors = [node.tensors[0] for node in captured.graph.inputs]
    refuse_no_arrays(f"{name} is called with an argument that is no array", captured.paths, tensors, leaves)
    leaves = packing.pack(leaves)  # leaves that `shard` has packed already pass through
    wrong = []
    for path, x, node in zip(captured.paths, leaves, captured.graph.inputs, strict=False):
        aval, tensor = jax.typeof(x), node.tensors[0]
        if tuple(aval.shape) != tensor.shape or aval.dtype != tensor.dtype:
            wrong.append(f"{path}: planned for {tensor}, called with {aval.str_short()}")
    refuse_others(f"{name} is called with other shapes or types than it was planned for", wrong)
    return leaves


def refuse_no_arrays(problem: str, paths: Sequence[str], planned: Sequence[object], leaves: Sequence[Any]) -> None:
    """Raise PlanError if JAX cannot take a leaf of the arguments for an array.

    Args:
        problem: how the error begins.
        paths: the paths of the leaves.
        planned: what was planned for each leaf, as it is printed.
        leaves: the leaves.
    """
    wrong = [
        f"{p}: planned for {t}, given {_in_words(x)}" for p, t, x in zip(paths, planned, leaves, strict=False) if not _is_array(x)
    ]
    refuse_others(problem, wrong, "Give arrays or numbers, and fix other values with functools.partial. (docs: plan#shapes)")


def _is_array(x: Any) -> bool:
    """Return whether JAX takes a leaf for an array."""
    try:
        return jax.typeof(x) is not None and not isinstance(x, jax.ShapeDtypeStruct)  # which has a type, but no value
    except (TypeError, ValueError, OverflowError):  # a number may have more bits than JAX's type of it
        return False


def _in_words(x: Any) -> str:
    """Return a description of a value that is not an array."""
    return f"the function {x.__qualname__}" if isinstance(x, FunctionType) else f"{short_repr(x)} ({type(x).__name__})"


def refuse_narrow(name: str, link: str = "plan#shapes") -> NoReturn:
    """Raise PlanError since 64-bit types are not enabled, but were when a function was planned."""
    raise PlanError(
        f"{name} was planned with 64-bit types (jax_enable_x64), and computes in them, but they are not enabled now:\n"
        f"    enable them where {name} is called, or plan again without them. (docs: {link})"
    )


def refuse_weak(name: str, captured: Captured, weak: Sequence[bool]) -> None:
    """Raise PlanError if arguments' weak types differ from the planned ones.

    Called where the function's results would have other types because of that.
    """
    triples = zip(captured.paths, weak, captured.weak[0], strict=True)
    kinds = {True: "weakly typed, as a Python number is", False: "an array that is not weakly typed"}
    wrong = [f"{path}: planned as {kinds[planned]}, given as {kinds[now]}" for path, now, planned in triples if now != planned]
    refuse_others(f"{name} computes in other types than planned with arguments of these weak types", wrong)


def differences(planned: Any, given: Any, at: str) -> Iterator[str]:
    """Yield descriptions of where the structures of two trees differ. `at` is the path of both trees, such as "args[0]"."""
    if jax.tree.structure(planned) == jax.tree.structure(given):
        return
    (left, data), (right, other) = _parts(planned), _parts(given)
    if left is None or right is None or type(planned) is not type(given):
        yield f"{at}: planned for {_kind(planned)}, given {_kind(given)}"
        return
    problems = [f"{at}{key} is missing" for key in left if key not in right]
    problems += [f"{at}{key} is not known to the plan, which was made without it" for key in right if key not in left]
    problems += [problem for key in left if key in right for problem in differences(left[key], right[key], at + key)]
    yield from problems or [f"{at}: {_kind(planned)}, planned with {data}, given with {other}"]


def _parts(tree: Any) -> tuple[dict[str, Any] | None, str]:
    """Return a tree's children by their keys, and its auxiliary data as text. A leaf has None for children."""
    if jax.tree_util.all_leaves([tree]):
        return None, ""
    level = jax.tree_util.flatten_one_level_with_keys(tree)
    keys = [f".{name}" for name in tree._fields] if hasattr(tree, "_fields") else [jax.tree_util.keystr((k,)) for k, _ in level[0]]
    return dict(zip(keys, (part for _, part in level[0]), strict=True)), str(level[1])


def _kind(tree: Any) -> str:
    if tree is None:
        return "None"
    return "an array" if jax.tree_util.all_leaves([tree]) else with_article(type(tree).__name__)


def refuse_others(
    problem: str, differing: Sequence[str], way_out: str = "Call unity.optimize again for these. (docs: plan#shapes)"
) -> None:
    """Raise PlanError if any argument differs from the planned one. `differing` describes each that does."""
    if differing:
        more = [f"and {len(differing) - SHOWN} more"] if len(differing) > SHOWN else []
        lines = "\n    ".join([*differing[:SHOWN], *more, way_out])
        raise PlanError(f"{problem}:\n    {lines}")


def by_position(fn: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return all arguments of a call by position, as planned. Raises PlanError for keyword-only arguments."""
    args, keywords = bound(fn, args, named)
    if keywords:
        raise PlanError(
            f"{getattr(fn, '__name__', 'the function')} takes {', '.join(keywords)} by name alone: fix such values with"
            " functools.partial before it is planned, because plans take arguments by position. (docs: plan#shapes)"
        )
    return args


def bound(fn: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call by position, and those that the function takes by name alone, sorted by name.

    Raises PlanError if the function does not take them.
    """
    if not named:
        return args, {}
    try:
        arguments = inspect.signature(fn).bind(*args, **named)
    except (TypeError, ValueError) as error:  # ValueError: some built-in functions have no signature
        name = getattr(fn, "__name__", "the function")
        raise PlanError(f"{name} cannot be called with {', '.join(named)}: {error}. (docs: plan#shapes)") from error
    return arguments.args, dict(sorted(arguments.kwargs.items()))


@contextmanager
def in_reverse(name: str) -> Iterator[None]:
    """Turn JAX's error about forward-mode differentiation of a reverse-only rule into a PlanError that names the function."""
    try:
        yield
    except TypeError as error:
        if not all(word in str(error) for word in ("forward-mode", "custom_vjp")):
            raise
        raise PlanError(
            f"{name} is differentiated forward (jax.jvp, jax.linearize, jax.jacfwd), but the plan has a derivative rule for reverse"
            " only: a jax.custom_vjp, a unity.kernel, another package's primitive, a pipeline, micro-batches, branches, a sum over"
            " devices of numbers narrower than float32, or a value that all devices have and of which each takes a part.\n"
            "    Use jax.vjp, jax.grad or jax.jacrev; jax.vjp of jax.vjp gives what jax.jvp would. (docs: plan#derivatives)"
        ) from error
