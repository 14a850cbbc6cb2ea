"""Eight virtual CPU devices for every test, asked for before anything starts JAX's backend."""

import os

from hypothesis import settings

DEVICES = "--xla_force_host_platform_device_count=8"

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# the first example of a test compiles, and takes a thousand times as long as the others
settings.register_profile("unity", deadline=None)
settings.load_profile("unity")
