"""/v1/files through the official client and raw requests, against a live server and store."""

from __future__ import annotations

import hashlib
import io
import json
import re
import socket
import time
import uuid
from typing import Any
from urllib.parse import urlsplit

import boto3
import openai
import psutil
import pytest

from tests.live import wait_for
from tests.site import Site

CHATS = b"".join(
    json.dumps(
        {
            "messages": [
                {"role": "user", "content": f"question {i}"},
                {"role": "assistant", "content": f"answer {i}"},
            ]
        }
    ).encode()
    + b"\n"
    for i in range(12)
)


def upload(site: Site, content: bytes = b"some words", tenant: str = "acme", **fields: Any) -> Any:
    fields.setdefault("purpose", "user_data")
    return site.client(tenant).files.create(file=("words.txt", io.BytesIO(content)), **fields)


def objects(site: Site, tenant: str) -> set[str]:
    """Keys of what the tenant's files have in the store."""
    env = site.live.env
    store = boto3.client(
        "s3",
        endpoint_url=env["S3_ENDPOINT_URL"],
        aws_access_key_id=env["S3_ACCESS_KEY_ID"],
        aws_secret_access_key=env["S3_SECRET_ACCESS_KEY"],
        region_name="us-east-1",
    )
    found: set[str] = set()
    for folder in ("files", "uploads"):
        prefix = f"t/{site.live.tenants[tenant].id}/{folder}/"
        pages = store.get_paginator("list_objects_v2").paginate(
            Bucket=env["S3_BUCKET"], Prefix=prefix
        )
        found |= {item["Key"] for page in pages for item in page.get("Contents") or []}
    return found


def sweep(site: Site) -> None:
    site.run_python("from controlplane.files.sweep import files_sweep; files_sweep()")


def test_a_file_comes_and_goes(site: Site) -> None:
    client = site.client()
    before = time.time()
    file = upload(site, "Grüße 🦜".encode())
    assert re.fullmatch(r"file-[0-9a-f]{32}", file.id)
    assert (file.object, file.purpose, file.filename) == ("file", "user_data", "words.txt")
    assert file.bytes == len("Grüße 🦜".encode())
    assert (file.status, file.expires_at) == ("processed", None)
    assert before - 2 <= file.created_at <= time.time()
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == "Grüße 🦜".encode()
    gone = client.files.delete(file.id)
    assert (gone.id, gone.object, gone.deleted) == (file.id, "file", True)
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)
    assert not [key for key in objects(site, "acme") if file.id.removeprefix("file-") in key]


def test_rows_are_json_whatever_the_client_accepts(site: Site) -> None:
    path = f"/v1/files/{upload(site).id}"
    plain = site.send("GET", path)
    for query, accept in (
        ("", "text/plain"),
        ("", "application/json; indent=4"),
        ("?format=x", ""),
    ):
        answer = site.send("GET", path + query, headers={"Accept": accept})
        assert (answer.status_code, answer.content) == (200, plain.content)
        assert answer.headers["Content-Type"] == "application/json"
        assert "Allow" not in answer.headers
        assert answer.headers.get("Vary") == plain.headers.get("Vary")


def test_a_large_file_is_streamed_in_bounded_memory(site: Site) -> None:
    """Forty MiB in a form whose purpose comes last; the server grows by a few parts at most."""
    block = bytes(range(256)) * 4096
    content = block * 40
    server = psutil.Process(site.web.pid)
    upload(site)  # so that what is loaded once is loaded
    before = server.memory_info().rss
    boundary = b"----lorikeet"
    body = (
        b'--%b\r\nContent-Disposition: form-data; name="file"; filename="big.bin"\r\n'
        b"Content-Type: application/octet-stream\r\n\r\n%b\r\n"
        b'--%b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n--%b--\r\n'
    ) % (boundary, content, boundary, boundary)
    answer = site.send(
        "POST",
        "/v1/files",
        content=body,
        headers={"Content-Type": f"multipart/form-data; boundary={boundary.decode()}"},
    )
    assert answer.status_code == 200, answer.text
    grown = server.memory_info().rss - before
    assert grown < 30 * 1024**2, f"{grown / 1024**2:.0f} MiB for a file of 40 MiB"
    file = answer.json()
    assert file["bytes"] == len(content)
    client = site.client()
    digest = hashlib.sha256()
    with client.files.with_streaming_response.content(file["id"]) as streamed:
        for piece in streamed.iter_bytes():
            digest.update(piece)
    assert digest.hexdigest() == hashlib.sha256(content).hexdigest()
    client.files.delete(file["id"])


