"""Choice: turns one answer's tokens into text and log-probabilities, up to its end.

It does no I/O: it takes the engine's outputs and fills events.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from contract.messages.protocol import FinishReason, GenerateJob, TokenEvent
from contract.messages.tool_calls import BLANKS
from engine.request import RequestOutput, TokenLogprob
from engine.text.answer_text import AnswerText
from engine.text.call_formats import CallTranslator
from engine.text.codec import TextCodec
from engine.text.thoughts import AnswerReader, Part
from worker.grammar.checks import is_bound
from worker.serving.engine_commands import Prompt


class Choice:
    """Collects the tokens of one answer. Owned by its ActiveRequest.

    generated      tokens that the model generated so far: what is billed
    accepted_drafts, rejected_drafts  see RequestOutput
    runs_on        whether the engine still works on it
    finish_reason  set when it has ended, perhaps before the engine knows; if there is a schema, it
                   is sent only after the answer was checked
    answer         all of its text, kept if it may be checked
    is_checked     whether its answer was checked against its schema
    schema_error   how it violates its schema; None: it does not, or was not checked yet
    broken_param   the job's field with the violated schema, if that is strict
    """

    def __init__(self, job: GenerateJob, codec: TextCodec, index: int) -> None:
        self.index = index
        self.generated = 0
        self.accepted_drafts: Mapping[str, int] = {}
        self.rejected_drafts = 0
        self.runs_on = True
        self.finish_reason: str | None = None
        self._job = job
        self._codec = codec
        # An answer continues a raw prompt's text; a chat's answer is a text of its own.
        self._read = AnswerText(codec.pieces, job.sampling.stop, continues=job.messages is None)
        self._thought = self._text = ""
        self._thought_text = AnswerText(codec.pieces, continues=True)
        self._reader: AnswerReader | None = None
        self._calls: CallTranslator | None = None
        if job.tools and codec.call_format is not None:
            each = (tool["function"] for tool in job.tools)
            functions = {function["name"]: function.get("parameters") for function in each}
            self._calls = CallTranslator(codec.call_format, functions)
        self._has_thought = False
        self._held_blanks = ""
        self._logprobs: list[dict[str, Any]] = []
        self._prompt_logprobs: list[dict[str, Any]] = []
        self._token_ids: list[int] = []
        self._prompt_token_ids: tuple[int, ...] | None = None
        self._is_end_told = self.is_checked = False
        self.schema_error: str | None = None
        self.broken_param: str | None = None
        self.answer = ""

    @property
    def thought_tokens(self) -> int:
        """Return how many of the generated tokens are thoughts', with the marks around them."""
        return 0 if self._reader is None else self._reader.thought_tokens

    @property
    def has_news(self) -> bool:
        is_ended = self._reason_to_send is not None and not self._is_end_told
        is_added = self._text or self._thought or self._logprobs or self._prompt_logprobs
        return is_ended or bool(is_added)

    @property
    def num_to_send(self) -> int:
        """Tokens to send, with their alternatives."""
        return len(self._token_ids) + len(self._logprobs) * (1 + (self._job.sampling.logprobs or 0))

    @property
    def awaits_check(self) -> bool:
        """Return whether it is a finished answer that was not checked against its schema yet."""
        return (
            self.finish_reason == FinishReason.STOP
            and not self.is_checked
            and self._read.stop_string is None  # the client's stop string may cut the JSON anywhere
            and is_bound(self._job, self.answer)
        )

    def note_check(self, schema_error: str | None, broken_param: str | None = None) -> None:
        """Note the result of the check against its schema."""
        self.is_checked = True
        self.schema_error, self.broken_param = schema_error, broken_param

    @property
    def _reason_to_send(self) -> str | None:
        return None if self.awaits_check else self.finish_reason

    def begin(self, token_ids: list[int]) -> None:
        """Note how the prompt ends: it may have begun the thought."""
        if self._codec.thoughts is not None and self._job.thinks:
            self._reader = self._codec.thoughts.reader(token_ids, calls=bool(self._job.tools))

    def show(self, text: str) -> None:
        """Put text before the generated text."""
        self._text = text + self._text

    def take_prompt(self, prompt: Prompt, scored: list[TokenLogprob]) -> None:
        """Send what was asked of the prompt: before the generated text, or beside it.

        scored  log-probabilities of the prompt's tokens from the second on
        """
        sampling = self._job.sampling
        told = self._prompt_entries(prompt, scored)
        if sampling.prompt_logprobs is not None:
            self._prompt_logprobs = [_cut(entry, sampling.prompt_logprobs) for entry in told]
        if self._job.echo:
            self.show(prompt.text)
        if self._job.echo and sampling.logprobs is not None:
            for i, entry in enumerate(told):
                own = _cut(entry, sampling.logprobs)
                self._logprobs.append(own | {"span": prompt.spans[i]} if prompt.spans else own)

    def _prompt_entries(self, prompt: Prompt, scored: list[TokenLogprob]) -> list[dict[str, Any]]:
        """Return an entry for each of the prompt's tokens; the first has no log-probability."""
        entries: list[dict[str, Any]] = []
        is_first = True
        known: list[TokenLogprob | None] = [None, *scored]
        for token_id, own in zip(prompt.token_ids, known, strict=True):
            _, logprob, top, rank = own or TokenLogprob(token_id, 0.0, ())
            entry = self._token(token_id, logprob, is_first=is_first) | {"id": token_id}
            entry["top_logprobs"] = [
                self._token(*alternative, is_first=is_first) | {"id": alternative[0]}
                for alternative in top
            ]
            if own is None:
                entry |= {"logprob": None, "top_logprobs": None}
            entries.append(entry | {"rank": rank})
            is_first = is_first and self._codec.pieces.is_silent(token_id)
        return entries

    def show_prompt_ids(self, token_ids: list[int]) -> None:
        """Send the prompt's tokens with the choice's first event."""
        self._prompt_token_ids = tuple(token_ids)

    def feed(self, output: RequestOutput) -> None:
        """Take in what a step added, except `output.error`, which the request handles."""
        self.runs_on = self.runs_on and output.finish_reason is None
        if self.finish_reason is not None:
            return
        num_read = self._take(output)
        if num_read == len(output.token_ids):  # else drafts behind a stop string are among them
            self.accepted_drafts = output.accepted_drafts
            self.rejected_drafts = output.num_rejected_drafts
        if self._job.with_token_ids:
            self._token_ids += output.token_ids[:num_read]
        if self._read.stop_string is not None:
            self.generated += num_read
            self.finish_reason = FinishReason.STOP
            return
        self.generated = max(self.generated, output.num_generated)
        if output.end_logprob is not None and self._job.echo:
            # A client that scores an echo expects one entry for each generated token.
            self._logprobs.append(self._logprob(output.end_logprob, self._read.is_first))
        if output.finish_reason is not None:
            self._think(self._thought_text.finish())
            self._add(self._read.finish())
            if self._reader is not None and output.finish_reason == FinishReason.STOP:
                self._add(self._reader.finish())
            if self._calls is not None:
                self._tell(self._calls.finish())
            is_stopped = self._read.stop_string is not None
            self.finish_reason = FinishReason.STOP if is_stopped else output.finish_reason

    def _take(self, output: RequestOutput) -> int:
        """Take in an output's tokens up to a stop string; return their number."""
        entries = output.logprobs if self._job.sampling.logprobs is not None else None
        for number, token_id in enumerate(output.token_ids):
            if self._reader is not None and self._read_part(self._reader, token_id):
                continue
            is_first = self._read.is_first
            if self._calls is not None and self._codec.is_special(token_id):
                self._add(self._calls.mark(self._codec.names([token_id])[0]))
            piece, shown = self._read.feed(token_id)
            self._add(shown)
            if entries:
                entry = self._logprob(entries[number], is_first)
                self._logprobs.append(entry | {"text": piece} if self._job.token_details else entry)
            if self._read.stop_string is not None:
                return number + 1
        return len(output.token_ids)

    def _read_part(self, reader: AnswerReader, token_id: int) -> bool:
        """Take in a token of a thought, or of a mark; return False for one of the answer's text."""
        part = reader.read(token_id)
        if part is Part.THOUGHT:
            self._think(self._thought_text.feed(token_id)[1])
        elif part is Part.MARK:
            self._think(self._thought_text.finish())
        if reader.shown:
            self._add(self._read.finish() + reader.shown)
            reader.shown = ""
        return part is not Part.TEXT

    def _think(self, text: str) -> None:
        """Add to the thought, without the blanks around it."""
        text = self._held_blanks + text if self._has_thought else text.lstrip(BLANKS)
        shown = text.rstrip(BLANKS)
        self._held_blanks = text[len(shown) :]
        self._thought += shown
        self._has_thought = self._has_thought or bool(shown)

    def _add(self, text: str) -> None:
        """Add to the answer's text, in which a call has our form."""
        self._tell(text if self._calls is None else self._calls.feed(text))

    def _tell(self, text: str) -> None:
        self._text += text
        if self._job.json_schema is not None or self._job.tools:
            self.answer += text

    def event(self, event: TokenEvent) -> TokenEvent:
        """Return `event` with the choice's news since the last `clear`."""
        return dataclasses.replace(
            event,
            index=self.index,
            text=self._text,
            thought=self._thought,
            logprobs=tuple(self._logprobs) or None,
            prompt_logprobs=tuple(self._prompt_logprobs) or None,
            token_ids=tuple(self._token_ids) if self._job.with_token_ids else None,
            prompt_token_ids=self._prompt_token_ids,
            finish_reason=self._reason_to_send,
            stop_string=self._read.stop_string,
            schema_error=self.schema_error,
        )

    def clear(self) -> None:
        """Forget what has been sent."""
        self._thought = self._text = ""
        self._logprobs, self._prompt_logprobs = [], []
        self._token_ids = []
        self._prompt_token_ids = None
        self._is_end_told = self._reason_to_send is not None

    def _logprob(self, entry: TokenLogprob, is_first: bool) -> dict[str, Any]:
        token_id, logprob, top, _ = entry
        shown = self._token(token_id, logprob, is_first=is_first)
        shown["top_logprobs"] = [
            self._token(*alternative, is_first=is_first) for alternative in top
        ]
        return shown

    def _token(self, token_id: int, logprob: float, *, is_first: bool) -> dict[str, Any]:
        piece = self._codec.pieces.of(token_id, is_first=is_first)
        shown: dict[str, Any] = {
            "token": piece.text,
            "logprob": logprob if logprob > -9999.0 else -9999.0,  # JSON has no -inf or NaN
            "bytes": list(piece.bytes),
        }
        if self._job.messages is None or self._job.token_details:
            shown["id"] = token_id
        if self._job.token_details:
            shown["special"] = self._codec.is_special(token_id)
        return shown


def _cut(entry: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the entry with at most `number` alternatives."""
    top = entry["top_logprobs"]
    return {**entry, "top_logprobs": None if top is None else top[:number]}
