"""Sites: the variables of the search. The graph is flat, with the operators inside scans and remats beside the others (`opening`).

A *site* is an operator, or a place where the type of a tensor is free: an argument (how it is stored), a carry or a slice of a
scan, a copy that several users share, a result. *Ports* connect sites: an operand of one site is a result of another, with a
change from one type to the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from unity.pcg.analysis.stacked_values import NO_KERNELS, StackingKernels
from unity.pcg.ir.graph import Node
from unity.pcg.ir.program import Body, Tensor
from unity.pcg.propagation.choice import Choice
from unity.pcg.types.factors import facts_of
from unity.search.space.live_buffers import stays


class Slicing(StrEnum):
    """The dimension that a free site's operands and results have in addition, because a loop iterates over it."""

    NONE = ""
    SLICE = "in"  # the result is one step's slice of the operand
    STACK = "out"  # the result stacks the operands of all steps
    CARRY = "through"  # a pipeline's carry: operands and results of `_Builder.finish_carry`


@dataclass(frozen=True)
class Around:
    """The control flow around a site, as far as it multiplies runs and residuals.

    Args:
        times: Runs in one step of the program; a fraction for branches that run at the same time (`pcg.parallel.branches`).
        alive: Runs whose residuals are live at once: all steps of a scan, but only one run of a remat.
        share: The fraction with which it counts, as only one of several sibling remats is live at once.
        lasting: By the depth of a remat around it, 0 for none: the runs whose values are live at once if that remat's policy saves
            them.
        stacked: Whether a scan stacks the residuals of its steps.
        remats: The numbers of the remats around it, from the outermost. They run it once more in the backward pass.
    """

    times: float = 1
    alive: float = 1.0
    share: float = 1.0
    lasting: tuple[float, ...] = (1.0,)
    stacked: bool = False
    remats: tuple[int, ...] = ()

    @property
    def again(self) -> bool:
        """Whether it is inside a remat."""
        return bool(self.remats)

    def scan(self, length: int) -> Around:
        """Return the surroundings inside a scan of `length` steps."""
        return replace(self, times=self.times * length, alive=self.alive * length, lasting=self._times(length), stacked=True)

    def accumulating(self, length: int) -> Around:
        """Return the surroundings inside a loop of `length` micro-batches, one of which is live at a time."""
        return replace(self, times=self.times * length)

    def pipeline(self, runs: int, kept: int) -> Around:
        """Return the surroundings inside a pipeline of `runs` steps, with the residuals of `kept` of them live at once."""
        return replace(self, times=self.times * runs, alive=self.alive * kept, lasting=self._times(kept), stacked=True)

    def tail(self, runs: int) -> Around:
        """Return the surroundings inside a pipeline's tail: one run is live, as the backward pass of each follows immediately."""
        return replace(self, times=self.times * runs, alive=self.share, lasting=(self.share,) * len(self.lasting), stacked=False)

    def of(self, hoisted: int) -> float:
        """Return the live runs of a value that is produced `hoisted` times less often.

        Inside a remat it is produced in every run again, so hoisting saves nothing (`pcg.analysis.hoisting.residual_factors`).
        """
        return self.alive if self.again else self.alive / hoisted

    def beside(self, part: float) -> Around:
        """Return the surroundings of one of several branches that run at the same time, which counts for a `part`."""
        return replace(self, times=self.times * part, alive=self.alive * part, lasting=self._times(part))

    def remat(self, siblings: int, number: int) -> Around:
        """Return the surroundings inside a remat.

        Args:
            siblings: The number of remats beside each other, itself included.
            number: Its number among all remats of the program.
        """
        share, lasting, remats = self.share / siblings, (*self.lasting, self.alive), (*self.remats, number)
        return replace(self, alive=share, share=share, lasting=lasting, stacked=False, remats=remats)

    def encloses(self, inner: Around) -> bool:
        """Return whether these surroundings are in no other remats than `inner` ones."""
        return inner.remats[: len(self.remats)] == self.remats

    def _times(self, factor: float) -> tuple[float, ...]:
        return tuple(runs * factor for runs in self.lasting)


@dataclass(frozen=True)
class Port:
    """An operand of a site: result `index` of site `source`.

    Args:
        source: The producer.
        index: The producer's result.
        tensor: The shape and dtype.
        times: Runs of the change of type; forward there are `hoisted` times fewer.
        gradient: Whether a gradient flows back.
        kept: Instances that are live at once as residuals, in the type that the site reads.
        sole: Whether no other site needs it, so that it is not a residual in the producer's type.
        again: Whether it is inside a remat.
        repeats: Additional runs in the backward pass (`unity.pcg.analysis.rematerialization`).
        passed: The part of `repeats` that recompute a result, and not a gradient alone.
        argument: Whether it is an argument of the program, or a copy of one.
        last: Whether its gradient only has to be summed with others: that of an argument, or of a copy, view or conversion of one.
        hoisted: The factor by which scans run it less often (`pcg.analysis.hoisting`).
        apart: Axes whose devices do not run the change together, so that it cannot communicate along them.
        derived: The operands beside it that may be partial sums of a value that it is computed from (`space.contributions`).
        contributes: Whether a whole value may become a part of a sum in the change.
        dead: Whether its users ignore the value, so that the change moves nothing in the forward pass.
    """

    source: int
    index: int
    tensor: Tensor
    times: float
    gradient: bool
    kept: float = 0.0
    sole: bool = False
    again: bool = False
    repeats: float = 0
    passed: float = 0
    argument: bool = False
    last: bool = False
    hoisted: int = 1
    apart: tuple[str, ...] = ()
    derived: tuple[int, ...] = ()
    contributes: bool = True
    dead: bool = False

    @property
    def as_priced(self) -> Port:
        """The operand without the fields that the price of its change of type does not depend on: equal ones have one price."""
        return replace(self, source=0, argument=False, derived=())


