"""What a plan is called with, held against what it was planned for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from unity.base.errors import PlanError
from unity.pcg.capture.capture import Captured
from unity.pcg.capture.packed_arguments import Packing

SHOWN = 5  # arguments that an error names


def checked(name: str, captured: Captured, packing: Packing, args: tuple[Any, ...]) -> list[Any]:
    """The leaves of a call's arguments, weights packed as the plan has them. `name`: of the function.

    Raises PlanError if their structure, a shape or a type is not what `captured` has.
    """
    leaves, tree = jax.tree.flatten(args)
    if tree != captured.in_tree:
        shapes = [node.tensors[0].struct for node in captured.graph.inputs[: len(captured.paths)]]
        planned = jax.tree.unflatten(captured.in_tree, shapes)
        what = f"{name} is called with arguments of another structure than it was planned for"
        refuse_others(what, list(differences(planned, args, "args")))
    leaves = packing.pack(leaves)  # as they are, if `shard` has packed them
    wrong = []
    for path, x, node in zip(captured.paths, leaves, captured.graph.inputs, strict=False):
        aval, tensor = jax.typeof(x), node.tensors[0]
        if tuple(aval.shape) != tensor.shape or aval.dtype != tensor.dtype:
            wrong.append(f"{path}: planned for {tensor}, called with {aval.str_short()}")
    refuse_others(f"{name} is called with other shapes or types than it was planned for", wrong)
    return leaves


def refuse_weak(name: str, captured: Captured, weak: Sequence[bool]) -> None:
    """Raises PlanError for weak types of arguments with which the function computes in other types than were planned."""
    triples = zip(captured.paths, weak, captured.weak[0], strict=True)
    kinds = {True: "weakly typed, as a Python number is", False: "an array that is not weakly typed"}
    wrong = [f"{path}: planned as {kinds[planned]}, given as {kinds[now]}" for path, now, planned in triples if now != planned]
    refuse_others(f"{name} computes in other types than planned with arguments of these weak types", wrong)


def differences(planned: Any, given: Any, at: str) -> Iterator[str]:
    """Where two trees are of different structure, in words. `at`: what leads to them."""
    if jax.tree.structure(planned) == jax.tree.structure(given):
        return
    (left, data), (right, other) = _parts(planned), _parts(given)
    if left is None or right is None or type(planned) is not type(given):
        yield f"{at}: planned for {_kind(planned)}, given {_kind(given)}"
        return
    found = [f"{at}{key} is missing" for key in left if key not in right]
    found += [f"{at}{key} is not known to the plan" for key in right if key not in left]
    found += [said for key in left if key in right for said in differences(left[key], right[key], at + key)]
    yield from found or [f"{at}: {_kind(planned)}, planned with {data}, given with {other}"]


def _parts(tree: Any) -> tuple[dict[str, Any] | None, str]:
    """A tree's parts one level down, by what leads to them, and what else it holds; no parts of a leaf."""
    if jax.tree_util.all_leaves([tree]):
        return None, ""
    level = jax.tree_util.flatten_one_level_with_keys(tree)
    keys = [f".{name}" for name in tree._fields] if hasattr(tree, "_fields") else [jax.tree_util.keystr((k,)) for k, _ in level[0]]
    return dict(zip(keys, (part for _, part in level[0]), strict=True)), str(level[1])


def _kind(tree: Any) -> str:
    if tree is None:
        return "None"
    return "an array" if jax.tree_util.all_leaves([tree]) else f"a {type(tree).__name__}"


def refuse_others(what: str, wrong: Sequence[str]) -> None:
    """Raises PlanError if anything is of another shape or structure than it was planned for. `wrong`: what is, in words."""
    if wrong:
        more = [f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
        lines = "\n    ".join([*wrong[:SHOWN], *more])
        raise PlanError(f"{what}:\n    {lines}\n    Call unity.optimize again for these. (docs: plan#shapes)")


def by_position(fn: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """All arguments of a call in their positions, as planned. Raises PlanError if the function takes some by name alone."""
    name = getattr(fn, "__name__", "the function")
    try:
        bound = inspect.signature(fn).bind(*args, **named)
    except (TypeError, ValueError) as error:  # the second: some built-in functions have no signature
        raise PlanError(f"{name} cannot be called with {', '.join(named)}: {error}. (docs: plan#shapes)") from error
    if bound.kwargs:
        raise PlanError(
            f"{name} was planned for arguments by position, but takes {', '.join(bound.kwargs)} by name alone: fix such values"
            " with functools.partial before unity.optimize. (docs: plan#shapes)"
        )
    return bound.args


@contextmanager
def in_reverse(name: str) -> Iterator[None]:
    """Raises PlanError where JAX differentiates a call forward that has a rule for reverse only. `name`: of the function."""
    try:
        yield
    except TypeError as error:
        if not all(word in str(error) for word in ("forward-mode", "custom_vjp")):
            raise
        raise PlanError(
            f"{name} is differentiated forward (jax.jvp, jax.linearize, jax.jacfwd), but the plan has a derivative rule for reverse"
            " only: a jax.custom_vjp, a unity.kernel, another package's primitive, a pipeline, branches, or a sum over devices of"
            " numbers narrower than float32.\n"
            "    Use jax.vjp, jax.grad or jax.jacrev; jax.vjp of jax.vjp gives what jax.jvp would. (docs: plan#derivatives)"
        ) from error
