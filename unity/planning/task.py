"""The search for a plan: the programs that are searched for a request, and the choice of the plan among their strategies.

The searches "unity" and "captured" start from the captured program. A rewritten program replaces it where that is better by the
objective, and so does one with padded dimensions, if the user allows it. If the limit excludes the fastest strategy of the better
one, layers of that are recomputed; if it excludes all, the program with recomputed layers is rewritten, too. Micro-batches are
tried next, if the user asks for them. Last, a pipeline, and branches on separate groups of devices, are tried on both.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from unity.base.errors import ConstraintError, InfeasibleError, OptionError
from unity.base.formatting import size
from unity.base.interruption import UntilInterrupted
from unity.base.processes import same
from unity.base.user_warnings import recorded_warnings, repeat, warn_user
from unity.constraints.conflicts import conflict
from unity.constraints.kinds import Across, Constraint, OperatorPin
from unity.machine.machine import Machine
from unity.pcg.ir.payloads import ScheduleKind
from unity.pcg.parallel.parallelize import Assignment
from unity.pcg.parallel.stages import Mixed
from unity.plan.files import cache
from unity.plan.options import CONSTRAINED, no_branches, no_pipeline, not_decomposed
from unity.plan.plan import Plan
from unity.plan.plan_family import PlanFamily
from unity.planning.other_searches import as_published, by_substitution, in_sequence
from unity.planning.ranking import Solution, fastest_simulated, measured
from unity.planning.refusal import LeanPipelines, LimitedPrograms, refusal
from unity.planning.request import Request
from unity.planning.sub_machines import sub_machines
from unity.search.cost.operator_runs import stacking_seconds
from unity.search.cost.state_sizes import StateMemory
from unity.search.joint.joint import GAIN, Budget
from unity.search.joint.pricing import Prices
from unity.search.memory.backend import backend_of
from unity.search.memory.lower_bound import LeastMemory
from unity.search.request import Wish
from unity.search.session import Candidate, Search
from unity.transforms.branches import BranchesWish, Forked
from unity.transforms.branches import best as best_branches
from unity.transforms.micro_batching import MicroBatchingWish, leanest_micro_batches
from unity.transforms.micro_batching import best as best_micro_batches
from unity.transforms.packing import joining_of
from unity.transforms.padding import best as best_padding
from unity.transforms.pipelining import PipelineCandidate, PipelineWish, best_unlike
from unity.transforms.pipelining import best as best_pipeline
from unity.transforms.recomputing import RecomputingChoice, RecomputingWish, best_steps_of_scans, of_all_layers
from unity.transforms.recomputing import best as best_recomputing

STACKING = 0.02  # the part of a step's time that loops take to stack values, beyond which their steps may recompute some


@dataclass(frozen=True, eq=False)
class Task(Request):
    """The search for the plan of a request.

    Attributes:
        names_conflicts: whether an error names the constraints that leave no plan, which takes one more search for each constraint.
    """

    names_conflicts: bool = True

    def plan_on(self, machine: Machine) -> Plan:
        """Return the plan for one machine, from the cache if the same request was planned before."""
        started = time.perf_counter()
        path = cache.entry(self.captured, machine, self.training, self.settings)
        self.say("looking in the cache")
        cached = cache.recall(path, self.captured, self.fn, lambda: self.rewriter.library)
        # Several processes must measure together, or not at all: unless all of them have the same entry, all of them search.
        if self.local and not same("" if cached is None else Plan(*cached[:2]).program.pcg.key):
            cached = None
        if cached is not None:
            family, candidate, issued = cached
            repeat(issued)
            return Plan(self.timed(family, started), candidate)
        with recorded_warnings() as issued:
            family, candidate = self.searched(machine)
        family = replace(self.timed(family, started), limit=self.limit)
        if family.interrupted:
            self.say("interrupted: this is the best so far, and the next call searches again")
        else:
            cache.keep(path, family, candidate, issued)
        return Plan(family, candidate)

    def timed(self, family: PlanFamily, started: float) -> PlanFamily:
        """Return the family of a plan with the seconds since its start, and whether another `overlap` may lead to another plan."""
        may_overlap = self.kind in CONSTRAINED and self.objective != "memory" and not self.overlap
        return replace(family, seconds=time.perf_counter() - started, may_overlap=may_overlap)

    def plan_on_fewest(self, machine: Machine) -> Plan:
        """Return the fastest plan on the fewest devices that fit one (TensorOpt's mini-parallelism)."""
        *parts, whole = sub_machines(machine)
        for part in parts:
            self.say(f"trying {part.devices} devices")
            try:
                return replace(self, names_conflicts=False).plan_on(part)
            except (InfeasibleError, ConstraintError):  # a part may lack an axis that a constraint names
                continue
        return self.plan_on(whole)

    @property
    def settings(self) -> dict[str, Any]:
        """All that a plan depends on besides the function, the machine and the training, as JSON data."""
        settings = {"objective": self.objective, "limit": self.limit, "seed": self.seed, "search": self.kind, "steps": self.budget}
        settings |= {"here": self.local, "overlap": self.overlap, "measure": self.measure, "constraints": self.bound.record}
        settings |= asdict(self.transforms)
        return settings | self.rewriter.settings

    def searched(self, machine: Machine) -> Solution:
        """Return the solution that the request's search prefers, or the one that runs fastest if plans are to be measured."""
        if self.kind in CONSTRAINED:
            family, candidate = self.searched_jointly(machine)
        else:
            others = {"sequential": in_sequence, "unity-rules": by_substitution}
            family, candidate = others.get(self.kind, as_published)(self, machine)
        return self.measured(family, candidate) if self.measure and not family.interrupted else (family, candidate)

    def measured(self, family: PlanFamily, candidate: Candidate) -> Solution:
        """Return the point that runs fastest, of those near a candidate. Ctrl-C leaves the candidate."""
        try:
            ranking = measured(family, candidate, self.limit, self.say)
        except KeyboardInterrupt:
            return replace(family, interrupted=True), candidate
        return replace(family, tried=ranking.tried), ranking.chosen

    def searched_jointly(self, machine: Machine) -> Solution:
        """Return the best solution over the captured program and those that it may be transformed into.

        After Ctrl-C this is the best solution so far. Raises KeyboardInterrupt if no solution was reached, or if the plan must have
        a transformation that a solution so far may lack.
        """
        reached = UntilInterrupted(self.improvements(machine))
        solutions = list(reached)
        if not reached.interrupted:
            return self.overlapped(solutions, machine)
        if not solutions or self.transforms.has_required:
            raise KeyboardInterrupt
        family, candidate = solutions[-1]
        return replace(family, interrupted=True), candidate

    def overlapped(self, solutions: Sequence[Solution], machine: Machine) -> Solution:
        """Return the solution with the shortest simulated step, over all programs that are nearly as fast as the last.

        The last has the least sum of operators and collectives. After Ctrl-C it stays.
        """
        best = solutions[-1]
        if not self.overlap or self.objective == "memory" or not backend_of(machine).overlaps:
            return best
        self.say("simulating what overlaps")
        try:
            return fastest_simulated(best, () if self.transforms.has_required else solutions, self.limit)
        except KeyboardInterrupt:
            return replace(best[0], interrupted=True), best[1]

    def improvements(self, machine: Machine) -> Iterator[Solution]:
        """Yield solutions as the search proceeds. The last is the best.

        Raises InfeasibleError after the last if nothing fits, or if the plan must have a transformation that is infeasible. The
        error names the constraints to blame, if there is a plan without them.
        """
        try:
            refusal = yield from self.attempts(machine)
        except InfeasibleError as error:  # the plan must have a transformation
            refusal = partial(str, error)
        if refusal is not None:
            conflicting = self.conflict_on(machine) if self.names_conflicts and self.bound.every else None
            raise InfeasibleError(conflicting or refusal())

    def conflict_on(self, machine: Machine) -> str | None:
        """Return the message about the smallest set of constraints that leaves no plan, or None if no plan exists without them."""
        search = self.search(self.captured, Prices(machine, self.training))
        required = self.transforms.required
        fits_at_any_limit = bool(required) and self.has_plan(machine, self.bound.every, math.inf)
        limit = self.limit if not required or fits_at_any_limit else math.inf
        return conflict(self.bound, search, lambda some: self.has_plan(machine, some, limit), limit, required)

    def has_plan(self, machine: Machine, some: Sequence[Constraint], limit: float) -> bool:
        """Return whether there is a plan that obeys some of the constraints, by a search without rewriting.

        It ends at the first solution that fits, unless the plan must have a transformation.
        """
        rewriter = replace(self.rewriter, budget=Budget(programs=0))
        # A limit's search, unlike that for the least memory, ends where bounds exclude that anything fits.
        quick = replace(self, bound=self.bound.of(some), limit=limit, objective="time", rewriter=rewriter, local=False)
        attempts = quick.attempts(machine)
        try:
            with warnings.catch_warnings(action="ignore"):
                solutions = list(attempts if self.transforms.has_required else islice(attempts, 1))
        except InfeasibleError:
            return False
        return bool(solutions)

    def attempts(self, machine: Machine) -> Generator[Solution, None, Callable[[], str] | None]:
        """Yield solutions as the search proceeds, and return the error message, yet to be computed, if nothing fits.

        Raises InfeasibleError after the last if the plan must have a transformation that is infeasible.
        """
        prices = Prices(machine, self.training, bodies=self.captured.bodies, restrict=self.bound, pack=self.may_pack())
        captured = PlanFamily(self.fn, self.captured, self.search(self.captured, prices), 0.0, bound=self.bound)
        if self.is_excluded(captured.search):  # transformations keep the arguments and their types, so they cannot help
            return partial(self.refusal_of, captured, prices, None, LimitedPrograms(), LeanPipelines())
        keeping, best = yield from self.rewritten(captured, prices)
        padded = self.padded(keeping, prices, best) if self.padding_allowed else None
        if padded is not None:
            keeping, best = padded[0], padded
            yield best
        choice = self.recomputed(keeping, prices, best) if self.transforms.recompute else None
        programs, best = yield from self.with_recomputation(keeping, prices, best, choice)
        batched = LimitedPrograms()
        if self.transforms.micro_batches:
            best, batched = yield from self.micro_batched(keeping, prices, best)
            if self.transforms.required_micro_batches is not None:
                return None
        best = yield from self.best_on_groups(programs, prices, best)
        if best is None:
            pipeline, pipelines = self.leanest_pipeline(keeping, prices)
            if pipeline is None or pipeline[1].memory > self.limit:
                return partial(self.refusal_of, keeping, prices, choice, batched, pipelines)
            yield pipeline
        return None

    def may_pack(self) -> bool:
        """Return whether weights may be joined or stored padded. Warns if optimizer states that differ in size forbid it."""
        pack = self.transforms.pack and not self.bound.every
        if pack and self.training.state.others:
            warn_user(
                "pack=True: no weights are joined or stored padded, since the optimizer's state of some is larger than of others"
                " (docs: memory#optimizer-state)"
            )
            return False
        return pack

    def with_recomputation(
        self, keeping: PlanFamily, prices: Prices, than: Solution | None, choice: RecomputingChoice | None
    ) -> Generator[Solution, None, tuple[list[PlanFamily], Solution | None]]:
        """Yield the solutions of a program with chosen layers recomputed, where they are better than `than`.

        Where nothing fits without, the recomputed program is rewritten, too.

        Returns the programs that further transformations start from, and the best solution, `than` included.
        """
        if choice is None or choice.best is None:
            return [keeping], than
        recomputing = keeping.then(choice.best.transformation, choice.best.search)
        if than is None:
            recomputing, best = yield from self.rewritten(recomputing, prices)
            return [keeping, recomputing], best
        solution = recomputing, choice.best.candidate
        if not self.is_better(solution, than):
            return [keeping], than
        yield solution
        return [keeping, recomputing], solution

    def best_on_groups(
        self, programs: Sequence[PlanFamily], prices: Prices, than: Solution | None
    ) -> Generator[Solution, None, Solution | None]:
        """Yield the solutions of some programs on groups of devices, where they are better than `than`.

        Returns the best solution, `than` included. Raises InfeasibleError if every program refuses what the plan must have, or if
        some do and no solution is known.
        """
        best, refusals = than, list[InfeasibleError]()
        for program in programs:
            try:
                for solution in self.on_groups(program, prices, best):
                    best = solution
                    yield best
            except InfeasibleError as error:
                refusals.append(error)
            if self.transforms.has_required and not refusals:
                break  # this program has what the plan must have
        if refusals and (best is None or len(refusals) == len(programs)):
            raise refusals[-1]
        return best

    def padded(self, keeping: PlanFamily, prices: Prices, than: Solution | None) -> Solution | None:
        """Return a program with padded dimensions, or None if none fits and is better than the solution without, `than`."""
        wish = Wish(**self.wish(prices, than, None))
        best = best_padding(keeping.captured, prices.machine, wish, prices.pack, prices.bodies)
        if best is None:
            return None
        return self.if_better((keeping.then(best.transformation, best.search), best.candidate), than, None)

    def recomputed(
        self, keeping: PlanFamily, prices: Prices, than: Solution | None, limit: float | None = None
    ) -> RecomputingChoice:
        """Return the best choice of recomputed layers of a program.

        Args:
            keeping: the program.
            prices: the prices of operators.
            than: the solution that keeps all layers and is to be beaten, unless the plan must have another transformation. It can
                be beaten only if the limit excludes the fastest strategy, or if much of its time goes into what loops stack.
            limit: the memory limit, if it is not that of the task.
        """
        if than is None and self.is_hopeless(keeping.search):
            return RecomputingChoice()
        if than is not None and self.transforms.has_required:
            return RecomputingChoice()
        offload = self.transforms.offload and prices.machine.host is not None
        limit = self.limit if limit is None else limit
        wish = RecomputingWish(**self.wish(prices, than, None), limit=limit, offload=offload)
        if than is None or self.is_limited(than):
            return best_recomputing(keeping.captured, wish)
        search, launch = keeping.search, prices.machine.device.launch
        stacking = stacking_seconds(search.graph, search.differentiated, launch) if search.counted else 0.0
        is_worth_a_try = self.objective != "memory" and stacking > STACKING * than[1].time
        return best_steps_of_scans(keeping.captured, wish) if is_worth_a_try else RecomputingChoice()

    def micro_batched(
        self, keeping: PlanFamily, prices: Prices, than: Solution | None
    ) -> Generator[Solution, None, tuple[Solution | None, LimitedPrograms]]:
        """Yield the program over micro-batches, without and with all layers recomputed, where that is better than `than`.

        Returns the best solution, `than` included, and the programs that were tried. If the user chose their number, `than` does
        not count; otherwise they are tried only if the limit excludes its fastest strategy. Raises OptionError if the program
        cannot have that number, InfeasibleError if nothing fits with it.
        """
        required, best = self.transforms.required_micro_batches, than
        tried = LimitedPrograms()
        if self.inside:
            raise OptionError(
                f"micro_batches={self.transforms.micro_batches}, but {self.inside[0]} constrains the function: leave one out"
            )
        if required is not None:
            than = None
        elif than is not None and not self.is_limited(than):
            return best, tried
        for program in self.with_all_recomputed(keeping, prices):
            wish = MicroBatchingWish(**self.wish(prices, than, None), limit=self.limit)
            try:
                choice = best_micro_batches(program.captured, wish, required)
            except Mixed as reason:
                if required is not None:
                    raise OptionError(not_decomposed(required, str(reason))) from None
                warn_user(f"micro_batches=True: the plan has none, since {reason} (docs: memory#micro-batches)")
                break
            tried += LimitedPrograms.of(choice)
            if choice.best is not None:
                solution = program.then(choice.best.transformation, choice.best.search), choice.best.candidate
                if than is None or self.is_better(solution, than):
                    than = best = solution
                    yield solution
            if than is not None and than[1].time <= (1 + GAIN) * keeping.search.fastest.time:
                break
        if required is not None and than is None:
            raise InfeasibleError(refusal(keeping.search.machine, self.limit, tried))
        return best, tried

    def with_all_recomputed(self, keeping: PlanFamily, prices: Prices) -> list[PlanFamily]:
        """Return a program, and the one in which all of its layers are recomputed, if it has any and the options allow that."""
        recomputing = of_all_layers(keeping.captured) if self.transforms.recompute else None
        if recomputing is None:
            return [keeping]
        return [keeping, keeping.then(recomputing, self.search(recomputing.after, prices))]

    def refusal_of(
        self,
        keeping: PlanFamily,
        prices: Prices,
        choice: RecomputingChoice | None,
        batched: LimitedPrograms,
        pipelines: LeanPipelines,
    ) -> str:
        """Return the error message if nothing fits.

        Args:
            keeping: the program.
            prices: the prices of operators.
            choice: the choice of recomputed layers, if the option allows any.
            batched: the programs over micro-batches that were tried.
            pipelines: the pipelines that were tried.
        """
        way = self.state_on_host_way(keeping.search) + self.micro_batches_way(keeping, prices)
        way += "" if choice is not None else self.recomputing_way(keeping, prices)
        others = batched if choice is None else LimitedPrograms.of(choice) + batched
        tried = LimitedPrograms((keeping.search, *others.tried), (keeping.search, *others.searched))
        others_allowed = self.transforms.recompute or self.transforms.micro_batches or self.may_pipeline(prices.machine)
        is_state_alone = self.is_hopeless(keeping.search) and bool(others_allowed)
        return refusal(prices.machine, self.limit, tried, way, pipelines, self.padding_allowed, is_state_alone)

    @property
    def padding_allowed(self) -> bool:
        """Whether the plan may have padded dimensions."""
        return self.transforms.padding and not self.bound.every

    def recomputing_way(self, keeping: PlanFamily, prices: Prices) -> str:
        """Return recomputed layers as a way out of a memory limit, if the option is off and they may fit."""
        # Under a limit of 0, programs are listed only for how much memory they need at least.
        leanest = self.recomputed(keeping, prices, None, limit=0.0).leanest
        if leanest is None or leanest.least_memory.total >= keeping.search.least_memory.total:
            return ""
        least = leanest.least_memory.total
        return f"recompute=True, with at least {size(least)}, or " if least <= self.limit else ""

    def state_on_host_way(self, search: Search) -> str:
        """Return an optimizer's state on the host as a way out of a memory limit, if the option is off and it may fit."""
        state = self.training.state
        if state.memory is not StateMemory.DEVICE or search.machine.host is None:
            return ""
        training = replace(self.training, state=replace(state, memory=StateMemory.EITHER))
        least = replace(search, training=training).least_memory
        is_way_out = least.total < search.least_memory.total and least.total <= self.limit
        return f"offload=True, with at least {size(least.total)}, or " if is_way_out else ""

    def micro_batches_way(self, keeping: PlanFamily, prices: Prices) -> str:
        """Return micro-batches as a way out of a memory limit, if the option is off and they may fit."""
        if self.transforms.micro_batches or keeping.search.least_memory.state > self.limit:
            return ""
        try:
            programs = [leanest_micro_batches(program.captured).after for program in self.with_all_recomputed(keeping, prices)]
            least = min(self.search(program, prices).least_memory.total for program in programs)
        except Mixed:
            return ""
        return f"micro_batches=True, with at least {size(least)}, or " if least <= self.limit else ""

    def leanest_pipeline(self, plain: PlanFamily, prices: Prices) -> tuple[Solution | None, LeanPipelines]:
        """Return the pipeline with the least bound on memory, at its leanest point, and all that were tried.

        Without a pipeline, or if its bound exceeds the limit, the first is None.
        """
        bounds: list[LeastMemory] = []
        if self.is_hopeless(plain.search) or not self.may_pipeline(prices.machine):
            return None, LeanPipelines()

        def bounded(search: Search) -> Candidate:  # stands for a point whose memory is the bound, since a search takes longer
            bounds.append(search.least_memory)
            return Candidate(math.inf, search.least_memory.total, Assignment((), {}, {}, {}))

        memory = replace(self, objective="memory")
        wish = replace(PipelineWish(**memory.wish(prices, None, None)), choose=bounded)
        best, _ = self.best_pipeline(plain, prices.machine, wish)
        if best is None or best.search.least_memory.total > self.limit:
            return None, LeanPipelines(bounds=bounds)
        leanest = best.search.leanest
        return (plain.then(best.transformation, best.search), leanest), LeanPipelines(leanest, bounds)

    def rewritten(self, plain: PlanFamily, prices: Prices) -> Generator[Solution, None, tuple[PlanFamily, Solution | None]]:
        """Yield the solutions of a program and of the best program that it is rewritten to.

        Returns the better program, and its solution if any fits.
        """
        pack = prices.pack
        best, chosen, interrupted = self.solution_of(plain, prices), None, False
        if best is not None:
            yield best
            loops = self.with_loop_rules(plain, prices, best)
            if loops is not None:
                plain, best = loops[0], loops
                yield best
        captured = plain.captured
        if best is not None or pack:  # a rewritten program may fit, with its weights joined, where the captured one does not
            weight = math.inf if best is None else self.weight(best[0].search)
            chosen, interrupted = self.rewriter.best(captured, replace(prices, weight=weight), self.say)
        if chosen is not None:
            rewritten = plain.then(chosen, self.search(chosen.after, prices))
            solution = self.solution_of(rewritten, prices)
            if solution is not None and (best is None or self.is_better(solution, best)):
                plain, best = rewritten, solution
                yield best
        if interrupted:  # skip the parts that would follow
            raise KeyboardInterrupt
        return plain, best

    def with_loop_rules(self, plain: PlanFamily, prices: Prices, than: Solution) -> Solution | None:
        """Return a program after rules of loops, or None if none fits and is better than the solution without, `than`.

        A pin of an operator's result names dimensions that the result of all steps does not have in these places.
        """
        if any(isinstance(c, OperatorPin) for c in self.bound.every):
            return None
        weighted = replace(prices, weight=self.weight(than[0].search))
        for rewriting in self.rewriter.best_of_loops(plain.captured, weighted, than[1].time, self.say):
            solution = self.solution_of(plain.then(rewriting, self.search(rewriting.after, prices)), prices)
            better = self.if_better(solution, than, None) if solution is not None else None
            if better is not None:
                return better
        return None

    def on_groups(self, plain: PlanFamily, prices: Prices, than: Solution | None) -> Iterator[Solution]:
        """Yield the program with a pipeline, with branches on separate groups of devices, or with both, if better than `than`."""
        pipelined = self.pipelined(plain, prices, than)
        if pipelined is not None:
            yield pipelined
        last = self.pipelined_or_branched(plain, prices, than, pipelined)
        if last is not None:
            yield last

    def solution_of(self, plain: PlanFamily, prices: Prices) -> Solution | None:
        """Return a program's best solution that fits.

        Where weights may be packed, the program with its joined weights packed is searched, too, and the better one returned.
        """
        candidate = self.fitting(plain.search)
        solution = None if candidate is None else (plain, candidate)
        joining = joining_of(plain.captured, prices.machine.devices, prices.bodies) if prices.pack else None
        if joining is None:
            return solution
        self.say("joining weights")
        search = self.search(joining.after, prices)
        candidate = self.fitting(search)
        if candidate is None or (solution is not None and self.worth(candidate) >= self.worth(solution[1])):
            return solution
        return plain.then(joining, search), candidate

    def pipelined_or_branched(
        self, plain: PlanFamily, prices: Prices, than: Solution | None, pipelined: Solution | None
    ) -> Solution | None:
        """Return the program with a pipeline, with branches on separate groups of devices, or with both.

        Branches are tried on the best program with a pipeline, if there is one. Returns None if none of these fits and is better
        than the solution without them, `than`. Raises InfeasibleError if the plan must have branches and none fit.
        """
        solution, refused = self.branched(pipelined[0] if pipelined is not None else plain, prices, pipelined or than)
        groups = self.transforms.branch_groups
        if groups is None:
            return solution or pipelined
        if pipelined is not None and self.transforms.pipeline is None:  # branches may be better, or only exist, without it
            other, more = self.branched(plain, prices, than)
            both, refused = [s for s in (solution, other) if s is not None], [*refused, *more]
            solution = min(both, key=lambda s: self.worth(s[1]), default=None)
        if solution is None:
            raise InfeasibleError(no_branches(prices.machine, groups, list(dict.fromkeys(refused)), size(self.limit)))
        return solution

    def pipelined(self, plain: PlanFamily, prices: Prices, than: Solution | None) -> Solution | None:
        """Return the program with a pipeline, or None if none fits and is better than the solution without one, `than`."""
        required = self.transforms.pipeline
        numbers = None if required is None else (required.stages, required.micro_batches)
        schedule = None if required is None or required.schedule is None else ScheduleKind(required.schedule)
        if required is not None and self.inside:
            raise OptionError(f"pipeline={required!r}, but {self.inside[0]} constrains the function: leave one out")
        if not self.may_pipeline(prices.machine):
            return None
        wish = PipelineWish(**self.wish(prices, than, required), exactly=numbers, schedule=schedule)
        best, refused = self.best_pipeline(plain, prices.machine, wish)
        if best is None:
            if required is not None:
                raise InfeasibleError(no_pipeline(prices.machine, required, refused, size(self.limit)))
            return None
        return self.if_better((plain.then(best.transformation, best.search), best.candidate), than, required)

    def may_pipeline(self, machine: Machine) -> bool:
        """Return whether the options, the constraints and the number of devices allow a pipeline."""
        if not self.transforms.pipelines or self.inside:
            return False
        return machine.devices > 1 or self.transforms.pipeline is not None

    def best_pipeline(self, plain: PlanFamily, machine: Machine, wish: PipelineWish) -> tuple[PipelineCandidate | None, list[str]]:
        """Return the best pipeline of equal stages, or else of unlike ones, and the reasons why others were refused."""
        best, refused = best_pipeline(plain.captured, machine, wish)
        if best is not None:
            return best, refused
        best, more = best_unlike(plain.captured, machine, wish, self.transforms.pack, self.unpackable(plain))
        return best, [*refused, *more]

    def branched(self, before: PlanFamily, prices: Prices, than: Solution | None) -> tuple[Solution | None, list[str]]:
        """Return the program with branches on separate groups of devices, and the reasons against those that were refused.

        The first is None if none fits and is better than the solution without them, `than`.
        """
        required, machine = self.transforms.branch_groups, prices.machine
        excluding = [c for c in self.bound.every if isinstance(c, Across) and c.word == "only"]  # splits between branches, too
        if required is not None and excluding:
            raise OptionError(
                f"branch_groups={required}, but {excluding[0]} leaves nothing else: leave one out (docs: branches#which)"
            )
        if not self.transforms.branches or excluding or (machine.devices == 1 and required is None):
            return None, []
        unpacked = self.unpackable(before)
        wish = BranchesWish(**self.wish(prices, than, required), exactly=required, pack=self.transforms.pack, whole=unpacked)
        best, refused = best_branches(Forked.of(before.captured, before.transformations), machine, self.training, wish)
        if best is None:
            return None, refused
        family = before.then(best.transformation, best.search)
        candidate = best.candidate if required is None else self.runnable(family, best.candidate)
        return self.if_better((family, candidate), than, required), refused
