"""Rules of loops: rewritings of a scan and the program around it, which no rule over a flat graph can state.

A loop rule is data here: a name, a statement, and the reason. `transforms.loops` applies it, `verify.derivations.loops` checks an
application. Its proof has two parts. The steps of both scans compute the same, by the lemmas of `rules/loops.ranks` about each
primitive that is moved (`STEPPED`), which are proved for all ranks and sizes; so the scans do, by induction on the steps
(`verify.proofs.loop_rules`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class LoopRule:
    """A rule of loops.

    Attributes:
        name: the name by which libraries, constraints and plan files refer to it.
        left: the loop that it replaces, in words of the rule language.
        right: the replacement.
        reason: a sentence for people that says why the two are equal.
        pays: where it pays, in a few words.
    """

    name: str
    left: str
    right: str
    reason: str
    pays: str

    @property
    def statement(self) -> str:
        """Both sides as text."""
        return f"{self.left}  →  {self.right}"

    def to_json(self) -> dict[str, str]:
        """Return JSON data."""
        return asdict(self)


PRODUCTS = LoopRule(
    "products-before-loop",
    "scan(c, x in xs: step(c, dot(x, w)))",
    "scan(c, y in dot(xs, w): step(c, y))",
    "A product of a step's slices with constants does not wait for the carry, so one product computes it for all steps.",
    "recurrent networks whose products of a single step are small: the weight is read once, and its gradient is one product",
)
LOOK_UPS = LoopRule(
    "look-ups-before-loop",
    "scan(c, i in is: step(c, lookup(table, i)))",
    "scan(c, y in lookup(table, is): step(c, y))",
    "Rows of a constant table at a step's slices do not wait for the carry, so one look-up reads those of all steps.",
    "recurrent networks and decoders that embed tokens in the step: the table's gradient is not read and written in every step",
)
INVARIANTS = LoopRule(
    "invariants-before-loop",
    "scan(c, x in xs: step(c, x, f(w)))",
    "scan(c, x in xs: step(c, x, v)) where v = f(w)",
    "A value of constants alone is the same in every step, so it is computed once, and so is its gradient.",
    "weights that a step transforms, such as products of two weights or normalized ones",
)
SUMS = LoopRule(
    "sums-of-products-after-loop",
    "scan(s, x in xs: s + dot(f(x), g(x)))",
    "s + dot(fs, gs) over steps, too, where fs, gs = scan(x in xs: f(x), g(x))",
    "A sum of products over steps is one product whose contracted dimensions include the steps.",
    "covariances, and gradients of a weight that a loop adds up: the sum is not read and written in every step",
)
JOINED = LoopRule(
    "products-of-joined-slices",
    "scan(c, x in xs: step(c, dot(concat(x, f(c)), w)))",
    "scan(c, x in xs: step(c, add(dot(x, split(w).0), dot(f(c), split(w).1))))",
    "A product of joined values is a sum of products, of which that of the step's slices does not wait for the carry.",
    "recurrent cells that join input and state, as Haiku's do: the products of the inputs can leave the loop",
)
RESULTS = LoopRule(
    "products-after-loop",
    "scan(c, x in xs: step(c, x), g(dot(f(c, x), w)))",
    "g(dot(fs, w)) of all steps at once, where fs = scan(c, x in xs: step(c, x), f(c, x))",
    "A product that no later step waits for is one product of all steps, and so is what is computed from it alone.",
    "recurrent networks and decoders with an output layer in the step: its weight is read once, and its gradient is one product",
)
BATCHED = LoopRule(
    "equal-loops-as-batched-loop",
    "scan(c, x in xs: step(w, c, x)), scan(d, y in ys: step(v, d, y))",
    "unstack(scan(cs, zs in stack(xs, ys): steps(stack(w, v), cs, zs))) from stack(c, d)",
    "Loops that take equal steps and do not wait for each other can take them at once, each in a lane of its own.",
    "networks in two directions, towers and ensembles whose steps are small: fewer operators are launched, each of which does more",
)
MAPPED = LoopRule(
    "mapped-loops-as-batched-loop",
    "map(x in xs: scan(c(x), y in ys(x): step(x, c, y)))",
    "ds, swap(zs) where ds, zs = scan(c(xs), y in swap(ys(xs)): steps(xs, c, y))",
    "Loops of a map's steps are equal and do not wait for each other, so they take their steps at once, each in a lane of its own.",
    "recurrent networks over one sequence after the other: fewer operators are launched, each of which does more",
)
UNROLLED = LoopRule(
    "unrolled-loop",
    "scan(c, x in xs: step(c, x))",
    "scan(c, x in xs: step(c, x), unroll=n)",
    "A loop that takes several steps in a round takes the same steps.",
    "recurrent networks whose steps are small: what the steps stack for the backward pass is written once a round",
)
WRITTEN_OUT = LoopRule(
    "written-out-loop",
    "scan(c: step(c))",
    "step(step(… step(c)))",
    "A loop takes its steps one after the other, as they are taken where they are written out.",
    "few small steps: the first and the last may be divided another way than those between, and no step stacks anything",
)
LOOP_RULES: Mapping[str, LoopRule] = {
    rule.name: rule for rule in (JOINED, LOOK_UPS, PRODUCTS, INVARIANTS, SUMS, RESULTS, BATCHED, MAPPED, UNROLLED, WRITTEN_OUT)
}
FEWER_ROUNDS = (WRITTEN_OUT, UNROLLED)  # the rules that leave the steps of a loop as they are

SUM_OVER_STEPS, PRODUCT_OF_JOINED = "sum-of-dot-over-steps", "product-of-joined"  # the lemmas of two other rules
LANES = ("first-of-joined", "last-of-joined", "step-of-reversed")  # and those of lanes, which are beside each other in a loop

# The primitives that may be applied to all steps at once, with the lemma of `rules/loops.ranks` about each. Of others that
# compute each element by itself, the operator table knows that they do; their lemmas are the first three, by number of operands.
FUNCTIONS = ("step-of-function", "step-of-function-of-two", "step-of-function-of-three")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor")
STEPPED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(COMPARISONS, (FUNCTIONS[1],)),
    **dict.fromkeys(("not", "is_finite"), (FUNCTIONS[0],)),
    "add": (FUNCTIONS[1],),
    "add_any": (FUNCTIONS[1],),
    "mul": (FUNCTIONS[1],),
    "sub": (FUNCTIONS[1],),
    "convert_element_type": (FUNCTIONS[0],),
    "stop_gradient": (FUNCTIONS[0],),
    "select_n": ("step-of-select",),
    "dot_general": ("step-of-dot", "step-of-dot-on-the-right", "step-of-batched-dot"),
    "broadcast_in_dim": ("step-of-broadcast", "step-of-constant"),
    "transpose": ("step-of-transpose",),
    "reduce_sum": ("step-of-reduction",),
    "reduce_max": ("step-of-reduction",),
    "reduce_min": ("step-of-reduction",),
    "concatenate": ("step-of-concat",),
    "stack": ("step-of-concat", "step-of-broadcast"),
    "unstack": ("step-of-slice", "step-of-reshape"),
    "slice": ("step-of-slice",),
    "split": ("step-of-slice",),
    "gather": ("step-of-look-up", "step-of-look-up-in-constant", "step-of-look-up-at-constant"),
    "reshape": ("step-of-reshape",),
    "squeeze": ("step-of-reshape",),
}
