"""The declared types of plan files and of entries of the plan cache."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from unity.base.documents import Natural, Record
from unity.base.user_warnings import IssuedWarning
from unity.constraints.bound_constraints import BoundRecord
from unity.machine.machine import Machine
from unity.pcg.ir.compact_json import FoldedGraphs
from unity.plan.files.strategies import Figure, Strategies
from unity.plan.summary import RuleUse, SummaryRecord
from unity.search.cost.cost import Training
from unity.search.cost.state_sizes import StateMemory, StateSizes
from unity.search.substitution.trace import RuleApplication
from unity.substitutions.language.parallel_derivation import ParallelizationRecord
from unity.transforms.branches import BranchingRecord
from unity.transforms.loops import LoopRewritingRecord
from unity.transforms.micro_batching import MicroBatchingRecord
from unity.transforms.packing import JoiningRecord
from unity.transforms.padding import PaddingRecord
from unity.transforms.pipelining import AlikeRecord, UnlikeRecord
from unity.transforms.recomputing import RecomputingRecord
from unity.transforms.rewriting import RewritingRecord

SCHEMA = 11

AnyTransformation = (
    RecomputingRecord
    | MicroBatchingRecord
    | LoopRewritingRecord
    | RewritingRecord
    | AlikeRecord
    | UnlikeRecord
    | BranchingRecord
    | JoiningRecord
    | PaddingRecord
)


class TrainingRecord(Record):
    """The parts of a training step that were planned.

    Attributes:
        backward: whether there is a backward pass.
        optimizer_slots: bytes of the optimizer's state that are divided like a weight, for each byte of the weight.
        other_slots: the same of weights with another number of them, by the argument's name.
        whole_state: bytes of the state that every device stores.
        state_memory: the memory that the divided bytes of the state lie in.
    """

    backward: bool
    optimizer_slots: Natural | Figure
    other_slots: tuple[tuple[str, Natural | Figure], ...] = ()
    whole_state: Natural = 0
    state_memory: StateMemory = StateMemory.DEVICE

    @classmethod
    def of(cls, training: Training) -> TrainingRecord:
        """Return the record of what was planned."""
        state = training.state
        return cls(training.backward, state.slots, state.others, state.whole, state.memory)

    @property
    def planned(self) -> Training:
        """The parts of a training step, as a search counts them."""
        state = StateSizes(self.optimizer_slots, self.other_slots, self.whole_state, self.state_memory)
        return Training(self.backward, state)


class PlanDocument(Strategies, tag_field="unity", tag="plan", kw_only=True):
    """A plan: its types, transformations and predicted figures. Its first point is its own, the others are of its frontier.

    Attributes:
        graph: the hash of the captured graph.
        arguments: the shapes and types of the function's arguments and constants.
        differentiated: the numbers of the arguments that gradients are computed of.
        shardings: whether the shardings that the function states are constraints.
        limit: bytes on one device that the plan may need; None for infinity, which JSON lacks.
        seconds: the time of the search.
        interrupted: whether Ctrl-C ended the search.
        exact: whether the points are all that the frontier has.
        whole: whether the points form a frontier, or are only some points of one.
        may_overlap: whether overlap=True, which was not given, may lead to another plan.
        checksums: the checksum of every other part.
    """

    schema: Annotated[int, Meta(ge=SCHEMA, le=SCHEMA)] = SCHEMA
    graph: str
    arguments: tuple[str, ...]
    transformations: tuple[AnyTransformation, ...]
    machine: Machine
    training: TrainingRecord
    differentiated: tuple[Natural, ...]
    applications: tuple[RuleApplication, ...]
    constraints: BoundRecord
    shardings: Literal["free", "keep"]
    limit: float | None
    seconds: float
    interrupted: bool
    exact: bool
    whole: bool
    may_overlap: bool = False
    checksums: dict[str, str] = field(default_factory=dict)


class CachedPlan(PlanDocument, kw_only=True):
    """A plan in the cache, with the warnings that its search issued."""

    warnings: tuple[IssuedWarning, ...]


class StepRecord(Record):
    """The texts of a report's step."""

    title: str
    says: str
    uses: tuple[RuleUse, ...]


class StepsRecord(Record):
    """The steps of a report, and the graph after each."""

    told: tuple[StepRecord, ...]
    graphs: FoldedGraphs


class CostsRecord(Record):
    """Distinct descriptions of costs, as terms and texts, and the number of each node's."""

    rows: tuple[tuple[tuple[str, str], ...], ...]
    nodes: tuple[Natural, ...]


Priced = tuple[float, str]  # a figure to sort by, and its text


class MemoryTable(Record):
    """The live buffers of a device at its peak: in all, by reason, negative ones, and by reason, operator and line.

    `offloaded` are the bytes in the memory of the host.
    """

    whole: Priced
    parts: tuple[tuple[str, float, str], ...]
    less: tuple[tuple[str, float, str], ...]
    rows: tuple[tuple[str, str, str, Priced], ...]
    offloaded: Priced | None = None


class TimelineRow(Record):
    """A device or a link of a simulated step. A bar has a start, a length, and the number of its label."""

    name: str
    kind: str
    busy: str
    bars: tuple[tuple[float, float, Natural], ...]


class TimelineTable(Record):
    """A simulated step: its time, its rows, and how many rows and bars are not shown."""

    whole: str
    seconds: float
    rows: tuple[TimelineRow, ...]
    left: tuple[Natural, Natural]
    labels: tuple[str, ...]


class ReportRecord(Record):
    """The part of a report that needs the plan's function."""

    steps: StepsRecord
    costs: CostsRecord
    memory: MemoryTable
    timeline: TimelineTable
    blocked: tuple[str, ...]
    gap: str = ""


class SavedPlan(PlanDocument, kw_only=True):
    """A plan that a user saved, with the summaries and the report that are shown without its function."""

    captured: SummaryRecord
    planned: SummaryRecord
    parallelization: ParallelizationRecord
    report: ReportRecord | None = None
