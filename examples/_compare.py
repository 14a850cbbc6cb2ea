"""Losses of two trainings of the same model, side by side."""


def print_losses(one: list[float], many: list[float], devices: int) -> None:
    print(f"\n{'step':>6} {'1 device':>12} {f'{devices} devices':>12} {'difference':>12}")
    every = max(1, len(one) // 10)
    for step, (alone, together) in enumerate(zip(one, many, strict=True)):
        if step % every == 0 or step == len(one) - 1:
            print(f"{step:>6} {alone:>12.6f} {together:>12.6f} {abs(alone - together):>12.1e}")
    largest = max(abs(alone - together) / abs(alone) for alone, together in zip(one, many, strict=True))
    print(f"\nlargest relative difference: {largest:.1e}")
