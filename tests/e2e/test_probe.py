"""A new version is compared on the worker with PEFT before it is ready; with the real processes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import psutil
import pytest
import redis
from safetensors.numpy import load_file

from demo.client import FILES, ManagementClient
from demo.platform import WORKER_ID
from demo.release import wait_for_report
from tests.e2e.adapters import lora_tensors, write_adapter
from tests.e2e.system import System, until

#: In the inspector's child, PEFT scales every adapter by twice what its config says.
WRONG_PEFT = """
import sys
if "worker.inspect_adapter" in sys.orig_argv:
    from peft.tuners.lora.layer import LoraLayer
    update = LoraLayer.update_layer
    def wrong(self, adapter_name, *args, **kwargs):
        update(self, adapter_name, *args, **kwargs)
        self.scaling[adapter_name] *= 2
    LoraLayer.update_layer = wrong
"""


@contextlib.contextmanager
def inspector_of(system: System, **env: str) -> Iterator[None]:
    """The system's inspector, with more environment; others find none afterwards."""
    process, before = system.platform.inspector, system.platform.inspector.command
    own = {**before.env, "OMP_NUM_THREADS": "1", **env}
    process.command = dataclasses.replace(before, env=own)
    with redis.Redis.from_url(system.env["REDIS_URL"]) as client:

        def shown() -> list[bytes]:
            return list(client.scan_iter("*alive:default:inspector", count=1000))

        process.start()
        try:
            until(shown, "the inspector shows itself", timeout_s=90)
            yield
        finally:
            process.ask_to_stop()
            process.stop()
            process.command = before
            for key in shown():
                client.delete(key)


@pytest.fixture
def client(system: System) -> Iterator[ManagementClient]:
    with contextlib.closing(system.management()) as client:
        yield client


def make(system: System, folder: Path, seed: int) -> Path:
    return write_adapter(folder, lora_tensors(system.base_config, seed=seed))


def upload(client: ManagementClient, name: str, folder: Path, system: System) -> str:
    """Upload and complete a version; its address."""
    began = client.begin_upload(name, folder, base_model=system.base_model)
    for file in FILES:
        client.put_file(began["uploads"][file], folder / file)
    path = f"adapters/{name}/versions/{began['number']}"
    client.call("POST", f"{path}/complete")
    return path


def decided(client: ManagementClient, path: str) -> dict[str, Any]:
    def version() -> dict[str, Any] | None:
        found = client.call("GET", path)
        return found if found["status"] in ("ready", "rejected") else None

    return until(version, f"{path} is decided", timeout_s=180)


def probes_in_tables(system: System) -> int:
    """Rows of usage and of the request log that a probe left."""
    usage = system.query("select 1 from usage_usagerecord where request_id like %s", "probe%")
    logged = system.query("select 1 from inference_inferencerequest where endpoint = %s", "probe")
    return len(usage) + len(logged)


def test_a_worker_agrees_with_peft_and_nobody_is_billed(
    system: System, client: ManagementClient, tmp_path: Path
) -> None:
    folder = make(system, tmp_path / "good", seed=41)
    with inspector_of(system):
        path = upload(client, "probed", folder, system)
        version = decided(client, path)
    assert (version["status"], version["reasons"]) == ("ready", [])
    probe = version["probe"]
    device = system.env["LORIKEET_DEVICE"]
    dtype, bound = ("float32", 0.002) if device == "cpu" else ("bfloat16", 0.5)
    assert (probe["status"], probe["devices"], probe["dtype"]) == ("agreed", [device], dtype)
    assert probe["workers"] == [WORKER_ID]
    assert probe["values"] > 80 and probe["load_ms"] > 0
    assert max(probe["max_difference"], probe["base_max_difference"]) < bound
    assert probe["strength"] == pytest.approx(1, abs=0.01)
    assert client.call("GET", "adapters/probed")["live_version"] == 1
    assert probes_in_tables(system) == 0

    doctor = client.call("GET", f"{path}/doctor")
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(doctor["modules"]) == 2 * system.base_config["num_hidden_layers"]
    module = doctor["modules"][0]
    name = f"base_model.model.{module['module']}.lora_"
    delta = 2.0 * tensors[f"{name}B.weight"] @ tensors[f"{name}A.weight"]
    assert module["frobenius"] == pytest.approx(float(np.linalg.norm(delta)), rel=1e-3)
    num_bytes = 4 * sum(tensor.size for tensor in tensors.values())
    assert not doctor["is_estimated"]
    assert num_bytes <= doctor["device_bytes"] < num_bytes + 65_536, "padded to eighths of pages"
    assert doctor["compared"][0]["peft"] == pytest.approx(doctor["compared"][0]["worker"], abs=0.01)


@contextlib.contextmanager
def worker_of(system: System, **env: str) -> Iterator[None]:
    """The system's worker, with more environment; afterwards it is as before."""
    process, before = system.platform.worker, system.platform.worker.command

    def start(command: Any) -> None:
        process.ask_to_stop()
        process.stop()
        process.command = command
        process.start()
        system.platform.wait_until_ready()

    start(dataclasses.replace(before, env={**before.env, **env}))
    try:
        yield
    finally:
        start(before)


