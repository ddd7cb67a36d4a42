"""The command line's upload through a network that breaks, and a person who interrupts it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from contract.messages.protocol import adapter_digest
from demo.commands import Commands
from demo.ports import HOST, choose_ports
from demo.processes import ChildProcess, Command
from demo.seed import last_json
from demo.stack import EmbeddedStack
from tests.cli.runner import ROOT, Cli
from tests.controlplane.adapters.wide import CONFIG_BYTES, wide_base, wide_tensors
from tests.database import migrated_database

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
REVISION = "0" * 64
MIB = 1 << 20

SEED = """
import json
from controlplane.adapters.models import BaseModel
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants import services
from controlplane.tenants.key_rules import KeyRules
BaseModel.objects.create(name="wide", revision="0" * 64, config=json.loads('{config}'),
                         context_length=128, max_rank=256)
with tenant_scope(services.tenant_create(slug="acme", name="Acme").id):
    rules = KeyRules(scopes=("read", "adapters:write"))
    print(json.dumps({"key": services.api_key_create(name="cli", rules=rules)[1]}))
"""
CHECK = """
import json
from controlplane.adapters import ingest
from controlplane.adapters.models import AdapterVersion
from controlplane.infra import storage
from controlplane.tenancy.scoping import all_tenants, tenant_scope
with all_tenants(reason="test"):
    found = list(AdapterVersion.objects.order_by("adapter__name", "number"))
for version in found:
    with tenant_scope(version.tenant_id):
        ingest.version_ingest(version.pk)
        version.refresh_from_db()
left = [key for version in found for key in storage.keys(version.staging_prefix)]
left += [each["Key"] for v in found for each in storage.unfinished_writes(v.staging_prefix)]
rows = [[version.status, version.digest, version.reasons] for version in found]
print(json.dumps({"rows": rows, "left": left}))
"""


class CuttingProxy:
    """A TCP proxy that calls `cut` when so many bytes have gone to the server since the last cut.

    Without cuts, and after the last one, it only passes on.
    """

    def __init__(self, target: str, port: int) -> None:
        parts = urlsplit(target)
        self._target = (str(parts.hostname), int(parts.port or 80))
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._server = socket.create_server((HOST, port))
        self.url = f"http://{HOST}:{port}"
        self._cuts: list[int] = []
        self.num_cuts = 0
        self.num_bytes = 0
        self._since = 0
        #: What happens at a cut, beside the end of all connections.
        self.cut: Callable[[], None] = lambda: None
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_at(self, cuts: list[int]) -> None:
        with self._lock:
            self._cuts, self._since = list(cuts), 0

    def close(self) -> None:
        self._server.close()
        self._break()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                server = socket.create_connection(self._target)
                self._pairs.append((client, server))
                for pair in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, to: socket.socket, is_counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if is_counted and not self._may_pass(len(data)):
                    return
                to.sendall(data)
        for end in (source, to):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _may_pass(self, num_bytes: int) -> bool:
        with self._lock:
            self.num_bytes += num_bytes
            self._since += num_bytes
            if not self._cuts or self._since < self._cuts[0]:
                return True
            self._cuts.pop(0)
            self.num_cuts += 1
            self._since = 0
            self.cut()
            self._break()
            return False

    def _break(self) -> None:
        for pair in self._pairs:
            for end in pair:
                with contextlib.suppress(OSError):  # reset: what is in the buffers is lost, too
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
        self._pairs.clear()


@dataclasses.dataclass(frozen=True)
class Site:
    """A web server whose presigned URLs lead through the proxy, and a key's command line."""

    folder: Path
    proxy: CuttingProxy
    commands: Commands
    cli: Cli

    def check(self) -> list[Any]:
        """Check all versions. -> status, digest and reasons of each; nothing is left of them."""
        found = last_json(self.commands.run("shell", "--no-imports", "-c", CHECK))
        assert found["left"] == []
        return list(found["rows"])

    def adapter(self, name: str, layers: int) -> Path:
        folder = self.folder / name
        folder.mkdir()
        (folder / CONFIG).write_bytes(CONFIG_BYTES)
        (folder / TENSORS).write_bytes(wide_tensors(layers))
        return folder


