"""What a key with `allowed_models` changes reaches no further than the key: by an alias, what is
live, a forced deletion, or what models share."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from django.utils import timezone

from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel
from controlplane.aliases import services as aliases
from controlplane.aliases.contents import Contents, Part
from controlplane.aliases.models import Alias, Ramp
from controlplane.errors import PermissionDenied
from controlplane.evaluations.models import Evaluation, Judge
from controlplane.files.batches.models import Batch
from controlplane.files.batches.services import batches_list
from controlplane.files.models import File
from controlplane.files.services import files_list
from controlplane.requestlog.models import CapturedRequest
from controlplane.tenancy.model_scope import Bounds, allows_model, model_scope
from controlplane.tenancy.scoping import new_id, tenant_scope
from controlplane.training.datasets import services as dataset_services
from controlplane.training.datasets import versions
from controlplane.training.datasets.contents import Rows
from controlplane.training.models import Dataset, DatasetSource, Schedule, TrainingRun
from tests.controlplane.conftest import Party, as_user, assert_error
from tests.controlplane.management.bound_world import ALIAS, NAME, World, captured_make
from tests.controlplane.management.test_bound_keys import bound_to

API = "/api/v1"
pytestmark = pytest.mark.usefixtures("gateway_here")


@pytest.fixture
def others(acme: Party, world: World, base_model: BaseModel) -> Adapter:
    """A live adapter beside the world's model."""
    with tenant_scope(acme.tenant.id):
        adapter = Adapter.objects.create(name="others", base_model=base_model)
        adapter.live_version = AdapterVersion.objects.create(
            adapter=adapter, number=1, digest="9" * 64, status=AdapterVersion.Status.READY
        )
        adapter.save()
    return adapter


def _ask(client: Any, method: str, path: str, body: Any = None) -> Any:
    return getattr(client, method)(f"{API}{path}", {} if body is None else body, format="json")


def _refused(answer: Any, param: str | None) -> None:
    assert assert_error(answer, 403, param)["code"] == "model_not_allowed"


def test_an_alias_of_the_list_points_to_nothing_new(acme: Party, others: Adapter) -> None:
    """The alias was published to the key; it changes it, but within what it names already."""
    client, path = bound_to(acme, ALIAS), f"/aliases/{ALIAS}"
    assert _ask(client, "get", path).json()["primary"][0]["adapter"] == NAME
    assert _ask(client, "patch", path, {"system_prompt": "Be brief."}).status_code == 200
    assert _ask(client, "post", f"{path}/ramp", {"percent": 50}).status_code == 200
    for field in ("primary", "canary"):
        for target in ({"adapter": "others"}, {"adapter": NAME, "version": 1}):
            _refused(_ask(client, "patch", path, {field: target}), field)
    with tenant_scope(acme.tenant.id):
        alias = Alias.objects.get()
        was = alias.revision_number
        primary = (Part(adapter=NAME), Part(adapter="others", weight=0.1))
        aliases.alias_change(alias=alias, changes={"primary": primary})
        aliases.alias_change(alias=alias, changes={"primary": (Part(adapter=NAME),)})
    _refused(_ask(client, "post", f"{path}/rollback", {"revision": was + 1}), "primary")
    assert _ask(client, "post", f"{path}/rollback", {"revision": was}).status_code == 200


def test_an_alias_of_the_list_makes_nothing_live(acme: Party, world: World) -> None:
    client, path = bound_to(acme, ALIAS), f"/aliases/{ALIAS}"
    _refused(_ask(client, "post", f"{path}/promote-canary"), "name")
    _refused(_ask(client, "put", f"{path}/timetable", {"at_end": "promote"}), "at_end")
    assert _ask(client, "put", f"{path}/timetable", {"at_end": "stay"}).status_code == 200
    with tenant_scope(acme.tenant.id):
        live = Adapter.objects.get(name=NAME).live_version
        assert live is not None and live.number == 1
        assert Ramp.objects.get().at_end == Ramp.AtEnd.STAY
    assert _ask(bound_to(acme, ALIAS, NAME), "post", f"{path}/promote-canary").status_code == 200


