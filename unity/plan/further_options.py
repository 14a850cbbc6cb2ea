"""Options of `unity.optimize` that few calls need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypedDict

from unity.base.errors import OptionError
from unity.substitutions.language.library import Library


@dataclass(frozen=True)
class PipelineShape:
    """A pipeline that a plan must have: `unity.optimize(..., pipeline=unity.PipelineShape(4, 16))`.

    Attributes:
        stages: the number of stages, each on different devices.
        micro_batches: the number of micro-batches, a multiple of the stages.
        schedule: "1f1b", "gpipe" or "2bw"; by default 1F1B where the program allows it, and else GPipe.
    """

    stages: int
    micro_batches: int
    schedule: str | None = None


class FurtherOptions(TypedDict, total=False):
    """Options of `unity.optimize` and `unity.step` that few calls need, passed by name like the others.

    Only the searches "unity" and "captured" use pipelines, branches, recomputed layers and micro-batches.

    Attributes:
        pipelines: whether scans over layers may become pipelines, where that is better. True by default. Constraints other than
            pins of arguments exclude pipelines, because they refer to the function as it is.
        pipeline: the pipeline that the plan must have.
        branches: whether independent branches may run at the same time, on separate groups of devices, where that is better, also
            beside a pipeline. True by default.
        branch_groups: the number of groups of devices on which the plan must have branches.
        pack: whether weights may be packed: those of such branches into arrays on the branches' devices only, and those that the
            program joins into arrays that are joined once. `plan.shard` then returns weights of other shapes, in the same tree,
            and `plan.shard.unpack` restores the function's own. False by default; `unity.step` packs none.
        padding: whether dimensions that the devices do not divide, such as a vocabulary of 50,257 tokens, may be padded, where that
            is better. With `pack=True`, `plan.shard` stores weights with zeros behind them; otherwise every step pads them. False
            by default.
        recompute: whether the backward pass may recompute layers from the values that cross their borders, as `jax.checkpoint`
            around them does, if nothing fits the memory limit otherwise. A `jax.checkpoint` in the function always stays. True by
            default.
        offload: whether layers that are recomputed may have their products with weights in the memory of the host instead of
            recomputing those, and whether the optimizer's state of weights may be there until the update, where that is better.
            Needs a machine with a link to it (`unity.Machine.host`). False by default.
        micro_batches: the number of micro-batches, for which the loss is computed one after the other and gradients are added up.
            True chooses the number, beside recomputed layers, where the memory limit excludes the fastest plan. The loss must be a
            sum or a mean over samples, or a function of such. None by default: the samples of a step stay together.
        reduce_in: a type narrower than float32, such as "bfloat16": partial sums and gradients of that type are rounded on every
            device and added in it, which sends fewer bytes. By default they are added in float32 and rounded once.
        rules: the rules that may be used: the path of a library, a loaded one, or () for none. The default is unity's own library.
        seconds: a time limit for the search in the place of `budget`. The plan may then differ from run to run.
        overlap: whether to prefer plans that hide communication behind computing, on machines whose devices do both at once (GPUs):
            the plan then has the shortest simulated step among the candidates, in the searches "unity" and
            "captured", unless `objective="memory"`. Otherwise, it has the least sum of operators and collectives. False by default.
        measure: whether to simulate plans that are predicted to be nearly as fast as the fastest, to run the best of them on the
            devices of this process, and to choose the fastest of those. Needs `objective="time"` and no `machine`.
        seed: the seed of searches that draw at random.
    """

    pipelines: bool
    pipeline: PipelineShape | None
    branches: bool
    branch_groups: int | None
    pack: bool
    padding: bool
    recompute: bool
    offload: bool
    micro_batches: bool | int | None
    reduce_in: str | None
    rules: str | Path | Library | tuple[()] | None
    seconds: float | None
    overlap: bool
    measure: bool
    seed: int


@dataclass(frozen=True)
class Transforms:
    """The options about transformations of the program."""

    pipelines: bool = True
    pipeline: PipelineShape | None = None
    branches: bool = True
    branch_groups: int | None = None
    pack: bool = False
    padding: bool = False
    recompute: bool = True
    offload: bool = False
    micro_batches: bool | int | None = None

    @classmethod
    def of(cls, options: FurtherOptions) -> Transforms:
        """Return the options about transformations, with the defaults of those that are left out."""
        return cls(**{name: options[name] for name in cls.__dataclass_fields__ if name in options})

    @property
    def has_required(self) -> bool:
        """Whether the plan must have a pipeline, branches, or a number of micro-batches."""
        return bool(self.required)

    @property
    def required(self) -> str:
        """The options, as they are written in a call, that say which transformations the plan must have; "" without any."""
        values = {"pipeline": self.pipeline, "branch_groups": self.branch_groups, "micro_batches": self.required_micro_batches}
        return " and ".join(f"{name}={value!r}" for name, value in values.items() if value is not None)

    @property
    def required_micro_batches(self) -> int | None:
        """The number of micro-batches that the plan must have, or None."""
        return None if isinstance(self.micro_batches, bool) else self.micro_batches


def refuse_unknown(options: Mapping[str, Any], known: frozenset[str], name: str, docs: str) -> None:
    """Raise OptionError if a call of `name` has an option that is not known. `docs` is the page and section about options."""
    if unknown := sorted(options.keys() - known):
        near = [match for option in unknown for match in get_close_matches(option, sorted(known), 1)]
        hint = f"did you mean {' and '.join(near)}? It has" if near else "expected one of"
        raise OptionError(f"{name} has no option {', '.join(unknown)}: {hint} {', '.join(sorted(known))}. (docs: {docs})")
