"""Captured requests of the tenant in scope: read, rate, correct and erase them."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import re
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from django.db import transaction
from django.db.models import ExpressionWrapper, F, JSONField, Q, QuerySet, Value
from django.db.models.expressions import CombinedExpression
from django.utils import timezone

from contract.messages.tool_calls import read_calls
from contract.training.preference_rows import read_pair
from contract.training.row_messages import WrongRow, read_row
from controlplane.errors import Conflict, InvalidRequest, NotFound, require
from controlplane.events.audit.services import record, record_named
from controlplane.infra.metrics import FEEDBACK
from controlplane.requestlog import sealing
from controlplane.requestlog.capture import CaptureRule, capture_policy
from controlplane.requestlog.inference_request import InferenceRequest
from controlplane.requestlog.models import CapturedRequest, CapturePolicy, Feedback, Rating
from controlplane.tenancy.model_scope import current_bounds

#: Largest length of a corrected answer, as JSON.
MAX_ANSWER_CHARS = 64 * 1024
#: Number of rows of one dataset, newest first.
MAX_ROWS, MAX_ROW_BYTES = 50_000, 32 * 1024**2
#: Number of rows read from the database at a time.
_CHUNK = 200
#: An id in the form of the header x-request-id, or of an answer's `id`.
_ID = re.compile(r"(?:req_|chatcmpl-|cmpl-|resp_)([0-9a-f]{32})")

Answer = str | dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """A selection of captured requests.

    only  all: without those that were rated bad and not corrected; good: rated good, or corrected;
          corrected; pairs: corrected, with the answer that was given as the worse one; any: all, as
          they are
    """

    only: str = "all"
    model: str | None = None
    after: dt.datetime | None = None
    before: dt.datetime | None = None
    #: Not those whose rows this dataset has.
    unless_in: uuid.UUID | None = None

    def rows(self) -> QuerySet[CapturedRequest]:
        """Return the rows that have not expired, newest first."""
        oldest = timezone.now() - dt.timedelta(days=capture_policy().days)
        rows = CapturedRequest.objects.allowed().filter(created_at__gte=oldest)
        if self.model is not None:
            rows = rows.filter(model=self.model)
        if self.after is not None:
            rows = rows.filter(created_at__gte=self.after)
        if self.before is not None:
            rows = rows.filter(created_at__lt=self.before)
        if self.unless_in is not None:
            rows = rows.exclude(datasets__contains=[str(self.unless_in)])
        is_corrected = ~Q(sealed_answer=b"")
        wanted = {
            "all": ~Q(rating=Rating.BAD) | is_corrected,
            "good": Q(rating=Rating.GOOD) | is_corrected,
            "corrected": is_corrected,
            "pairs": is_corrected,
            "any": Q(),
        }
        return rows.filter(wanted[self.only]).order_by("-created_at", "-pk")


ONLY = ("all", "good", "corrected", "pairs")


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """JSONL to train on, and the number of captured requests that gave no row.

    keys  the captured requests that gave one
    """

    content: bytes
    num_rows: int
    num_left_out: int
    keys: list[uuid.UUID]


def request_id_of(name: str) -> str:
    """Return the request's id by a client's name for it. Raises NotFound."""
    match = _ID.fullmatch(name)
    if match is None:
        raise _no_request()
    return f"req_{match[1]}"


def _no_request() -> NotFound:
    return NotFound("There is no such request, or it has not ended.", param="request_id")


def no_row() -> NotFound:
    return NotFound("The request's content can no longer be read as a row: erase it.")


def captured_get(*, request_id: str) -> CapturedRequest:
    """Return a captured request that has not expired. Raises NotFound."""
    rows = Filter(only="any").rows()
    found = None if "\0" in request_id else rows.filter(request_id=request_id).first()
    return require(found, "No such request was captured.")


def row_of(captured: CapturedRequest, policy: CapturePolicy) -> dict[str, Any]:
    """Return the row to train on: the chat with its tools, and the answer to learn.

    The answer is the corrected one, if there is one. Earlier answers in the chat are not learned:
    each was another request's. Raises Unreadable, WrongRow.
    """
    return _row(*_opened(captured, policy))


def pair_of(captured: CapturedRequest, policy: CapturePolicy) -> dict[str, Any]:
    """Return the pair of a corrected answer and the one that was given.

    Raises Unreadable, and WrongRow, too, if no answer was corrected.
    """
    content, answer = _opened(captured, policy)
    if answer is None:
        raise WrongRow("", "has no corrected answer")
    *messages, better = _row(content, answer)["messages"]
    asked = {"messages": messages} | ({"tools": content["tools"]} if content["tools"] else {})
    worse = _row(content, None)["messages"][-1]
    pair = {"input": asked, "preferred_output": [better], "non_preferred_output": [worse]}
    read_pair(pair)
    return pair


def _opened(
    captured: CapturedRequest, policy: CapturePolicy
) -> tuple[dict[str, Any], Answer | None]:
    """Return what was stored of a request, and its corrected answer. Raises Unreadable."""
    content = sealing.unseal(bytes(captured.sealed), bytes(policy.wrapped_key))
    answer: Answer | None = None
    if captured.sealed_answer:
        said = sealing.unseal(bytes(captured.sealed_answer), bytes(policy.wrapped_key))
        content["request_id"] = said["request_id"]
        answer = said["answer"]
    if content["request_id"] != captured.request_id:
        raise sealing.Unreadable  # it was moved to another row
    return content, answer


def _row(content: dict[str, Any], answer: Answer | None) -> dict[str, Any]:
    messages = [_message(message) for message in content["messages"]]
    if answer is None:
        learned = _learned(content["output"], has_tools=bool(content["tools"]))
    else:
        said = {"content": answer} if isinstance(answer, str) else answer
        learned = {"role": "assistant", **said}
    row: dict[str, Any] = {"messages": [*messages, learned]}
    if content["tools"]:
        row["tools"] = content["tools"]
    read_row(row)
    return row


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of the prompt in the form of a dataset."""
    names = ("role", "content", "tool_call_id")
    told: dict[str, Any] = {name: message[name] for name in names if name in message}
    if message.get("tool_calls"):
        told["tool_calls"] = [
            _call(each["id"], **each["function"]) for each in message["tool_calls"]
        ]
    return {**told, "weight": 0} if message["role"] == "assistant" else told


