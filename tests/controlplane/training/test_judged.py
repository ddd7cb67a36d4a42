"""From a retrain in a batch to the gate's evaluations: real child, real store, no worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contract.judging import SCORES_FILE
from controlplane.adapters import promotion
from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel
from controlplane.evaluations import batch_scores, gate, suites
from controlplane.evaluations.models import BatchScores, Evaluation
from controlplane.tenancy.scoping import tenant_scope
from controlplane.training import batch, batch_child, execution, picking
from controlplane.training.models import TrainingRun
from tests.controlplane.conftest import Party
from tests.controlplane.training.conftest import ROWS
from tests.controlplane.training.test_batch import make_run

pytestmark = pytest.mark.django_db(transaction=True)
CASES: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": f"hello {number} ZEBRA"}], "expected": "world"}
    for number in range(3)
]
CASES[2]["checks"] = [{"type": "exact"}]
CASES.append({"messages": CASES[0]["messages"], "checks": [{"type": "contains", "value": "x"}]})


@pytest.fixture(autouse=True)
def together(settings: Any, tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.TRAIN_BATCH = 4
    monkeypatch.setattr(execution, "TICK_S", 0.05)
    monkeypatch.setattr(batch, "JOIN_S", 0.5)


def gate_it(party: Party) -> Adapter:
    """Gate the adapter whose first version is live."""
    with tenant_scope(party.tenant.id):
        suites.suite_version_create(name="held-out", cases=CASES, origin={"kind": "api"})
        adapter = Adapter.objects.get()
        promotion.promotion_policy_set(adapter=adapter, gate={"suite": "held-out"})
        return adapter


def messages(run: TrainingRun) -> list[str]:
    return list(run.events.filter(kind="message").values_list("message", flat=True))


def test_a_batch_scores_a_gated_retrain_and_nothing_of_others(
    acme: Party, globex: Party, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(acme)
    batch.training_next()
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
    run, other = make_run(acme, seed=5), make_run(globex, ROWS.replace(b"world", b"moon"))
    batch.training_next()
    with tenant_scope(globex.tenant.id):
        other.refresh_from_db()
        assert (other.status, BatchScores.objects.count()) == ("succeeded", 0)
    assert not seen.get(str(other.pk), False)
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


def test_a_run_says_why_its_batch_scored_nothing(
    acme: Party, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(acme)
    batch.training_next()
    gate_it(acme)
    # What the child writes is not believed.
    give_out = batch_child.BatchChild._follow

    def spoil(self: Any, events: Any, ticks: Any, reader: Any, folder: Path) -> None:
        give_out(self, events, ticks, reader, folder)
        (folder / "adapter" / SCORES_FILE).write_text('{"candidate": "all good"}')

    with monkeypatch.context() as patch:
        patch.setattr(batch_child.BatchChild, "_follow", spoil)
        spoilt = make_run(acme, seed=6)
        batch.training_next()
    alone = make_run(acme, seed=7, checkpoints=1)
    batch.training_next()
    assert picking.next_run() is None
    with tenant_scope(acme.tenant.id):
        for run, why in (
            (spoilt, "the trainer's scores cannot be read: its fields are not given,"),
            (alone, "the run was trained by itself"),
        ):
            run.refresh_from_db()
            assert (run.status, run.error) == ("succeeded", "")
            begin = "The batch scored no expected answers, so the gate asks serving workers: "
            assert any(told.startswith(begin + why) for told in messages(run)), messages(run)
        assert not BatchScores.objects.exists()
