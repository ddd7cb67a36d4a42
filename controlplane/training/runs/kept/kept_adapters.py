"""Make versions of a training's checkpoints.

The child writes each into a folder of its own (`worker.training.kept_adapters`); a thread of the
task sends it through the checks of an upload, while the training continues. A run has one
checkpoint of a step: an attempt on another machine continues after the last one's checkpoints.
"""

from __future__ import annotations

import contextvars
import json
import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.db import connection, transaction

from contract.adapters import peft_config, safetensors_header
from contract.training.job import METRICS_FILE
from controlplane.adapters import services as adapter_services
from controlplane.adapters.models import AdapterVersion
from controlplane.errors import ApiError
from controlplane.infra.outages import STORE_OUTAGE
from controlplane.training.models import TrainingCheckpoint, TrainingRun
from controlplane.training.runs.lease import RunLease, with_retry

log = logging.getLogger(__name__)

_MAX_METRICS_BYTES = 4096
_METRICS = ("train_loss", "full_valid_loss")
Status = TrainingRun.Status


class KeptAdapters:
    """The adapters that one attempt at a run has kept and that are not versions yet.

    folder  of the run
    warn    gets messages for the run's owner
    """

    def __init__(self, run: TrainingRun, folder: Path, warn: Callable[[str], None]) -> None:
        self.path = folder / "kept"
        self._run, self._warn = run, warn
        self._thread: threading.Thread | None = None

    def publish_if_due(self) -> None:
        """Begin to make versions of the present adapters; do not wait."""
        if self._thread is not None and self._thread.is_alive():
            return
        if self._found():
            context = contextvars.copy_context()  # with the tenant's scope
            self._thread = threading.Thread(target=context.run, args=(self._in_thread,))
            self._thread.start()

    def publish_now(self) -> None:
        """Make versions of all, and wait; repeat it while the database or the store is away.

        Raises TrainingAbandoned, STORE_OUTAGE.
        """
        self.close()
        with_retry(self._run, Status.RUNNING, self._publish)

    def close(self) -> None:
        """Wait for the version that is being made."""
        if self._thread is not None:
            self._thread.join()

    def _found(self) -> list[Path]:
        """Return the complete folders, in the order of their steps."""
        if not self.path.is_dir():
            return []
        return sorted((at for at in self.path.iterdir() if at.name.isdigit()), key=_step)

    def _in_thread(self) -> None:
        try:
            self._publish()
        except STORE_OUTAGE as error:
            log.warning("a checkpoint's version waits: %r", error)  # for the next tick
        except Exception:
            log.exception("a checkpoint became no version")
        finally:
            connection.close()

    def _publish(self) -> None:
        for folder in self._found():
            try:
                self._publish_one(folder)
            except ApiError as error:
                self._warn(
                    f"the checkpoint after step {_step(folder)} was not kept: {error.message}"
                )
            shutil.rmtree(folder, ignore_errors=True)

    def _publish_one(self, folder: Path) -> None:
        files = (peft_config.FILE, safetensors_header.FILE)
        version = self._version(folder, {name: (folder / name).stat().st_size for name in files})
        if version is not None and version.status == AdapterVersion.Status.UPLOADING:
            adapter_services.adapter_version_upload_files(
                version=version,
                config_path=folder / peft_config.FILE,
                tensors_path=folder / safetensors_header.FILE,
            )

    @transaction.atomic
    def _version(self, folder: Path, sizes: dict[str, int]) -> AdapterVersion | None:
        """Return the checkpoint's version, made by the first call; None: the run is not ours."""
        run, step = self._run, _step(folder)
        if RunLease(run).rows(Status.RUNNING).select_for_update().first() is None:
            return None
        known = TrainingCheckpoint.objects.filter(run=run, step=step).select_related("version")
        if (checkpoint := known.first()) is not None:
            return checkpoint.version
        version = adapter_services.adapter_version_create(
            name=run.adapter.name,
            files=sizes,
            created_by=run.created_by,
            source=AdapterVersion.Source.CHECKPOINT,
        )
        TrainingCheckpoint.objects.create(
            run=run, step=step, metrics=_metrics(folder), version=version
        )
        return version


def _step(folder: Path) -> int:
    return int(folder.name)


def _metrics(folder: Path) -> dict[str, Any]:
    with (folder / METRICS_FILE).open("rb") as file:
        told = json.loads(file.read(_MAX_METRICS_BYTES))
    return {name: told[name] for name in _METRICS if isinstance(told.get(name), int | float)}
