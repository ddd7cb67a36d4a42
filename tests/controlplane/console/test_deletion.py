"""The console asks before it deletes, and says what is in the way."""

from __future__ import annotations

from controlplane.adapters.models import Adapter, AdapterVersion
from controlplane.tenancy.scoping import tenant_scope
from controlplane.training.models import Dataset, TrainingRun
from tests.controlplane.conftest import Party
from tests.controlplane.console.conftest import Belongings, browser_of

ADAPTER = "/console/adapters/invoices"


def test_a_version_is_deleted_after_a_question(acme: Party, belongings: Belongings) -> None:
    browser = browser_of(acme.owner)
    link = f"{ADAPTER}/versions/1/delete"
    assert link in browser.get(f"{ADAPTER}/versions/1").content.decode()
    assert "Delete version 1 of invoices permanently?" in browser.get(link).content.decode()
    with tenant_scope(acme.tenant.id):
        assert AdapterVersion.objects.filter(number=1).exists()
    answer = browser.post(link, follow=True)
    assert answer.redirect_chain == [(ADAPTER, 302)]
    assert "Version 1 of invoices is deleted." in answer.content.decode()
    with tenant_scope(acme.tenant.id):
        assert not AdapterVersion.objects.filter(number=1).exists()


def test_what_uses_an_adapter_or_a_dataset_is_shown(acme: Party, belongings: Belongings) -> None:
    browser = browser_of(acme.owner)
    dataset = "/console/training/datasets/chats/delete"
    assert dataset in browser.get("/console/training").content.decode()
    for link in (dataset, f"{ADAPTER}/delete"):
        answer = browser.post(link)
        assert answer.status_code == 409
        assert f"the training run {belongings.run.pk}" in answer.content.decode()
        assert browser.post(link, {"force": "on"}).status_code == 302
    with tenant_scope(acme.tenant.id):
        assert not Adapter.objects.exists()
        assert not Dataset.objects.exists()


def test_a_viewer_has_no_buttons(acme: Party, belongings: Belongings) -> None:
    browser = browser_of(acme.viewer)
    for page in (ADAPTER, f"{ADAPTER}/versions/1", "/console/training"):
        assert "/delete" not in browser.get(page).content.decode()


def test_a_run_without_its_dataset_has_a_page(acme: Party, belongings: Belongings) -> None:
    with tenant_scope(acme.tenant.id):
        TrainingRun.objects.update(dataset=None)
    browser = browser_of(acme.owner)
    page = browser.get(f"/console/training/runs/{belongings.run.pk}").content.decode()
    assert "deleted" in page
    assert browser.get("/console/training").status_code == 200
