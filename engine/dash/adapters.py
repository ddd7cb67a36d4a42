"""AdapterNames: the adapters' names in a DashEngine.

The engine knows an adapter by the digest of its files. A name means one digest at a time. If it is
registered with another folder it means another digest at once; earlier requests keep the old one.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
import stat
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from engine.adapters.config import MAX_CONFIG_BYTES
from engine.adapters.files import CONFIG_FILE, TENSORS_FILE, refuse_other_formats
from engine.dash.hub import ADAPTER_FILES, HubId, NotOnHub, fetch, find_id
from engine.dash.loop import EngineLoop
from engine.engine import Engine
from engine.errors import AdapterUnavailable, EngineError, UnknownAdapter

_READERS = 2


@dataclass(slots=True, eq=False)
class NamedAdapter:
    """One registration; `ready` raises if the files cannot be read or do not fit.

    hub_id  the Hub repository that its files come from, if any; `path` is set once they are there
    """

    name: str
    path: Path
    hub_id: HubId | None = None
    digest: str | None = None
    ready: Future[None] = field(default_factory=Future)


class AdapterNames:
    """Owns the names; all methods may be called from any thread.

    offload_dir  see DashConfig
    """

    def __init__(self, loop: EngineLoop, offload_dir: Path | None) -> None:
        self._loop = loop
        self._offload_dir = None if offload_dir is None else offload_dir.absolute()
        self._named: dict[str, NamedAdapter] = {}
        self._lock = threading.Lock()  # guards `_named` and its adapters' digests
        self._threads = ThreadPoolExecutor(_READERS, thread_name_prefix="adapter-reader")

    def register(self, name: str, source: str | Path, revision: str | None = None) -> None:
        """Let `name` mean a PEFT folder, or a Hub id, from now on; another thread reads it."""
        if not isinstance(name, str) or not name:
            raise ValueError(
                f"an adapter's name must be a string of one character or more, not {name!r}"
            )
        # It is read again later, wherever the process may be by then.
        adapter = NamedAdapter(name, Path(source).absolute(), find_id(source, revision))
        with self._lock:
            replaced = self._named.get(name)
            self._named[name] = adapter
            adapter.ready = self._threads.submit(self._read, adapter)
        if replaced is not None:
            self._drop(replaced)

    def unregister(self, name: str) -> None:
        """Forget the name; raises UnknownAdapter."""
        with self._lock:
            adapter = self._named.pop(name, None)
        if adapter is None:
            raise _unknown(name)
        self._drop(adapter)

    def find(self, name: str) -> NamedAdapter:
        """Return the adapter that the name means now; raises UnknownAdapter."""
        with self._lock:
            adapter = self._named.get(name)
        if adapter is None:
            raise _unknown(name)
        return adapter

    def check(self, adapter: NamedAdapter) -> str:
        """Return the digest of an adapter that is ready; raises its error if it has one."""
        try:
            adapter.ready.result()
        except CancelledError as error:
            raise _unknown(adapter.name) from error
        assert adapter.digest is not None
        return adapter.digest

    def bind(self, engine: Engine, adapters: Sequence[NamedAdapter]) -> None:
        """Make sure that the engine knows adapters that were found; on the engine's thread.

        They may have lost their names since. `release` after the request was added.
        """
        for adapter in adapters:
            engine.register_adapter(self.check(adapter), adapter.path)

    def release(self, engine: Engine, adapters: Sequence[NamedAdapter]) -> None:
        """Let the engine forget those that have no name; on the engine's thread."""
        with self._lock:
            live = {adapter.digest for adapter in self._named.values()}
        for adapter in adapters:
            if adapter.digest is not None and adapter.digest not in live:
                engine.unregister_adapter(adapter.digest)

    def all(self) -> list[NamedAdapter]:
        """Return every adapter that has a name, the oldest name first."""
        with self._lock:
            return list(self._named.values())

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _drop(self, adapter: NamedAdapter) -> None:
        """Drop an adapter that has lost its name; if the engine hears of it later, `_read` does."""
        if not adapter.ready.cancel():
            self._loop.call(lambda engine: self.release(engine, [adapter]))

    def _read(self, adapter: NamedAdapter) -> None:
        """Learn the digest, have the engine check that the adapter fits, and load it."""
        if adapter.hub_id is not None:
            try:
                adapter.path = fetch(adapter.hub_id, ADAPTER_FILES)
            except NotOnHub as error:
                raise AdapterUnavailable(str(error)) from error
        if self._offload_dir is not None:
            digest, adapter.path = _adopt(adapter.path, self._offload_dir)
        else:
            digest = _digest(adapter.path)
        with self._lock:
            adapter.digest = digest

        def introduce(engine: Engine) -> None:
            engine.register_adapter(digest, adapter.path)
            engine.prefetch(digest)
            self.release(engine, [adapter])

        self._loop.call(introduce).result()


def _unknown(name: str) -> EngineError:
    return UnknownAdapter(f"no adapter is named {name!r}", param="active_adapters")


def digest_of(config_text: bytes, tensors_sha256: str) -> str:
    """Return a DashEngine's digest of an adapter, by which the engine verifies its files."""
    config = hashlib.sha256(config_text)
    return hashlib.sha256(config.digest() + bytes.fromhex(tensors_sha256)).hexdigest()


def _digest(folder: Path) -> str:
    """Return the digest of both files; raises AdapterUnavailable."""
    try:
        _check_files(folder)
        with (folder / TENSORS_FILE).open("rb") as file:
            tensors_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        with (folder / CONFIG_FILE).open("rb") as file:
            # Longer content is refused, and must not fill the memory before that.
            return digest_of(file.read(MAX_CONFIG_BYTES + 1), tensors_sha256)
    except (OSError, ValueError) as error:  # ValueError: not a path at all, such as one with a NUL
        raise _unreadable(folder, error) from error


def _adopt(source: Path, folder: Path) -> tuple[str, Path]:
    """Copy an adapter's two files to a folder named by their digest, unless the folder is complete.

    The digest is the copy's, since the source may change. Raises AdapterUnavailable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(dir=folder, prefix=".copying-"))
    except OSError as error:
        raise _unreadable(folder, error) from error
    try:
        _check_files(source)
        for name in (CONFIG_FILE, TENSORS_FILE):
            shutil.copyfile(source / name, staging / name)
        digest = _digest(staging)
        _put(staging, folder / digest)
    except (OSError, ValueError) as error:
        raise _unreadable(source, error) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return digest, folder / digest


def _check_files(folder: Path) -> None:
    """Raise OSError unless both are files: a pipe or a device is never read to its end.

    Raises AdapterMismatch where tensors of another format are in their place.
    """
    refuse_other_formats(folder)
    for name in (CONFIG_FILE, TENSORS_FILE):
        if not stat.S_ISREG((folder / name).stat().st_mode):
            raise OSError(errno.EINVAL, "not a file", str(folder / name))


def _put(staging: Path, folder: Path) -> None:
    """Move a copy to its place, unless the same is there, whole; raises OSError."""
    try:
        staging.rename(folder)
    except OSError:
        with suppress(AdapterUnavailable):
            if _digest(folder) == folder.name:
                return
        # The files differ from those that were once copied: the disk has lost some of them.
        aside = staging.with_name(f"{staging.name}-damaged")
        folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
        staging.rename(folder)


def _unreadable(folder: Path, error: OSError | ValueError) -> EngineError:
    path = getattr(error, "filename", None) or folder  # the missing part may be one of its files
    reason = getattr(error, "strerror", None) or error
    return AdapterUnavailable(f"{str(path)!r} cannot be read: {reason}")
