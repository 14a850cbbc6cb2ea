"""A plan: the user's function, on all devices. A drop-in that can be called, differentiated, jitted, read and saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import jax
import jax.core
from jax.sharding import Mesh, NamedSharding

from unity.exec.lowering import mesh_of, program, spec_of
from unity.pcg.capture import Captured
from unity.pcg.check import check
from unity.pcg.erasing import erased
from unity.pcg.errors import DerivationError, PlanError
from unity.pcg.graph import PCG
from unity.pcg.parallelize import parallelize
from unity.rewriting import Rewriting
from unity.search.machine import Machine
from unity.search.session import Candidate, Search
from unity.search.unity_rules.trace import Application

if TYPE_CHECKING:
    from unity.difference import PlanDiff
    from unity.exec.check import Check
    from unity.exec.liveness import MemoryTimeline
    from unity.search.simulator import Simulation
    from unity.substitutions.derivation import Step


@dataclass(frozen=True)
class Tried:
    """A plan that was looked at before one was chosen: seconds of a step as costs say, as simulated, and as run, if it was."""

    predicted: float
    memory: float  # bytes on one device, predicted
    simulated: float
    measured: float | None = None


@dataclass(frozen=True, eq=False)
class Made:
    """What all plans of one frontier share: the function, its graph, and the search that found them."""

    fn: Callable[..., Any]
    captured: Captured  # rewritten, if it was
    search: Search
    seconds: float  # that the search took
    known: tuple[Candidate, ...] = ()  # a frontier that was read from a file
    known_exact: bool = False
    rewriting: Rewriting | None = None  # how the captured function was rewritten, if it was
    applications: tuple[Application, ...] = ()  # what the search by substitution did
    tried: tuple[Tried, ...] = ()  # the plans that this one was chosen from by measuring, itself first

    @cached_property
    def frontier(self) -> tuple[tuple[Candidate, ...], bool]:
        """All points, fastest first, and whether they are all there are. Searched for when first asked for."""
        return (self.known, self.known_exact) if self.known else self.search.frontier


class Plan:
    """Computes what the planned function computes, on all devices of the machine it was planned for.

    Made by `unity.optimize` and `unity.load`. Works inside `jax.jit`, `jax.grad` and `jax.value_and_grad`; the result and
    the gradients are ordinary arrays.
    """

    def __init__(self, made: Made, candidate: Candidate) -> None:
        self._made, self._candidate = made, candidate
        self._warned = False
        self.__name__ = getattr(made.fn, "__name__", "plan")
        self.__doc__ = made.fn.__doc__

    @property
    def candidate(self) -> Candidate:
        """The point of the frontier that this plan is."""
        return self._candidate

    @property
    def machine(self) -> Machine:
        """The machine that it was planned for."""
        return self._made.search.machine

    @property
    def time(self) -> float:
        """Predicted seconds of one step."""
        return self.candidate.time

    @property
    def memory(self) -> float:
        """Predicted bytes on one device when most is held: weights, gradients, optimizer slots, what is kept, what is worked on."""
        return self.candidate.memory

    @property
    def search_seconds(self) -> float:
        """How long the search took (near zero from the cache)."""
        return self._made.seconds

    @property
    def original(self) -> PCG:
        """The graph as captured, serial."""
        rewriting = self._made.rewriting
        return self.serial if rewriting is None else rewriting.before.graph

    @property
    def serial(self) -> PCG:
        """The graph that was parallelized: as captured, or rewritten."""
        return self._made.captured.graph

    @property
    def rewriting(self) -> Rewriting | None:
        """How the captured program was rewritten before it was parallelized; nothing if it was not."""
        return self._made.rewriting

    @property
    def applications(self) -> tuple[Application, ...]:
        """The rules that parallelized it, in order; nothing but with `search="unity-rules"`."""
        return self._made.applications

    @property
    def tried(self) -> tuple[Tried, ...]:
        """The plans that it was chosen from, itself first; nothing but with `measure=True`, and not kept in files."""
        return self._made.tried

    def simulate(self) -> Simulation:
        """When everything of one step runs, on every device and link: its makespan, what is busy when, a trace, a picture."""
        from unity.search.simulator import simulate

        differentiated = self._made.captured.differentiated if self._made.search.training.backward else ()
        return simulate(self.pcg, self.machine, differentiated)

    @cached_property
    def pcg(self) -> PCG:
        """The parallel graph: what every device holds of everything, and every change of it."""
        graph = parallelize(self.serial, self.candidate.assignment)
        check(graph)
        return graph

    @cached_property
    def frontier(self) -> Frontier:
        """The trade-off between time and memory; its points are plans too."""
        return Frontier(self._made, self._candidate)

    @cached_property
    def mesh(self) -> Mesh:
        """The devices as a mesh of prime axes. Raises PlanError if there are fewer than planned for."""
        devices = jax.devices()
        if len(devices) < self.machine.devices:
            raise PlanError(
                f"this plan is for {self.machine.devices} devices ({self.machine.name}), but JAX sees {len(devices)}"
                f" ({devices[0].platform}).\n    Run it where they are, plan with machine=unity.Machine.local(), or give a CPU more"
                f" virtual devices: XLA_FLAGS=--xla_force_host_platform_device_count={self.machine.devices} (docs: plan#devices)"
            )
        return mesh_of(self.machine.axes, devices)

    @cached_property
    def _shardings(self) -> tuple[NamedSharding, ...]:
        nodes = self.pcg.inputs
        return tuple(NamedSharding(self.mesh, spec_of(n.types[0], self.pcg.axes, n.tensors[0].ndim)) for n in nodes)

    @property
    def in_shardings(self) -> Any:
        """Where the plan wants its arguments: a tuple of pytrees of `NamedSharding`, one for each argument."""
        return jax.tree.unflatten(self._made.captured.in_tree, self._shardings[: self._n_leaves])

    @property
    def _n_leaves(self) -> int:
        return len(self._made.captured.paths)

    @overload
    def shard(self, arg: Any, /) -> Any: ...
    @overload
    def shard(self, *args: Any) -> tuple[Any, ...]: ...
    def shard(self, *args: Any) -> Any:
        """The arguments, placed as the plan wants them. Fewer than all may be given: the first ones. One gives one back."""
        wanted = self.in_shardings
        if not 0 < len(args) <= len(wanted):
            raise PlanError(f"{self.__name__} takes {len(wanted)} arguments, shard was given {len(args)}")
        placed = tuple(
            jax.tree.map(jax.device_put, arg, shardings) if jax.tree.structure(arg) == jax.tree.structure(shardings) else None
            for arg, shardings in zip(args, wanted, strict=False)
        )
        for k, (arg, shardings) in enumerate(zip(args, wanted, strict=False)):
            if jax.tree.structure(arg) != jax.tree.structure(shardings):
                raise PlanError(
                    f"argument {k} of shard has the structure {jax.tree.structure(arg)}, but the plan was made for"
                    f" {jax.tree.structure(shardings)}"
                )
        return placed[0] if len(args) == 1 else placed

    @cached_property
    def _program(self) -> Callable[..., tuple]:
        """The lowered function of all leaves; jitted, for calls outside of any jit."""
        return jax.jit(program(self.pcg, self.mesh))

    def __call__(self, *args: Any) -> Any:
        """What the planned function gives for arguments of the shapes that it was planned for."""
        captured = self._made.captured
        leaves = self._checked(args)
        if not any(isinstance(x, jax.core.Tracer) for x in leaves):
            leaves = self._placed(leaves)
        return jax.tree.unflatten(captured.out_tree, self._program(*leaves, *captured.consts))

    def _checked(self, args: tuple[Any, ...]) -> list:
        captured = self._made.captured
        leaves, tree = jax.tree.flatten(args)
        if tree != captured.in_tree:
            raise PlanError(
                f"{self.__name__} was planned for arguments of the structure\n    {captured.in_tree}\n"
                f"but is called with\n    {tree}\n    Call unity.optimize again for these. (docs: plan#shapes)"
            )
        wrong = []
        for path, x, node in zip(captured.paths, leaves, self.original.inputs, strict=False):
            aval, tensor = jax.typeof(x), node.tensors[0]
            if tuple(aval.shape) != tensor.shape or aval.dtype != tensor.dtype:
                wrong.append(f"    {path}: planned for {tensor}, called with {aval.str_short()}")
        if wrong:
            more = f"\n    and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise PlanError(
                f"{self.__name__} is called with other shapes than it was planned for:\n" + "\n".join(wrong[:5]) + more
                + "\n    Call unity.optimize again for these. (docs: plan#shapes)"
            )  # fmt: skip
        return leaves

    def _placed(self, leaves: list) -> list:
        """Arrays that lie elsewhere than planned are moved, at a cost that the user should know of."""
        moved, placed = 0, []
        for x, sharding in zip(leaves, self._shardings, strict=False):
            here = isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim)
            moved += 0 if here else 1
            placed.append(x if here else jax.device_put(x, sharding))
        if moved and self.machine.devices > 1 and not self._warned:
            self._warned = True
            warnings.warn(
                f"{moved} of {len(leaves)} arrays are not placed as the plan wants them, and are moved at every call;"
                " place them once with plan.shard(...)",
                stacklevel=3,
            )
        return placed

    def explain(self, *, file: Any = None) -> None:
        """Prints what was decided: every operator's parallelization and cost, every collective, what could not be split."""
        from unity.explain import explain  # rich is imported only when something is shown

        explain(self, file)

    def diff(self, other: Plan | None = None) -> PlanDiff:
        """What is different: between the program as captured, on one device, and this plan; or between this plan and another.

        The other may be of another program, budget or machine. Printed it is text; it can be Markdown, HTML, JSON and DOT too.
        """
        from unity.difference import PlanDiff
        from unity.summary import captured_summary_of, summary_of

        if other is None:
            return PlanDiff(captured_summary_of(self), summary_of(self))
        return PlanDiff(summary_of(self), summary_of(other))

    def to_json(self) -> dict[str, Any]:
        """The plan as data for other tools: the parallel graph, the rules behind it, costs by line. (`save` keeps what can run.)"""
        from unity.summary import summary_of

        return summary_of(self).to_json()

    def memory_timeline(self, *, gradient: bool | None = None) -> MemoryTimeline:
        """What one device holds while a step runs: the bytes over time, the peak and what holds it, by operator and line.

        More exact than `memory`, which the search adds up: the step is traced, and laid in memory as the compiler would. Nothing is
        compiled, and no devices are needed.
        """
        from unity.exec.liveness import plan_timeline

        return plan_timeline(self, self._made.search.training.backward if gradient is None else gradient)

    def check(self, *, gradient: bool | None = None) -> Check:
        """Compiles the plan and compares the program's collectives and memory with the prediction, line by line."""
        from unity.exec.check import compare

        return compare(self, self._made.search.training.backward if gradient is None else gradient)

    def check_derivation(self) -> tuple[Step, ...]:
        """Replays how the captured program was rewritten, step by step, with none of the search's code, and gives the steps.

        Each step must be a rule of the library (by its hash), applied where its conditions and types hold, and the last one must
        lead to the program that is run. That program, parallelized, must be well-typed operator by operator, and without its
        parallelization operators it must be what was derived. Raises DerivationError, naming the step that is wrong.
        """
        rewriting = self.rewriting
        if rewriting is not None:
            rewriting.check(rewriting.derivation)
        check(self.pcg)
        if erased(self.pcg).key != self.serial.key:
            raise DerivationError("the parallel graph without its parallelization operators is not the graph that was derived")
        return rewriting.derivation.every if rewriting is not None else ()

    def save(self, path: str | Path) -> None:
        """Writes the plan and its whole frontier as JSON. A crash while saving leaves an old file whole."""
        from unity.planfile import save

        save(path, self._made, self._candidate)

    def __repr__(self) -> str:
        return f"<Plan of {self.__name__} on {self.machine.name}: {self.time * 1e3:.3g} ms, {self.memory / 1e6:.4g} MB per device>"


