"""What `unity.optimize` is asked for, and the plan that it comes to: which programs are searched, and which of them is taken."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, TypeAlias

from unity.base.errors import ConstraintError, InfeasibleError, OptionError
from unity.base.formatting import size
from unity.base.interruption import UntilInterrupted
from unity.base.processes import same
from unity.constraints.bound import Bound
from unity.constraints.conflicts import conflict, possible
from unity.constraints.kinds import Across, Pin
from unity.constraints.paths import matching
from unity.exec.measure.trial import ratio
from unity.machine.machine import Machine
from unity.pcg.capture.capture import Captured
from unity.plan import cache
from unity.plan.options import no_branches, no_pipeline, shortfall
from unity.plan.plan import Plan
from unity.plan.plan_family import PlanFamily
from unity.plan.step import can_run, step_of
from unity.planning.ranking import measured
from unity.search.cost.cost import Training
from unity.search.joint.joint import GAIN
from unity.search.joint.pricing import Prices
from unity.search.published import Asked, algorithm
from unity.search.session import Candidate, Search
from unity.search.substitution.fitting import fitting, leanest
from unity.transforms.branches import BranchesWish, Forked
from unity.transforms.branches import best as best_branches
from unity.transforms.packing import joining_of
from unity.transforms.pipelining import PipelineWish, best_unlike
from unity.transforms.pipelining import best as best_pipeline
from unity.transforms.rewriting import Rewriter

Found: TypeAlias = tuple[PlanFamily, Candidate]


@dataclass(frozen=True)
class Ways:
    """What else a program may become, or must: a pipeline, and branches on devices of their own."""

    pipelines: bool | tuple[int, int] | tuple[int, int, str]
    branches: bool | int
    pack: bool

    @property
    def pipeline(self) -> tuple[int, int] | tuple[int, int, str] | None:
        """The pipeline that there must be, if any."""
        return None if isinstance(self.pipelines, bool) else self.pipelines

    @property
    def groups(self) -> int | None:
        """Of how many groups of devices there must be branches, if any."""
        return None if isinstance(self.branches, bool) else self.branches

    @property
    def asked(self) -> bool:
        """Whether there must be any of these."""
        return self.pipeline is not None or self.groups is not None


@dataclass(frozen=True, eq=False)
class Task:
    """What is asked for, whatever machine it is tried on."""

    fn: Callable[..., Any]
    captured: Captured
    training: Training
    objective: str
    limit: float
    seed: int
    kind: str  # of search
    budget: float | None
    rewriter: Rewriter
    here: bool  # on the devices of this process: what the costs say is tried
    measure: bool  # and more than what they say is fastest
    say: Callable[[str], None]
    bound: Bound
    ways: Ways

    def on(self, machine: Machine) -> Plan:
        """The plan on one machine, from the cache if it was found before."""
        started = time.perf_counter()
        path = cache.entry(self.captured, machine, self.training, self.asked)
        self.say("looking in the cache")
        known = cache.recall(path, self.captured, self.fn, lambda: self.rewriter.library)
        # Processes that measure do so together, or not at all: what not all of them know is searched for again.
        if self.here and not same("" if known is None else Plan(*known).pcg.key):
            known = None
        if known is not None:
            made, candidate = known
            return Plan(replace(made, seconds=time.perf_counter() - started), candidate)
        ours = {"unity": self.rewritten, "captured": self.rewritten, "sequential": self.sequential, "unity-rules": self.substituted}
        made, candidate = ours.get(self.kind, self.published)(machine)
        if self.measure and not made.interrupted:
            made, candidate = self.measured(made, candidate)
        made = replace(made, seconds=time.perf_counter() - started, limit=self.limit)
        if made.interrupted:
            self.say("interrupted: this is the best so far, and the next call searches again")
        else:
            cache.keep(path, made, candidate)
        return Plan(made, candidate)

    def measured(self, made: PlanFamily, candidate: Candidate) -> Found:
        """The best of what was measured; what there is if that is interrupted."""
        try:
            ranking = measured(made, candidate, self.limit, self.say)
        except KeyboardInterrupt:
            return replace(made, interrupted=True), candidate
        return replace(made, tried=ranking.tried), ranking.chosen

    @property
    def asked(self) -> dict[str, Any]:
        """What a plan depends on beside the function, the machine and the training."""
        options = {"objective": self.objective, "limit": self.limit, "seed": self.seed, "search": self.kind, "steps": self.budget}
        options |= {"here": self.here, "measure": self.measure, "constraints": self.bound.to_json()}
        options |= vars(self.ways)
        return options | self.rewriter.settings

    def rewritten(self, machine: Machine) -> Found:
        """The captured program's best strategy, or a rewritten one's where that is better. Of what was found until Ctrl-C, too."""
        reached = UntilInterrupted(self.better_and_better(machine))
        found = [found for found in reached if found is not None]
        if not reached.interrupted:
            return found[-1]
        if not found or self.ways.asked:
            raise KeyboardInterrupt
        made, candidate = found[-1]
        return replace(made, interrupted=True), candidate

    def better_and_better(self, machine: Machine) -> Iterator[Found | None]:
        """What there is after each part of the search, the last the best; nothing as long as nothing fits."""
        pack = self.ways.pack and not self.bound.every
        prices = Prices(machine, self.training, bodies=self.captured.bodies, restrict=self.bound, pack=pack)
        plain = self.made(self.captured, self.search(self.captured, prices))
        best, chosen, interrupted = self.strategy(plain, prices), None, False
        yield best
        if best is not None or pack:  # what does not fit may, with its weights joined
            weight = math.inf if best is None else self.weight(best[0].search)
            chosen, interrupted = self.rewriter.best(self.captured, replace(prices, weight=weight), self.say)
        if chosen is not None:
            other = replace(self.made(chosen.after, self.search(chosen.after, prices)), rewriting=chosen)
            found = self.strategy(other, prices)
            if found is not None and (best is None or self.taken(found, best)):
                plain, best = other, found
                yield best
        if interrupted:  # and so all that would follow
            raise KeyboardInterrupt
        piped = self.piped(plain, prices, best)
        yield piped
        found = self.spread(plain, prices, best, piped) or best
        if found is None:
            search = plain.search
            raise InfeasibleError(conflict(self.bound, search, self.limit) or shortfall(machine, search.leanest, self.limit))
        yield found

    def strategy(self, plain: PlanFamily, prices: Prices) -> Found | None:
        """A program's best strategy that fits. Where weights may be packed, with what it joins of them joined once, if that is
        better."""
        candidate = self.fitting(plain.search)
        found = None if candidate is None else (plain, candidate)
        joining = joining_of(plain.captured, prices.machine.devices, prices.bodies) if prices.pack else None
        if joining is None:
            return found
        self.say("joining weights")
        other = self.search(joining.after, prices)
        candidate = self.fitting(other)
        if candidate is None or (found is not None and self.worth(candidate) >= self.worth(found[1])):
            return found
        return replace(plain, captured=joining.after, search=other, joining=joining), candidate

    def made(self, captured: Captured, search: Search) -> PlanFamily:
        """What plans of a program share."""
        return PlanFamily(self.fn, captured, search, 0.0, bound=self.bound)

    def spread(self, plain: PlanFamily, prices: Prices, than: Found | None, piped: Found | None) -> Found | None:
        """The program with a pipeline, with branches on devices of their own, or with both: of the best with a pipeline it is
        looked at what branches gain. None if none of that fits and is better than what there is without."""
        found, refused = self.apart(piped[0] if piped is not None else plain, prices, piped or than)
        groups = self.ways.groups
        if groups is None:
            return found or piped
        if piped is not None and self.ways.pipeline is None:  # it might be better without the pipeline, or only be there so
            other, more = self.apart(plain, prices, than)
            both, refused = [f for f in (found, other) if f is not None], [*refused, *more]
            found = min(both, key=lambda f: self.worth(f[1]), default=None)
        if found is None:
            raise InfeasibleError(no_branches(prices.machine, groups, list(dict.fromkeys(refused)), size(self.limit)))
        return found

    def piped(self, plain: PlanFamily, prices: Prices, than: Found | None) -> Found | None:
        """The program with a pipeline, if one fits and is better than what there is without."""
        exactly = self.ways.pipeline
        numbers, schedule = (exactly[:2], next(iter(exactly[2:]), None)) if exactly is not None else (None, None)
        inside = [c for c in self.bound.every if not isinstance(c, Pin)]  # arguments are the same with a pipeline
        if exactly is not None and inside:
            raise OptionError(f"pipelines={exactly!r}, but {inside[0]} constrains the function: leave one out")
        if not self.ways.pipelines or inside or (prices.machine.devices == 1 and exactly is None):
            return None
        wish = PipelineWish(**self.wish(prices, than, exactly), exactly=numbers, schedule=schedule)
        found, refused = best_pipeline(plain.captured, prices.machine, wish)
        if found is None:  # weights are packed once: what is joined already stays so
            pack = self.ways.pack and plain.joining is None
            found, more = best_unlike(plain.captured, prices.machine, wish, pack, self.pinned)
            refused = [*refused, *more]
        if found is None:
            if exactly is not None:
                raise InfeasibleError(no_pipeline(prices.machine, exactly, refused, size(self.limit)))
            return None
        made = replace(plain, captured=found.pipelining.after, search=found.search, pipelining=found.pipelining)
        return self.better((made, found.candidate), than, exactly)

    def apart(self, before: PlanFamily, prices: Prices, than: Found | None) -> tuple[Found | None, list[str]]:
        """The program with branches on devices of their own, if that fits and is better than what there is without; and why what
        there is of them was refused."""
        wanted, exactly, machine = self.ways.branches, self.ways.groups, prices.machine
        inside = [c for c in self.bound.every if isinstance(c, Across) and c.word == "only"]  # which branches would not be
        if exactly is not None and inside:
            raise OptionError(f"branches={exactly}, but {inside[0]} leaves nothing else: leave one out (docs: branches#which)")
        if not wanted or inside or (machine.devices == 1 and exactly is None):
            return None, []
        wish = BranchesWish(**self.wish(prices, than, exactly), exactly=exactly, pack=self.ways.pack, whole=self.pinned)
        plain = before.captured if before.pipelining is None else before.pipelining.before
        found, refused = best_branches(Forked.of(plain, before.pipelining), machine, self.training, wish)
        if found is None:
            return None, refused
        made = replace(before, captured=found.branching.after, search=found.search, branching=found.branching)
        candidate = found.candidate if exactly is None else self.running(made, found.candidate)
        return self.better((made, candidate), than, exactly), refused

    def running(self, made: PlanFamily, best: Candidate) -> Candidate:
        """The best that the devices of this process can run, if this is for them and they can run any: `best`, or near it."""
        if not self.here or can_run(Plan(made, best)):
            return best
        self.say("looking for what these devices can run")
        others = [c for c in made.frontier[0] if c.memory <= self.limit and can_run(Plan(made, c))]
        return min(others, key=self.worth, default=best)

    @property
    def pinned(self) -> frozenset[int]:
        """The arguments that are pinned, by number: none of them is packed."""
        pins = [c.path for c in self.bound.every if isinstance(c, Pin)]
        return frozenset(k for path in pins for k in matching(path, self.bound.paths))

    def better(self, found: Found, than: Found | None, asked: object | None) -> Found | None:
        """What was found, if it is asked for, or better than what there is."""
        return found if than is None or asked is not None or self.taken(found, than) else None

    def wish(self, prices: Prices, than: Found | None, asked: object | None) -> dict[str, Any]:
        """What every `Wish` has. What is asked for, or the leanest, need not beat what there is."""
        beaten = (than[0].search, than[1]) if than is not None and asked is None and self.objective != "memory" else None
        search = partial(self.search, prices=prices)
        return {"search": search, "choose": self.fitting, "worth": self.worth, "than": beaten, "say": self.say}

    def fitting(self, search: Search) -> Candidate | None:
        """What the objective asks for, if it fits."""
        candidate = self.best(search)
        return candidate if candidate is not None and candidate.memory <= self.limit else None

    def worth(self, c: Candidate) -> tuple[float, float]:
        """What is to be small."""
        return (c.memory, c.time) if self.objective == "memory" else (c.time, c.memory)

    def sequential(self, machine: Machine) -> tuple[PlanFamily, Candidate]:
        """The best strategy of the program that is the fastest on one device (Unity, section 6.4, compares with it)."""
        chosen, interrupted = self.rewriter.best(self.captured, Prices(machine.alone, self.training), self.say)
        captured = self.captured if chosen is None else chosen.after
        search = self.search(captured, Prices(machine, self.training))
        candidate = self.best(search)
        if candidate is None or candidate.memory > self.limit:
            raise InfeasibleError(shortfall(machine, search.leanest, self.limit))
        return PlanFamily(self.fn, captured, search, 0.0, rewriting=chosen, interrupted=interrupted), candidate

    def substituted(self, machine: Machine) -> tuple[PlanFamily, Candidate]:
        """The best strategy that substitutions lead to."""
        search = self.search(self.captured, Prices(machine, self.training))
        budget = self.rewriter.budget
        found = leanest(search, budget) if self.objective == "memory" else fitting(search, self.limit, budget)
        if found.candidate.memory > self.limit:
            if found.interrupted:
                raise KeyboardInterrupt
            raise InfeasibleError(shortfall(machine, found.candidate, self.limit))
        made = PlanFamily(self.fn, self.captured, search, 0.0, (found.candidate,), applications=found.applications)
        return replace(made, interrupted=found.interrupted), found.candidate

    def published(self, machine: Machine) -> tuple[PlanFamily, Candidate]:
        """What a published algorithm finds, whose own objective it is."""
        search = self.search(self.captured, Prices(machine, self.training))
        found = algorithm(self.kind)(search, Asked(self.limit, self.seed, self.budget))
        if found.memory > self.limit:
            raise InfeasibleError(shortfall(machine, found, self.limit, f"the plan of search={self.kind!r}"))
        return PlanFamily(self.fn, self.captured, search, 0.0, (found,)), found

    def slower(self, one: Found, other: Found) -> bool:
        """Whether a step of one program, run on the devices of this process, takes longer than one of another."""
        self.say("running both programs")
        return ratio(step_of(Plan(*one), self.training), step_of(Plan(*other), self.training)) > 1

    def search(self, captured: Captured, prices: Prices) -> Search:
        """The search for a program's parallelization, which shares with others what was listed and priced."""
        graph, differentiated = captured.graph, captured.differentiated
        return Search(graph, differentiated, prices.machine, self.training, self.say, prices.listed, self.bound)

    def best(self, search: Search) -> Candidate | None:
        """What the objective asks for. None: nothing fits the limit, or obeys the constraints."""
        if self.bound.every and not possible(search):
            return None
        return search.leanest if self.objective == "memory" else search.under(self.limit)

    def taken(self, one: Found, other: Found) -> bool:
        """Whether a rewritten program is better than another by enough: as predicted, and measured where it can be. On the devices
        of this process it must be one that they can run."""
        new, old = one[1], other[1]
        leaner, faster = new.memory < (1 - GAIN) * old.memory, new.time < (1 - GAIN) * old.time
        better = leaner if self.objective == "memory" else new.memory <= self.limit and faster
        if not (better and self.here):
            return better
        if not can_run(Plan(*one)):
            return False
        return self.objective == "memory" or not can_run(Plan(*other)) or not self.slower(one, other)

    def weight(self, search: Search) -> float:
        """What a byte of memory counts in seconds, where rewritings are priced."""
        if self.objective == "memory":
            return math.inf
        return 0.0 if search.fastest.memory <= self.limit else search.rate

    def fewest(self, machine: Machine) -> Plan:
        """The fastest plan on the fewest devices that fit it (TensorOpt's mini-parallelism)."""
        *parts, whole = sub_machines(machine)
        for part in parts:
            self.say(f"trying {part.devices} devices")
            try:
                return self.on(part)
            except (InfeasibleError, ConstraintError):  # a part may lack an axis that is spoken of
                continue
        return self.on(whole)


def sub_machines(machine: Machine) -> list[Machine]:
    """Parts of a machine, smallest first, itself last: inner levels fill up before outer ones are used."""
    sizes = [level.size for level in machine.levels]
    found = {}
    for k in range(len(sizes)):
        for n in range(1, sizes[k] + 1):
            if sizes[k] % n == 0:
                part = [1] * k + [n] + sizes[k + 1 :]
                found.setdefault(prod(part), part)
    return [
        replace(machine, name=f"{machine.name} ({n} devices)" if n < machine.devices else machine.name,
                levels=tuple(replace(level, size=units) for level, units in zip(machine.levels, part, strict=True)))
        for n, part in sorted(found.items())
    ]  # fmt: skip