@dataclass(eq=False)
class Site:
    """A variable of the search.

    Args:
        kind: "operator", "input" (an argument) or "free".
        node: The operator or the argument; None for a free site.
        ports: The operands.
        results: The tensors of the results.
        around: The control flow around it.
        flows: For each result, whether it has a gradient.
        stored: For each result, the instances in its own type that are live at once as residuals.
        inner: Residuals inside the operator (`pcg.analysis.residuals`), as (variable, bytes).
        saved: Values of the operator that the policy of a remat around it saves, as (variable, bytes of all runs live at once).
        offloaded: Values of the operator that a policy saves in the memory of the host, as (variable, bytes of one run, runs that
            are live at once).
        recomputable: Whether the backward pass may recompute `inner`.
        reader: The only user, as (site, operand), if the backward pass may rerun the operator with it and not keep the result.
        instead: Operands that are residuals only if the operator reruns with its reader.
        weight: Whether it is a differentiated argument.
        step: The additional dimension of its operands or results.
        along: Stage axes of the pipeline around it, along which it has the choice `staged` alone.
        staged: Its choice along stage axes.
        sends: Messages between stages that send its result.
        returns: Messages between stages that send the gradient of its result.
        whole: Whether it crosses the program's boundary, where only most major digits and no partial sums are allowed.
        mark: The node of `unity.constrain` whose value it is.
        hoisted: The factor by which it runs less often, forward, than its users (`pcg.analysis.hoisting`).
        repeats: Additional runs in the backward pass, inside remats (`unity.pcg.analysis.rematerialization`).
        computed: Additional runs of single variables of its program, as (variable, runs).
        stacking: The kernels that write its rows of stacked values.
    """

    kind: str
    node: Node | None
    ports: list[Port]
    results: tuple[Tensor, ...]
    around: Around = Around()
    flows: tuple[bool, ...] = ()
    stored: list[float] = field(default_factory=list)
    inner: tuple[tuple[int, int], ...] = ()
    saved: tuple[tuple[int, float], ...] = ()
    offloaded: tuple[tuple[int, int, float], ...] = ()
    recomputable: bool = False
    reader: tuple[int, int] | None = None
    instead: tuple[int, ...] = ()
    weight: bool = False
    step: Slicing = Slicing.NONE
    along: tuple[str, ...] = ()
    staged: Choice | None = None
    sends: float = 0
    returns: float = 0
    whole: bool = False
    mark: Node | None = None
    hoisted: int = 1
    repeats: float = 0
    computed: tuple[tuple[int, float], ...] = ()
    stacking: StackingKernels = NO_KERNELS

    @property
    def body(self) -> Body | None:
        """The program of the operator, if it has one."""
        return self.node.body if self.node is not None else None

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product or a convolution."""
        return self.node is not None and facts_of(self.node.kind).product

    @property
    def end(self) -> int:
        """The operand of a free site that is a graph's output."""
        return 1 if self.step == Slicing.CARRY else 0

    @property
    def times(self) -> float:
        """Runs in one step of the program; forward there are `hoisted` times fewer."""
        return self.around.times

    @property
    def alive(self) -> float:
        """Instances of its values that are live at once as residuals."""
        return self.around.of(self.ports[0].hoisted if copies(self) else self.hoisted)

    @property
    def again(self) -> bool:
        """Whether it is inside a remat."""
        return self.around.again


@dataclass(frozen=True, eq=False)
class Sites:
    """All sites of a graph, with the sites that determine the type of every value of the graph.

    Args:
        sites: The sites, in the order in which they run.
        of_node: The site of a node, by the node's id.
        operands: The free sites that an operand passes through, by the user's id and the operand's position.
        outputs: The free sites that an output passes through, by the graph's id and the output's position.
        results: The (site, result) of each result of a scan or another node with a graph inside, by the node's id.
    """

    sites: tuple[Site, ...]
    of_node: dict[int, int]
    operands: dict[tuple[int, int], tuple[int, ...]]
    outputs: dict[tuple[int, int], tuple[int, ...]]
    results: dict[int, tuple[tuple[int, int], ...]]


Where = tuple[int, int]  # (site, result)


def copies(site: Site) -> bool:
    """Return whether a site has the value of its only operand, possibly in another type.

    A value that a policy saves by its name is another than the operand, which then need not be a residual.
    """
    if len(site.ports) != 1 or site.saved or site.offloaded:
        return False
    return site.kind == "free" or (site.node is not None and stays(site.node))


SMALL = 1e-3  # the largest size of a small operand, relative to the result


def small(port: Port, site: Site) -> bool:
    """Return whether an operand is an argument of negligible size compared with the site's result."""
    return port.argument and port.tensor.nbytes <= SMALL * site.results[0].nbytes
