"""2 GiB of rows, from the client's disk to a version; docs/training.md has the figures.

All processes are real: the web server takes the parts, the object store puts them together, and a
sealed child of the web server's checks the rows.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.conftest import STACK
from tests.site import Site

MIB = 1 << 20
MOST_BYTES = 2 << 30
PARTS = ("web", "rows", "objects", "redis", "database")


class Watch(threading.Thread):
    """The most memory that each kind of process has had, all processes of a kind together.

    A page that several processes of PostgreSQL share is counted in each of them.
    """

    def __init__(self, web: int) -> None:
        super().__init__(daemon=True)
        self.most: dict[str, int] = {}
        self._web, self._is_over = psutil.Process(web), threading.Event()

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self.join()

    def run(self) -> None:
        while not self._is_over.wait(0.1):
            now: dict[str, int] = {}
            for kind, process in self._processes():
                try:
                    now[kind] = now.get(kind, 0) + process.memory_info().rss
                except psutil.Error:  # it has just ended
                    continue
            self.most = {kind: max(self.most.get(kind, 0), now.get(kind, 0)) for kind in PARTS}

    def _processes(self) -> Iterator[tuple[str, psutil.Process]]:
        yield "web", self._web
        for child in self._web.children(recursive=True):
            yield "rows", child
        for name in ("seaweedfs", "redis", "postgres"):
            kind = {"seaweedfs": "objects", "postgres": "database"}.get(name, name)
            for process in server(name):
                yield kind, process


def server(name: str) -> list[psutil.Process]:
    """Return a server of the tests and its processes."""
    record = json.loads((STACK.folder / "run" / f"{name}.json").read_text())
    process = psutil.Process(record["pid"])
    return [process, *process.children(recursive=True)]


def write_rows(path: Path) -> tuple[int, int]:
    """Write nearly as many bytes of different rows as a dataset may have. -> rows, bytes."""
    num_rows = num_bytes = 0
    with path.open("wb") as file:
        while True:
            block = b"".join(
                b'{"messages": [{"role": "user", "content": "%d: %s"}, '
                b'{"role": "assistant", "content": "yes"}]}\n' % (number, b"word " * 800)
                for number in range(num_rows, num_rows + 256)
            )
            if num_bytes + len(block) > MOST_BYTES:
                return num_rows, num_bytes
            file.write(block)
            num_rows, num_bytes = num_rows + 256, num_bytes + len(block)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_two_gibibytes_become_a_version_in_bounded_memory(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    num_rows, num_bytes = write_rows(path)
    client = site.client(timeout=600)
    headers = {"Authorization": f"Bearer {client.api_key}"}
    versions = f"{site.url}/api/v1/datasets/large/versions"
    before, began = psutil.Process(site.web.pid).memory_info().rss, time.monotonic()
    with Watch(site.web.pid) as watch:
        file = client.uploads.upload_file_chunked(
            file=path, mime_type="application/jsonl", purpose="fine-tune"
        ).file
        assert file is not None
        uploaded = time.monotonic()
        made = httpx.post(versions, json={"file": file.id}, headers=headers, timeout=900)
        ended = time.monotonic()
    assert made.status_code == 201, made.text
    assert (made.json()["num_rows"], made.json()["num_bytes"]) == (num_rows, num_bytes)
    figures = {
        "rows": num_rows,
        "bytes": num_bytes,
        "upload_s": round(uploaded - began, 1),
        "version_s": round(ended - uploaded, 1),
        "web_before_mib": before // MIB,
        **{f"{kind}_mib": most // MIB for kind, most in watch.most.items()},
    }
    sys.stdout.write(json.dumps(figures) + "\n")
    client.files.delete(file.id)
    # A part is in memory at a time; then the rows pass through in pieces.
    assert watch.most["web"] - before <= 256 * MIB, figures
    assert 0 < watch.most["rows"] <= 64 * MIB, figures
