"""Run: one call of `DashEngine.generate` or `stream`, with its requests and their answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import TracebackType
from typing import Self

from engine.dash.adapters import AdapterNames, NamedAdapter
from engine.dash.loop import EngineLoop, Outputs
from engine.engine import Engine
from engine.errors import EngineError
from engine.request import (
    AdapterPart,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)
from engine.text.answer_text import AnswerText
from engine.text.token_pieces import TokenPieces


@dataclass(slots=True, repr=False)
class Completion:
    """One prompt's continuation; prints as its text.

    text           "" without a tokenizer, and before it has ended; the continuation of a prompt of
                   text or ids keeps the space with which it begins
    token_ids      without the EOS or stop token that ended it; up to the one that completed a stop
                   string
    finish_reason  None while it is being generated
    error          why it ended, if the reason is ERROR; the text generated until then stays
    schema_error   how the finished text violates the `json_schema`, for example because it was
                   truncated; None: it does not, or there is no schema
    logprobs       one for each token, if `sampling.logprobs` asks for them
    prompt_logprobs  one for each token of the prompt but the first, if `sampling` asks for them;
                   the alternatives have none
    alternatives   the other n - 1 continuations of the prompt
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: EngineError | None = None
    schema_error: str | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    alternatives: list[Completion] = field(default_factory=list)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        shown = self.text if len(self.text) <= 60 else f"{self.text[:57]}..."
        reason = None if self.finish_reason is None else self.finish_reason.value
        error = "" if self.error is None else f", error={self.error!r}"
        broken = "" if self.schema_error is None else f", schema_error={self.schema_error!r}"
        return f"Completion({shown!r}, {len(self.token_ids)} tokens, {reason}{error}{broken})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The text that was added to the continuation of prompt `index`; prints as its text.

    finish_reason  set in a prompt's last piece
    completion     the completion so far; its `text` is set with the last piece
    """

    index: int
    text: str
    finish_reason: FinishReason | None
    completion: Completion

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt to run.

    is_chat   the continuation is a text of its own
    adapters  the adapters that the names meant when the call was made, each with its weight
    error     why it cannot be run; None: it can
    """

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    n: int
    json_schema: str | None
    adapters: Mapping[NamedAdapter, float]
    is_chat: bool = False
    error: EngineError | None = None


class _Growing:
    """A continuation that grows.

    text   its text that stands, as pieces
    taken  how many of them a stream has yielded
    """

    __slots__ = ("answer", "completion", "taken", "text")

    def __init__(self, completion: Completion, answer: AnswerText | None) -> None:
        self.completion, self.answer = completion, answer
        self.text: list[str] = []
        self.taken = 0

    @property
    def is_stopped(self) -> bool:
        """Return whether a stop string has ended it."""
        return self.answer is not None and self.answer.stop_string is not None

    def feed(self, output: RequestOutput) -> int:
        """Take in an output's tokens up to a stop string; return their number."""
        completion, before = self.completion, len(self.completion.token_ids)
        for token_id in output.token_ids:
            completion.token_ids.append(token_id)
            if self.answer is not None:
                self.text.append(self.answer.feed(token_id)[1])
            if self.is_stopped:
                break
        number = len(completion.token_ids) - before
        if output.logprobs is not None:
            completion.logprobs = (completion.logprobs or []) + output.logprobs[:number]
        if output.finish_reason is not None and self.answer is not None and not self.is_stopped:
            self.text.append(self.answer.finish())
        completion.error = output.error
        completion.finish_reason = FinishReason.STOP if self.is_stopped else output.finish_reason
        if completion.finish_reason is not None:
            completion.text = "".join(self.text)
        return number

    def take_text(self) -> str:
        """Return the text that became final since the last call."""
        text = "".join(self.text[self.taken :])
        self.taken = len(self.text)
        return text


