"""An upload of 100 MB is ready in 20 s, with 300 MB of memory: this process's growth and the
child together. docs/adapters.md has what it took."""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from contract.adapters.base_shape import BaseShape
from controlplane.adapters import ingest, services
from controlplane.adapters.models import AdapterVersion, BaseModel
from controlplane.infra import sealed_child, storage
from controlplane.tenancy.scoping import tenant_scope
from tests.controlplane.adapters.files import config_bytes
from tests.controlplane.conftest import TINY_CONFIG, Party

RANK = 72
CONFIG = TINY_CONFIG | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_hidden_layers": 16,
}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture
def scope(acme: Party, base_model: BaseModel) -> Iterator[None]:
    BaseModel.objects.update(config=CONFIG)
    with tenant_scope(acme.tenant.id):
        yield


def large_file() -> bytes:
    noise = np.random.default_rng(0)
    found = {}
    for path, layer, (width_in, width_out) in BaseShape.from_config(CONFIG).modules():
        if layer is None:
            continue
        for part, shape in (("A", (RANK, width_in)), ("B", (width_out, RANK))):
            values = noise.standard_normal(shape, dtype=np.float32).astype(np.float16)
            found[f"base_model.model.{path}.lora_{part}.weight"] = values
    return safetensors.numpy.save(found, metadata={"format": "pt"})


def _rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class _Watch(threading.Thread):
    """The most memory that this process has while it runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.is_over = 0, False

    def run(self) -> None:
        while not self.is_over:
            self.most = max(self.most, _rss())
            time.sleep(0.005)


@pytest.mark.long
def test_a_large_upload_is_ready_in_time(scope: None, monkeypatch: pytest.MonkeyPatch) -> None:
    content, config = large_file(), config_bytes(r=RANK, target_modules=list(LINEARS))
    assert len(content) > 100_000_000
    stated = {"adapter_config.json": len(config), "adapter_model.safetensors": len(content)}
    version = services.adapter_version_create(name="invoices", files=stated)
    storage.put_bytes(version.staged_config_key, config)
    storage.put_bytes(version.staged_tensors_key, content)
    AdapterVersion.objects.update(status=AdapterVersion.Status.UPLOADED)
    del content
    ended: list[sealed_child.Ended] = []
    run_sealed = sealed_child.run_sealed

    def noted(*args: Any, **named: Any) -> sealed_child.Ended:
        ended.append(run_sealed(*args, **named))
        return ended[-1]

    monkeypatch.setattr(sealed_child, "run_sealed", noted)
    before, watch = _rss(), _Watch()
    watch.start()
    began = time.monotonic()
    ingest.version_ingest(version.pk)
    took = time.monotonic() - began
    watch.is_over = True
    watch.join()
    version.refresh_from_db()
    assert version.status == AdapterVersion.Status.READY, version.reasons
    figures = {
        "seconds": round(took, 2),
        "child_cpu_s": round(ended[0].cpu_s, 2),
        "parent_growth_mb": (watch.most - before) >> 20,
        "child_mb": ended[0].peak_bytes >> 20,
        "cores": len(os.sched_getaffinity(0)),
    }
    sys.stdout.write(json.dumps(figures) + "\n")
    assert took < 20
    assert watch.most - before + ended[0].peak_bytes < 300 << 20
