"""What the command line says of servers that are away, busy, old, or somebody else's.

The servers here are not Lorikeet's on purpose; tests/e2e/cli has the real one.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from demo.ports import choose_ports
from tests.cli.conftest import Answer, Handler
from tests.cli.runner import Cli, Done

KEY = "lk_live_" + "x" * 71
LIST = {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
Serve = Callable[[Handler], str]


def ok(document: object = LIST) -> Answer:
    return 200, {"Content-Type": "application/json"}, json.dumps(document).encode()


def refused(status: int, code: str, message: str = "No.", **headers: str) -> Answer:
    error = {"message": message, "type": "t", "param": None, "code": code}
    return status, headers, json.dumps({"error": error}).encode()


def run(cli: Cli, url: str, *argv: str) -> Done:
    return cli.run(*argv, LORIKEET_URL=url, LORIKEET_API_KEY=KEY)


def assert_one_line(done: Done, code: int, pattern: str) -> None:
    """It ends so, and its last line says it; nothing of a traceback."""
    assert done.code == code, done
    last = done.err.strip().splitlines()[-1]
    assert last.startswith("lorikeet: ") and re.search(pattern, last), done.err
    assert "Traceback" not in done.err and done.out == ""


def test_a_server_that_is_away_is_said_so_within_ten_seconds(cli: Cli) -> None:
    (port,) = choose_ports(1)
    began = time.monotonic()
    done = run(cli, f"http://127.0.0.1:{port}", "adapters", "list")
    assert_one_line(done, 4, "does not answer .*refused.*Check the address")
    assert time.monotonic() - began < 10


def test_a_name_that_nobody_has(cli: Cli) -> None:
    done = run(cli, "http://nobody.invalid", "adapters", "list")
    assert_one_line(done, 4, "http://nobody.invalid does not answer")


FOREIGN: dict[str, Answer] = {
    "a page": (200, {"Content-Type": "text/html"}, b"<html>Welcome</html>"),
    "a page's 404": (404, {"Content-Type": "text/html"}, b"<html>Not found</html>"),
    "other JSON": (200, {}, b"[1, 2]"),
    "other JSON's 404": (404, {}, b'{"detail": "Not Found"}'),
    "nothing": (404, {}, b""),
}


@pytest.mark.parametrize("answer", FOREIGN.values(), ids=FOREIGN)
def test_a_server_that_is_not_lorikeet(cli: Cli, serve: Serve, answer: Answer) -> None:
    done = run(cli, serve(lambda *_: answer), "adapters", "list")
    assert_one_line(done, 4, "not as Lorikeet does.*Check the address")


def test_signing_in_at_a_server_that_is_not_lorikeet_saves_nothing(cli: Cli, serve: Serve) -> None:
    url = serve(lambda *_: (200, {}, b'{"ok": true}'))
    done = cli.run("login", url, "--key-stdin", stdin=KEY)
    assert_one_line(done, 4, "not as Lorikeet does")
    assert not cli.config.exists()


def test_a_redirect_is_not_followed_with_the_key(cli: Cli, serve: Serve) -> None:
    asked: list[str] = []

    def elsewhere(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        asked.append(headers.get("authorization", ""))
        return ok()

    target = serve(elsewhere)
    done = run(cli, serve(lambda *_: (301, {"Location": target}, b"")), "adapters", "list")
    assert_one_line(done, 4, "redirects to http://127")
    assert asked == []


def test_an_old_server_is_said_so(cli: Cli, serve: Serve) -> None:
    done = run(cli, serve(lambda *_: refused(404, "unknown_url")), "usage")
    assert_one_line(done, 1, "has no /api/v1/usage: it is older than this command line")


def test_a_key_that_nobody_knows(cli: Cli, serve: Serve) -> None:
    done = run(cli, serve(lambda *_: refused(401, "invalid_api_key")), "adapters", "list")
    assert_one_line(done, 3, "refuses the key: No. Run `lorikeet login`")


def test_what_is_not_allowed(cli: Cli, serve: Serve) -> None:
    done = run(cli, serve(lambda *_: refused(403, "permission_denied", "Not you.")), "usage")
    assert_one_line(done, 3, "Not you.")


def test_a_servers_words_cannot_steer_the_terminal(cli: Cli, serve: Serve) -> None:
    evil = "red \x1b[31m and\r\nlorikeet: done"
    done = run(cli, serve(lambda *_: refused(400, "x", evil)), "usage")
    assert_one_line(done, 1, "red")
    assert "\x1b" not in done.err and len(done.err.splitlines()) == 1


def test_a_busy_server_is_asked_again_when_it_says(cli: Cli, serve: Serve) -> None:
    """The write has the same Idempotency-Key each time."""
    keys: list[str] = []
    made = {"public_id": "p", "name": "n", "last4": "abcd", "revoked_at": None, "expires_at": None}
    made |= {"last_used_at": None, "scopes": [], "allowed_models": [], "allowed_ips": []}

    def busy(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        keys.append(headers["idempotency-key"])
        if len(keys) == 1:
            return refused(503, "overloaded", **{"Retry-After": "1"})
        if len(keys) == 2:
            return refused(429, "rate_limit_exceeded", **{"Retry-After": "1"})
        return ok({**made, "key": "lk_live_secret"})

    done = run(cli, serve(busy), "keys", "create", "ci")
    assert done.code == 0 and "lk_live_secret" in done.out, done.err
    assert len(keys) == 3 and len(set(keys)) == 1
    assert done.err.count("trying again in 1 s") == 2


def test_what_can_never_succeed_is_not_tried_again(cli: Cli, serve: Serve) -> None:
    asked: list[str] = []

    def spent(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        asked.append(path)
        return refused(429, "insufficient_quota", "Spent.", **{"x-should-retry": "false"})

    assert_one_line(run(cli, serve(spent), "usage"), 1, "Spent")
    assert len(asked) == 1


def test_a_long_wait_is_left_to_the_person(cli: Cli, serve: Serve) -> None:
    url = serve(lambda *_: refused(503, "overloaded", "Later.", **{"Retry-After": "3600"}))
    assert_one_line(run(cli, url, "usage"), 1, "Later")


def test_an_endless_answer_is_cut(cli: Cli, serve: Serve) -> None:
    done = run(cli, serve(lambda *_: (200, {}, b" " * (33 << 20))), "usage")
    assert_one_line(done, 4, "more than 32 MiB")


def test_a_page_after_a_page(cli: Cli, serve: Serve) -> None:
    def numbered(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        begin = int(match[1]) + 1 if (match := re.search(r"after=(\d+)", path)) else 0
        match = re.search(r"limit=(\d+)", path)
        assert match is not None
        ids = range(begin, min(begin + int(match[1]), 150))
        rows = [{"id": str(i), "name": f"a{i}", "base_model": "b"} for i in ids]
        last = rows[-1]["id"] if rows else None
        return ok({**LIST, "data": rows, "last_id": last, "has_more": ids.stop < 150})

    url = serve(numbered)
    for limit, found, has_more in ((120, 120, True), (500, 150, False)):
        done = run(cli, url, "adapters", "list", f"--limit={limit}", "--output=json")
        assert len({row["id"] for row in done.json["data"]}) == found
        assert done.json["has_more"] is has_more


def test_a_large_dataset_is_never_whole_in_memory(cli: Cli, serve: Serve, tmp_path: Path) -> None:
    parts: list[int] = []
    peak = tmp_path / "peak"

    def take(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        if path.endswith("/parts"):
            parts.append(len(body))
            return ok({"id": f"part_{len(parts)}"})
        if path.endswith("/uploads"):
            assert json.loads(body)["bytes"] == 300 << 20
            return ok({"id": "upload_1"})
        return refused(400, "invalid_dataset", "Not chats.")

    large = tmp_path / "large.jsonl"
    with large.open("wb") as file:
        file.truncate(300 << 20)
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit\n"
        "def note():\n"
        # Not ru_maxrss, which begins with that of the process that started this one.
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    kib = [line.split()[1] for line in lines if line.startswith('VmHWM')][0]\n"
        f"    open({str(peak)!r}, 'w').write(kib)\n"
        "atexit.register(note)\n"
    )
    path = f"{tmp_path}:{cli.environment()['PYTHONPATH']}"
    env = {"LORIKEET_URL": serve(take), "LORIKEET_API_KEY": KEY, "PYTHONPATH": path}
    done = cli.run("datasets", "upload", str(large), **env)
    assert_one_line(done, 1, "Not chats")
    assert sum(parts) > 300 << 20 > max(parts)
    assert int(peak.read_text()) * 1024 < 200 << 20


CONTENTS = {
    "adapter_config.json": b'{"peft_type": "LORA"}',
    "adapter_model.safetensors": b"tensors",
}


def adapter_folder(folder: Path) -> str:
    folder.mkdir()
    for name, data in CONTENTS.items():
        (folder / name).write_bytes(data)
    return str(folder)


def with_store(serve: Serve, store: str, seen: list[tuple[str, str, Any]] | None = None) -> str:
    """A server that lets clients upload to `store`, each file in one part; `seen` is added to."""
    file = {"part_bytes": 8 << 20, "parts": []}
    upload = {"object": "adapter_upload", "number": 1, "files": dict.fromkeys(CONTENTS, file)}

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        if seen is not None:
            seen.append((method, path, json.loads(body or b"{}")))
        if path.endswith("/parts"):
            asked = json.loads(body)
            digests = {"1": hashlib.sha256(CONTENTS[asked["file"]]).hexdigest()}
            assert asked["parts"] == digests
            url = f"{store}/{asked['file']}"
            return ok({"data": [{"number": 1, "url": url, "method": "PUT", "headers": {}}]})
        if path.endswith("/complete"):
            return ok({"model": "a@1", "number": 1, "status": "uploaded"})
        return ok({"number": 1, "upload": upload})

    return serve(answer)


def test_an_object_store_that_is_away_is_named(cli: Cli, serve: Serve, tmp_path: Path) -> None:
    (port,) = choose_ports(1)
    url = with_store(serve, f"http://127.0.0.1:{port}")
    done = run(cli, url, "adapters", "upload", adapter_folder(tmp_path / "a"))
    assert_one_line(done, 4, f"object store: .*:{port} does not answer.*S3_PUBLIC_ENDPOINT_URL")


def test_an_object_store_that_refuses_says_why(cli: Cli, serve: Serve, tmp_path: Path) -> None:
    seen: list[dict[str, str]] = []

    def refuse(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        seen.append(headers)
        return 403, {}, b"<Error><Message>Request has expired</Message></Error>"

    url = with_store(serve, serve(refuse))
    done = run(cli, url, "adapters", "upload", adapter_folder(tmp_path / "a"))
    assert_one_line(done, 1, "refused adapter_config.json with status 403: Request has expired")
    assert len(seen) == 1 and "authorization" not in seen[0], "the store gets no key"


def test_what_the_store_got_is_compared_and_sent_again(
    cli: Cli, serve: Serve, tmp_path: Path
) -> None:
    etags = iter(["0" * 32, *(hashlib.md5(data).hexdigest() for data in CONTENTS.values())])
    url = with_store(serve, serve(lambda *_: (200, {"ETag": f'"{next(etags)}"'}, b"")))
    done = run(cli, url, "adapters", "upload", adapter_folder(tmp_path / "a"), "--output=id")
    assert (done.code, done.out) == (0, "a@1\n"), done.err
    assert "got other bytes; sending part 1 of adapter_config.json again" in done.err
    always = serve(lambda *_: (200, {"ETag": f'"{"0" * 32}"'}, b""))
    done = run(cli, with_store(serve, always), "adapters", "upload", str(tmp_path / "a"))
    assert_one_line(done, 1, "adapter_config.json was damaged on its way")


@pytest.mark.parametrize("field", ["multipart", "accept_base_mismatch"])
def test_a_server_that_takes_no_parts_is_named(
    field: str, cli: Cli, serve: Serve, tmp_path: Path
) -> None:
    error = {"message": "There is no such field.", "code": None, "param": field}
    url = serve(lambda *_: (400, {}, json.dumps({"error": error}).encode()))
    done = run(cli, url, "adapters", "upload", adapter_folder(tmp_path / "a"))
    assert_one_line(done, 1, f"The server is older than this command line: .* {field}")


def test_what_the_check_is_to_accept_is_part_of_what_was_begun(
    cli: Cli, serve: Serve, tmp_path: Path
) -> None:
    """Else an upload that goes on would be rejected for what its command accepts."""
    seen: list[tuple[str, str, Any]] = []
    refused = serve(lambda *_: (403, {}, b"<Error><Message>No</Message></Error>"))
    url = with_store(serve, refused, seen)
    folder, accept = adapter_folder(tmp_path / "a"), "--accept-base-mismatch"
    begun = ("POST", "/api/v1/adapters/a/versions")
    for options in ((), (accept,), (accept,)):
        assert run(cli, url, "adapters", "upload", folder, *options).code == 1
    made = [
        body.get("accept_base_mismatch") for method, path, body in seen if (method, path) == begun
    ]
    assert made[:2] == [None, True]
    assert [path for method, path, _ in seen if method == "DELETE"] == [f"{begun[1]}/1/upload"]


def test_a_home_that_cannot_be_written_hurts_no_upload(
    cli: Cli, serve: Serve, tmp_path: Path
) -> None:
    url = with_store(serve, serve(lambda *_: (200, {}, b"")))
    folder = adapter_folder(tmp_path / "a")
    (tmp_path / "file").write_text("no folder")
    done = cli.run(
        *("adapters", "upload", folder, "--output=id"),
        LORIKEET_URL=url,
        LORIKEET_API_KEY=KEY,
        XDG_STATE_HOME=str(tmp_path / "file"),
    )
    assert (done.code, done.out, done.err) == (0, "a@1\n", "")
