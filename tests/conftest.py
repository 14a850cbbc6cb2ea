"""Eight virtual CPU devices for every test, asked for before anything starts JAX's backend; and what many tests need."""

import gc
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from ci_cases import CI, fewer
from hypothesis import settings

DEVICES = "--xla_force_host_platform_device_count=8"

# LLVM's optimizing is a third of the time of tests that compile (of the LSTM's programs 19.4 CPU seconds, 13.3 without). The passes
# over HLO, which decide what is stored and sent, are the same without.
UNOPTIMIZED = "--xla_backend_optimization_level=0"

# XLA writes kernels by MLIR, each in a context of its own, which is a third of the time of tests that compile (of `test_table.py`
# 458 CPU seconds, 310 by the emitters of before). What is sent is the same; of what is held, scatters can differ. So what memory is
# predicted for is compiled as users' programs are, and so are those whose text is the subject.
KERNELS = "xla_cpu_use_fusion_emitters"
KNOWN = version("jaxlib").startswith("0.10.")  # a compiler that has no such flag (any more) ends the process
AS_USERS: dict[str, str | bool] = {KERNELS: True} if KNOWN else {}

# XLA compiles a program's kernels in up to 32 parts side by side, each by an LLVM of its own. The other core is another test's,
# and in one part it is a third less work (of a step of a GPT and its gradients 0.25 CPU seconds, 0.17 in one part).
PARTS = "xla_cpu_parallel_codegen_split_count"

FLAGS = f"{DEVICES} {UNOPTIMIZED} --{KERNELS}=false --{PARTS}=1" if KNOWN else f"{DEVICES} {UNOPTIMIZED}"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# The first example of a test compiles, and takes a thousand times as long as the others. A gate must say the same of the same
# code every time, so it draws the same examples; by hand, every run draws new ones.
settings.register_profile("unity", max_examples=fewer(50), deadline=None, derandomize=CI)
settings.load_profile("unity")


# What JAX and the tests before have left is a million objects, and to look through all of them at every 700,000 new ones was a
# fifth of the time (of three files, the joint search's among them, 73 CPU seconds of 310; with these it is 9).
gc.set_threshold(20_000, 20, 10)


@pytest.fixture(autouse=True, scope="module")
def _unchanged_precision() -> Iterator[None]:
    """No module of tests leaves 64-bit types enabled, which would change the programs of all tests after it."""
    import jax  # the process that hands out tests does not need it

    def wide() -> bool:
        return jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]

    before = wide()
    yield
    after = wide()
    jax.config.update("jax_enable_x64", before)
    assert after == before, "these tests changed jax_enable_x64, as exported files do when they are run: enable it by in_64_bits"


@pytest.fixture(autouse=True, scope="session")
def _few_programs() -> Iterator[None]:
    """In CI, a search that is given no budget prices as few programs as lead to a rewriting where a test wants one.

    Of a loss of three layers a plan took 9.7 CPU seconds; with these it is 1.8.
    """
    if not CI:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unity.transforms.rewriting.PROGRAMS", 40)
        yield


@pytest.fixture
def as_users_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks compile kernels as XLA does where nobody says otherwise."""
    from unity.exec import planned_step

    options = planned_step.compiler_options
    monkeypatch.setattr(planned_step, "compiler_options", lambda *platform: {**options(*platform), **AS_USERS})


@pytest.fixture
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, so that nothing is found there that another one has left."""
    path = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    return path
