"""The losses of a training as a curve with a bounded number of points. Pure."""

from __future__ import annotations

MAX_POINTS = 256


class LossCurve:
    """[step, loss] in the order of the steps; at `MAX_POINTS` every second point is dropped."""

    def __init__(self) -> None:
        self.points: list[list[float]] = []

    def add(self, step: int, loss: float) -> None:
        """Add the loss of a step, unless the step is not after the last one."""
        if self.points and step <= self.points[-1][0]:
            return
        if len(self.points) >= MAX_POINTS:
            self.points = self.points[::2]
        self.points.append([step, loss])
