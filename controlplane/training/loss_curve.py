"""The losses of a training as a line to draw, however long it is. Pure."""

from __future__ import annotations

MAX_POINTS = 256


class LossCurve:
    """[step, loss] in the order of the steps; older ones are thinned out to `MAX_POINTS`."""

    def __init__(self) -> None:
        self.points: list[list[float]] = []

    def add(self, step: int, loss: float) -> None:
        """Take the loss of a step; one that is not after the last is ignored."""
        if self.points and step <= self.points[-1][0]:
            return
        if len(self.points) >= MAX_POINTS:
            self.points = self.points[::2]
        self.points.append([step, loss])