def test_a_body_in_chunks_of_unknown_length(site: Site) -> None:
    def body() -> Any:
        yield b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nevals\r\n'
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n12'
        yield b"34\r\n--x--\r\n"

    # It might be as long as a file can be, and this tenant's storage is smaller.
    answer = site.send(
        "POST",
        "/v1/files",
        content=body(),
        headers={"Content-Type": "multipart/form-data; boundary=x"},
    )
    assert answer.json()["error"]["code"] == "storage_limit_exceeded"


@pytest.mark.parametrize(
    ("header", "status", "part", "content_range"),
    [
        ("bytes=0-3", 206, b"0123", "bytes 0-3/10"),
        ("bytes=7-", 206, b"789", "bytes 7-9/10"),
        ("bytes=-2", 206, b"89", "bytes 8-9/10"),
        ("bytes=-20", 200, b"0123456789", None),
        ("bytes=4-99", 206, b"456789", "bytes 4-9/10"),
        ("bytes=1-2,4-5", 200, b"0123456789", None),
        ("lines=1-2", 200, b"0123456789", None),
        ("bytes=4-2", 200, b"0123456789", None),
        ("bytes=-", 200, b"0123456789", None),
    ],
)
def test_a_range_of_the_content(
    site: Site, header: str, status: int, part: bytes, content_range: str | None
) -> None:
    file = upload(site, b"0123456789")
    answer = site.send("GET", f"/v1/files/{file.id}/content", headers={"Range": header})
    assert (answer.status_code, answer.content) == (status, part)
    assert answer.headers.get("Content-Range") == content_range
    site.client().files.delete(file.id)


@pytest.mark.parametrize("header", ["bytes=10-", "bytes=10-12", "bytes=-0", f"bytes={10**19}-"])
def test_a_range_of_which_nothing_is_there(site: Site, header: str) -> None:
    file = upload(site, b"0123456789")
    answer = site.send("GET", f"/v1/files/{file.id}/content", headers={"Range": header})
    assert (answer.status_code, answer.headers["Content-Range"]) == (416, "bytes */10")
    assert answer.json()["error"]["code"] == "range_not_satisfiable"
    site.client().files.delete(file.id)


def test_lists_page_by_page_in_both_orders(site: Site) -> None:
    client = site.client("globex")
    made = [upload(site, b"%d" % i, tenant="globex").id for i in range(5)]
    other = upload(site, CHATS, tenant="globex", purpose="fine-tune").id
    listed = client.files.list(purpose="user_data")
    assert [file.id for file in listed.data] == made[::-1]
    assert listed.has_more is False
    assert [file.id for file in client.files.list(purpose="user_data", limit=2)] == made[::-1]
    assert [file.id for file in client.files.list(order="asc", limit=4)] == [*made, other]
    first = client.files.list(order="asc", limit=4)
    assert first.has_more is True
    page = site.send("GET", f"/v1/files?order=asc&limit=4&after={made[3]}", "globex").json()
    assert [file["id"] for file in page["data"]] == [made[4], other]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (made[4], other, False)
    for file_id in (*made, other):
        client.files.delete(file_id)
    assert client.files.list().data == []


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=10001", "limit"),
        ("limit=00000110000000", "limit"),
        ("limit=x", "limit"),
        ("order=up", "order"),
        ("after=batch_1", "after"),
        ("purpose=nothing", "purpose"),
    ],
)
def test_a_list_that_is_asked_for_wrongly(site: Site, query: str, param: str) -> None:
    answer = site.send("GET", f"/v1/files?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "purpose"),
        ({"purpose": "batch_output"}, "purpose"),
        ({"purpose": "everything"}, "purpose"),
        ({"purpose": "evals", "colour": "red"}, "colour"),
        ({"purpose": "evals", "expires_after[anchor]": "now"}, "expires_after.anchor"),
        (
            {
                "purpose": "evals",
                "expires_after[anchor]": "created_at",
                "expires_after[seconds]": "60",
            },
            "expires_after.seconds",
        ),
    ],
)
def test_a_form_that_says_something_wrong(site: Site, fields: dict[str, str], param: str) -> None:
    before = objects(site, "acme")
    answer = site.send("POST", "/v1/files", data=fields, files={"file": ("a", b"words")})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert answer.headers["x-request-id"].startswith("req_")
    assert objects(site, "acme") == before