def test_a_key_of_one_version_reads_it_and_changes_nothing(acme: Party, world: World) -> None:
    client, path = bound_to(acme, f"{NAME}@2"), f"/adapters/{NAME}/versions"
    assert _ask(client, "get", f"{path}/2").status_code == 200
    for action in ("promote", "retire", "deprecate", "gate"):
        _refused(_ask(client, "post", f"{path}/2/{action}"), "name")
    _refused(_ask(client, "delete", f"{path}/2"), "name")
    assert client.delete(f"/v1/models/{NAME}@2").status_code == 403
    for method, other in (
        ("get", f"/adapters/{NAME}"),
        ("get", path),
        ("get", f"{path}/1"),
        ("post", f"{path}/1/download"),
        ("get", f"{path}/2/diff?with=1"),
        ("get", f"{path}/22"),
        ("get", f"/adapters/{NAME.upper()}/versions/2"),
    ):
        _refused(_ask(client, method, other), "name")
    listed = _ask(client, "get", "/evaluations").json()["data"]
    assert [each["model"] for each in listed] == [f"{NAME}@2"]


def test_a_forced_deletion_ends_nothing_of_others(acme: Party, others: Adapter) -> None:
    with tenant_scope(acme.tenant.id):
        contents = Contents(primary=(Part(adapter="others"),))
        aliases.alias_create(name="theirs", contents=contents)
    client = bound_to(acme, "others")
    assert _ask(client, "delete", "/adapters/others").status_code == 409
    _refused(_ask(client, "delete", "/adapters/others?force=true"), "force")
    _refused(_ask(client, "delete", "/datasets/rows?force=true"), "name")
    with tenant_scope(acme.tenant.id):
        assert Alias.objects.filter(name="theirs").exists() and Dataset.objects.exists()
        assert Schedule.objects.exists() and TrainingRun.objects.get().status == "queued"
    assert _ask(bound_to(acme, "others", "theirs"), "delete", "/adapters/others?force=true")


def test_rows_that_another_model_is_trained_on_stay(acme: Party, world: World) -> None:
    client = bound_to(acme, "others")
    assert _ask(client, "get", "/datasets/rows").status_code == 200
    rows = Rows(sha256="1" * 64, num_bytes=1, num_rows=2)
    with tenant_scope(acme.tenant.id), model_scope(Bounds(("others",), new_id())):
        with pytest.raises(
            PermissionDenied, match="Another model, which you may not name, is trained"
        ):
            versions.version_add(name="rows", rows=rows, kind=versions.Kind.UPLOAD, appends=False)
    captured = {"kind": "captured", "model": "others"}
    for method, path, body in (
        ("post", "/datasets/rows/restore", {"version": 1}),
        ("put", "/datasets/rows/source", captured),
    ):
        _refused(_ask(client, method, path, body), "name")
    assert _ask(client, "put", "/datasets/own/source", captured).status_code == 200
    with tenant_scope(acme.tenant.id):
        for place in ({"model": NAME}, {}):
            source = DatasetSource.objects.create(
                name=f"of-{len(place)}", kind="captured", place=place, sealed=b"x"
            )
            for method, path in (("get", "source"), ("delete", "source"), ("post", "pulls")):
                _refused(_ask(client, method, f"/datasets/{source.name}/{path}"), "model")
            _refused(_ask(client, "put", f"/datasets/{source.name}/source", captured), "model")


def test_suites_of_another_models_gate_and_judges_stay(acme: Party, world: World) -> None:
    client = bound_to(acme, "others")
    case = {"messages": [{"role": "user", "content": "x"}], "expected": "z"}
    assert _ask(client, "get", "/suites/cases").status_code == 200
    _refused(_ask(client, "post", "/suites/cases/versions", {"cases": [case]}), "name")
    _refused(_ask(client, "delete", "/suites/cases"), "name")
    with tenant_scope(acme.tenant.id):
        Adapter.objects.update(gate={})
        Judge.objects.create(name="strict", url="https://judge.example/v1", model="m")
    _refused(_ask(client, "delete", "/suites/cases"), None)
    judge = {"url": "https://evil.example/v1", "model": "m"}
    _refused(_ask(client, "put", "/judges/strict", judge), None)
    _refused(_ask(client, "delete", "/judges/strict"), None)
    assert _ask(client, "post", "/suites/own/versions", {"cases": [case]}).status_code == 201
    assert _ask(client, "delete", "/suites/own").status_code == 204
    with tenant_scope(acme.tenant.id):
        assert Evaluation.objects.exists() and Judge.objects.exists()


