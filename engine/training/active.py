"""A run that takes part: its place in the pools, and how far it has come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.training.packer import Piece, cut_pieces, example_lengths
from engine.training.parameters import AdapterLayout, Span
from engine.training.policy import Policy, Samples
from engine.training.preferences import add_figures
from engine.training.reference import Reference
from engine.training.run import RunRequest
from engine.training.schedule import RowOrder, learning_rate
from engine.training.validation import Validation
from kernels.training import RunStep


class ActiveRun:
    """One run's state between micro-batches.

    step        optimiser steps made
    tokens      that were trained on in these steps
    figures     of the step that is under way: of its rows that went through a micro-batch
    reference   None: it compares no pairs
    validation  None: it is not validated
    """

    def __init__(
        self,
        request: RunRequest,
        layout: AdapterLayout,
        span: Span,
        *,
        budget: int,
        step: int = 0,
        tokens: int = 0,
    ) -> None:
        self.request, self.layout, self.span = request, layout, span
        self.step, self.tokens = step, tokens
        self._budget = budget
        settings, rows, held_out = request.settings, request.rows, request.held_out
        lengths = example_lengths(rows, settings.rows_per_example)
        self._order, self._num_examples = RowOrder(settings, lengths), len(lengths)
        self.reference = Reference(request, self._order, budget) if settings.has_pairs else None
        self.validation: Validation | None = None
        if held_out is not None:
            pairs = None if self.reference is None else self.reference.held_out
            self.validation = Validation(held_out, settings.steps, budget, pairs)
        self._plan_step()

    @property
    def is_finished(self) -> bool:
        return self.step >= self.request.settings.steps

    @property
    def is_validating(self) -> bool:
        """Return whether its last step is being validated: its next rows are held-out ones."""
        return self.validation is not None and self.validation.made is not None

    @property
    def awaits_samples(self) -> bool:
        """Return whether it continues with answers to `examples`, once it is given them."""
        is_sampled = self.request.settings.samples is not None
        return is_sampled and (self.is_validating or not (self.is_finished or self._pieces))

    @property
    def examples(self) -> Sequence[int]:
        """The prompts whose answers it awaits."""
        held_out = self.request.held_out
        if held_out is not None and self.is_validating:
            return range(len(held_out.rows))
        return self._examples

    def give_samples(self, samples: Samples) -> None:
        """Continue with the answers that it awaits, to be trained on."""
        policy = Policy.of(samples, self.request.settings)
        rows = samples.rows
        self._pieces = cut_pieces(rows, range(len(rows)), self._budget, 1.0, policy=policy)
        add_figures(self.figures, samples.figures)

    @property
    def is_read_only(self) -> bool:
        """Return whether its next rows change nothing: they are held out, or compared with."""
        return self.is_validating or not (self.reference is None or self.reference.is_whole)

    @property
    def piece(self) -> Piece:
        """The rows of the run that the next micro-batch takes."""
        if self.reference is not None and not self.reference.is_whole:
            return self.reference.piece
        if self.validation is not None and self.is_validating:
            return self.validation.piece
        return self._pieces[self._next]

    @property
    def is_step_whole(self) -> bool:
        """Return whether all rows of the step went through a micro-batch: the update is due."""
        return not self.awaits_samples and self._next == len(self._pieces)

    def pass_piece(self, figures: Mapping[str, float]) -> None:
        """Note that `piece` went through a micro-batch, and its part of the step's figures."""
        add_figures(self.figures, figures)
        self._step_tokens += self.piece.num_tokens
        self._next += 1

    def update(self) -> RunStep:
        """Return the optimiser's update that is due when the step is whole."""
        settings = self.request.settings
        return RunStep(
            first=self.span.first,
            size=self.span.size,
            step=self.step + 1,
            lr=learning_rate(settings, self.step),
            beta1=settings.beta1,
            beta2=settings.beta2,
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            max_norm=settings.max_grad_norm or float("inf"),
        )

    def end_step(self) -> None:
        """Count the step as done and plan the next one."""
        self.step += 1
        self.tokens += self._step_tokens
        self._plan_step()

    def _plan_step(self) -> None:
        self.figures: dict[str, float] = {}
        self._step_tokens, self._next, self._pieces = 0, 0, list[Piece]()
        self._examples: Sequence[int] = ()
        if self.is_finished:
            return
        rows, settings = self.request.rows, self.request.settings
        steps = steps_per_epoch(
            self._num_examples, settings.batch_size, settings.gradient_accumulation
        )
        epoch, number = divmod(self.step, steps)
        first = number * settings.rows_per_step
        examples = self._order.epoch(epoch)[first : first + settings.rows_per_step]
        if settings.samples is not None:
            self._examples = examples
            return
        if self.reference is None:
            weight, pairs = 1 / sum(rows.num_answers[example] for example in examples), None
        else:
            weight, pairs = 1 / len(examples), self.reference.trained
        self._pieces = cut_pieces(rows, examples, self._budget, weight, pairs)


def steps_per_epoch(num_rows: int, batch_size: int, gradient_accumulation: int = 1) -> int:
    """Optimiser steps that take each row once; the last may have fewer rows."""
    batches = -(-num_rows // batch_size)
    return -(-batches // gradient_accumulation)
