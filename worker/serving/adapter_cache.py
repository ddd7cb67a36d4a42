"""AdapterCache: the worker's disk cache of adapters from S3, verified, one folder per digest.

    <root>/<digest>/adapter_config.json
    <root>/<digest>/adapter_model.safetensors

A folder appears complete, by a rename, after its content was hashed. After a restart a folder is
hashed again before its first use. A root belongs to one worker.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shutil
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
from botocore.client import Config
from botocore.exceptions import BotoCoreError, ClientError

from contract.adapters.peft_config import ENGINE_LIMITS
from contract.adapters.peft_config import FILE as CONFIG_FILE
from contract.adapters.safetensors_header import FILE as TENSORS_FILE
from contract.messages.protocol import AdapterRef, adapter_digest
from contract.queue.deleted_adapters import ADAPTER_AGE_S
from engine.stats import LoadCounts
from worker.config import S3Config

log = logging.getLogger(__name__)

NUM_DOWNLOADS = 8
PIECE_BYTES = 1 << 20
DIGEST = re.compile(r"[0-9a-f]{64}")

#: Writes an adapter's two files into an empty folder.
Fetch = Callable[[AdapterRef, Path], None]


class AdapterFetchError(Exception):
    """The adapter's files cannot be downloaded, or do not have its digest."""


class S3Fetch:
    """Fetches adapters from the object store; raises AdapterFetchError."""

    def __init__(self, config: S3Config) -> None:
        self._bucket = config.bucket
        self._client: Any = boto3.client(
            "s3",
            endpoint_url=config.endpoint_url,
            aws_access_key_id=config.access_key_id,
            aws_secret_access_key=config.secret_access_key,
            region_name=config.region,
            config=Config(
                signature_version="s3v4",
                s3={"addressing_style": "path"},
                connect_timeout=5,
                read_timeout=30,
                max_pool_connections=NUM_DOWNLOADS,
                retries={"max_attempts": 3, "mode": "standard"},
            ),
        )

    def __call__(self, ref: AdapterRef, folder: Path) -> None:
        try:
            self._download(ref.config_key, folder / CONFIG_FILE, ENGINE_LIMITS.max_bytes)
            self._download(ref.tensors_key, folder / TENSORS_FILE, ref.num_bytes)
        except (BotoCoreError, ClientError, OSError) as error:
            raise AdapterFetchError(f"download failed: {error}") from error

    def _download(self, key: str, path: Path, max_bytes: int) -> None:
        body = self._client.get_object(Bucket=self._bucket, Key=key)["Body"]
        left = max_bytes
        with path.open("wb") as file:
            for piece in body.iter_chunks(PIECE_BYTES):
                left -= len(piece)
                if left < 0:
                    raise AdapterFetchError(f"{key} is longer than {max_bytes} bytes")
                file.write(piece)