class Frontier(Sequence[Plan]):
    """The points that no other beats in both time and memory, fastest first. Each is a plan."""

    def __init__(self, made: Made, chosen: Candidate) -> None:
        self._made, self._chosen = made, chosen
        self._candidates, self.exact = made.frontier

    def __len__(self) -> int:
        return len(self._candidates)

    @overload
    def __getitem__(self, index: int) -> Plan: ...
    @overload
    def __getitem__(self, index: slice) -> list[Plan]: ...
    def __getitem__(self, index: int | slice) -> Plan | list[Plan]:
        if isinstance(index, slice):
            return [Plan(self._made, c) for c in self._candidates[index]]
        if not -len(self) <= index < len(self):
            raise IndexError(f"the frontier has {len(self)} points, there is no point {index}")
        return Plan(self._made, self._candidates[index])

    def __iter__(self) -> Iterator[Plan]:
        return (self[k] for k in range(len(self)))

    def __str__(self) -> str:
        from unity.explain import frontier_table, rendered

        return rendered(frontier_table(self._candidates, self._chosen, self.exact))

    __repr__ = __str__

    def plot(self, path: str | Path | None = None) -> Any:
        """The frontier as a matplotlib figure (the extra `plot`), written to `path` if one is given."""
        from unity.explain import frontier_plot

        return frontier_plot(self._candidates, self._chosen, self._made.search.machine.name, path)
