"""Kernels on a GPU against what the roofline says of them, products by alignment and size among them; and copies to its host.

`python -m benchmarks.gpu_kernels`, where there is a GPU. Each row has the seconds of a program over the least seconds: those of its
arithmetic at the preset's peak, or of reading its operands and writing its results once. *backward* is the two products, or the
gradient, that belong to it. Runs follow each other without waiting, so launching them is hidden. Then follow whole steps, of a
function and of its plan with a padded vocabulary, run in turns; and copies to pinned memory of the host and back. With names of
parts, such as `copies`, these are measured alone, and rows of others on the same kind of device stay recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

import unity
from benchmarks.alternate import alternate, ratio
from benchmarks.gpu import CASES
from benchmarks.models import concrete
from benchmarks.record import BESIDE, asked, in_order, record, results, show
from unity.machine.machine import Machine
from unity.search.cost.alignment import aligned_elements

RUNS, ROUNDS = 10, 5
SMALL = 2**25  # bytes
COPIED = 2**30  # bytes
TURNS = 15
VOCABULARY = tuple((8192, 768, n, "bfloat16") for n in (50304, 50264, 50260, 50258, 50257))  # the first of each is aligned
WORDS = tuple((4096, 1024, n, "float32") for n in (30528, 30524, 30522, 30521))
CONTRACTED = tuple((8192, k, 4096, "bfloat16") for k in (1024, 1020, 1023))
ROWS = ((m, 1024, 4096, "bfloat16") for m in (8191, 8188))
SQUARE = ((n, n, n, kind) for kind in ("bfloat16", "float32") for n in (256, 512, 1024, 2048, 4096))
FLAT = ((512, 512, n, "float32") for n in (1024, 2048, 4096, 8192))
PRODUCTS = (*VOCABULARY, *WORDS, *CONTRACTED, *ROWS, *SQUARE, *FLAT)


def softmax(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x)


def masked_softmax(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(jnp.where(jnp.tri(x.shape[-2], dtype=bool), x.astype(jnp.float32), -jnp.inf)).astype(x.dtype)


def cross_entropy(x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    return (jax.nn.logsumexp(x, -1) - x[..., 0]).mean()


def layer_norm(x: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)


def batch_norm(x: jax.Array) -> jax.Array:
    mean = x.mean((0, 2, 3), keepdims=True)
    return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean((0, 2, 3), keepdims=True) + 1e-5)


def gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x)


ELEMENTS: tuple[tuple[Callable[[jax.Array], jax.Array], tuple[int, ...], str], ...] = (
    (gelu, (8192, 8192), "float32"),
    (gelu, (8192, 8192), "bfloat16"),
    (softmax, (98304, 1024), "float32"),
    (softmax, (98304, 1024), "bfloat16"),
    (masked_softmax, (8, 12, 1024, 1024), "float32"),
    (masked_softmax, (8, 12, 1024, 1024), "bfloat16"),
    (cross_entropy, (8192, 50304), "float32"),
    (cross_entropy, (8192, 50257), "float32"),
    (cross_entropy, (8192, 50304), "bfloat16"),
    (layer_norm, (65536, 1024), "float32"),
    (layer_norm, (65536, 1024), "bfloat16"),
    (layer_norm, (8192, 8192), "float32"),
    (batch_norm, (64, 256, 56, 56), "float32"),
)


def draw(*shape: int, dtype: str) -> jax.Array:
    return jax.random.normal(jax.random.key(len(shape)), shape, dtype)


def seconds(program: Callable[..., Any], *args: Any) -> float:
    """Return the median seconds of a run among others; small arguments are copied for several runs in one program."""
    copies = 20 if sum(x.nbytes for x in args) < SMALL else 1
    args = tuple([x + k for k in range(copies)] for x in args)
    run = jax.jit(lambda *args: [program(*of) for of in zip(*args, strict=True)]).lower(*args).compile()

    def taken() -> float:
        start = time.perf_counter()
        results = [run(*args) for _ in range(RUNS)]
        jax.block_until_ready(results)
        return (time.perf_counter() - start) / RUNS / copies

    taken()
    return median(taken() for _ in range(ROUNDS))


def products() -> Iterator[dict[str, Any]]:
    card = Machine.grid(1, 1, "h200").device
    for m, k, n, dtype in PRODUCTS:
        x, w, g = draw(m, k, dtype=dtype), draw(k, n, dtype=dtype), draw(m, n, dtype=dtype)
        arithmetic = 2 * m * k * n / (card.flops_of(dtype) * card.efficiency)
        traffic = (x.nbytes + w.nbytes + g.nbytes) / card.bandwidth
        least = max(arithmetic, traffic)
        forward, backward = seconds(jnp.matmul, x, w), seconds(lambda x, w, g: (g @ w.T, x.T @ g), x, w, g)
        yield {
            "what": "product",
            "shape": f"{m} {k} {n}",
            "dtype": dtype,
            "least us": least * 1e6,
            "forward": forward / least,
            "backward": backward / least / 2,
        }


def misaligned(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return how many times as long misaligned products take as aligned ones of about the size: the least, the median, the most.

    A product counts forward and, where it is the result whose rows are misaligned, backward: `Device.misaligned` is of these.
    """
    by_shape = {(row["shape"], row["dtype"]): row for row in rows if row["what"] == "product"}
    times = []
    for group, ways in ((VOCABULARY, ("forward", "backward")), (WORDS, ("forward", "backward")), (CONTRACTED, ("forward",))):
        aligned, *others = (by_shape.get((f"{m} {k} {n}", dtype)) for m, k, n, dtype in group)
        for (_, k, n, dtype), row in zip(group[1:], others, strict=True):
            if row and aligned and any(size % aligned_elements(dtype) for size in (k, n)):
                times += [row[way] / aligned[way] for way in ways]
    return {"least": min(times), "median": median(times), "most": max(times)} if times else {}


