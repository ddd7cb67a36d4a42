"""The embedded servers: real ones, started, killed and started again on the same data."""

from __future__ import annotations

import dataclasses
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import boto3
import httpx
import psutil
import psycopg
import pytest
import redis
from botocore.exceptions import ClientError

from demo import ports, servers
from demo.ports import GRPC_OFFSET, HOST, HeldPorts, are_free, choose_ports
from demo.processes import ChildProcess, Command, recorded_process, stop_leftover, write_pid_file
from demo.stack import EmbeddedStack, stop_stack


def _s3(env: dict[str, str], secret: str | None = None) -> object:
    return boto3.client(
        "s3",
        endpoint_url=env["S3_ENDPOINT_URL"],
        aws_access_key_id=env["S3_ACCESS_KEY_ID"],
        aws_secret_access_key=secret or env["S3_SECRET_ACCESS_KEY"],
        region_name=env["S3_REGION"],
    )


@pytest.mark.parametrize(
    ("name", "can_create"), [("DATABASE_URL", False), ("DATABASE_OWNER_URL", True)]
)
def test_roles_have_no_power_over_the_server(
    stack: EmbeddedStack, name: str, can_create: bool
) -> None:
    with psycopg.connect(stack.env[name]) as connection:
        row = connection.execute(
            "select rolsuper, rolbypassrls, rolcreaterole, rolcreatedb from pg_roles "
            "where rolname = current_user"
        ).fetchone()
    assert row == (False, False, False, can_create)


def test_wrong_passwords_are_refused(stack: EmbeddedStack) -> None:
    password = stack.secrets.application_password
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(stack.env["DATABASE_URL"].replace(password, "wrong"))
    with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
        _s3(stack.env, secret="wrong").list_buckets()


def test_nothing_answers_a_stranger(stack: EmbeddedStack) -> None:
    """On every port that the stack's servers listen on, with what anybody may send."""
    listening = {
        (found.laddr.ip, found.laddr.port)
        for process in stack.processes
        for found in psutil.Process(process.pid).net_connections("tcp")
        if found.status == psutil.CONN_LISTEN
    }
    known = dataclasses.asdict(stack.ports)
    s3_parts = [known[name] for name in ("s3_master", "s3_volume", "s3_filer", "s3")]
    grpc = {port + GRPC_OFFSET for port in s3_parts}
    assert listening == {(HOST, port) for port in {*known.values(), *grpc}}
    _s3(stack.env).put_object(Bucket=stack.env["S3_BUCKET"], Key="t/x/private", Body=b"words")
    # What the parts' own addresses are, without the pages that tell of versions and sizes.
    paths = [
        *("/buckets/", "/buckets/lorikeet/t/x/private", "/lorikeet/t/x/private"),
        *("/lorikeet?list-type=2", "/dir/assign", "/dir/status", "/vol/status", "/vol/grow"),
        *("/dir/lookup?volumeId=1", "/1,01637037d6", "/kv/any", "/submit"),
    ]
    for port in s3_parts:
        for path in paths:
            for method in ("GET", "PUT", "POST", "DELETE"):
                url = f"http://{HOST}:{port}{path}"
                answer = httpx.request(method, url, content=b"x", timeout=5)
                told = (method, url, answer.status_code, answer.text[:200])
                assert answer.status_code in (400, 401, 403, 404, 405), told
                assert "words" not in answer.text, told
    for port in grpc:
        assert "certificate required" in _tls_as_nobody(port), port
    with redis.Redis(host=HOST, port=stack.ports.redis) as client:
        with pytest.raises(redis.AuthenticationError):
            client.ping()


