"""The graph as the search sees it: one variable for every operator, flat, with scans and remats opened (`search.opening`).

A *site* is an operator, or a place where a tensor's type is free: an argument (how it is stored), what a scan carries or takes
one step of, a copy that several users share, a result. Sites are joined by ports: an operand of one is a result of another,
changed from the one type to the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from unity.pcg.ir.graph import Node
from unity.pcg.ir.program import Tensor
from unity.pcg.propagation.choices import Choice
from unity.search.space.live_buffers import stays


@dataclass(frozen=True)
class Around:
    """What scans and remats stand around a site.

    `times`: how often it runs. `again`: it runs once more in the backward pass, inside a remat. `alive`: of all its runs, how
    many are held at once when each keeps something for the backward pass: all steps of a scan; but of a remat only one run,
    and of several remats side by side one (so each counts for a `share`). `stacked`: each step of a scan leaves its values to
    a stack.
    """

    times: float = 1  # of branches that run at the same time the part that counts (`pcg.branches`)
    again: bool = False
    alive: float = 1.0
    share: float = 1.0
    stacked: bool = False

    def scan(self, length: int) -> Around:
        return replace(self, times=self.times * length, alive=self.alive * length, stacked=True)

    def pipeline(self, runs: int, kept: int) -> Around:
        """As a scan of so many steps, of which so many are held at once."""
        return replace(self, times=self.times * runs, alive=self.alive * kept, stacked=True)

    def tail(self, runs: int) -> Around:
        """Of all runs one is held: the backward pass of each follows at once."""
        return replace(self, times=self.times * runs, alive=self.share, stacked=False)

    def of(self, hoisted: int) -> float:
        """How many are held at once of what is made so many times less often. In a remat that is not so when it runs again
        (`pcg.hoisting.kept_once`)."""
        return self.alive if self.again else self.alive / hoisted

    def beside(self, part: float) -> Around:
        """Among branches that run at the same time: each counts for a part."""
        return replace(self, times=self.times * part, alive=self.alive * part)

    def remat(self, siblings: int) -> Around:
        share = self.share / siblings
        return replace(self, again=True, alive=share, share=share, stacked=False)


@dataclass(frozen=True)
class Port:
    """An operand of a site: result `index` of site `source`.

    `times`: how often the change of type runs, forward so many times less often than `hoisted` says (`pcg.hoisting`). `again`: it
    is inside of a remat, and runs `repeats` times more in the backward pass, `passed` of them to compute a result anew, and not for
    a gradient alone (`pcg.again`).
    """

    source: int
    index: int
    tensor: Tensor
    times: float
    gradient: bool
    kept: float = 0.0  # how many of the operands are held at once for the backward pass, as the site sees them
    sole: bool = False  # nobody else needs it, so that before it is changed it is not kept
    again: bool = False
    repeats: int = 0
    passed: int = 0
    argument: bool = False  # an argument of the program, or a copy of one
    last: bool = False  # of its gradient nothing but a sum with others is left to do: of an argument, a copy or a view of one
    hoisted: int = 1
    apart: tuple[str, ...] = ()  # axes whose devices are not all there where the change runs: along these there is none


@dataclass(eq=False)
class Site:
    """A variable of the search."""

    kind: str  # "operator", "input", "free"
    node: Node | None
    ports: list[Port]
    results: tuple[Tensor, ...]
    around: Around = Around()
    flows: tuple[bool, ...] = ()  # gradients of the results
    stored: list[float] = field(default_factory=list)  # how many of each result are kept for the backward pass as they are
    inner: tuple[tuple[int, int], ...] = ()  # kept inside the operator, as `pcg.residuals` has it
    recomputable: bool = False  # or computed again in the backward pass
    reader: tuple[int, int] | None = None  # (site, operand) with which it may run again there as a whole, its result not kept
    instead: tuple[int, ...] = ()  # operands that are kept for that, and else are not
    weight: bool = False  # an argument that is differentiated
    step: str = ""  # "in": the result is one step of the operand; "out": it stacks the operand; "through": `_Builder.through`
    along: tuple[str, ...] = ()  # stage axes of the pipeline around it, along which it has this choice alone
    staged: Choice | None = None
    sends: float = 0  # how often the stages send each other its result
    returns: float = 0  # and its gradient
    whole: bool = False  # crosses the program's boundary: most major digits only, nothing partial
    mark: Node | None = None  # the node of `unity.constrain` whose value it is
    hoisted: int = 1  # how many times less often than others around its readers it is made, forward (`pcg.hoisting`)
    repeats: int = 0  # how often it runs once more in the backward pass, inside of remats (`pcg.again`)
    computed: tuple[tuple[int, int], ...] = ()  # how often these variables of its program do, if not never

    @property
    def end(self) -> int:
        """Of a free site: the operand that is a graph's output."""
        return 1 if self.step == "through" else 0

    @property
    def times(self) -> float:
        """How often it runs, forward so many times less often than `hoisted` says."""
        return self.around.times

    @property
    def alive(self) -> float:
        """How many of what it makes are held at once for the backward pass."""
        return self.around.of(self.ports[0].hoisted if copies(self) else self.hoisted)

    @property
    def again(self) -> bool:
        """Whether it is inside of a remat."""
        return self.around.again


@dataclass(frozen=True, eq=False)
class Sites:
    """All sites of a graph, and how to find the ones that hold an operator's or a result's type."""

    sites: tuple[Site, ...]
    of_node: dict[int, int]  # id(node) → site
    operands: dict[tuple[int, int], tuple[int, ...]]  # (id(node), position) → free sites that the operand passes through
    outputs: dict[tuple[int, int], tuple[int, ...]]
    results: dict[int, tuple[tuple[int, int], ...]]  # id(node) → (site, result) of each result, for scans


Where = tuple[int, int]  # (site, result)


def copies(site: Site) -> bool:
    """Whether a site is the same value as another, only placed otherwise."""
    return len(site.ports) == 1 and (site.kind == "free" or (site.node is not None and stays(site.node)))


SMALL = 1e-3  # of a result


def small(port: Port, site: Site) -> bool:
    """Whether an operand is an argument that takes nothing beside the site's result."""
    return port.argument and port.tensor.nbytes <= SMALL * site.results[0].nbytes
