"""The README's picture: time against memory for a 12-layer GPT on eight A100s. `python -m benchmarks.picture`."""

from __future__ import annotations

from pathlib import Path

import unity
from benchmarks import models

TARGET = Path(__file__).parent.parent / "docs" / "frontier.png"


def main() -> None:
    model = models.get("gpt2_padded", batch=32)
    plan = unity.optimize(model.loss, model.params, model.batch, machine=unity.Machine.grid(1, 8, "a100"))
    figure = plan.frontier.plot()
    figure.set_size_inches(7, 4)
    figure.savefig(TARGET, dpi=110)
    print(TARGET)


if __name__ == "__main__":
    main()
