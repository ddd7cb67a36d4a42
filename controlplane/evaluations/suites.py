"""All changes to suites of the tenant in scope; their cases come from callers, rows or the log."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from django.db import transaction
from django.db.models import QuerySet, Sum

from contract.process.line_reader import lines
from contract.training import chat_rows
from contract.training.row_messages import Row
from controlplane.adapters.models import Adapter
from controlplane.errors import ApiError, Conflict, InvalidRequest, NotFound, require
from controlplane.evaluations import checks
from controlplane.evaluations.leakage import prompt_digest
from controlplane.evaluations.models import Case, Evaluation, Suite, SuiteVersion
from controlplane.events.audit.services import record
from controlplane.inference.parsing import make_body
from controlplane.inference.schemas import ChatBody
from controlplane.infra import storage
from controlplane.infra.characters import can_be_written
from controlplane.infra.locks import lock_until_commit
from controlplane.requestlog import services as requestlog
from controlplane.tenancy.model_scope import check_unbound, may_name
from controlplane.tenancy.scoping import current_tenant_id
from controlplane.tenants.auth import Permission, Principal, authorize
from controlplane.tenants.models import User, is_slug, slug_validator
from controlplane.training.datasets import contents
from controlplane.training.datasets.services import dataset_version_get

#: Limits of a tenant's suites.
MAX_SUITES = 50
MAX_TENANT_BYTES = 64 * 1024**2
#: Limit of one suite.
MAX_VERSIONS = 50
#: Limits of one version.
MAX_CASES = 2000
MAX_BYTES = 8 * 1024**2
#: Limits of one case, and of a version's slices.
MAX_CASE_BYTES = 64 * 1024
MAX_SLICES = 20

CaseFields = Mapping[str, Any]


class Cases(NamedTuple):
    """Cases for a suite, and whether they have words of requests."""

    fields: Sequence[CaseFields]
    has_requests: bool = False


def suite_get(*, name: str, param: str | None = None) -> Suite:
    """Return the suite of this name. Raises NotFound."""
    found = Suite.objects.filter(name=name).first() if is_slug(name) else None
    return require(found, "There is no such suite.", param=param)


def suite_version_get(
    *, suite: Suite, number: int | None = None, param: str | None = None
) -> SuiteVersion:
    """Return a version, without a number the newest one. Raises NotFound."""
    rows = SuiteVersion.objects.filter(suite=suite).select_related("suite").order_by("-number")
    found = (rows if number is None else rows.filter(number=min(number, 2**31 - 1))).first()
    return require(found, "There is no such version of the suite.", param=param)


def may_read(version: SuiteVersion, by: Principal) -> bool:
    """Return whether the principal may read a version's cases, and answers to them."""
    return not version.has_requests or Permission.REQUESTS_CONTENT in by.permissions


def cases_of(version: SuiteVersion, *, by: Principal) -> QuerySet[Case]:
    """Return a version's cases. Raises PermissionDenied for words that `by` may not read."""
    if version.has_requests:
        authorize(by, Permission.REQUESTS_CONTENT)
    return Case.objects.filter(suite_version=version)


def suite_version_create(
    *,
    name: str,
    cases: Iterable[CaseFields],
    origin: dict[str, Any],
    description: str | None = None,
    created_by: User | None = None,
    has_requests: bool = False,
) -> SuiteVersion:
    """Make the next version of a suite; the suite, too, if there is none of this name.

    cases         each with `messages`, and `expected`, `checks`, `slice`
    has_requests  whether they have words of requests
    Raises InvalidRequest naming the case, Conflict when a limit is reached.
    """
    if not is_slug(name):
        raise InvalidRequest(str(slug_validator.message), param="name")
    rows = _checked(list(cases))
    num_bytes = sum(_num_bytes(row) for row in rows)
    if num_bytes > MAX_BYTES:
        raise InvalidRequest(
            f"A suite's cases can have at most {MAX_BYTES} bytes: leave some out.", param="cases"
        )
    with transaction.atomic():
        lock_until_commit(f"suites {current_tenant_id()}")
        _check_users(name)
        suite = Suite.objects.filter(name=name).first()
        _check_room(suite, num_bytes)
        is_new = suite is None
        suite = suite or Suite(name=name)
        suite.last_number += 1
        if description is not None:
            suite.description = description
        suite.save()
        version = SuiteVersion.objects.create(
            suite=suite,
            number=suite.last_number,
            num_cases=len(rows),
            num_bytes=num_bytes,
            origin=origin,
            has_requests=has_requests,
            created_by=created_by,
        )
        for row in rows:
            row.suite_version = version
        Case.objects.bulk_create(rows, batch_size=500)
        after = {"name": name, "version": version.number, "cases": len(rows), "origin": origin}
        record("created" if is_new else "changed", suite, after=after)
    return version