def _learned(output: str, *, has_tools: bool) -> dict[str, Any]:
    calls = read_calls(output) if has_tools else []
    if not calls:
        return {"role": "assistant", "content": output}
    told = [_call(f"call_{n}", name, arguments) for n, (name, arguments) in enumerate(calls)]
    return {"role": "assistant", "content": None, "tool_calls": told}


def _call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


def rows_of(wanted: Filter) -> Rows:
    """Return the newest captured requests as rows, the oldest of them first."""
    policy, lines, num_bytes, num_left_out = capture_policy(), [], 0, 0
    keys: list[uuid.UUID] = []
    found = _chunks(wanted.rows()[:MAX_ROWS])
    made = pair_of if wanted.only == "pairs" else row_of
    for captured in found:
        try:
            line = json.dumps(made(captured, policy), ensure_ascii=False).encode() + b"\n"
        except (sealing.Unreadable, WrongRow, UnicodeEncodeError):
            num_left_out += 1
            continue
        if num_bytes + len(line) > MAX_ROW_BYTES:
            num_left_out += 1 + sum(1 for _ in found)
            break
        lines.append(line)
        keys.append(captured.pk)
        num_bytes += len(line)
    return Rows(b"".join(reversed(lines)), len(lines), num_left_out, keys)


def dataset_note(*, dataset_id: uuid.UUID, keys: list[uuid.UUID], appends: bool) -> None:
    """Note that a dataset has the rows of these captured requests; call it in its transaction.

    appends  False: it has no other rows
    Raises Conflict when another call has just added one of them.
    """
    name = str(dataset_id)
    if not appends:
        before = CapturedRequest.objects.filter(datasets__contains=[name])
        for captured in before.only("pk", "datasets").iterator(chunk_size=_CHUNK):
            others = [each for each in captured.datasets if each != name]
            CapturedRequest.objects.filter(pk=captured.pk).update(datasets=others)
    new = CapturedRequest.objects.filter(pk__in=keys).exclude(datasets__contains=[name])
    known = CapturedRequest.objects.filter(pk__in=keys, datasets__contains=[name])
    if known.exists():
        raise Conflict(
            "These captured requests are just being added by another call.", code="append_under_way"
        )
    joined = CombinedExpression(F("datasets"), "||", Value([name], JSONField()))
    new.update(datasets=ExpressionWrapper(joined, JSONField()))


