"""Ask a judge for its mark: a model behind any OpenAI-compatible endpoint that a tenant names.

All calls go through `infra.outbound`, so that no judge is inside this network. The key is stored
encrypted, and read only for the call.
"""

from __future__ import annotations

import json
import re
from typing import Any

from cryptography.fernet import InvalidToken
from django.db import transaction

from controlplane.errors import Conflict, InvalidRequest, require
from controlplane.evaluations.models import Case, Judge
from controlplane.events.audit.services import record
from controlplane.infra.ciphers import is_under_current_pepper, peppered_cipher
from controlplane.infra.outbound import outbound
from controlplane.infra.outbound.outbound import Bounds, CallFailed
from controlplane.infra.outbound.outbound_policy import Refused
from controlplane.tenancy.model_scope import check_unbound
from controlplane.tenants.auth import Permission, Principal, authorize
from controlplane.tenants.models import is_slug, slug_validator

MAX_JUDGES = 20
_PURPOSE = b"judge key"
_KEY = re.compile(r"[!-~]{0,500}")
_BOUNDS = Bounds(connect_s=5.0, total_s=60.0, max_bytes=256 * 1024)
_MARK = re.compile(r"-?\d+(?:\.\d+)?")
_SHARED = "Suites of all models share the judges."
DEFAULT_RUBRIC = "Is the answer correct and complete?"
_ASK = """You give marks to answers. {rubric}

The conversation:
{prompt}

The answer that was expected:
{expected}

The answer to mark:
{output}

Reply with one number from 0 (useless) to 10 (perfect), and nothing else."""
#: Statuses after which the same call may succeed later.
_LATER = frozenset({408, 409, 425, 429, 500, 502, 503, 504})


class JudgeFailed(Exception):
    """The judge gave no mark; the message is for the tenant.

    is_final  asking again will not help
    """

    def __init__(self, message: str, *, is_final: bool) -> None:
        super().__init__(message)
        self.is_final = is_final


class NoMark(JudgeFailed):
    """The judge's answer is not a mark."""


def judge_get(*, name: str, param: str | None = None) -> Judge:
    """Return the judge of this name. Raises NotFound."""
    found = Judge.objects.filter(name=name).first() if is_slug(name) else None
    return require(found, "There is no such judge.", param=param)


@transaction.atomic
def judge_set(
    *, name: str, url: str, model: str, by: Principal, api_key: str | None = None
) -> Judge:
    """Make or replace a judge.

    api_key  "": none; None: keep the stored one, if the address stays, too
    Raises InvalidRequest for an address that may not be called, PermissionDenied if suites with
    words of requests name it and `by` may not read these: they would be sent to its address.
    """
    check_unbound(_SHARED)
    if not is_slug(name):
        raise InvalidRequest(str(slug_validator.message), param="name")
    url = url.rstrip("/")
    try:
        outbound.check(f"{url}/chat/completions")
    except Refused as error:
        raise InvalidRequest(str(error), param="url") from error
    if not _KEY.fullmatch(api_key or ""):
        raise InvalidRequest("A key has at most 500 visible ASCII characters.", param="api_key")
    asked = Case.objects.filter(checks__contains=[{"type": "judge", "judge": name}])
    if asked.filter(suite_version__has_requests=True).exists():
        authorize(by, Permission.REQUESTS_CONTENT)
    known = Judge.objects.select_for_update().filter(name=name).first()
    if known is None and Judge.objects.count() >= MAX_JUDGES:
        raise Conflict(
            f"A tenant can have at most {MAX_JUDGES} judges: delete one first.",
            code="too_many_judges",
        )
    fields: dict[str, Any] = {"url": url, "model": model}
    if api_key is None and known is not None and known.url != url:
        raise InvalidRequest(
            "A new address needs its own key: set api_key, which may be empty.", param="api_key"
        )
    if api_key is not None or known is None:
        fields["sealed"] = peppered_cipher(_PURPOSE).encrypt((api_key or "").encode())
    judge, is_new = Judge.objects.update_or_create(name=name, defaults=fields)
    after = {"name": name, "url": url, "model": model}
    record("created" if is_new else "changed", judge, after=after)
    return judge


@transaction.atomic
def judge_delete(*, judge: Judge) -> None:
    """Delete a judge; evaluations that still need it fail."""
    check_unbound(_SHARED)
    record("deleted", judge, before={"name": judge.name, "url": judge.url})
    judge.delete()


def is_current(sealed: bytes) -> bool:
    """Return whether a key can be read under the current pepper."""
    return is_under_current_pepper(_PURPOSE, sealed)


def renewed(sealed: bytes) -> bytes | None:
    """Return a key encrypted under the current pepper; None if it can no longer be read."""
    try:
        return peppered_cipher(_PURPOSE).rotate(sealed)
    except InvalidToken:
        return None


def mark(judge: Judge, *, rubric: str, prompt: Any, expected: str, output: str) -> float:
    """Return a judge's mark, from 0 to 1. Raises JudgeFailed."""
    shown = "\n".join(f"{message['role']}: {message.get('content')}" for message in prompt)
    asked = _ASK.format(
        rubric=rubric or DEFAULT_RUBRIC, prompt=shown, expected=expected or "(none)", output=output
    )
    messages = [{"role": "user", "content": asked}]
    return _mark_in(answer_of(judge, messages, temperature=0, max_tokens=8))


def answer_of(judge: Judge, messages: list[dict[str, str]], **params: Any) -> str:
    """Return what a judge answers to a chat. Raises JudgeFailed."""
    try:
        key = peppered_cipher(_PURPOSE).decrypt(bytes(judge.sealed)).decode()
    except InvalidToken as error:
        raise JudgeFailed("Its key can no longer be read: set it again.", is_final=True) from error
    body = {"model": judge.model, "messages": messages, **params}
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    answer = _called(f"{judge.url}/chat/completions", headers, json.dumps(body).encode())
    try:
        return str(json.loads(answer)["choices"][0]["message"]["content"])
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        raise JudgeFailed("The judge's answer is not a chat completion.", is_final=True) from None


def _called(url: str, headers: dict[str, str], body: bytes) -> bytes:
    try:
        with outbound.call("POST", url, headers=headers, body=body, bounds=_BOUNDS) as answer:
            if answer.status != 200:
                raise JudgeFailed(
                    f"It answered {answer.status}.", is_final=answer.status not in _LATER
                )
            return answer.read()
    except Refused as error:
        raise JudgeFailed(
            f"The judge's address may not be called: {error}", is_final=True
        ) from error
    except CallFailed as error:
        raise JudgeFailed(f"The judge could not be reached: {error}", is_final=False) from error


def _mark_in(text: str) -> float:
    found = _MARK.search(text)
    if found is None or not 0 <= float(found[0]) <= 10:
        raise NoMark("The judge gave no number from 0 to 10.", is_final=True)
    return float(found[0]) / 10
