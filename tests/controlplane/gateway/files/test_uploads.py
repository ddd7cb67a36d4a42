"""/v1/uploads: files that come in parts."""

from __future__ import annotations

import hashlib
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.controlplane.gateway.files.test_files import CHATS, objects, sweep
from tests.site import Site


def begin(site: Site, num_bytes: int, **fields: Any) -> Any:
    fields = {"filename": "parts.bin", "purpose": "user_data", "mime_type": "a/b", **fields}
    return site.client().uploads.create(bytes=num_bytes, **fields)


def add(site: Site, upload: Any, data: bytes) -> str:
    part = site.client().uploads.parts.create(upload.id, data=data)
    assert (part.object, part.upload_id) == ("upload.part", upload.id)
    assert part.id.startswith("part_")
    return part.id


def test_parts_of_any_size_and_order_become_a_file(site: Site) -> None:
    content = b"".join(b"%07d\n" % number for number in range(1_500_000))  # 12 MB: several writes
    cuts = [0, 1, 5_000_000, 5_000_010, 9_000_000, len(content)]
    pieces = [content[a:b] for a, b in itertools.pairwise(cuts)]
    upload = begin(site, len(content), expires_after={"anchor": "created_at", "seconds": 7200})
    assert (upload.status, upload.file, upload.bytes) == ("pending", None, len(content))
    assert upload.expires_at == upload.created_at + 3600
    with ThreadPoolExecutor() as threads:
        ids = list(threads.map(lambda piece: add(site, upload, piece), pieces[::-1]))[::-1]
    add(site, upload, b"sent twice, and named once")
    done = site.client().uploads.complete(
        upload.id, part_ids=ids, md5=hashlib.md5(content).hexdigest()
    )
    assert (done.status, done.id) == ("completed", upload.id)
    assert done.file is not None
    assert (done.file.bytes, done.file.filename) == (len(content), "parts.bin")
    assert done.file.expires_at == done.file.created_at + 7200
    assert site.client().files.content(done.file.id).content == content
    assert not any("/uploads/" in key for key in objects(site, "acme"))
    again = site.client().uploads.complete(upload.id, part_ids=ids)  # its answer was lost
    assert again == done
    with pytest.raises(openai.ConflictError):
        site.client().uploads.cancel(upload.id)
    site.client().files.delete(done.file.id)