def _chunks(rows: QuerySet[CapturedRequest]) -> Iterator[CapturedRequest]:
    keys = list(rows.values_list("pk", flat=True))
    for begin in range(0, len(keys), _CHUNK):
        by_key = CapturedRequest.objects.in_bulk(keys[begin : begin + _CHUNK])
        yield from (by_key[key] for key in keys[begin : begin + _CHUNK] if key in by_key)


def num_pairs(since: dt.datetime, until: dt.datetime, model: str | None = None) -> int:
    """Return the number of kept pairs whose newest feedback came in that time."""
    given = Feedback.objects.allowed().filter(updated_at__gt=since, updated_at__lte=until)
    pairs = Filter(only="pairs", model=model).rows()
    return pairs.filter(request_id__in=given.values("request_id")).count()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Feedback as stored."""

    request_id: str
    rating: str | None
    is_captured: bool
    has_corrected_answer: bool


@transaction.atomic
def feedback_give(
    *,
    request_id: str,
    rating: str | None = None,
    answer: Answer | None = None,
    may_name: Callable[[str], bool] = lambda model: True,
) -> Given:
    """Rate a request's answer, or correct it; fields left out stay.

    An answer for a request that was not captured is not stored, because its prompt is not.

    may_name  (model) -> whether the caller may ask it
    Raises NotFound, InvalidRequest for an answer that is no row's.
    """
    captured = CapturedRequest.objects.select_for_update().filter(request_id=request_id).first()
    model = captured.model if captured is not None else _model_of(request_id)
    if model is None or not may_name(model):
        raise _no_request()
    if captured is not None:
        _rate(captured, rating, answer)
    fields: dict[str, Any] = {"model": model} | ({"rating": rating} if rating else {})
    feedback, _ = Feedback.objects.update_or_create(request_id=request_id, defaults=fields)
    is_corrected = captured is not None and bool(captured.sealed_answer)
    kind = "corrected" if answer is not None and is_corrected else rating
    FEEDBACK.labels(kind or "not_captured").inc()
    return Given(
        request_id=request_id,
        rating=feedback.rating or None,
        is_captured=captured is not None,
        has_corrected_answer=is_corrected,
    )


def _model_of(request_id: str) -> str | None:
    lines = InferenceRequest.objects.filter(request_id=request_id)
    return lines.values_list("model", flat=True).first()


def _rate(captured: CapturedRequest, rating: str | None, answer: Answer | None) -> None:
    captured.is_rated = True
    captured.rating = rating or captured.rating
    if answer is not None:
        policy = capture_policy()
        key = bytes(policy.wrapped_key)
        try:
            content = sealing.unseal(bytes(captured.sealed), key)
            _row(content, answer)
        except WrongRow as wrong:
            field, problem = wrong.args
            name = field.partition("].")[2] if field.startswith("messages[") else ""
            place = f"corrected_answer.{name}" if name else "corrected_answer"
            raise InvalidRequest(f"It {problem}.", param=place) from wrong
        except sealing.Unreadable as error:
            raise _no_request() from error
        said = {"request_id": captured.request_id, "answer": answer}
        captured.sealed_answer = sealing.seal(said, key)
        captured.num_bytes = len(captured.sealed) + len(captured.sealed_answer)
    captured.save()


@transaction.atomic
def captured_delete(*, request_id: str) -> None:
    """Erase one captured request with its corrected answer. Raises NotFound."""
    captured = captured_get(request_id=request_id)
    captured.delete()
    record("deleted", captured, before={"request_id": request_id})


@transaction.atomic
def captures_delete(*, wanted: Filter) -> int:
    """Erase captured requests; datasets made of them stay. -> their number

    Without any filter the key is deleted, too, so requests just being added are unreadable.
    """
    if wanted == Filter(only="any") and current_bounds() is None:
        num = CapturedRequest.objects.all().delete()[0]
        policy = CapturePolicy.objects.select_for_update().first()
        if policy is not None:
            is_on = CaptureRule.of(policy) is not None
            policy.wrapped_key = sealing.new_key() if is_on else b""
            policy.save()
    else:
        keys = wanted.rows().values_list("pk", flat=True)
        num = CapturedRequest.objects.filter(pk__in=list(keys)).delete()[0]
    if num:
        after = {"rows": num, "only": wanted.only, "model": wanted.model}
        record_named("deleted", "captured_request", "several", after=after)
    return num
