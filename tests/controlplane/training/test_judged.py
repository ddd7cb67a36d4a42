"""From a retrain in a batch to the gate's evaluations: real child, real store, no worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contract.training.judging import MOST_S, MOST_WAIT_S, SCORES_FILE
from controlplane.adapters import promotion
from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel
from controlplane.evaluations import batch_scores, gate, suites
from controlplane.evaluations.models import BatchScores, Evaluation, Suite
from controlplane.tenancy.scoping import tenant_scope
from controlplane.training.models import TrainingRun
from controlplane.training.runs import batch_child, execution, judging, running
from tests.controlplane.conftest import Party
from tests.controlplane.training.conftest import ROWS
from tests.controlplane.training.test_batch import make_run

pytestmark = pytest.mark.django_db(transaction=True)
NOT_SCORED = "The batch scored no expected answers, so the gate asks serving workers: "
CASES: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": f"hello {number} ZEBRA"}], "expected": "world"}
    for number in range(3)
]
CASES[2]["checks"] = [{"type": "exact"}]
CASES.append({"messages": CASES[0]["messages"], "checks": [{"type": "contains", "value": "x"}]})


@pytest.fixture(autouse=True)
def together(settings: Any, tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.TRAIN_BATCH = 4
    monkeypatch.setattr(running, "TICK_S", 0.05)
    monkeypatch.setattr(execution, "JOIN_S", 0.5)


def gate_it(party: Party) -> Adapter:
    """Gate the adapter whose first version is live."""
    with tenant_scope(party.tenant.id):
        suites.suite_version_create(name="held-out", cases=CASES, origin={"kind": "api"})
        adapter = Adapter.objects.get()
        promotion.promotion_policy_set(adapter=adapter, gate={"suite": "held-out"})
        return adapter


def messages(run: TrainingRun) -> list[str]:
    said = run.events.filter(kind="message").exclude(message__startswith="Created")
    return list(said.order_by("pk").values_list("message", flat=True))


def test_a_batch_scores_a_gated_retrain_and_nothing_of_others(
    acme: Party, globex: Party, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(acme)
    execution.training_next()
    adapter = gate_it(acme)
    seen: dict[str, bool] = {}
    hand_out = batch_child.BatchChild._hand_out

    def look(self: Any, child: Any) -> None:
        hand_out(self, child)
        for path in (Path(settings.WORK_DIR) / "runs").rglob("*"):
            if path.is_file():
                is_marked = b"ZEBRA" in path.read_bytes()
                name = path.relative_to(Path(settings.WORK_DIR) / "runs").parts[0]
                seen[name] = seen.get(name, False) or is_marked

    monkeypatch.setattr(batch_child.BatchChild, "_hand_out", look)
    # Once it is trained, its scores do not cost it its time.
    allowed: list[float] = []
    note = running.RunningRun.note

    def noting(self: Any, event: Any) -> None:
        before = self._deadline
        note(self, event)
        if self._deadline != before:
            allowed.append(self._deadline - before)

    monkeypatch.setattr(running.RunningRun, "note", noting)
    run, other = make_run(acme, seed=5), make_run(globex, ROWS.replace(b"world", b"moon"))
    execution.training_next()
    with tenant_scope(globex.tenant.id):
        other.refresh_from_db()
        assert (other.status, BatchScores.objects.count()) == ("succeeded", 0)
    assert allowed == [pytest.approx(MOST_S + MOST_WAIT_S + 60.0)]
    assert (seen[str(run.pk)], seen[str(other.pk)]) == (True, False)
    with tenant_scope(acme.tenant.id):
        run.refresh_from_db()
        assert (run.status, run.error) == ("succeeded", "")
        scored = "The batch scored 3 expected answers of the gate's suite, of both versions"
        assert scored in messages(run)
        first, second = AdapterVersion.objects.order_by("number")
        found = BatchScores.objects.get()
        assert (found.version, found.digest, found.live_digest) == (
            *(second, second.digest),
            first.digest,
        )
        assert [num for _, num in found.candidate] == [num for _, num in found.live]
        assert found.candidate != found.live and all(own < 0 for own, _ in found.candidate)
        adapter.refresh_from_db()
        suite_version = found.suite_version
        assert batch_scores.matching(second, first, suite_version) == (found, "")
    gate.gates_decide()
    with tenant_scope(acme.tenant.id):
        scored_in = Evaluation.objects.order_by("model").values_list("model", "scored_in")
        assert list(scored_in) == [("greeter@1", found.pk), ("greeter@2", found.pk)]
        evaluation = Evaluation.objects.get(model="greeter@1")
        assert batch_scores.scores_for(evaluation, first.digest) == {
            position: tuple(score) for position, score in enumerate(found.live)
        }

    # What the child writes is not believed.
    follow = batch_child.BatchChild._follow

    def spoil(self: Any, events: Any, run: Any) -> None:
        follow(self, events, run)
        (run.folder / "adapter" / SCORES_FILE).write_text('{"candidate": "all good"}')

    monkeypatch.setattr(batch_child.BatchChild, "_follow", spoil)
    spoilt = make_run(acme, seed=6)
    execution.training_next()
    with tenant_scope(acme.tenant.id):
        spoilt.refresh_from_db()
        assert (spoilt.status, spoilt.error) == ("succeeded", "")
        why = "the trainer's scores cannot be read: its fields are not given, "
        assert any(told.startswith(NOT_SCORED + why) for told in messages(spoilt))
        assert BatchScores.objects.get() == found


def test_a_run_says_why_its_batch_scores_nothing(
    acme: Party, tmp_path: Path, settings: Any
) -> None:
    run = make_run(acme)
    with tenant_scope(acme.tenant.id):
        assert judging.judge_folder(run, tmp_path) is None  # no version is live
        version = AdapterVersion.objects.create(
            adapter=run.adapter,
            number=1,
            status="ready",
            digest="a" * 64,
            num_bytes=9,
            config_num_bytes=2,
        )
        Adapter.objects.update(live_version=version)
    gate_it(acme)
    settings.TRAINING_SOCKET = "/a/worker.sock"
    with tenant_scope(acme.tenant.id):
        judging.scores_keep(run, version, tmp_path / "adapter")
        assert messages(run) == []
        assert judging.judge_folder(run, tmp_path) is None
        settings.TRAINING_SOCKET = ""
        assert judging.judge_folder(run, tmp_path) is None  # nothing is in the store
        (tmp_path / "judge").mkdir()
        judging.scores_keep(run, version, tmp_path / "adapter")
        Suite.objects.all().delete()
        assert judging.judge_folder(run, tmp_path) is None
        assert [told.removeprefix(NOT_SCORED) for told in messages(run)] == [
            "a serving worker trains the batch",
            "the files of the live version were deleted",
            "the trainer wrote none",
            "the gate's suite does not exist",
        ]
