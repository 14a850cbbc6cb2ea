"""`plan.shard`: arguments, parts of them, and trees that mirror the weights, placed on a plan's devices."""

from __future__ import annotations

from functools import cached_property
from typing import Any, overload

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from unity.exec.context import automatic, on_mesh, typed_mesh
from unity.exec.hosts.arrays import place
from unity.exec.lowering import spec_of
from unity.plan.call_arguments import by_position
from unity.plan.device_mesh import graph_on
from unity.plan.face.inspection import Inspection
from unity.plan.planned_program import PlannedProgram
from unity.plan.shardings.following_shardings import HOST, following, weights_of
from unity.plan.shardings.placement import Placement, on_devices


class Sharder:
    """Places arrays as a plan needs them: `plan.shard(params, batch)`, and further forms as methods."""

    def __init__(self, program: PlannedProgram, inspect: Inspection) -> None:
        self._program, self._inspect = program, inspect
        self._placements: dict[Mesh | AbstractMesh | None, Placement] = {}  # by the user's mesh

    @overload
    def __call__(self, arg: Any, /) -> Any: ...
    @overload
    def __call__(self, *args: Any, **named: Any) -> tuple[Any, ...]: ...
    def __call__(self, *args: Any, **named: Any) -> Any:
        """Place arguments on the devices as the plan needs them.

        Pass all arguments, by position or by name, or only the first ones. Several are returned as a tuple, in their positions; a
        single argument is returned alone.

        With several processes, each passes whole arrays; `local` takes each process's part. If packing was allowed, weights of
        branches, and weights that the program joins, are returned packed (`unpack` is the inverse).
        """
        args = by_position(self._program.family.fn, args, named)
        packing = self._program.packing
        args = jax.tree.unflatten(jax.tree.structure(args), packing.pack(jax.tree.leaves(args)))
        placed = self.placement.whole(args)
        return placed[0] if len(args) == 1 else placed

    def local(self, part: Any, argument: int = 1) -> Any:
        """Place one argument, usually the batch, of which each process has a part.

        Every process passes an equal part of each array's rows (dimension 0), in the order of processes, as a data loader reads
        them that uses `jax.process_index()` and `jax.process_count()`. Arrays of the planned shape are taken to be whole in every
        process. Weights of branches are returned packed, as by `plan.shard`.

        Args:
            part: this process's part of the argument.
            argument: the argument's place among those of the function.
        """
        return self.placement.part(part, argument)

    def state(self, tree: Any, argument: int = 0) -> Any:
        """Place a tree that mirrors the weights, such as an optimizer's state from a checkpoint, as the plan needs it.

        This is the inverse of `unpack`: weights are packed as `plan.shard` packs them. Leaves outside of subtrees with the
        argument's structure are replicated on all devices.

        Args:
            tree: a tree that contains trees of the argument's structure.
            argument: the argument's place among those of the function.
        """
        placed = self.placement.packed(tree, argument)
        return jax.tree.map(place, placed, self.shardings(placed))

    def unpack(self, tree: Any, argument: int = 0) -> Any:
        """Unpack the weights or gradients that `plan.shard` packed, into the function's own shapes, as for checkpoints.

        Every subtree with the argument's structure is unpacked, so that `tree` may also be an optimizer's state.

        Args:
            tree: an argument, its gradients, or a tree that contains such trees.
            argument: the argument's place among those of the function.
        """
        return self.placement.unpacked(tree, argument)

    def shardings(self, tree: Any) -> Any:
        """Return shardings for a tree that mirrors the weights, such as an optimizer's state, whose moments follow their weights.

        A leaf follows the weight whose path its own path ends with, if their shapes are equal. All other leaves are replicated.

        Where a plan has the state of a weight in the memory of the host, the sharding of a leaf that follows it has the memory kind
        "pinned_host", unless its path is the weight's: such a tree has the weights themselves, or their gradients. So pass these
        and the state apart.

        Args:
            tree: arrays or `jax.ShapeDtypeStruct`s, such as `jax.eval_shape(optimizer.init, params)`.
        """
        placement, mesh = self.placement, self._inspect.mesh
        differentiated = self._program.family.captured.differentiated
        weights = weights_of(placement.arguments, placement.shapes, differentiated)
        whole = NamedSharding(typed_mesh(mesh) or mesh, PartitionSpec())
        hosted = self._program.hosted_state
        if not any(hosted):
            return following(tree, weights, whole)
        of_state = [s.with_memory_kind(HOST) if h else s for s, h in zip(placement.shardings, hosted, strict=True)]
        state = weights_of(jax.tree.unflatten(placement.tree, of_state), placement.shapes, differentiated)
        return following(tree, state, whole, weights)

    @property
    def placement(self) -> Placement:
        """The shardings of the arguments, on the user's mesh while one with explicit axes is set."""
        return self.placement_on(typed_mesh(self._inspect.mesh))

    def placement_on(self, mesh: Mesh | AbstractMesh | None) -> Placement:
        """Return the shardings of the arguments on a mesh of the user's, or on the plan's."""
        if mesh not in self._placements:
            program, axes = self._program, graph_on(self._program, self._inspect.mesh).axes
            captured = program.family.captured
            shapes = tuple(node.tensors[0].shape for node in program.serial.inputs[: len(captured.paths)])
            shardings = self._own if mesh is None else tuple(on_mesh(s, mesh, axes) for s in self._own)
            name = program.family.name
            self._placements[mesh] = Placement(name, captured.in_tree, captured.paths, shapes, shardings, program.packing)
        return self._placements[mesh]

    @cached_property
    def constants(self) -> tuple[Any, ...]:
        """The arrays that the function closes over. Those that are committed to other devices are copied to the plan's, once."""
        consts, shardings = self._program.family.captured.consts, self._every[len(self._own) :]
        return tuple(on_devices(x, sharding) for x, sharding in zip(consts, shardings, strict=True))

    @property
    def _own(self) -> tuple[NamedSharding, ...]:
        """The shardings of the arguments' leaves on the plan's mesh."""
        return self._every[: len(self._program.family.captured.paths)]  # the rest are the function's constants

    @cached_property
    def _every(self) -> tuple[NamedSharding, ...]:
        """The shardings of all inputs of the program on the plan's mesh."""
        graph, mesh = graph_on(self._program, self._inspect.mesh), automatic(self._inspect.mesh)
        return tuple(NamedSharding(mesh, spec_of(n.types[0], graph.axes, n.tensors[0].ndim)) for n in graph.inputs)