def test_bodies_that_are_no_form(site: Site) -> None:
    for headers, content in (
        ({"Content-Type": "application/json"}, b'{"purpose": "batch"}'),
        ({"Content-Type": "multipart/form-data"}, b"--x"),
        ({"Content-Type": "multipart/form-data; boundary=x"}, b"no boundary"),
        ({"Content-Type": "multipart/form-data; boundary=x"}, b""),
        ({"Content-Type": "multipart/form-data; boundary*=nothing''x"}, b"--x--"),
        ({}, b""),
    ):
        answer = site.send("POST", "/v1/files", content=content, headers=headers)
        assert answer.status_code == 400, answer.text
    odd = {"Content-Type": "text/plain; charset*=nothing''x"}
    for path in ("/v1/models", "/healthz"):
        assert site.send("GET", path, headers=odd).status_code == 200
    answer = site.send("POST", "/v1/files", data={"purpose": "evals"}, files={"other": b"x"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "other")
    answer = site.send("POST", "/v1/files", data={"purpose": "evals"}, files={"file": ("a", b"")})
    assert answer.json()["error"]["message"] == "The file is empty."


def test_rows_for_training_are_checked_as_datasets_are(site: Site) -> None:
    client = site.client()
    good = client.files.create(file=("chats.jsonl", CHATS), purpose="fine-tune")
    assert good.bytes == len(CHATS)
    before = objects(site, "acme")
    bad = CHATS + b'{"messages": [{"role": "user", "content": "no answer"}]}\n{"broken\n'
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.create(file=("chats.jsonl", bad), purpose="fine-tune")
    assert refused.value.code == "invalid_dataset"
    assert "line 13 has no answer, but the rows before have one answer" in refused.value.message
    assert "line 14 is not JSON" in refused.value.message
    assert objects(site, "acme") == before
    client.files.delete(good.id)


def test_rows_that_say_more_than_messages_are_obeyed_or_refused(site: Site) -> None:
    client = site.client()
    asked = {"role": "user", "content": "Hi"}
    answer = {"role": "assistant", "content": "Hello"}
    row: dict[str, Any] = {"messages": [asked, answer]}

    def refusal(*rows: Any) -> str:
        content = "\n".join(map(json.dumps, rows)).encode()
        with pytest.raises(openai.BadRequestError) as refused:
            client.files.create(file=("rows.jsonl", content), purpose="fine-tune")
        assert (refused.value.code, refused.value.param) == ("invalid_dataset", "file")
        return refused.value.message

    assert "line 2: label is a key of preference tuning" in refusal(row, row | {"label": False})
    assert "line 1: images is not text" in refusal(row | {"images": ["cat.png"]})
    told = refusal(
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
    )
    assert "line 1 is a row of another format: ShareGPT. `lorikeet datasets convert" in told
    system = {"role": "system", "content": "Be kind."}
    good = [row | {"system": "s"}, {"messages": [system, answer]}]
    content = "\n".join(map(json.dumps, good)).encode()
    client.files.delete(client.files.create(file=("r.jsonl", content), purpose="fine-tune").id)


def test_expiry_is_told_and_kept(site: Site) -> None:
    client = site.client()
    file = upload(site, expires_after={"anchor": "created_at", "seconds": 3600})
    assert file.expires_at == file.created_at + 3600
    batch = upload(site, b"{}\n", purpose="batch")
    assert batch.expires_at == batch.created_at + 30 * 24 * 3600
    pk = file.id.removeprefix("file-")
    with site.database() as database:
        database.execute("update files_file set expires_at = now() where id = %s", (pk,))
    with pytest.raises(openai.NotFoundError):  # at once, whenever the sweep comes
        client.files.retrieve(file.id)
    assert file.id not in [each.id for each in client.files.list()]
    assert any(pk in key for key in objects(site, "acme"))
    sweep(site)
    assert not any(pk in key for key in objects(site, "acme"))
    with site.database() as database:
        assert database.execute("select 1 from files_file where id = %s", (pk,)).fetchone() is None
        (action,) = database.execute(
            "select action from audit_auditevent where resource_id = %s order by seq desc limit 1",
            (str(uuid.UUID(pk)),),
        ).fetchone() or ("",)
    assert action == "file.expired"
    assert client.files.retrieve(batch.id).id == batch.id
    client.files.delete(batch.id)


def test_who_made_and_deleted_a_file_is_in_the_audit_trail(site: Site) -> None:
    file = upload(site)
    answer = site.send("DELETE", f"/v1/files/{file.id}")
    with site.database() as database:
        rows = database.execute(
            "select action, actor_type, request_id from audit_auditevent"
            " where replace(resource_id, '-', '') = %s order by seq",
            (file.id.removeprefix("file-"),),
        ).fetchall()
    assert [row[:2] for row in rows] == [("file.created", "api_key"), ("file.deleted", "api_key")]
    assert rows[1][2] == answer.headers["x-request-id"]


def test_anothers_file_and_no_file_are_one_answer(site: Site) -> None:
    file = upload(site, b"of acme")
    missing = f"file-{'0' * 32}"
    for method, path in (
        ("GET", "/v1/files/{}"),
        ("DELETE", "/v1/files/{}"),
        ("GET", "/v1/files/{}/content"),
    ):
        theirs = site.send(method, path.format(file.id), "globex")
        none = site.send(method, path.format(missing), "globex")
        assert (theirs.status_code, none.status_code) == (404, 404)
        assert theirs.content == none.content
    assert site.send("GET", f"/v1/files?after={file.id}", "globex").json()["data"] == []
    assert site.client().files.content(file.id).content == b"of acme"
    site.client().files.delete(file.id)


def test_the_storage_of_a_tenant_is_bounded(site: Site) -> None:
    """64 MiB here: what is there and what is announced count together."""
    client = site.client()
    kept = upload(site, bytes(30 * 1024**2))
    announced = client.uploads.create(
        filename="x", purpose="user_data", bytes=20 * 1024**2, mime_type="text/plain"
    )
    with pytest.raises(openai.BadRequestError) as refused:
        upload(site, bytes(15 * 1024**2))
    assert refused.value.code == "storage_limit_exceeded"
    client.uploads.cancel(announced.id)
    client.files.delete(upload(site, bytes(15 * 1024**2)).id)
    client.files.delete(kept.id)


def open_upload(site: Site, num_bytes: int) -> socket.socket:
    """A connection on which a file of so many bytes begins to come."""
    parts = urlsplit(site.url)
    connection = socket.create_connection((parts.hostname or "", parts.port or 0))
    connection.sendall(
        (
            f"POST /v1/files HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            f"Authorization: Bearer {site.live.tenants['acme'].key}\r\n"
            "Content-Type: multipart/form-data; boundary=x\r\n"
            f"Content-Length: {num_bytes}\r\n\r\n"
            '--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nevals\r\n'
            '--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        ).encode()
    )
    return connection


def test_a_client_that_leaves_halfway_leaves_nothing(site: Site) -> None:
    before, others = objects(site, "acme"), unready(site)
    connection = open_upload(site, 30 * 1024**2)
    connection.sendall(bytes(18 * 1024**2))  # two parts of it are in the store by now
    wait_for(lambda: unready(site) - others, what="the file's row")
    connection.close()
    wait_for(lambda: not unready(site) - others, what="its end")
    assert objects(site, "acme") == before


def test_slow_clients_of_one_tenant_leave_room_for_others_and_for_reading(site: Site) -> None:
    kept, others = upload(site), unready(site)
    slow = [open_upload(site, 1000) for _ in range(8)]
    wait_for(lambda: len(unready(site) - others) == 8, what="slow files")
    with pytest.raises(openai.RateLimitError):
        upload(site)
    theirs = upload(site, tenant="globex")
    assert site.client().files.content(kept.id).content == b"some words"
    for connection in slow:
        connection.close()
    wait_for(lambda: is_taken_in(site), what="room")
    site.client().files.delete(kept.id)
    site.client("globex").files.delete(theirs.id)


def unready(site: Site) -> set[uuid.UUID]:
    """Files that are under way. Killed batch runners, in other tests, may have left some too."""
    with site.database() as database:
        rows = database.execute("select id from files_file where status <> 'ready'")
        return {file_id for (file_id,) in rows}


def is_taken_in(site: Site) -> bool:
    try:
        site.client().files.delete(upload(site).id)
    except openai.RateLimitError:
        return False
    return True


def test_a_file_whose_publishing_was_only_said_to_fail_keeps_its_bytes(site: Site) -> None:
    """The connection may end between the commit and the word of it."""
    code = (
        "import uuid\n"
        "from django.db import OperationalError, transaction\n"
        "from controlplane.infra import storage\n"
        "from controlplane.files import contents, services\n"
        "from controlplane.files.models import File\n"
        "from controlplane.tenancy.scoping import tenant_scope\n"
        "publish = services.file_publish\n"
        "def lose():\n"
        "    raise OperationalError('gone')\n"
        "def publish_and_lose(file):\n"
        "    publish(file)\n"
        "    transaction.on_commit(lose)\n"
        "services.file_publish = publish_and_lose\n"
        f"with tenant_scope(uuid.UUID('{site.live.tenants['acme'].id}')):\n"
        "    file = services.file_begin(max_bytes=10)\n"
        "    writer = contents.FileWriter(file.key, max_bytes=10)\n"
        "    writer.write(b'half')\n"
        "    form = services.FileForm(purpose='evals', filename='f')\n"
        "    try:\n"
        "        services.file_finish(file, form, writer)\n"
        "    except OperationalError:\n"
        "        print(File.objects.get(pk=file.pk).status, storage.object_size(file.key))\n"
    )
    assert site.run_python(code).split() == ["ready", "4"]
    client = site.client()
    (file,) = [file for file in client.files.list() if file.filename == "f"]
    assert client.files.content(file.id).content == b"half"
    client.files.delete(file.id)


def test_too_long_a_body_is_refused_before_it_is_read(site: Site) -> None:
    connection = open_upload(site, 600 * 1024**2)
    answer = connection.makefile("rb").readline()
    assert answer.startswith(b"HTTP/1.1 413")
    connection.close()


def test_a_key_needs_the_scope(site: Site) -> None:
    code = (
        "import uuid\n"
        "from controlplane.tenancy.scoping import tenant_scope\n"
        "from controlplane.tenants import key_services\n"
        "from controlplane.tenants.key_rules import KeyRules\n"
        f"with tenant_scope(uuid.UUID('{site.live.tenants['acme'].id}')):\n"
        "    rules = KeyRules(scopes=('files:read',))\n"
        "    print(key_services.api_key_create(name='reader', rules=rules)[1])\n"
    )
    reader = site.client(api_key=site.run_python(code).strip())
    assert reader.files.list().object == "list"
    with pytest.raises(openai.PermissionDeniedError):
        reader.files.create(file=b"x", purpose="evals")
    with pytest.raises(openai.PermissionDeniedError):
        reader.files.delete(f"file-{'0' * 32}")
    with pytest.raises(openai.PermissionDeniedError):
        reader.uploads.create(filename="x", purpose="evals", bytes=1, mime_type="a/b")
    nobody = site.client(api_key="lk_nothing")
    with pytest.raises(openai.AuthenticationError):
        nobody.files.create(file=bytes(3 * 1024**2), purpose="evals")
