"""Log-probabilities computed by the batch that trained a version, instead of serving workers.

While a run is trained, its folder has the expected answers of the suite of its adapter's gate, and
the live version. The child scores the answers under both (`worker.training.judging`). The
gate's two evaluations take these scores if version, live version and suite are still the same. Both
do or neither, because another program computes other last digits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from django.db import transaction
from django.db.models import QuerySet

from contract.adapters import peft_config, safetensors_header
from contract.training import judging
from contract.training.judging import ExpectedAnswer, Given, Score
from controlplane.adapters.models import Adapter, AdapterVersion
from controlplane.errors import InvalidRequest, NotFound
from controlplane.evaluations.models import BatchScores, Case, Evaluation, SuiteVersion
from controlplane.evaluations.suites import suite_get, suite_version_get
from controlplane.inference.parsing import make_body
from controlplane.inference.schemas import ChatBody
from controlplane.infra import storage
from controlplane.training.models import TrainingRun
from controlplane.training.runs import events
from controlplane.training.runs.judging import NothingGiven
from controlplane.training.runs.lease import while_held

#: Number of an adapter's newest scores that are kept.
MAX_KEPT = 5


class ScoresGone(Exception):
    """An evaluation's scores are deleted, or are of other versions."""


class GateJudge:
    """The `training.judging.Judge` that scores the run's version for the gate."""

    def wants(self, run: TrainingRun) -> bool:
        gated = Adapter.objects.filter(
            pk=run.adapter_id,
            promotion_policy=Adapter.PromotionPolicy.GATE,
            live_version__isnull=False,
        )
        return gated.exists()

    def give(self, run: TrainingRun, folder: Path) -> None:
        adapter = Adapter.objects.select_related("live_version", "base_model").get(
            pk=run.adapter_id
        )
        live = adapter.live_version
        if live is None:
            raise NothingGiven("no version is live")
        try:
            suite = suite_get(name=str(adapter.gate.get("suite")))
            suite_version = suite_version_get(suite=suite)
        except NotFound as error:
            raise NothingGiven("the gate's suite does not exist") from error
        if not _expecting(suite_version).exists():
            raise NothingGiven("no case has an expected answer")
        given = Given(
            suite_version=str(suite_version.pk),
            live_digest=live.digest,
            base_revision=adapter.base_model.revision,
        )
        judging.write_cases(folder, given, _answers(suite_version))
        for name, key, num_bytes in (
            (peft_config.FILE, live.config_key, live.config_num_bytes),
            (safetensors_header.FILE, live.tensors_key, live.num_bytes),
        ):
            with (folder / name).open("wb") as file:
                pieces = storage.read_pieces(key, max_bytes=num_bytes)
                file.writelines(while_held(run, pieces))

    @transaction.atomic
    def take(self, run: TrainingRun, version: AdapterVersion, scores: judging.BatchScores) -> str:
        given = scores.given
        # Locked, so that a deletion of the suite waits for the row that names it.
        rows = SuiteVersion.objects.select_for_update(no_key=True).select_related(None)
        suite_version = rows.filter(pk=given.suite_version).first()
        if suite_version is None:
            return "the suite was deleted"
        num = _expecting(suite_version).count()
        if len(scores.candidate) != num:
            return f"it has {len(scores.candidate)} scores for {num} expected answers"
        if BatchScores.objects.filter(version=version).exists():
            return ""  # a commit whose answer was lost
        BatchScores.objects.create(
            version=version,
            suite_version=suite_version,
            digest=scores.digest,
            live_digest=given.live_digest,
            base_revision=given.base_revision,
            cases_sha256=scores.cases_sha256,
            candidate=scores.candidate,
            live=scores.live,
        )
        _forget_old(version)
        message = f"The batch scored {num} expected answers of the gate's suite, of both versions"
        events.event_add(run, message, cases=num)
        return ""


def _forget_old(version: AdapterVersion) -> None:
    rows = BatchScores.objects.filter(version__adapter=version.adapter_id).order_by("-created_at")
    old = list(rows.values_list("pk", flat=True)[MAX_KEPT : MAX_KEPT + 100])
    BatchScores.objects.filter(pk__in=old).delete()


def matching(
    version: AdapterVersion, live: AdapterVersion, suite_version: SuiteVersion
) -> tuple[BatchScores | None, str]:
    """Return the scores with which two versions of an adapter can be compared, or None.

    -> also the reason, if there are scores but they do not fit
    """
    scores = BatchScores.objects.filter(version=version).first()
    if scores is None:
        return None, ""
    revision = version.adapter.base_model.revision
    for is_same, why_not in (
        (scores.digest == version.digest, "its batch scored another adapter"),
        (scores.live_digest == live.digest, "another version is live than its batch scored"),
        (scores.suite_version_id == suite_version.pk, "its batch scored an earlier suite"),
        (scores.base_revision == revision, "its batch scored over another base"),
        (scores.cases_sha256 == _cases_sha256(suite_version), "its batch scored other cases"),
    ):
        if not is_same:
            return None, why_not
    return scores, ""


def scores_for(evaluation: Evaluation, digest: str) -> dict[int, Score]:
    """Return the scores of an evaluation's cases, by position.

    digest  of the version that answers
    Raises ScoresGone.
    """
    assert evaluation.scored_in is not None
    scores = BatchScores.objects.filter(pk=evaluation.scored_in).first()
    if scores is None:
        raise ScoresGone("The scores of its batch were deleted: evaluate again.")
    if digest not in (scores.digest, scores.live_digest):
        raise ScoresGone("The scores of its batch are of other versions: evaluate again.")
    found = scores.candidate if digest == scores.digest else scores.live
    positions = _expecting(evaluation.suite_version).values_list("position", flat=True)
    return {
        position: (logprob, num_tokens)
        for position, (logprob, num_tokens) in zip(positions, found, strict=True)
    }


def _expecting(suite_version: SuiteVersion) -> QuerySet[Case]:
    cases = Case.objects.filter(suite_version=suite_version).exclude(expected="")
    return cases.order_by("position")


def _answers(suite_version: SuiteVersion) -> Iterator[ExpectedAnswer]:
    return map(answer_of, _expecting(suite_version))


def answer_of(case: Case) -> ExpectedAnswer:
    """Return the scored part of a case, messages as `asking` renders them.

    Raises NothingGiven for a case that is no longer a valid request.
    """
    try:
        body = make_body(ChatBody, model="any", messages=case.messages)
    except InvalidRequest as error:
        raise NothingGiven(f"case {case.position + 1}: {error.message}") from error
    return ExpectedAnswer(list(body.rendered_messages()), case.expected)


def _cases_sha256(suite_version: SuiteVersion) -> str:
    """Return the digest of a suite's expected answers; "" if a batch cannot score them."""
    try:
        return judging.cases_sha256(answer.as_line() for answer in _answers(suite_version))
    except NothingGiven:
        return ""
