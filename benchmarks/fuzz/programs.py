"""Random programs as data: steps over named values, each a line of JAX, so that they can be minimized, printed and run again."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from unity.pcg.parallel.marks import constrain

NAMESPACE = {"jax": jax, "jnp": jnp, "np": np, "lax": lax, "optax": optax, "constrain": constrain, "P": jax.sharding.PartitionSpec}
HEADER = """import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
"""


class Rejected(Exception):
    """A draw that JAX refuses, or that is larger than programs of the fuzzer may be."""


@dataclass(frozen=True)
class Argument:
    """An argument of a program. `kind` names the distribution of its data (`data.DRAWERS`)."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # of numpy, or "key:threefry2x32", "key:rbg", …
    kind: str


@dataclass(frozen=True)
class Step:
    """One line: `results = text`, in which `{0}` is an operand and `{f0}` a function."""

    results: tuple[str, ...]
    text: str
    operands: tuple[str, ...]
    functions: tuple[Function, ...] = ()
    unpack: bool = False  # whether the line's value is a tuple or list even of one result

    def lines(self, indent: str) -> Iterator[str]:
        """The source, with definitions of the functions in front."""
        for f in self.functions:
            yield from f.lines(indent)
        names = {f"f{k}": f.name for k, f in enumerate(self.functions)}
        left = ", ".join(self.results) + ("," if self.unpack and len(self.results) == 1 else "")
        yield f"{indent}{left} = {self.text.format(*self.operands, **names)}"

    @cached_property
    def reads(self) -> frozenset[str]:
        """Every outer value that the step reads, closures of its functions included."""
        return frozenset(self.operands).union(*(f.free for f in self.functions))

    def renamed(self, names: dict[str, str]) -> Step:
        """The step with other values read in the place of some."""
        inner = tuple(f.renamed(names) for f in self.functions)
        return replace(self, operands=tuple(names.get(o, o) for o in self.operands), functions=inner)


@dataclass(frozen=True)
class Function:
    """A function of named parameters; it may read values of the functions around it. `wrap` decorates it."""

    name: str
    parameters: tuple[str, ...]
    steps: tuple[Step, ...]
    outputs: str  # the text of what it returns
    returned: tuple[str, ...]  # the values in that text, `{0}` the first
    wrap: str = ""
    tail: str = ""  # a line after the definition, as for derivative rules

    def lines(self, indent: str) -> Iterator[str]:
        if self.wrap:
            yield f"{indent}@{self.wrap}"
        yield f"{indent}def {self.name}({', '.join(self.parameters)}):"
        for step in self.steps:
            yield from step.lines(indent + "    ")
        yield f"{indent}    return {self.outputs.format(*self.returned)}"
        if self.tail:
            yield f"{indent}{self.tail}"

    @property
    def source(self) -> str:
        return "\n".join(self.lines(""))

    @cached_property
    def free(self) -> frozenset[str]:
        """The values that it reads from around it."""
        bound = set(self.parameters).union(*(s.results for s in self.steps))
        read = set(self.returned).union(*(s.reads for s in self.steps))
        return frozenset(read - bound)

    def renamed(self, names: dict[str, str]) -> Function:
        returned = tuple(names.get(o, o) for o in self.returned)
        return replace(self, steps=tuple(s.renamed(names) for s in self.steps), returned=returned)

    def compiled(self, parameters: Sequence[str] | None = None) -> Callable[..., Any]:
        """The function itself. `parameters`: what it reads from around it becomes further parameters."""
        given = replace(self, parameters=(*self.parameters, *(parameters or ())))
        space = dict(NAMESPACE)
        exec(compile(given.source, f"<{self.name}>", "exec"), space)
        return space[self.name]

    def every(self) -> Iterator[Step]:
        """All steps, those of inner functions too."""
        for step in self.steps:
            yield step
            for f in step.functions:
                yield from f.every()


