"""Progress a person can follow: one line every few seconds, the same on a terminal, in a log and in CI."""

import time


class Progress:
    """Counts steps of a long job and prints `name [####----] 24/48 loss 3.12, 1:32 left` to standard output.

    `every` is the number of seconds between lines; the first and the last step always print.
    """

    def __init__(self, name: str, total: int, *, done: int = 0, every: float = 5.0):
        self.name, self.total, self.done, self.every = name, total, done, every
        self.first = done
        self.started = time.monotonic()
        self.printed = float("-inf")

    def step(self, count: int = 1, **values: float) -> None:
        """Advance by `count` steps and show `values` (for example loss=3.1)."""
        self.done += count
        now = time.monotonic()
        if now - self.printed < self.every and self.done < self.total:
            return
        self.printed = now
        filled = round(20 * self.done / max(self.total, 1))
        left = (now - self.started) / (self.done - self.first) * (self.total - self.done)
        shown = "".join(f" {name} {value:.3f}" for name, value in values.items())
        bar = "#" * filled + "-" * (20 - filled)
        clock = f"{int(left) // 60}:{int(left) % 60:02d}"
        print(f"{self.name} [{bar}] {self.done}/{self.total}{shown}, {clock} left", flush=True)
