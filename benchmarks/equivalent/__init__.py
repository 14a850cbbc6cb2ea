"""Classes of programs that compute the same, written as different people write them, and the step times of their plans."""

from collections.abc import Mapping

from benchmarks.equivalent import attention, images, layers, lookups, loops, losses, pairs, sequences, statistics
from benchmarks.equivalent.forms import Equivalence

CLASSES: Mapping[str, Equivalence] = {
    **losses.CLASSES, **statistics.CLASSES, **attention.CLASSES, **sequences.CLASSES, **layers.CLASSES, **images.CLASSES,
    **loops.CLASSES, **lookups.CLASSES, **pairs.CLASSES,
}  # fmt: skip