@dataclass(frozen=True)
class Program:
    """A function of arguments, and how its data is drawn.

    Attributes:
        kinds: the operations in it, for the report.
        focus: the kind of plans that it was drawn for, if any.
        weights: the arguments with a gradient, which is that of the first result; by default all floating ones, of all results.
    """

    seed: int
    arguments: tuple[Argument, ...]
    body: Function
    x64: bool
    kinds: tuple[str, ...] = field(default=())
    focus: str = ""
    weights: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        return self.body.source

    @cached_property
    def function(self) -> Callable[..., Any]:
        return self.body.compiled()

    @property
    def depth(self) -> int:
        """The longest chain of steps."""
        depth: dict[str, int] = {}
        for step in self.body.steps:
            own = 1 + max((depth.get(o, 0) for o in step.reads), default=0)
            depth |= dict.fromkeys(step.results, own)
        return max(depth.values(), default=0)

    @property
    def differentiated(self) -> tuple[int, ...]:
        """The numbers of the arguments that have a gradient."""
        floating = [k for k, a in enumerate(self.arguments) if kind_of(struct(a.dtype, a.shape).dtype) in "fc"]
        return tuple(k for k in floating if not self.weights or self.arguments[k].name in self.weights)

    def to_json(self) -> dict[str, Any]:
        """As data."""
        return {"seed": self.seed, "x64": self.x64, "arguments": [vars(a) for a in self.arguments], "source": self.source}


def struct(dtype: str, shape: Sequence[int]) -> jax.ShapeDtypeStruct:
    """An abstract array; of keys too."""
    if dtype.startswith("key:"):
        return jax.eval_shape(
            lambda: (
                jax.random.split(jax.random.key(0, impl=dtype[4:]), tuple(shape)) if shape else jax.random.key(0, impl=dtype[4:])
            )
        )
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))


def dtype_name(dtype: Any) -> str:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return "key:" + re.findall(r"key<(\w+)>", str(dtype))[0].replace("fry", "threefry2x32")
    return str(dtype)


MOST = 600  # elements of a value
SIZES = (2, 4, 6, 12, 3, 8, 1, 5, 0), (6, 6, 6, 3, 2, 2, 2, 1, 0.15)  # sizes, and how often each is drawn
FOCUSED = 0.3  # of programs, those that are drawn for one kind of plans
FLOATS = ("float64", "float32", "bfloat16", "float16")


def kind_of(dtype: Any) -> str:
    """A letter: float, integer, bool, complex, key."""
    for letter, of in (("k", jax.dtypes.prng_key), ("f", jnp.floating), ("i", jnp.integer), ("c", jnp.complexfloating)):
        if jnp.issubdtype(dtype, of):
            return letter
    return "b"