class AdapterCache:
    """Owns the adapters on the disk: fetches them, counts their users, evicts unused ones.

    on_evict  called with a digest before its folder is deleted

    `acquire` and `release` come in pairs; a folder in use is never evicted, so the cache may
    exceed `max_bytes` by what running requests need.
    """

    def __init__(
        self,
        root: Path,
        *,
        max_bytes: int,
        base_revision: str,
        fetch: Fetch,
        on_evict: Callable[[str], None],
    ) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._base_revision = base_revision
        self._fetch = fetch
        self._on_evict = on_evict
        self._sizes: OrderedDict[str, int] = OrderedDict()  # bytes of each, oldest use first
        self._verified: set[str] = set()  # those that this process has hashed
        self._users: dict[str, int] = {}
        self._doomed: set[str] = set()  # deleted adapters that requests still use
        self._arrivals: dict[str, asyncio.Task[int]] = {}
        self.downloads = LoadCounts()
        self._threads = ThreadPoolExecutor(NUM_DOWNLOADS, thread_name_prefix="adapter")
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob("*.part"):
            shutil.rmtree(leftover, ignore_errors=True)
        # Count only folders that this class can have made, because it deletes what it counts.
        found = [path for path in root.iterdir() if path.is_dir() and DIGEST.fullmatch(path.name)]
        oldest = time.time() - ADAPTER_AGE_S
        for folder in sorted(found, key=lambda path: path.stat().st_mtime):
            # it may have been deleted during this worker's absence
            if folder.stat().st_mtime < oldest:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                self._sizes[folder.name] = _size_of(folder)

    def __contains__(self, digest: object) -> bool:
        return digest in self._sizes

    def newest_first(self) -> Iterator[str]:
        """Return the digests, the last used first."""
        return reversed(self._sizes)

    async def acquire(self, ref: AdapterRef) -> Path:
        """Return the adapter's folder, fetched if it is missing and kept until `release`.

        Requests for the same digest wait for the same download. Raises AdapterFetchError.
        """
        digest = ref.digest
        self._users[digest] = self._users.get(digest, 0) + 1
        try:
            if digest not in self._verified:
                await self._arrive(ref)
        except BaseException:
            self.release(digest)
            raise
        self._sizes.move_to_end(digest)
        return self._root / digest

    def release(self, digest: str) -> None:
        """Undo one `acquire`."""
        self._users[digest] -= 1
        if not self._users[digest]:
            del self._users[digest]
            if digest in self._doomed:
                self.drop(digest)
            self._evict()

    def drop(self, digest: str) -> None:
        """Delete a folder as soon as no request uses it: the adapter was deleted."""
        # A download continues after its request is cancelled.
        if digest in self._users or digest in self._arrivals:
            self._doomed.add(digest)
            return
        self._doomed.discard(digest)
        if digest in self._sizes:
            self._remove(digest)
            log.info("adapter %s was deleted", digest)

    async def _arrive(self, ref: AdapterRef) -> None:
        task = self._arrivals.get(ref.digest)
        if task is None:
            task = asyncio.create_task(self._bring(ref))
            self._arrivals[ref.digest] = task
            task.add_done_callback(lambda _: self._has_arrived(ref.digest))
        # Shielded: the cancellation of one request must not stop the download for others.
        await asyncio.shield(task)

    def _has_arrived(self, digest: str) -> None:
        del self._arrivals[digest]
        if digest in self._doomed:
            self.drop(digest)

    async def _bring(self, ref: AdapterRef) -> int:
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        try:
            size = await loop.run_in_executor(self._threads, self._fetch_verified, ref)
        except Exception:
            self.downloads.failures += 1
            raise
        self.downloads.add(loop.time() - began_at)
        self._sizes[ref.digest] = size
        self._verified.add(ref.digest)
        self._evict()
        return size

    def _fetch_verified(self, ref: AdapterRef) -> int:
        """Fetch and verify the folder, in a thread; return its bytes on the disk."""
        folder = self._root / ref.digest
        if folder.exists():
            if self._digest_of(folder) == ref.digest:
                return _size_of(folder)
            log.warning("adapter %s was damaged on the disk", ref.digest)
            shutil.rmtree(folder)
        staging = Path(tempfile.mkdtemp(prefix=ref.digest, suffix=".part", dir=self._root))
        try:
            self._fetch(ref, staging)
            if (found := self._digest_of(staging)) != ref.digest:
                raise AdapterFetchError(f"the stored files have digest {found}, not {ref.digest}")
            staging.rename(folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return _size_of(folder)

    def _digest_of(self, folder: Path) -> str | None:
        try:
            config = json.loads((folder / CONFIG_FILE).read_bytes())
            return adapter_digest(config, _pieces(folder / TENSORS_FILE), self._base_revision)
        except (OSError, ValueError, RecursionError):
            return None

    def _evict(self) -> None:
        excess = sum(self._sizes.values()) - self._max_bytes
        for digest in list(self._sizes):
            if excess <= 0:
                return
            if digest in self._users:
                continue
            excess -= self._remove(digest)
            log.info("adapter %s evicted from the disk", digest)

    def _remove(self, digest: str) -> int:
        """Delete the folder. -> its bytes."""
        size = self._sizes.pop(digest)
        self._verified.discard(digest)
        self._on_evict(digest)
        shutil.rmtree(self._root / digest, ignore_errors=True)
        return size

    def check_integrity(self) -> None:
        """Raise AssertionError unless counts, sizes and the disk agree."""
        assert all(count > 0 for count in self._users.values())
        assert self._verified <= set(self._sizes)
        assert self._doomed <= {*self._users, *self._arrivals}
        for digest, size in self._sizes.items():
            assert _size_of(self._root / digest) == size, digest


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def _size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())