def suite_case_add(
    *,
    name: str,
    case: CaseFields,
    created_by: User | None = None,
    has_requests: bool = False,
) -> SuiteVersion:
    """Make a suite's next version: the cases of the newest one, if there is any, and one more.

    has_requests  whether the case has words of a request
    Raises what `suite_version_create` raises.
    """
    known: list[CaseFields] = []
    if suite := Suite.objects.filter(name=name).first():
        newest = suite_version_get(suite=suite)
        rows, has_requests = newest.cases, has_requests or newest.has_requests
        fields = ("messages", "expected", "checks", "slice")
        known = list(rows.order_by("position").values(*fields))
    origin = {"kind": "case added", "to": len(known)}
    return suite_version_create(
        name=name,
        cases=[*known, case],
        origin=origin,
        created_by=created_by,
        has_requests=has_requests,
    )


def _check_users(name: str) -> None:
    """Raise PermissionDenied if a gate uses the suite for a model that the caller may not name."""
    users = Adapter.objects.filter(gate__suite=name)
    if not all(may_name(user) for user in users.values_list("name", flat=True)):
        check_unbound("The gate of another model uses this suite.", "name")


def _check_room(suite: Suite | None, num_bytes: int) -> None:
    if suite is None and Suite.objects.count() >= MAX_SUITES:
        raise Conflict(
            f"A tenant can have at most {MAX_SUITES} suites: delete one first.",
            code="too_many_suites",
        )
    if suite is not None and suite.versions.count() >= MAX_VERSIONS:
        raise Conflict(
            f"A suite can have at most {MAX_VERSIONS} versions: begin a new suite.",
            code="too_many_versions",
        )
    used = SuiteVersion.objects.aggregate(sum=Sum("num_bytes"))["sum"] or 0
    if used + num_bytes > MAX_TENANT_BYTES:
        raise Conflict(
            f"A tenant's suites can have at most {MAX_TENANT_BYTES} bytes: delete some of them.",
            code="too_many_cases",
        )


def _checked(cases: Sequence[CaseFields]) -> list[Case]:
    if not 1 <= len(cases) <= MAX_CASES:
        raise InvalidRequest(f"A suite must have 1 to {MAX_CASES} cases.", param="cases")
    rows = [_case(fields, number) for number, fields in enumerate(cases)]
    if len({row.slice for row in rows}) > MAX_SLICES:
        raise InvalidRequest(f"A suite can have at most {MAX_SLICES} slices.", param="cases")
    return rows


def _case(fields: CaseFields, number: int) -> Case:
    param = f"cases.{number}"
    unknown = fields.keys() - {"messages", "expected", "checks", "slice"}
    if unknown:
        raise InvalidRequest(
            "A case has no such field: remove it.", param=f"{param}.{min(unknown)[:60]}"
        )
    if not can_be_written(fields):
        raise InvalidRequest("The case has a lone surrogate: remove it.", param=param)
    expected, slice = fields.get("expected", ""), fields.get("slice", "")
    for name, text, most in (("expected", expected, MAX_CASE_BYTES), ("slice", slice, 63)):
        if not isinstance(text, str) or len(text) > most or "\0" in text:
            raise InvalidRequest(
                f"This must be a text of at most {most} characters, without NUL.",
                param=f"{param}.{name}",
            )
    messages = fields.get("messages")
    try:
        body = make_body(ChatBody, model="any", messages=messages)
    except ApiError as error:
        error.param = f"{param}.{error.param or 'messages'}"
        raise
    if body.messages[-1].role == "assistant":
        raise InvalidRequest(
            "The last message must not be the assistant's: move it to `expected`.",
            param=f"{param}.messages",
        )
    case = Case(
        position=number,
        slice=slice,
        messages=messages,
        expected=expected,
        checks=checks.checked(
            fields.get("checks", []), f"{param}.checks", has_expected=bool(expected.strip())
        ),
        prompt_sha256=prompt_digest(body.rendered_messages()),
    )
    if _num_bytes(case) > MAX_CASE_BYTES:
        raise InvalidRequest(
            f"A case can have at most {MAX_CASE_BYTES} bytes: shorten it.", param=param
        )
    if "\\u0000" in json.dumps([case.messages, case.checks]):
        raise InvalidRequest("The case has NUL characters: remove them.", param=param)
    if not case.expected and not case.checks:
        raise InvalidRequest("A case needs `expected` or `checks`.", param=param)
    return case