class Draw:
    """The state of drawing one function: the values there are, and the steps so far."""

    def __init__(self, rng: random.Random, main: str, outer: Draw | None = None) -> None:
        self.rng, self.main, self.outer = rng, main, outer
        self.values: list[tuple[str, jax.ShapeDtypeStruct]] = []
        self.steps: list[Step] = []
        self.sizes: tuple[Sequence[int], Sequence[float]] = SIZES if outer is None else outer.sizes
        self.root: Draw = self if outer is None else outer.root
        self.depth: int = 0 if outer is None else outer.depth + 1
        if outer is None:
            self.arguments: list[Argument] = []
            self.counter = 0
            self.special = rng.random() < 0.45  # whether data may be anything
            self.kinds: list[str] = []

    # what there is

    @property
    def visible(self) -> list[tuple[str, jax.ShapeDtypeStruct]]:
        outer = [] if self.outer is None else self.outer.visible
        return [*outer, *self.values]

    def of(self, name: str) -> jax.ShapeDtypeStruct:
        return next(s for n, s in reversed(self.visible) if n == name)

    def name(self, prefix: str) -> str:
        self.root.counter += 1
        return f"{prefix}{self.root.counter}"

    def shape(self, rank: int | None = None) -> tuple[int, ...]:
        rank = self.rng.choice((0, 1, 2, 2, 2, 2, 3, 3, 4)) if rank is None else rank
        while True:
            shape = tuple(self.rng.choices(*self.sizes, k=rank))
            if np.prod(shape) <= MOST // 3:
                return shape

    def dtype(self, letter: str) -> str:
        x64 = self.root.main == "float64" or self.rng.random() < 0.1
        if letter == "f":
            return self.root.main if self.rng.random() < 0.93 else self.rng.choice(FLOATS if x64 else FLOATS[1:])
        if letter == "c":
            return "complex128" if self.root.main == "float64" else "complex64"
        if letter == "i":
            return self.rng.choice(["int32"] * 8 + ["int64"] * 2 + ["int8", "int16", "uint8", "uint32"])
        return "bool" if letter == "b" else self.rng.choice(["key:threefry2x32"] * 6 + ["key:rbg", "key:unsafe_rbg"])

    # operands

    def argument(self, shape: Sequence[int], dtype: str, kind: str | None = None) -> str:
        """A new argument of the program."""
        root = self.root
        name = f"a{len(root.arguments)}"
        if kind is None:
            kind = self.data_kind(dtype)
        root.arguments.append(Argument(name, tuple(shape), dtype, kind))
        root.values.append((name, struct(dtype, shape)))
        return name

    def data_kind(self, dtype: str) -> str:
        from benchmarks.fuzz.data import kinds

        plain, special = kinds(dtype)
        return self.rng.choice(special) if self.root.special and self.rng.random() < 0.5 else self.rng.choice(plain)

    def pick(
        self,
        letters: str = "f",
        ndim: int | None = None,
        least: int = 0,
        shape: Sequence[int] | None = None,
        dtype: str | None = None,
        fits: Callable[[jax.ShapeDtypeStruct], bool] = lambda s: True,
        fresh: float = 0.2,
        kind: str | None = None,
        wish: Sequence[int] | None = None,
    ) -> str:
        """An operand: a value that fits, recent ones preferred, or a new argument. `wish`: the shape of a new argument."""

        def good(s: jax.ShapeDtypeStruct) -> bool:
            return (
                kind_of(s.dtype) in letters
                and (ndim is None or len(s.shape) == ndim)
                and len(s.shape) >= least
                and (shape is None or tuple(s.shape) == tuple(shape))
                and (dtype is None or dtype_name(s.dtype) == dtype)
                and fits(s)
            )

        names = [n for n, s in self.visible if good(s)]
        made = [n for n in names if not n.startswith("a")]
        if made and self.rng.random() < 0.75:
            return self.rng.choice(made[-2:])
        if names and (self.rng.random() >= fresh):
            at = len(names) - 1 - int(abs(self.rng.gauss(0, 2)))
            return names[max(at, 0)] if self.rng.random() < 0.8 else self.rng.choice(names)
        if dtype is None:
            dtype = self.dtype(self.rng.choice(letters))
        for _ in range(50):
            own = shape if shape is not None else wish if wish is not None else self.shape(ndim)
            if len(own) < least or not fits(struct(dtype, own)):
                if shape is not None or wish is not None:
                    raise Rejected("no such argument")
                continue
            return self.argument(own, dtype, kind)
        raise Rejected("no such argument")

    def beside(self, x: str, letters: str = "f") -> str:
        """An operand that broadcasts with another, of its type mostly."""
        own = self.of(x)
        shape = tuple(own.shape)
        way = self.rng.random()
        if way < 0.35:
            shapes = shape
        elif way < 0.7 and shape:
            shapes = shape[self.rng.randrange(len(shape)) :]
        elif way < 0.85:
            shapes = tuple(n if self.rng.random() < 0.5 else 1 for n in shape)
        else:
            shapes = ()
        dtype = dtype_name(own.dtype) if kind_of(own.dtype) in letters and self.rng.random() < 0.9 else None
        return self.pick(letters, shape=shapes, dtype=dtype, fresh=0.4)

    def axis(self, x: str) -> int:
        n = len(self.of(x).shape)
        if not n:
            raise Rejected("no axis")
        return self.rng.randrange(n)

    def axes(self, x: str) -> str:
        """One axis, several, or all, as text."""
        n = len(self.of(x).shape)
        if not n or self.rng.random() < 0.15:
            return "None"
        if self.rng.random() < 0.7 or n == 1:
            return str(self.rng.randrange(n) - self.rng.choice((0, n)))
        return str(tuple(sorted(self.rng.sample(range(n), self.rng.randint(2, n)))))

    # steps

    def add(self, text: str, *operands: str, functions: Sequence[Function] = (), **attributes: Any) -> list[str]:
        """A step, where JAX accepts it and its results are small. `<name>` in the text are attributes."""
        for key, value in attributes.items():
            text = text.replace(f"<{key}>", str(value))
        step = Step(("r",), text, tuple(operands), tuple(functions))
        reads = sorted(step.reads)
        probe = Function("probe", tuple(reads), (step,), "{0}", ("r",)).compiled()
        try:
            shape = jax.eval_shape(probe, *(self.of(r) for r in reads))
        except (
            TypeError,
            ValueError,
            NotImplementedError,
            IndexError,
            ZeroDivisionError,
            OverflowError,
            AssertionError,
            AttributeError,
        ) as error:
            raise Rejected(f"{text}: {type(error).__name__} {error}") from error
        leaves = jax.tree.leaves(shape)
        unpack = isinstance(shape, tuple | list)
        if not leaves or (unpack and len(leaves) != len(shape)) or (not unpack and len(leaves) != 1):
            raise Rejected("results in a tree")
        if any(np.prod(s.shape) > MOST for s in leaves):
            raise Rejected("too large")
        names = tuple(self.name("v") for _ in leaves)
        self.steps.append(replace(step, results=names, unpack=unpack))
        self.values += [(n, jax.ShapeDtypeStruct(s.shape, s.dtype)) for n, s in zip(names, leaves, strict=True)]
        return list(names)

    def forget(self, steps: int) -> None:
        """Leave out all steps but the first ones, with their results. Arguments stay."""
        lost = {name for step in self.steps[steps:] for name in step.results}
        del self.steps[steps:]
        self.values = [(name, s) for name, s in self.values if name not in lost]

    # inner functions

    def inner(self, parameters: Sequence[tuple[str, jax.ShapeDtypeStruct]], steps: int) -> Draw:
        """The draw of a function inside, of some parameters and of what is around it."""
        draw = Draw(self.rng, self.main, self)
        draw.values = list(parameters)
        draw.fill(steps)
        return draw

    def fill(self, steps: int) -> None:
        from benchmarks.fuzz.operations.table import draw_step

        for _ in range(steps):
            draw_step(self)

    def fitted(self, shape: Sequence[int], dtype: Any) -> str:
        """A value of exactly this shape and type, made from a recent one if there is none."""
        own = [n for n, s in self.values if tuple(s.shape) == tuple(shape) and s.dtype == dtype]
        own_made = [n for n in own if any(n in s.results for s in self.steps)]
        if own_made:
            return own_made[-1]
        letter = kind_of(dtype)
        made = [n for s in self.steps for n in s.results if kind_of(self.of(n).dtype) in ("f", "i") and letter in "fi"]
        base = [n for n, s in self.values if tuple(s.shape) == tuple(shape) and s.dtype == dtype]
        if made and base and letter == "f":
            try:
                return self.add("({0} + jnp.mean({1})).astype({0}.dtype)", base[0], made[-1])[0]
            except Rejected:
                pass
        if base:
            return base[-1]
        if letter == "k":
            raise Rejected("no key")
        source = (made or [n for n, s in self.values if kind_of(s.dtype) in "fib"] or [None])[-1]
        if source is None:
            raise Rejected("nothing to return")
        return self.add("jnp.broadcast_to(jnp.sum({0}), <shape>).astype('<dtype>')", source, shape=tuple(shape), dtype=dtype)[0]

    def function(self, parameters: Sequence[str], outputs: str, returned: Sequence[str]) -> Function:
        """The function of the steps so far, without those that nothing reads."""
        return Function(self.name("f"), tuple(parameters), pruned(self.steps, returned), outputs, tuple(returned))