class Run:
    """The requests of one call. Leaving its context cancels those that have not ended.

    pieces  of the tokenizer; None: there is none
    """

    def __init__(
        self,
        loop: EngineLoop,
        names: AdapterNames,
        pieces: TokenPieces | None,
        jobs: Sequence[Job],
        stop: Sequence[str],
    ) -> None:
        self._loop, self._names, self._jobs = loop, names, jobs
        self.completions = [
            Completion(alternatives=[Completion() for _ in range(job.n - 1)]) for job in jobs
        ]
        self._growing = [
            [
                _Growing(
                    completion,
                    None if pieces is None else AnswerText(pieces, stop, continues=not job.is_chat),
                )
                for completion in (first, *first.alternatives)
            ]
            for first, job in zip(self.completions, jobs, strict=True)
        ]
        self._indices = {job.request_id: i for i, job in enumerate(jobs)}
        # Lists of outputs, a RuntimeError, or the index of a job whose next adapter is ready.
        self._news: Outputs = SimpleQueue()
        self._left = {job.request_id: job.n for job in jobs}  # continuations that have not ended
        self._submitted: set[str] = set()
        self._num_tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Cancel the requests that are left, for example on Ctrl-C, and wait until they end."""
        self._left = {r: count for r, count in self._left.items() if r in self._submitted}
        for request_id in self._left:
            self._loop.cancel(request_id, FinishReason.CANCELLED)
        with suppress(RuntimeError):
            for _ in self._follow():
                pass

    @property
    def num_tokens(self) -> int:
        """Tokens of all continuations so far."""
        return self._num_tokens

    @property
    def num_ended(self) -> int:
        """Prompts whose continuations have all ended."""
        return len(self._jobs) - len(self._left)

    def changes(self) -> Iterator[list[int]]:
        """Yield the indices of prompts whose completions have grown or ended, until all have ended.

        Raises RuntimeError if the engine is closed or has failed.
        """
        for index in range(len(self._jobs)):
            self._submit(index)
        yield from self._follow()

    def _follow(self) -> Iterator[list[int]]:
        while self._left:
            news = self._news.get()
            if isinstance(news, RuntimeError):
                self._left.clear()  # nothing more will come
                raise news
            if isinstance(news, int):
                self._submit(news)
            else:
                yield [self._take(output) for output in news]

    def pieces(self) -> Iterator[Piece]:
        """Yield every completion's text piece by piece."""
        has_ended = [False] * len(self._jobs)
        for indices in self.changes():
            for i in dict.fromkeys(indices):
                completion = self.completions[i]
                if has_ended[i]:
                    continue
                text = self._growing[i][0].take_text()
                has_ended[i] = completion.finish_reason is not None
                if text or has_ended[i]:
                    yield Piece(
                        index=i,
                        text=text,
                        finish_reason=completion.finish_reason,
                        completion=completion,
                    )

    def _submit(self, index: int) -> None:
        """Give a job to the engine as soon as all its adapters are ready."""
        job = self._jobs[index]
        if job.request_id not in self._left:
            return  # it was cancelled
        for adapter in job.adapters:
            if not adapter.ready.done():
                adapter.ready.add_done_callback(lambda _: self._news.put(index))
                return
        self._submitted.add(job.request_id)
        try:
            self._loop.add(job.request_id, job.n, lambda engine: self._add(engine, job), self._news)
        except RuntimeError:
            self._left.clear()
            raise

    def _add(self, engine: Engine, job: Job) -> None:
        """Add the request to the engine, on the engine's thread; raises EngineError."""
        if job.error is not None:
            raise job.error
        adapters = list(job.adapters)
        self._names.bind(engine, adapters)
        try:
            weights: dict[str, float] = {}
            for adapter, weight in job.adapters.items():
                digest = self._names.check(adapter)  # two names may mean the same adapter
                weights[digest] = weights.get(digest, 0.0) + weight
            engine.add(
                Request(
                    request_id=job.request_id,
                    token_ids=job.token_ids,
                    sampling=job.sampling,
                    n=job.n,
                    adapters=tuple(AdapterPart(digest=d, weight=w) for d, w in weights.items()),
                    json_schema=job.json_schema,
                )
            )
        finally:
            self._names.release(engine, adapters)

    def _take(self, output: RequestOutput) -> int:
        """Add an output to its completion; return the index of its prompt."""
        index = self._indices[output.request_id]
        growing = self._growing[index][output.index]
        completion = growing.completion
        if output.finish_reason is not None:
            self._left[output.request_id] -= 1
            if self._left[output.request_id] == 0:
                del self._left[output.request_id]
        if completion.finish_reason is not None:
            return index  # a stop string ended it; this token was already being computed
        self._num_tokens += growing.feed(output)
        if output.prompt_logprobs is not None:
            self.completions[index].prompt_logprobs = output.prompt_logprobs
        if growing.is_stopped and output.finish_reason is None:
            self._loop.cancel(output.request_id, FinishReason.STOP, output.index)
        if completion.finish_reason is not None:
            completion.schema_error = _schema_error(self._jobs[index], completion)
        return index


def _schema_error(job: Job, completion: Completion) -> str | None:
    if job.json_schema is None:
        return None
    if completion.finish_reason is FinishReason.ERROR:
        return "it ended with an error"
    try:
        # it imports libraries that nothing else needs
        from engine.dash.answer_check import schema_error
    except ImportError as error:
        return f"it cannot be checked: {error}"
    return schema_error(job.json_schema, completion.text)