def test_captured_requests_are_the_keys_models_alone(
    acme: Party, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_id = f"req_{new_id().hex}"
    with tenant_scope(acme.tenant.id):
        captured_make(request_id, "others@3")
    stored: list[bytes] = []

    def keep(content: bytes, **_: Any) -> Any:
        stored.append(content)
        raise InterruptedError

    # The store is not asked: what would be stored is enough.
    monkeypatch.setattr(dataset_services, "rows_store", keep)
    client = bound_to(acme, "others")
    with pytest.raises(InterruptedError):
        _ask(client, "post", "/datasets/own/from-captured")
    assert b"answer of others@3" in stored[0] and b"answer of ledger" not in stored[0]
    none = _ask(client, "post", "/datasets/own/from-captured", {"model": NAME})
    assert assert_error(none, 400, "only")["code"] == "nothing_captured"
    assert _ask(client, "delete", "/captured-requests").json()["deleted"] == 1
    with tenant_scope(acme.tenant.id):
        assert CapturedRequest.objects.get().model == NAME
    words = _ask(as_user(acme.owner), "get", f"/captured-requests/{_captured_of(world)}").json()
    assert words["row"]["messages"][-1]["content"] == "answer of ledger"


def _captured_of(world: World) -> str:
    return world.ids["/api/v1/captured-requests/{request_id}"]


def test_a_key_sees_the_batches_of_its_models_and_its_own(acme: Party, world: World) -> None:
    with tenant_scope(acme.tenant.id):
        common = {"endpoint": "/v1/completions", "expires_at": timezone.now()}
        Batch.objects.create(input_file_id=new_id(), api_key=acme.api_key, model="", **common)
        Batch.objects.create(input_file_id=new_id(), model="others@2", **common)
        assert batches_list().count() == 3
        for key_id, allowed, num_batches, num_files in (
            (acme.api_key.pk, ("a", "b"), 1, 1),
            (new_id(), ("a", "b"), 0, 1),
            (new_id(), ("others",), 1, 1),
            (acme.api_key.pk, (NAME, "others"), 3, 4),
        ):
            with model_scope(Bounds(allowed, key_id)):
                assert batches_list().count() == num_batches
                assert files_list().count() == num_files
        assert files_list().count() == File.objects.count() == 4


def test_a_job_of_a_bound_key_names_its_adapter(acme: Party, world: World) -> None:
    client = bound_to(acme, "others", "tiny")
    body = {"model": "tiny", "training_file": world.input_file}
    for more in ({}, {"suffix": NAME}):
        _refused(client.post("/v1/fine_tuning/jobs", body | more, format="json"), "suffix")


@pytest.mark.parametrize("name", ["ledger", "ledger@3", "ft:tiny:acme:ledger:3", "ledger2", "led"])
@pytest.mark.parametrize("entry", ["ledger", "ledger@3", "led.er", "ledger@30"])
def test_rows_and_names_follow_one_rule(acme: Party, name: str, entry: str) -> None:
    """The database's pattern of a list allows what the list allows."""
    plain = "ledger@3" if name.startswith("ft:") else name
    with tenant_scope(acme.tenant.id):
        Batch.objects.create(
            endpoint="/v1/completions",
            input_file_id=new_id(),
            model=name,
            expires_at=timezone.now() + dt.timedelta(days=1),
        )
        with model_scope(Bounds((entry,), new_id())):
            assert Batch.objects.allowed().exists() is allows_model((entry,), plain)