@contextlib.contextmanager
def running_site(stack: EmbeddedStack, folder: Path, layers: int) -> Iterator[Site]:
    port, proxy_port = choose_ports(2)
    proxy = CuttingProxy(stack.env["S3_ENDPOINT_URL"], proxy_port)
    redis = stack.env["REDIS_URL"].removesuffix("/0") + "/13"
    env = {
        **os.environ,
        **stack.env,
        **migrated_database(stack.env, "cut"),
        "REDIS_URL": redis,
        "CELERY_BROKER_URL": redis,
        "LORIKEET_BASE_URL": f"http://{HOST}:{port}",
        "S3_PUBLIC_ENDPOINT_URL": proxy.url,
    }
    web = ChildProcess(
        "web",
        Command(
            argv=[sys.executable, "-m", "controlplane.serve", f"--port={port}"], env=env, cwd=ROOT
        ),
        log=folder / "web.log",
        pid_file=folder / "web.json",
    )
    commands = Commands(env)
    try:
        seed = SEED.replace("{config}", json.dumps(wide_base(layers)))
        key = last_json(commands.run("shell", "--no-imports", "-c", seed))["key"]
        web.start()
        web.wait_until(lambda: _listens(port), timeout_s=60)
        home = folder / "home"
        home.mkdir()
        account = {"LORIKEET_URL": f"http://{HOST}:{port}", "LORIKEET_API_KEY": key}
        yield Site(folder, proxy, commands, Cli(home, account))
    finally:
        web.stop()
        commands.close()
        proxy.close()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((HOST, port), timeout=1).close()
        return True
    return False


def upload_with_cuts(site: Site, folder: Path) -> int:
    """Upload a folder; every second cut also ends the command, which is run again. -> its runs."""
    runs = 0
    while True:
        process = site.cli.start("adapters", "upload", str(folder), "--output=id")
        runs += 1
        kill = signal.SIGINT if runs % 2 else signal.SIGKILL

        def cut(process: subprocess.Popen[str] = process, kill: signal.Signals = kill) -> None:
            if site.proxy.num_cuts % 2 == 0:
                process.send_signal(kill)

        site.proxy.cut = cut
        said, errors = process.communicate(timeout=300)
        assert runs == 1 or f"Resuming {folder.name}@1" in errors, errors
        if process.returncode == 0:
            assert said == f"{folder.name}@1\n"
            return runs
        assert process.returncode in (130, -signal.SIGKILL), (process.returncode, errors)
        if process.returncode == 130:
            assert "Run the same command again to resume." in errors


def cut_and_compare(stack: EmbeddedStack, folder: Path, layers: int, cuts: list[int]) -> None:
    """Upload an adapter whole, then again and again until all cuts are made."""
    num_cuts = len(cuts)
    with running_site(stack, folder, layers) as site:
        whole = site.adapter("aa", layers)
        done = site.cli.run("adapters", "upload", str(whole))
        assert (done.code, done.err) == (0, ""), done.err
        tensors = (whole / TENSORS).read_bytes()
        assert len(tensors) < site.proxy.num_bytes < len(tensors) + MIB, "each byte is sent once"
        site.proxy.cut_at(cuts)
        runs = []
        while site.proxy.num_cuts < num_cuts:
            runs.append(upload_with_cuts(site, site.adapter(f"broken-{len(runs)}", layers)))
        assert sum(runs) == num_cuts // 2 + len(runs)
        expected = adapter_digest(json.loads(CONFIG_BYTES), [tensors], REVISION)
        assert site.check() == [["ready", expected, []]] * (1 + len(runs))


def test_an_upload_that_is_cut_goes_on(stack: EmbeddedStack, tmp_path: Path) -> None:
    """21 MiB, in three parts: all cuts are in one upload."""
    places = random.Random(1)
    cut_and_compare(stack, tmp_path, 3, [places.randrange(1, 4 * MIB) for _ in range(5)])


@pytest.mark.long
def test_an_upload_that_is_cut_fifty_times_goes_on(stack: EmbeddedStack, tmp_path: Path) -> None:
    """112 MiB, in fourteen parts."""
    places = random.Random(2)
    cut_and_compare(stack, tmp_path, 16, [places.randrange(1, 30 * MIB) for _ in range(50)])