def elements() -> Iterator[dict[str, Any]]:
    card = Machine.grid(1, 1, "h200").device
    for fn, shape, dtype in ELEMENTS:
        x = draw(*shape, dtype=dtype)
        result = jax.eval_shape(fn, x)
        g = draw(*result.shape, dtype=str(result.dtype))
        forward_least = (x.nbytes + g.nbytes) / card.bandwidth
        backward_least = (2 * x.nbytes + g.nbytes) / card.bandwidth
        yield {
            "what": fn.__name__,
            "shape": " ".join(map(str, shape)),
            "dtype": dtype,
            "least us": forward_least * 1e6,
            "forward": seconds(fn, x) / forward_least,
            "step": seconds(lambda x, g, fn=fn: jax.vjp(fn, x)[1](g), x, g) / (backward_least),
        }


def steps() -> Iterator[dict[str, Any]]:
    """Yield steps of models with a vocabulary of odd size: as they are, and padded."""
    for name in ("gpt2 small, bfloat16", "gpt2 small", "bert_large, 4 layers"):
        model = CASES[name].full()
        options: dict[str, Any] = {"machine": Machine.grid(1, 1, "h200"), "search": "captured", "progress": False}
        odd = unity.optimize(model.loss, model.params, model.batch, **options)
        even = unity.optimize(model.loss, model.params, model.batch, padding=True, pack=True, **options)
        args, runs = concrete(model), {}
        for which, step, real in (("function", model.loss, args), ("padded", even, even.shard(*args))):
            program = jax.jit(jax.value_and_grad(step)).lower(*real).compile()
            runs[which] = lambda program=program, real=real: program(*real)
        times = alternate(runs, TURNS)
        yield {
            "what": name,
            "padded": str(even.program.padding),
            "predicted ms": odd.time * 1e3,
            "predicted padded ms": even.time * 1e3,
            "ms": times["function"].median * 1e3,
            "padded ms": times["padded"].median * 1e3,
            "times as fast": ratio(times["function"], times["padded"])["ratio"],
        }


def copies() -> Iterator[dict[str, Any]]:
    """Yield the copies of an array between the device and pinned memory of its host."""
    x = draw(COPIED // 4, dtype="float32")
    away = jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))
    for what, array, end in (("copy to the host", x, away.sharding), ("copy from the host", away, x.sharding)):
        taken = []
        for _ in range(RUNS):
            start = time.perf_counter()
            jax.block_until_ready(jax.device_put(array, end, may_alias=False))
            taken.append(time.perf_counter() - start)
        yield {"what": what, "GB": COPIED / 1e9, "GB/s": COPIED / 1e9 / median(taken)}


# Each part with a column that its rows alone have.
PARTS: dict[str, tuple[Callable[[], Iterator[dict[str, Any]]], str]] = {
    "elements": (elements, "step"),
    "products": (products, "backward"),
    "steps": (steps, "times as fast"),
    "copies": (copies, "GB/s"),
}


def main() -> None:
    parts, _ = asked(__doc__, PARTS, BESIDE)
    recorded, device = results("gpu_kernels"), jax.devices()[0].device_kind
    here = recorded["rows"] if recorded.get("device") == device else []  # those of another device are not beside these
    rows = {name: [row for row in here if column in row] for name, (_, column) in PARTS.items()}
    for name in parts:
        rows[name] = []
        for row in PARTS[name][0]():
            rows[name].append(row)
            print(row, flush=True)
            measured = in_order(rows, PARTS)
            record("gpu_kernels", measured, device=device, misaligned=misaligned(measured))
    show("kernels over the roofline, padded steps, and copies", in_order(rows, PARTS))


if __name__ == "__main__":
    main()
