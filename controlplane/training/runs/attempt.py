"""One attempt at a run: what its trainer has told so far, and what it used."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from django.db.models import F, Value
from django.db.models.functions import Coalesce

from controlplane.training.models import TrainingRun
from controlplane.training.runs.events import Kind, Level, StepMetrics, event_add, metrics_forget
from controlplane.training.runs.trainer import LossCurve
from controlplane.usage.training import training_usage_add, training_usage_remove

CPU = "cpu"
GOES_ON = "The job continues after step"


class Attempt:
    """The record of one attempt: events and usage. `settle` writes it when the attempt ends.

    has_advanced  whether the run's state was saved later than where the attempt before began
    """

    def __init__(self, run: TrainingRun, num_sharing: Callable[[], int] = lambda: 1) -> None:
        self.run = run
        self._metrics = StepMetrics(run)
        self._num_sharing = num_sharing
        self._curve = LossCurve()
        self._device = CPU
        self._trained_tokens = self._tokens_before = 0
        self._started_after: int | None = None  # that step; None: this is written
        self._curve_from = 0  # the losses up to that step are missing in the curve
        self.has_advanced = False
        self._warnings: list[str] = []
        self._used_s = 0.0
        self._used_until: float | None = None

    def begin(self) -> None:
        """Note that the trainer starts."""
        self._used_until = time.monotonic()

    def note(self, event: dict[str, Any]) -> None:
        """Note a line of the trainer."""
        self._use()
        if event.get("event") == "started":
            self._device = str(event.get("device") or CPU)[:64]
            self._started_after = int(event.get("resumed_step") or 0)
            self._curve_from = self._started_after
            self._warn_of_leaks(event)
            if self._started_after:
                # The trainer counts the tokens before its checkpoint, too.
                self._tokens_before = self.run.trained_tokens or 0
        if event.get("event") == "saved":
            self.has_advanced = True
        if event.get("event") == "warning":
            self.warn(str(event.get("message"))[:500])
        if event.get("event") == "progress":
            self._metrics.note(event)
            if event.get("loss") is not None:
                self._curve.add(event["step"], event["loss"])
        tokens = event.get("trained_tokens")
        if isinstance(tokens, int):
            self._trained_tokens = max(self._trained_tokens, tokens - self._tokens_before)

    def _warn_of_leaks(self, started: dict[str, Any]) -> None:
        leaked, rows = started.get("leaked_rows"), started.get("validation_rows")
        if leaked and not self._started_after:
            self.warn(
                f"{leaked} of {rows} rows to validate with have a prompt that is trained on, too: "
                "their losses, by which the best state is chosen, are too good"
            )

    def warn(self, message: str) -> None:
        """Have the run's owner told; written with the next metrics."""
        self._warnings.append(message[:1].upper() + message[1:])

    def _use(self) -> None:
        """Count the time since the last call; runs that train together share it equally."""
        now = time.monotonic()
        if self._used_until is not None:
            self._used_s += (now - self._used_until) / max(1, self._num_sharing())
            self._used_until = now

    def write(self) -> None:
        """Write the metrics that wait, in place of those of steps that are made again."""
        step = self._started_after
        if step is not None and self.run.attempts > 1:
            metrics_forget(self.run, after_step=step)
            if step:
                # A trainer that lost its platform saves once more, and cannot say so.
                self.has_advanced |= step > self._last_began_after()
                event_add(self.run, f"{GOES_ON} {step}", step=step)
        self._started_after = None  # last: while the database is away, this is called again
        self._metrics.write()
        while self._warnings:
            event_add(self.run, self._warnings[0], level=Level.WARN)
            del self._warnings[0]

    def _last_began_after(self) -> int:
        """Return the step after which the last resumed attempt began; 0: none was resumed."""
        began = self.run.events.filter(message__startswith=GOES_ON).order_by("-pk")
        return int(began.values_list("data__step", flat=True).first() or 0)

    def _curve_after(self, step: int) -> LossCurve:
        """Return the curve with the losses before the checkpoint that this attempt began from."""
        curve = LossCurve()
        before = self.run.events.filter(kind=Kind.METRICS, data__step__lte=step)
        names = ("data__step", "data__train_loss")
        for point in [*before.order_by("pk").values_list(*names), *self._curve.points]:
            if point[1] is not None:
                curve.add(*point)
        return curve

    def progress(self, event: dict[str, Any]) -> dict[str, Any]:
        """Return the progress for the run's row: the newest event, and the curve so far."""
        self._use()
        if "step" not in event:
            return event
        if self._curve_from:
            self._curve = self._curve_after(self._curve_from)
            self._curve_from = 0
        return {**event, "losses": self._curve.points}

    def settle(self) -> None:
        """Write the last metrics and the usage, in the transaction that ends the attempt.

        An attempt that the platform lost is not settled: nobody pays for it.
        """
        self.write()
        if self._used_until is None:
            return
        run = self.run
        training_usage_add(
            run_id=run.pk,
            attempt=run.attempts,
            adapter=run.adapter.name,
            base_model=run.adapter.base_model.name,
            trained_tokens=self._trained_tokens,
            device=self._device,
            is_gpu=self._device != CPU,
            seconds=self._used_s,
        )
        before = Coalesce(F("trained_tokens"), Value(0))
        rows = TrainingRun.objects.filter(pk=run.pk)
        rows.update(trained_tokens=before + self._trained_tokens)


def unsettle(run: TrainingRun) -> None:
    """Take back the usage of a settled attempt, because its adapter was lost before it was stored.

    Call it in the transaction that queues the run again.
    """
    tokens = training_usage_remove(run.pk, run.attempts)
    TrainingRun.objects.filter(pk=run.pk).update(trained_tokens=F("trained_tokens") - tokens)