def _num_bytes(case: Case) -> int:
    return len(json.dumps([case.messages, case.expected, case.checks, case.slice]).encode())


@storage.answering()
def cases_of_dataset(
    *,
    name: str,
    by: Principal,
    checks: list[dict[str, Any]],
    every: int = 1,
    offset: int = 0,
    slice: str = "",
) -> Cases:
    """Return a case for every n-th row of a dataset, at most `MAX_CASES`.

    The row's last answer is the expected one. Completions and rows with tools are left out.
    name  of a dataset, or of its version: name@n
    by    who makes a suite of them
    Raises PermissionDenied for captured requests that `by` may not read, NotFound, Conflict,
    Unavailable.
    """
    dataset, version = dataset_version_get(name, param="dataset")
    sha256 = (version or dataset).sha256
    has_requests = contents.has_requests(sha256)
    if has_requests:
        authorize(by, Permission.REQUESTS_CONTENT)
    pieces = contents.pieces(sha256)
    rows = chat_rows.read_rows(lines(pieces, max_bytes=chat_rows.MAX_LINE_BYTES))
    try:
        return Cases(_cases_of_rows(rows, checks, every, offset, slice), has_requests)
    except storage.ObjectMissing as error:
        raise NotFound(
            "The dataset's rows were deleted. Upload them again.", param="dataset"
        ) from error


def _cases_of_rows(
    rows: Iterable[Row | chat_rows.Problem],
    checks: list[dict[str, Any]],
    every: int,
    offset: int,
    slice: str,
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        if isinstance(row, chat_rows.Problem) or number % every != offset:
            continue
        last = row.learned[-1] if row.learned else 0
        answer = row.messages[last].get("content") if row.learned else None
        if not row.tools and isinstance(answer, str) and answer:
            found.append(_own(list(row.messages[:last]), answer, checks, slice))
        if len(found) == MAX_CASES:
            break
    return found


def cases_of_requests(
    *, request_ids: Sequence[str], by: Principal, checks: list[dict[str, Any]], slice: str = ""
) -> Cases:
    """Return a case for each logged request; its answer is the expected one.

    Raises PermissionDenied unless `by` may read it, NotFound for one whose content is not stored,
    InvalidRequest for one that is not a chat.
    """
    authorize(by, Permission.REQUESTS_CONTENT)
    found = []
    for number, request_id in enumerate(request_ids):
        param = f"requests.{number}"
        try:
            words = requestlog.content_get(request_id=request_id)
        except NotFound as error:
            error.param = param
            raise
        messages = words.prompt.get("messages")
        if messages is None or words.is_truncated or not words.outputs:
            raise InvalidRequest(
                "Leave this request out: a case needs a chat that is stored with its answer.",
                param=param,
            )
        found.append(_own(list(messages), words.outputs[0], checks, slice))
    return Cases(found, has_requests=True)


def _own(
    messages: list[Any], expected: str, checks: list[dict[str, Any]], slice: str
) -> dict[str, Any]:
    return {"messages": messages, "expected": expected, "checks": checks, "slice": slice}


@transaction.atomic
def suite_delete(*, suite: Suite) -> None:
    """Delete a suite with its versions and their runs. Raises Conflict if a gate or run needs it.

    Decisions that the gate made with it stay.
    """
    lock_until_commit(f"suites {current_tenant_id()}")
    _check_users(suite.name)
    evaluations = Evaluation.objects.filter(suite_version__suite=suite)
    if evaluations.exclude(pk__in=Evaluation.objects.allowed()).exists():
        check_unbound("Another model, which you may not name, was evaluated on this suite.")
    users = Adapter.objects.filter(gate__suite=suite.name).order_by("name")
    if names := list(users.values_list("name", flat=True)[:5]):
        raise Conflict(
            f"The gate of {', '.join(names)} uses the suite {suite.name}: change it first.",
            code="in_use",
        )
    if evaluations.filter(status__in=Evaluation.ACTIVE).exists():
        raise Conflict("The suite is being run. Cancel its evaluations first.", code="in_use")
    record("deleted", suite, before={"name": suite.name, "versions": suite.versions.count()})
    suite.delete()