def pruned(steps: Sequence[Step], outputs: Sequence[str]) -> tuple[Step, ...]:
    """The steps that the outputs are made of."""
    needed, kept = set(outputs), []
    for step in reversed(steps):
        if needed & set(step.results):
            kept.append(step)
            needed |= step.reads
    return tuple(reversed(kept))


def draw_program(seed: int, most: int = 12, kinds: Sequence[str] = ()) -> Program:
    """A random program. Equal seeds give equal programs.

    Args:
        seed: the seed.
        most: the largest number of steps.
        kinds: kinds of plans, for one of which it is drawn. By default it is drawn for one of all kinds, or for none.
    """
    from benchmarks.fuzz.operations.models import FOCUS, draw_for
    from benchmarks.fuzz.sample_losses import draw_sample_loss

    rng = random.Random(seed)
    main = rng.choices(("float64", "float32", "bfloat16", "float16"), (60, 22, 10, 8))[0]
    x64 = main == "float64" or rng.random() < 0.5
    focus = rng.choice(kinds) if kinds else rng.choice(sorted(FOCUS)) if rng.random() < FOCUSED else ""
    with jax.enable_x64(x64):
        while True:
            draw = Draw(rng, main)
            steps = min(most, 1 + int(rng.expovariate(1 / (1.5 if focus else 3.5))))
            try:
                if focus == "micro-batches":
                    return draw_sample_loss(seed, rng, main, x64)
                if focus:
                    draw_for(focus, draw, steps)
                else:
                    for _ in range(rng.choice((1, 1, 2))):
                        draw.argument(draw.shape(), draw.dtype("f"))
                    draw.fill(steps)
            except Rejected:
                continue
            if draw.steps:
                return replace(finished(seed, draw, x64, rng), focus=focus)


