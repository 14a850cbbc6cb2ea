"""Eight virtual CPU devices for every test, asked for before anything starts JAX's backend; and what many tests need."""

import gc
import os
from pathlib import Path

import pytest
from hypothesis import settings

DEVICES = "--xla_force_host_platform_device_count=8"

# LLVM's optimizing is a third of the time of tests that compile (of the LSTM's programs 19.4 CPU seconds, 13.3 without). The passes
# over HLO, which decide what is held and sent, are the same without.
COMPILER = "--xla_backend_optimization_level=0"

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES} {COMPILER}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# The first example of a test compiles, and takes a thousand times as long as the others. A gate must say the same of the same
# code every time, so it draws the same examples; by hand, every run draws new ones.
settings.register_profile("unity", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("unity")


# What JAX and the tests before have left is a million objects, and to look through all of them at every 700,000 new ones was a
# fifth of the time (of three files, the joint search's among them, 73 CPU seconds of 310; with these it is 9).
gc.set_threshold(20_000, 20, 10)


@pytest.fixture
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, so that nothing is found there that another one has left."""
    path = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    return path