def test_the_clients_own_way_through_chunks(site: Site, tmp_path: Any) -> None:
    """And on to a version of a dataset, as docs/training.md has it."""
    path = tmp_path / "chats.jsonl"
    content = CHATS * (3_000_000 // len(CHATS))  # so much that a child checks the rows
    path.write_bytes(content)
    client = site.client()
    done = client.uploads.upload_file_chunked(
        file=path, mime_type="application/jsonl", purpose="fine-tune", part_size=1 << 20
    )
    assert done.file is not None
    assert client.files.content(done.file.id).content == content
    versions = f"{site.url}/api/v1/datasets/in-parts/versions"
    headers = {"Authorization": f"Bearer {client.api_key}"}
    made = httpx.post(versions, json={"file": done.file.id, "append": True}, headers=headers)
    assert (made.status_code, made.json()["num_bytes"]) == (201, len(content)), made.text
    client.files.delete(done.file.id)
    shown = httpx.get(versions.replace("versions", "preview?limit=1"), headers=headers)
    assert shown.status_code == 200
    gone = httpx.delete(versions.removesuffix("/versions"), headers=headers)
    assert gone.status_code == 204


def test_what_does_not_add_up_leaves_the_upload_open(site: Site) -> None:
    upload = begin(site, 6)
    first, second = add(site, upload, b"abc"), add(site, upload, b"def")
    complete = site.client().uploads.complete
    for part_ids, md5, param in (
        ([first], None, "part_ids"),
        ([first, first], None, "part_ids"),
        ([first, f"part_{'0' * 32}"], None, "part_ids"),
        ([first, second], "0" * 32, "md5"),
        ([first, second], "xyz", "md5"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            complete(upload.id, part_ids=part_ids, **({"md5": md5} if md5 else {}))
        assert refused.value.param == param
    done = complete(upload.id, part_ids=[second, first])
    assert done.file is not None
    assert site.client().files.content(done.file.id).content == b"defabc"
    site.client().files.delete(done.file.id)


def test_rows_for_training_are_checked_at_the_end(site: Site) -> None:
    broken = b'{"messages": []}\n'
    upload = begin(site, len(broken), purpose="fine-tune")
    part = add(site, upload, broken)
    before = objects(site, "acme")
    with pytest.raises(openai.BadRequestError) as refused:
        site.client().uploads.complete(upload.id, part_ids=[part])
    assert refused.value.code == "invalid_dataset"
    assert objects(site, "acme") == before
    assert site.client().uploads.cancel(upload.id).status == "cancelled"


def test_a_cancelled_upload_is_over(site: Site) -> None:
    upload = begin(site, 3)
    part = add(site, upload, b"abc")
    assert site.client().uploads.cancel(upload.id).status == "cancelled"
    assert not any("/uploads/" in key for key in objects(site, "acme"))
    assert site.client().uploads.cancel(upload.id).status == "cancelled"
    for call in (
        lambda: add(site, upload, b"abc"),
        lambda: site.client().uploads.complete(upload.id, part_ids=[part]),
    ):
        with pytest.raises(openai.ConflictError):
            call()


def test_an_upload_lives_for_an_hour(site: Site) -> None:
    upload = begin(site, 3)
    part = add(site, upload, b"abc")
    with site.database() as database:
        database.execute(
            "update files_upload set expires_at = now() where id = %s",
            (upload.id.removeprefix("upload_"),),
        )
    with pytest.raises(openai.ConflictError):
        site.client().uploads.complete(upload.id, part_ids=[part])
    sweep(site)
    assert not any("/uploads/" in key for key in objects(site, "acme"))
    with site.database() as database:
        found = database.execute(
            "select status from files_upload where id = %s", (upload.id.removeprefix("upload_"),)
        ).fetchone()
    assert found == ("expired",)


def test_an_upload_that_expires_while_it_is_put_together_leaves_no_file(site: Site) -> None:
    client = site.client("globex")
    upload = begin_as(client, 4)
    part = client.uploads.parts.create(upload.id, data=b"half").id
    code = (
        "import uuid\n"
        "from controlplane.errors import Conflict\n"
        "from controlplane.files import contents, services\n"
        "from controlplane.files.models import Upload\n"
        "from controlplane.tenancy.scoping import tenant_scope\n"
        "check = contents.check\n"
        "def expire(file, heartbeat):\n"  # as the sweep does
        "    Upload.objects.filter(status='assembling').update(status='expired')\n"
        "    check(file, heartbeat)\n"
        "contents.check = expire\n"
        f"with tenant_scope(uuid.UUID('{site.live.tenants['globex'].id}')):\n"
        f"    upload = services.upload_get('{upload.id}')\n"
        "    try:\n"
        f"        services.upload_complete(upload, part_ids=['{part}'], md5=None)\n"
        "    except Conflict:\n"
        "        print('refused')\n"
    )
    assert site.run_python(code).strip() == "refused"
    assert client.files.list().data == []


def test_an_upload_whose_server_was_killed_can_be_completed_again(site: Site) -> None:
    """Minutes later; and if that server was only paused, it finds its file refused."""
    client, before = site.client("globex"), objects(site, "globex")
    upload = begin_as(client, 4)
    part = client.uploads.parts.create(upload.id, data=b"half").id
    code = (
        "import uuid\n"
        "from controlplane.errors import Conflict\n"
        "from controlplane.files import contents, services\n"
        "from controlplane.tenancy.scoping import tenant_scope\n"
        "check = contents.check\n"
        "def pause(file, heartbeat):\n"
        "    print('paused', flush=True)\n"
        "    input()\n"
        "    check(file, heartbeat)\n"
        "contents.check = pause\n"
        f"with tenant_scope(uuid.UUID('{site.live.tenants['globex'].id}')):\n"
        f"    upload = services.upload_get('{upload.id}')\n"
        "    try:\n"
        f"        services.upload_complete(upload, part_ids=['{part}'], md5=None)\n"
        "    except Conflict:\n"
        "        print('refused')\n"
    )
    with site.talk_to_python(code) as paused:
        assert paused.stdout is not None
        assert paused.stdout.readline() == "paused\n"
        for call in (
            lambda: client.uploads.complete(upload.id, part_ids=[part]),
            lambda: client.uploads.cancel(upload.id),
        ):
            with pytest.raises(openai.ConflictError, match="being assembled"):
                call()
        with site.database() as database:
            database.execute("update files_file set alive_at = now() - interval '5 minutes'")
        done = client.uploads.complete(upload.id, part_ids=[part])
        assert paused.communicate("\n")[0] == "refused\n"
    assert done.file is not None
    assert client.files.content(done.file.id).content == b"half"
    assert [file.id for file in client.files.list()] == [done.file.id]
    client.files.delete(done.file.id)
    assert objects(site, "globex") == before


def begin_as(client: Any, num_bytes: int) -> Any:
    return client.uploads.create(
        filename="x", purpose="evals", bytes=num_bytes, mime_type="text/plain"
    )


def test_the_sweep_removes_what_a_killed_server_left(site: Site) -> None:
    """A row and half of its bytes, and a multipart write that nobody will finish."""
    code = (
        "import datetime as dt, uuid\n"
        "from django.utils import timezone\n"
        "from controlplane.infra import storage\n"
        "from controlplane.files.models import File\n"
        "from controlplane.files import services\n"
        "from controlplane.files.sweep import files_sweep\n"
        "from controlplane.tenancy.scoping import tenant_scope\n"
        f"with tenant_scope(uuid.UUID('{site.live.tenants['acme'].id}')):\n"
        "    file = services.file_begin(max_bytes=10)\n"
        "    writer = storage.ObjectWriter(file.key)\n"
        "    writer.write(bytes(9 * 1024**2))\n"
        "    storage.put_bytes(file.key, b'half')\n"
        "    slow = services.file_begin(max_bytes=10)\n"
        "    long_ago = timezone.now() - dt.timedelta(hours=1)\n"
        "    File.objects.update(created_at=long_ago)\n"
        "    File.objects.filter(pk=file.pk).update(alive_at=long_ago)\n"
        "print(file.pk, storage.object_size(file.key))\n"
        "files_sweep()\n"
        "print(storage.object_size(file.key))\n"
        f"with tenant_scope(uuid.UUID('{site.live.tenants['acme'].id}')):\n"
        "    File.objects.get(pk=slow.pk).delete()\n"
        "for _ in range(2):\n"
        "    soon = timezone.now() + dt.timedelta(hours=1)\n"
        "    print(storage.abort_old_parts(before=soon))\n"
    )
    pk, *sizes = site.run_python(code).split()
    assert sizes == ["4", "None", "1", "0"]
    with site.database() as database:
        assert database.execute("select 1 from files_file where id = %s", (pk,)).fetchone() is None


def test_parts_that_a_killed_server_left_give_their_room_back(site: Site) -> None:
    """Minutes later; one whose bytes still come keeps its own, one that wakes is refused."""
    upload = begin(site, 3)
    code = (
        "import datetime as dt, uuid\n"
        "from django.utils import timezone\n"
        "from controlplane.infra import storage\n"
        "from controlplane.errors import Conflict, InvalidRequest\n"
        "from controlplane.files import contents, services\n"
        "from controlplane.files.models import UploadPart\n"
        "from controlplane.files.sweep import files_sweep\n"
        "from controlplane.tenancy.scoping import tenant_scope\n"
        "contents._HEARTBEAT_S = 0\n"
        f"with tenant_scope(uuid.UUID('{site.live.tenants['acme'].id}')):\n"
        f"    upload = services.upload_get('{upload.id}')\n"
        "    most = services.MAX_PART_BYTES\n"
        "    lost, slow = [services.part_begin(upload, max_bytes=most) for _ in range(2)]\n"
        "    storage.put_bytes(lost.key, b'half')\n"
        "    lost_writer, slow_writer = services.part_writer(lost), services.part_writer(slow)\n"
        "    long_ago = timezone.now() - dt.timedelta(minutes=5)\n"
        "    UploadPart.objects.filter(upload=upload).update(alive_at=long_ago)\n"
        "    slow_writer.write(b'abc')\n"
        "    try:\n"
        "        services.part_begin(upload, max_bytes=most)\n"
        "    except InvalidRequest:\n"
        "        print('full')\n"
        "files_sweep()\n"
        f"with tenant_scope(uuid.UUID('{site.live.tenants['acme'].id}')):\n"
        "    print(storage.object_size(lost.key))\n"
        "    services.part_drop(services.part_begin(upload, max_bytes=most))\n"
        "    services.part_finish(slow, slow_writer)\n"
        "    try:\n"
        "        lost_writer.write(b'late')\n"
        "        services.part_finish(lost, lost_writer)\n"
        "    except Conflict:\n"
        "        print('refused', storage.object_size(lost.key))\n"
        "    print(*UploadPart.objects.filter(upload=upload))\n"
    )
    printed = site.run_python(code).split()
    assert printed[:-1] == ["full", "None", "refused", "None"]
    done = site.client().uploads.complete(upload.id, part_ids=[printed[-1]])
    assert done.file is not None
    assert site.client().files.content(done.file.id).content == b"abc"
    site.client().files.delete(done.file.id)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bytes": 0}, "bytes"),
        ({"bytes": 513 * 1024**2}, "bytes"),
        ({"bytes": 201 * 1024**2, "purpose": "batch"}, "bytes"),
        ({"purpose": "batch_output"}, "purpose"),
        ({"filename": ""}, "filename"),
        ({"mime_type": None}, "mime_type"),
        ({"mime_type": "a/\0"}, "mime_type"),
        ({"filename": "a\0b"}, "filename"),
        ({"expires_after": {"anchor": "created_at", "seconds": 5}}, "expires_after.seconds"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_an_upload_that_is_announced_wrongly(
    site: Site, fields: dict[str, Any], param: str
) -> None:
    body = {"filename": "x", "purpose": "evals", "bytes": 1, "mime_type": "a/b", **fields}
    answer = site.send("POST", "/v1/uploads", content=json.dumps(body))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_anothers_upload_and_no_upload_are_one_answer(site: Site) -> None:
    upload = begin(site, 3)
    part = add(site, upload, b"abc")
    missing = f"upload_{'0' * 32}"
    for path, sent in (
        ("/v1/uploads/{}/parts", {"files": {"data": b"abc"}}),
        ("/v1/uploads/{}/complete", {"content": json.dumps({"part_ids": [part]})}),
        ("/v1/uploads/{}/cancel", {}),
    ):
        theirs = site.send("POST", path.format(upload.id), "globex", **sent)
        none = site.send("POST", path.format(missing), "globex", **sent)
        assert (theirs.status_code, none.status_code) == (404, 404), theirs.text
        assert theirs.content == none.content
    assert site.client().uploads.cancel(upload.id).status == "cancelled"