def finished(seed: int, draw: Draw, x64: bool, rng: random.Random) -> Program:
    """The program of all steps; what nothing reads is returned, sometimes as one loss."""
    read = frozenset[str]().union(*(s.reads for s in draw.steps))
    last = [n for s in draw.steps for n in s.results if n not in read]
    last = [n for n in last if kind_of(draw.of(n).dtype) != "k"] or last
    if any(kind_of(draw.of(n).dtype) == "k" for n in last):
        names = [draw.add("jax.random.key_data({0})", n)[0] for n in last]
        last = names
    floats = [n for n in last if kind_of(draw.of(n).dtype) == "f"]
    if floats and rng.random() < 0.3:
        made = [
            draw.add(rng.choice(("jnp.sum({0})", "jnp.mean({0})", "jnp.sum({0} * {0})", "jnp.max({0})")), n)[0]
            if draw.of(n).size
            else n
            for n in floats
        ]
        last = [*made, *(n for n in last if n not in floats)]
    return returning(last, seed, draw, x64)


def returning(results: Sequence[str], seed: int, draw: Draw, x64: bool) -> Program:
    """The program that returns some of the values that were drawn."""
    outputs = ", ".join(f"{{{k}}}" for k in range(len(results))) + ("," if len(results) == 1 else "")
    body = Function("fn", (), pruned(draw.steps, results), outputs, tuple(results))
    arguments = tuple(a for a in draw.arguments if a.name in body.free)
    body = replace(body, parameters=tuple(a.name for a in arguments))
    return Program(seed, arguments, body, x64, tuple(sorted(set(draw.kinds))))
