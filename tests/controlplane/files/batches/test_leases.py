"""Who may work on a batch, and what is refused to whoever may not any more."""

from __future__ import annotations

import datetime as dt
import uuid
from typing import Any

import pytest
from django.utils import timezone

from controlplane.files.batches import output, results, services
from controlplane.files.batches.leases import MAX_TENANT_RUNNING, Lease, claim
from controlplane.files.batches.models import Batch, BatchResult
from controlplane.files.batches.results import Result
from controlplane.tenancy.row_lease import LeaseLost
from controlplane.tenancy.scoping import tenant_scope
from tests.controlplane.conftest import Party

COUNTS = {"prompt_tokens": 2, "cached_tokens": 1, "completion_tokens": 3, "thought_tokens": 4}


def make(party: Party, num: int = 1, **fields: object) -> list[Batch]:
    with tenant_scope(party.tenant.id):
        return [
            Batch.objects.create(
                **{
                    "api_key": party.api_key,
                    "endpoint": "/v1/completions",
                    "input_file_id": uuid.uuid4(),
                    "expires_at": timezone.now() + dt.timedelta(hours=24),
                    **fields,
                }
            )
            for _ in range(num)
        ]


def claimed() -> Lease:
    lease = claim()
    assert lease is not None
    return lease


def lapse(lease: Lease) -> None:
    with tenant_scope(lease.tenant_id):
        Batch.objects.filter(pk=lease.row_id).update(lease_until=timezone.now())


def result(line: int, *, is_error: bool = False) -> Result:
    return Result(line=line, is_error=is_error, output="{}", **COUNTS)


def test_a_batch_is_claimed_once_until_its_lease_is_over(acme: Party) -> None:
    (batch,) = make(acme)
    first = claimed()
    assert first.row_id == batch.pk
    assert claim() is None
    lapse(first)
    assert claim([batch.pk]) is None  # not by who is at it, and only has to renew it
    second = claimed()
    assert (second.row_id, second.fence) == (batch.pk, first.fence + 1)


def test_a_runner_that_was_given_up_writes_nothing(acme: Party) -> None:
    make(acme, status=Batch.Status.IN_PROGRESS)
    zombie = claimed()
    lapse(zombie)
    owner = claimed()
    for write in (
        zombie.renew,
        lambda: results.keep(zombie, [result(1)]),
        lambda: results.begin_validation(zombie),
        lambda: results.stop(zombie, Batch.Status.COMPLETED),
        lambda: results.end(zombie, {}),
    ):
        with pytest.raises(LeaseLost):
            write()
    zombie.release()  # not its own
    assert claim() is None
    assert owner.renew().status == Batch.Status.IN_PROGRESS
    assert results.done_lines(owner) == set()


def test_results_are_counted_in_the_transaction_that_keeps_them(acme: Party) -> None:
    make(acme, status=Batch.Status.IN_PROGRESS)
    lease = claimed()
    results.keep(lease, [result(1), result(2, is_error=True), result(5)])
    batch = lease.renew()
    assert (batch.num_completed, batch.num_failed) == (2, 1)
    assert {name: getattr(batch, name) for name in COUNTS} == {n: 3 * c for n, c in COUNTS.items()}
    assert results.done_lines(lease) == {1, 2, 5}


def test_results_that_are_written_again_after_a_lost_commit_count_once(acme: Party) -> None:
    make(acme, status=Batch.Status.IN_PROGRESS)
    lease = claimed()
    results.keep(lease, [result(1), result(2, is_error=True)])
    results.keep(lease, [result(1), result(2, is_error=True), result(3)])
    batch = lease.renew()
    assert (batch.num_completed, batch.num_failed) == (2, 1)
    assert {name: getattr(batch, name) for name in COUNTS} == {n: 3 * c for n, c in COUNTS.items()}
    assert results.done_lines(lease) == {1, 2, 3}


def test_a_batch_that_has_ended_is_nobodys(acme: Party) -> None:
    make(acme, status=Batch.Status.IN_PROGRESS)
    lease = claimed()
    results.keep(lease, [result(1)])
    results.stop(lease, Batch.Status.COMPLETED)
    results.end(lease, {})
    with tenant_scope(acme.tenant.id):
        batch = Batch.objects.get()
        assert (batch.status, BatchResult.objects.count()) == (Batch.Status.COMPLETED, 0)
    assert batch.completed_at is not None and batch.finalizing_at is not None
    assert claim() is None
    with pytest.raises(LeaseLost):
        lease.renew()


def test_a_cancelled_batch_stays_cancelled_whatever_its_runner_was_about(acme: Party) -> None:
    make(acme, status=Batch.Status.CANCELLING, ends_as=Batch.Status.CANCELLED)
    lease = claimed()
    results.stop(lease, Batch.Status.COMPLETED)
    assert lease.renew().status == Batch.Status.CANCELLING
    results.end(lease, {})
    with tenant_scope(acme.tenant.id):
        assert Batch.objects.get().status == Batch.Status.CANCELLED


def test_tenants_take_turns_and_none_has_more_than_its_share(acme: Party, globex: Party) -> None:
    make(acme, MAX_TENANT_RUNNING + 3)
    theirs = make(globex, 2)
    leases = []
    while (lease := claim()) is not None:
        leases.append(lease)
    owners = [lease.tenant_id for lease in leases]
    assert owners[:4] == [acme.tenant.id, globex.tenant.id] * 2
    assert owners.count(acme.tenant.id) == MAX_TENANT_RUNNING
    assert [lease.row_id for lease in leases if lease.tenant_id == globex.tenant.id] == [
        batch.pk for batch in theirs
    ]
    leases[0].release()
    assert claimed().row_id == leases[0].row_id


def test_a_pool_takes_up_its_own_batches_and_what_is_nobodys(acme: Party, settings: Any) -> None:
    settings.POOL = "east"
    theirs = make(acme, MAX_TENANT_RUNNING + 1, pool="east")
    for _ in range(MAX_TENANT_RUNNING):
        claimed()
    settings.POOL = "west"
    assert claim() is None
    ours, old = make(acme, pool="west") + make(
        acme, pool=""
    )  # and one from before pools were noted
    leases = [claimed(), claimed()]
    assert [lease.row_id for lease in leases] == [ours.pk, old.pk]
    for lease in leases:
        lapse(lease)
    settings.POOL = "east"
    *running, waiting = theirs
    with tenant_scope(acme.tenant.id):
        Batch.objects.filter(pk__in=[batch.pk for batch in running]).update(status="completed")
    assert claimed().row_id == waiting.pk
    assert claim() is None  # the old one was adopted


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_batch_that_ends_while_it_is_checked_has_no_lines(
    acme: Party, is_cancelled: bool
) -> None:
    (batch,) = make(acme)
    lease = claimed()
    results.keep_refusals(lease, [(1, "{}"), (3, "{}")])
    if is_cancelled:
        with tenant_scope(acme.tenant.id):
            services.batch_cancel(batch)
    else:
        results.stop(lease, Batch.Status.EXPIRED)
    output.write(lease, lease.renew(), [])
    with tenant_scope(acme.tenant.id):
        ended = Batch.objects.get(pk=batch.pk)
        assert BatchResult.objects.count() == 0
    assert ended.status == ("cancelled" if is_cancelled else "expired")
    assert (ended.num_lines, ended.num_failed, ended.error_file_id) == (0, 0, None)