@pytest.mark.long
def test_a_quantized_worker_agrees_within_its_precision(
    system: System, client: ManagementClient, tmp_path: Path
) -> None:
    """Base and adapters in FP8: the probe says what each costs, and still finds a wrong adapter."""
    good, wrong = (make(system, tmp_path / name, seed=48) for name in ("good", "wrong"))
    (tmp_path / "sitecustomize.py").write_text(WRONG_PEFT)
    precision = {"LORIKEET_BASE_PRECISION": "fp8", "LORIKEET_ADAPTER_PRECISION": "fp8"}
    with worker_of(system, **precision):
        with inspector_of(system):
            version = decided(client, upload(client, "rounded", good, system))
        with inspector_of(system, PYTHONPATH=str(tmp_path)):
            rejected = decided(client, upload(client, "doubled", wrong, system))
    told, probe = {"weights": "fp8", "kv": "float32", "adapters": "fp8"}, version["probe"]
    assert (probe["status"], probe["precisions"]) == ("agreed", [told])
    assert all(0 < abs(probe[name]) < 0.5 for name in ("base_nats", "nats"))
    assert probe["strength"] == pytest.approx(1, abs=0.1)
    assert version["copy_nats"] == probe["copy_nats"] != 0, "both were asked"
    assert version["is_in_fp8"] == (probe["copy_nats"] <= 0.05)
    assert (rejected["status"], rejected["probe"]["status"]) == ("rejected", "mismatch")


@pytest.mark.long
def test_the_demo_waits_for_the_report(
    system: System, client: ManagementClient, tmp_path: Path
) -> None:
    """Also of a version that became ready before an inspector ran; and not for ever."""
    path = upload(client, "early", make(system, tmp_path / "early", seed=47), system)
    assert decided(client, path)["probe"]["status"] == "not_run"
    assert not wait_for_report(client, "early", 1, timeout_s=1.0)
    with inspector_of(system):
        assert wait_for_report(client, "early", 1)
    assert client.call("GET", path)["probe"]["status"] == "agreed"
    doctor = client.call("GET", f"{path}/doctor")
    assert doctor["summary"] and doctor["compared"]


@pytest.mark.long
def test_a_planted_mismatch_is_rejected(
    system: System, client: ManagementClient, tmp_path: Path
) -> None:
    """The inspector's PEFT scales twice as much: to the probe it is the worker that is wrong."""
    (tmp_path / "sitecustomize.py").write_text(WRONG_PEFT)
    folder = make(system, tmp_path / "planted", seed=42)
    with inspector_of(system, PYTHONPATH=str(tmp_path)):
        path = upload(client, "planted", folder, system)
        version = decided(client, path)
    assert version["status"] == "rejected"
    [reason] = version["reasons"]
    assert "by PEFT and" in reason["message"] and "position" in reason["message"]
    assert version["probe"]["status"] == "mismatch"
    assert version["probe"]["base_max_difference"] < version["probe"]["tolerance"]
    assert client.call("GET", "adapters/planted")["live_version"] is None


@pytest.mark.long
def test_files_that_were_swapped_in_the_store_are_found(
    system: System, client: ManagementClient, tmp_path: Path
) -> None:
    """It went on without an inspector, and is live: nobody is cut off, but it is said."""
    first = make(system, tmp_path / "first", seed=43)
    path = upload(client, "swapped", first, system)
    version = decided(client, path)
    assert (version["status"], version["probe"]["status"]) == ("ready", "not_run")
    other = make(system, tmp_path / "other", seed=44) / "adapter_model.safetensors"
    store = boto3.client(
        "s3",
        endpoint_url=system.env["S3_ENDPOINT_URL"],
        aws_access_key_id=system.env["S3_ACCESS_KEY_ID"],
        aws_secret_access_key=system.env["S3_SECRET_ACCESS_KEY"],
        region_name="us-east-1",
    )
    bucket = system.env.get("S3_BUCKET", "lorikeet")
    tenant = system.query("select id from tenants_tenant where slug = 'acme'")[0]["id"]
    key = f"t/{tenant}/adapters/{version['digest']}/adapter_model.safetensors"
    store.put_object(Bucket=bucket, Key=key, Body=other.read_bytes())
    with inspector_of(system):
        client.call("POST", f"{path}/doctor")
        found = until(
            lambda: [
                probe
                for probe in [client.call("GET", path)["probe"]]
                if probe["status"] == "mismatch"
            ],
            "the mismatch",
            timeout_s=120,
        )
    assert "stored files are not those that were checked" in found[0]["why"]
    assert client.call("GET", path)["status"] == "ready"  # it is live
    assert client.call("GET", "adapters/swapped")["live_version"] == 1


@pytest.mark.long
def test_a_killed_inspector_is_replaced(
    system: System, client: ManagementClient, tmp_path: Path
) -> None:
    """kill -9 during an inspection; the version goes on when its wait is over."""
    folder = make(system, tmp_path / "killed", seed=45)
    with inspector_of(system):
        path = upload(client, "killed", folder, system)
        until(
            lambda: system.query(
                "select 1 from adapters_adapterinspection where lease_until > now() and is_held"
            ),
            "it is taken up",
            timeout_s=60,
        )
        inspector = psutil.Process(system.platform.inspector.pid)
        for process in (*inspector.children(recursive=True), inspector):
            process.kill()
    assert client.call("GET", path)["status"] == "validating"
    system.execute(
        "update adapters_adapterinspection set held_until = now(), lease_until = now()"
        " where is_held"
    )
    system.platform.beat.start()
    try:
        version = decided(client, path)
        assert (version["status"], version["probe"]["status"]) == ("ready", "not_run")
        with inspector_of(system):
            until(
                lambda: client.call("GET", path)["probe"]["status"] == "agreed",
                "the sweep has it probed",
                timeout_s=120,
            )
    finally:
        system.platform.beat.ask_to_stop()
        system.platform.beat.stop()
