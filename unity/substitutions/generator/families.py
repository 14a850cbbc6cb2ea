"""The families of the default library. Their tensors are small: that a rule holds at every size is confirmed and proved later."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, State, partitioned
from unity.substitutions.generator.family import Family, FamilyLeaf, Instance, WrittenPair
from unity.substitutions.language.term import Attribute
from unity.substitutions.language.typecheck import TensorType, tensor

A, B = Axis("a", 2, 0), Axis("b", 2, 0)


def each(name: str, *choices: Sequence[Attribute]) -> list[Instance]:
    """Return an operator with every combination of attributes."""
    return [(name, attributes) for attributes in itertools.product(*choices)]


MATRIX, CUBE, VECTOR, SCALAR = tensor((4, 4)), tensor((4, 4, 4)), tensor((4,)), tensor(())
IMAGE, LARGE_IMAGE, TABLE, INDICES = tensor((2, 4, 4, 4)), tensor((2, 4, 8, 8)), tensor((4, 4)), tensor((4,), dtype="int32")
KERNELS = {k: tensor((4, 4, *k)) for k in ((1, 1), (1, 3), (3, 1), (3, 3))}

PRODUCT = each("matmul")
SUM, TIMES, MINUS = each("add"), each("mul"), each("sub")
ACTIVATION = each("map", ("clip", "f"))
SWAP = each("transpose")


def joins(dims: Iterable[int]) -> list[Instance]:
    """Return concatenations and splits along dimensions."""
    dims = tuple(dims)
    return [*each("concat", dims), *each("split", dims)]


def moves(dims: Sequence[int], axis: str = "a", fused: bool = True) -> list[Instance]:
    """Return the parallelization operators along one axis. `fused`: with those that compose two others."""
    instances = [*each("partition", dims, axis), *each("combine", dims, axis), *each("replicate", axis), *each("reduce", axis)]
    if fused:
        instances += [*each("reduce_partition", dims, axis), *each("combine_replicate", dims, axis)]
        instances += [("combine_partition", (d, e, axis)) for d in dims for e in dims if d != e]
    return instances


def placed_leaves(
    type_: TensorType, states: Sequence[State], count: int = 2, free: tuple[int, ...] = (0, 1), kernel: bool = False
) -> list[FamilyLeaf]:
    """Return leaves of one shape in several states along one axis."""
    return [FamilyLeaf(tensor(type_.shape, (s,), type_.dtype), count, free, kernel) for s in states]


def family(name: str, leaves: Sequence[FamilyLeaf], *instances: Sequence[Instance], operators: int = 3, **others) -> Family:
    """Return a family from lists."""
    return Family(name, tuple(leaves), tuple(i for group in instances for i in group), operators, **others)


IMAGES, BOTH = (0, 1, 2, 3), (0, 1)
ONE_TABLE, ONE_INDICES = FamilyLeaf(TABLE, 1, BOTH), FamilyLeaf(INDICES, 1, (0,))
STACKED_TABLES = (
    WrittenPair("embedding(concat(-2, x, y), within(x, z)) = embedding(x, z)", (ONE_TABLE, ONE_TABLE, ONE_INDICES)),
    WrittenPair("embedding(concat(-2, x, y), behind(x, within(y, z))) = embedding(y, z)", (ONE_TABLE, ONE_TABLE, ONE_INDICES)),
    WrittenPair(
        "(split(-2, embedding(concat(-2, x, y), concat(-1, within(x, z), behind(x, within(y, w))))).0,"
        " split(-2, embedding(concat(-2, x, y), concat(-1, within(x, z), behind(x, within(y, w))))).1)"
        " = (embedding(x, z), embedding(y, w))",
        (ONE_TABLE, ONE_TABLE, ONE_INDICES, ONE_INDICES),
    ),
)
ALGEBRA = (
    family(
        "halves", [FamilyLeaf(MATRIX, 3, BOTH)], ACTIVATION, SUM, TIMES, SWAP, PRODUCT, joins((-1, -2)), operators=2, halves=True
    ),
    family("matrices", [FamilyLeaf(MATRIX, 4, BOTH)], PRODUCT, SUM, TIMES, ACTIVATION, SWAP, joins((-1, -2))),
    family("products", [FamilyLeaf(MATRIX, 4, BOTH)], PRODUCT, SUM, SWAP, operators=4),
    family("differences", [FamilyLeaf(MATRIX, 3, BOTH)], MINUS, SUM, TIMES, PRODUCT, SWAP, joins((-1,)), operators=2),
    family("scalars", [FamilyLeaf(MATRIX, 2, BOTH), FamilyLeaf(SCALAR, 2)], each("scale"), SUM, TIMES, PRODUCT, SWAP, joins((-1,))),
    family(
        "biases",
        [FamilyLeaf(MATRIX, 2, BOTH), FamilyLeaf(VECTOR, 2, (0,))],
        each("bias"),
        SUM,
        ACTIVATION,
        each("scale"),
        joins((-1, -2)),
    ),
    family("batches", [FamilyLeaf(CUBE, 4, (0, 1, 2))], PRODUCT, SUM, ACTIVATION, SWAP, joins((-1, -2, -3))),
    family(
        "sums",
        [FamilyLeaf(MATRIX, 2, BOTH), FamilyLeaf(SCALAR, 1)],
        each("sum", (-1, -2)),
        SUM,
        each("scale"),
        SWAP,
        joins((-1, -2)),
    ),
    family("norms", [FamilyLeaf(CUBE, 2, (0, 1, 2))], each("softmax"), each("layer_norm"), ACTIVATION, joins((-2, -3))),
    family(
        "tables",
        [FamilyLeaf(TABLE, 2, BOTH), FamilyLeaf(INDICES, 2, (0,))],
        *(each("embedding"), SUM, joins((-1, -2))),
        written=STACKED_TABLES,
    ),
    family("reshapes", [FamilyLeaf(CUBE, 2, (0, 1, 2))], each("merge", (-1, -2)), ACTIVATION),
    family("unmerged", [FamilyLeaf(MATRIX, 2, (0,))], each("unmerge", (-1,), (2,)), each("merge", (-1,)), ACTIVATION),
    family("constants", [FamilyLeaf(MATRIX, 2, BOTH)], each("ones"), each("identity"), PRODUCT, TIMES, operators=2),
    family(
        "images",
        [FamilyLeaf(IMAGE, 2, IMAGES), FamilyLeaf(KERNELS[3, 3], 2, BOTH, kernel=True)],
        *(each("conv2d", (1,), (1, 2), ("same",)), each("conv2d", (1,), (1,), ("valid",)), SUM, ACTIVATION, joins((-3, -4))),
    ),
    family(
        "kernels",
        [FamilyLeaf(IMAGE, 1, IMAGES), *(FamilyLeaf(k, 1, BOTH, kernel=True) for k in KERNELS.values())],
        *(each("conv2d", (1,), (1,), ("same",)), each("enlarge", (3,)), joins((-3, -4))),
        variables=3,
    ),
    family(
        "groups",
        [FamilyLeaf(IMAGE, 2, IMAGES), FamilyLeaf(KERNELS[3, 3], 2, BOTH, kernel=True)],
        *(each("conv2d", (1, 2), (1,), ("same",)), SUM, joins((-3, -4))),
    ),
    family(
        "pools",
        [FamilyLeaf(LARGE_IMAGE, 2, IMAGES)],
        *(each("maxpool", (3,), (1, 2), ("same",)), each("avgpool", (3,), (1, 2), ("same",))),
        *(each("mean_kernel", (3,)), each("identity_kernel", (1, 3)), each("conv2d", (0, 1), (1, 2), ("same",))),
        *(ACTIVATION, SUM, joins((-3, -4))),
        operators=2,
        variables=2,
    ),
)

STATES = (UNUSED, partitioned(0), partitioned(1), PARTIAL, REPLICATED)
LINEAR_STATES = (UNUSED, PARTIAL, REPLICATED)
PARALLEL = (
    family("moves", placed_leaves(MATRIX, STATES, 1), moves((-1, -2)), each("map", ("f",)), SWAP, axes=(A,)),
    family(
        "moves along two axes",
        [FamilyLeaf(tensor((8, 8), (s, t)), 1, BOTH) for s in STATES for t in STATES],
        *(moves((-1, -2), fused=False), moves((-1, -2), "b", fused=False)),
        axes=(A, B),
    ),
    family(
        "elementwise, parallel", placed_leaves(MATRIX, STATES, 2), moves((-1, -2)), SUM, TIMES, ACTIVATION, axes=(A,), variables=2
    ),
    family("matrices, parallel", placed_leaves(MATRIX, STATES, 2), moves((-1, -2)), PRODUCT, SWAP, axes=(A,), variables=2),
    family("joins, parallel", placed_leaves(MATRIX, STATES, 2), moves((-1, -2)), joins((-1, -2)), axes=(A,), variables=2),
    family("batches, parallel", placed_leaves(CUBE, STATES, 2, (0, 1, 2)), moves((-1, -2, -3)), PRODUCT, axes=(A,), variables=2),
    family("sums, parallel", placed_leaves(MATRIX, STATES, 1), moves((-1, -2)), each("sum", (-1, -2)), axes=(A,), variables=1),
    family("norms, parallel", placed_leaves(MATRIX, STATES, 1), moves((-1, -2)), each("softmax"), each("layer_norm"), axes=(A,)),
    family(
        "biases and scalars, parallel",
        [
            *placed_leaves(MATRIX, STATES, 1),
            *placed_leaves(VECTOR, STATES[:2] + STATES[3:], 1, (0,)),
            *placed_leaves(SCALAR, LINEAR_STATES, 1, ()),
        ],
        *(moves((-1, -2)), each("bias"), each("scale")),
        axes=(A,),
        variables=2,
    ),
    family(
        "tables, parallel",
        [*placed_leaves(TABLE, STATES, 1), *placed_leaves(INDICES, (UNUSED, partitioned(0), REPLICATED), 1, (0,))],
        *(moves((-1, -2)), each("embedding")),
        axes=(A,),
        variables=2,
    ),
    family(
        "reshapes, parallel", placed_leaves(CUBE, STATES, 1, (0, 1, 2)), moves((-1, -2, -3)), each("merge", (-1, -2)), axes=(A,)
    ),
    family(
        "images, parallel",
        [*placed_leaves(LARGE_IMAGE, STATES, 1, IMAGES), *placed_leaves(KERNELS[3, 3], STATES, 1, BOTH, kernel=True)],
        *(moves((-3, -4)), each("conv2d", (1,), (1,), ("same",)), each("conv2d", (1,), (2,), ("valid",))),
        *(each("maxpool", (3,), (2,), ("same",)), each("avgpool", (3,), (2,), ("same",))),
        axes=(A,),
        variables=2,
    ),
)

FAMILIES = ALGEBRA + PARALLEL