def _tls_as_nobody(port: int) -> str:
    """What a server says to who has no certificate."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((HOST, port), timeout=5) as plain,
            context.wrap_socket(plain) as wrapped,
        ):
            wrapped.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
            return repr(wrapped.recv(100))
    except ssl.SSLError as error:
        return str(error)


def test_seaweedfs_sockets_are_nobody_elses(stack: EmbeddedStack) -> None:
    ports = {*dataclasses.asdict(stack.ports).values()}
    ports |= {port + GRPC_OFFSET for port in ports}
    found = [
        path
        for path in Path("/tmp").glob("seaweedfs-*.sock")
        if int(path.stem.rpartition("-")[2]) in ports
    ]
    assert found and not any(path.stat().st_mode & 0o077 for path in found)


def test_redis_refuses_writes_rather_than_evicting(stack: EmbeddedStack) -> None:
    with redis.Redis.from_url(stack.env["REDIS_URL"], decode_responses=True) as client:
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.config_get("appendonly") == {"appendonly": "yes"}


def test_data_survives_a_kill_of_everything(tmp_path: Path) -> None:
    first = EmbeddedStack(tmp_path / "stack", durable=False)
    first.start()
    try:
        with psycopg.connect(first.env["DATABASE_OWNER_URL"]) as connection:
            connection.execute("create table kept (n int)")
        with redis.Redis.from_url(first.env["REDIS_URL"]) as client:
            client.set("kept", "1")
        _s3(first.env).put_object(Bucket=first.env["S3_BUCKET"], Key="kept", Body=b"1")
    finally:
        pids = [process.pid for process in first.processes]
        # The servers stay behind, as they do when the demo is killed.
        del first
    with EmbeddedStack(tmp_path / "stack", durable=False) as second:
        assert not any(psutil.pid_exists(pid) and _is_live(pid) for pid in pids)
        with psycopg.connect(second.env["DATABASE_OWNER_URL"]) as connection:
            assert connection.execute("select count(*) from kept").fetchone() == (0,)
        with redis.Redis.from_url(second.env["REDIS_URL"]) as client:
            assert client.get("kept") == b"1"
        body = _s3(second.env).get_object(Bucket=second.env["S3_BUCKET"], Key="kept")["Body"]
        assert body.read() == b"1"
        left = [process.pid for process in second.processes]
    assert not stop_stack(tmp_path / "stack")
    assert not any(_is_live(pid) for pid in left)


def _is_live(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_held_ports_are_not_chosen_by_others() -> None:
    [port] = choose_ports(1)
    held = HeldPorts([port])
    try:
        assert not are_free([port])
    finally:
        held.release()
    assert are_free([port])


def test_no_port_is_chosen_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another process has chosen it may not have bound yet."""
    code = "from demo.ports import choose_ports; print(*choose_ports(2), flush=True); input()"
    argv = [sys.executable, "-c", code]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        taken = [int(number) for number in other.stdout.readline().split()]
        monkeypatch.setattr(ports, "_FIRST", min(taken))
        monkeypatch.setattr(ports, "_LAST", max(taken) + 50)
        [port] = choose_ports(1)
        assert port not in taken
        other.communicate("\n")


def test_failing_server_shows_its_log_and_what_to_do(tmp_path: Path) -> None:
    process = ChildProcess(
        "Redis",
        Command(argv=[str(servers.program("redis-server")), "--port", "not-a-port"]),
        log=tmp_path / "redis.log",
        pid_file=tmp_path / "redis.json",
    )
    process.start()
    with pytest.raises(Exception, match=r"(?s)ended with status 1.*not-a-port.*What to do"):
        process.wait_until(lambda: False, timeout_s=10)


def test_pid_of_another_process_is_left_alone(tmp_path: Path) -> None:
    victim = ChildProcess(
        "victim",
        Command(argv=["sleep", "60"]),
        log=tmp_path / "log",
        pid_file=tmp_path / "victim.json",
    )
    victim.start()
    try:
        record = tmp_path / "stale.json"
        write_pid_file(record, victim.pid)
        record.write_text(record.read_text().replace('"started": ', '"started": 1'))
        assert recorded_process(record) is None
        assert not stop_leftover(record)
        assert victim.is_running()
    finally:
        victim.stop()


def test_stubborn_process_is_killed_with_its_children(tmp_path: Path) -> None:
    script = "trap '' TERM; sleep 60 & echo ready; wait; wait; sleep 60"
    process = ChildProcess(
        "stubborn",
        Command(argv=["bash", "-c", script], stop_timeout_s=0.2),
        log=tmp_path / "log",
        pid_file=tmp_path / "stubborn.json",
    )
    process.start()
    process.wait_until(lambda: "ready" in process.log.read_text(), timeout_s=10)
    children = psutil.Process(process.pid).children()
    process.stop()
    assert children and not any(_is_live(child.pid) for child in children)
    assert process.returncode == -signal.SIGKILL
