"""What is wrong is answered with a 4xx in OpenAI's body that names the field; nobody else notices.

Every test ends with a good request, so that "nothing else notices" is checked too.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from demo.client import FILES
from tests.e2e.adapters import lora_config, lora_tensors, write_adapter
from tests.e2e.system import System, until

MESSAGES = [{"role": "user", "content": "Hi."}]


@pytest.fixture(autouse=True)
def good_request_still_works(system: System) -> Iterator[None]:
    yield
    answer = system.client().chat.completions.create(
        model=system.tenants["acme"].adapter, messages=MESSAGES, max_tokens=2
    )
    assert answer.usage is not None and answer.usage.completion_tokens > 0


def post(system: System, content: bytes | dict[str, Any], key: str | None = None) -> httpx.Response:
    key = system.tenants["acme"].api_key if key is None else key
    return httpx.post(
        f"{system.base_url}/v1/chat/completions",
        content=content if isinstance(content, bytes) else json.dumps(content).encode(),
        headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        timeout=60,
    )


def assert_refused(response: httpx.Response, status: int, **expected: str | None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert {name: error[name] for name in expected} == expected
    return error


@pytest.mark.parametrize("key", ["nonsense", "lk-unknown", "Ω"], ids=repr)
def test_unknown_key(system: System, key: str) -> None:
    body = {"model": system.base_model, "messages": MESSAGES}
    response = httpx.post(
        f"{system.base_url}/v1/chat/completions",
        json=body,
        headers={"Authorization": f"Bearer {key}".encode()},
    )
    assert_refused(response, 401, type="authentication_error", code="invalid_api_key")


def test_revoked_key(system: System) -> None:
    made = system.api_key_create("acme")
    body = {"model": system.base_model, "messages": MESSAGES, "max_tokens": 1}
    assert post(system, body, key=made["key"]).status_code == 200
    system.api_key_revoke(made["public_id"])
    # Within the time that a web process may remember a key for.
    until(lambda: post(system, body, key=made["key"]).status_code == 401, "the key's end", 3)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'"text"', b"[" * 100_000, b'{"model": "\xff"}'], ids=repr
)
def test_malformed_json(system: System, content: bytes) -> None:
    assert_refused(post(system, content), 400, type="invalid_request_error")


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("messages", "hello", "messages"),
        ("messages", [], "messages"),
        ("messages", [{"role": "wizard", "content": "x"}], "messages.0.role"),
        ("messages", [{"role": "user", "content": 7}], "messages.0.content"),
        ("model", 7, "model"),
        ("max_tokens", "many", "max_tokens"),
        ("max_tokens", 0, "max_tokens"),
        ("temperature", 3, "temperature"),
        ("temperature", "hot", "temperature"),
        ("top_p", -0.1, "top_p"),
        ("stop", ["a"] * 5, "stop"),
        ("stream", "yes", "stream"),
        ("n", 17, "n"),
        ("logit_bias", {"x": 1}, "logit_bias"),
        ("no_such_field", 1, "no_such_field"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_wrong_field_is_named(system: System, field: str, value: Any, param: str) -> None:
    body = {"model": system.base_model, "messages": MESSAGES, field: value}
    error = assert_refused(post(system, body), 400, type="invalid_request_error")
    assert str(error["param"]).replace("[", ".").replace("]", "").startswith(param)


def test_prompt_longer_than_the_context(system: System) -> None:
    content = "word " * (system.base_config["max_position_embeddings"] + 100)
    body = {"model": system.base_model, "messages": [{"role": "user", "content": content}]}
    assert_refused(post(system, body), 400, code="context_length_exceeded", param="messages")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "no such type"},
        {"$ref": "https://example.com/schema.json"},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/missing"}}},
        {"type": "integer", "minimum": 5, "maximum": 3},
    ],
    ids=["unknown type", "remote reference", "dangling reference", "impossible"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_schema_that_cannot_be_obeyed(system: System, schema: dict[str, Any], stream: bool) -> None:
    body = {
        "model": system.base_model,
        "messages": MESSAGES,
        "stream": stream,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    error = assert_refused(post(system, body), 400, type="invalid_request_error")
    assert str(error["param"]).startswith("response_format")


Spoil = Callable[[Path], None]


def _header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite a safetensors file's header, its data unchanged."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def _pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps({"weights": [1.0, 2.0]}))


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def _lying_length(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 1 << 60) + path.read_bytes()[8:])


def _overlapping(path: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_A.weight"
        header[name.format(1)]["data_offsets"] = header[name.format(0)]["data_offsets"]

    _header(path, change)


def _not_json(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 4) + b"{{{{")


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (_pickled, "adapter_model.safetensors"),
        (_truncated, "adapter_model.safetensors"),
        (_lying_length, "adapter_model.safetensors"),
        (_not_json, "adapter_model.safetensors"),
        (_overlapping, "overlaps"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_spoiled_file_is_rejected_with_reasons(
    system: System, tmp_path: Path, spoil: Spoil, named: str
) -> None:
    folder = write_adapter(tmp_path / "adapter", lora_tensors(system.base_config, seed=5))
    spoil(folder / "adapter_model.safetensors")
    assert_rejected(system, folder, named)


def test_wrong_shape_is_rejected_by_the_tensors_name(system: System, tmp_path: Path) -> None:
    tensors = lora_tensors(system.base_config, seed=5)
    name = "base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight"
    tensors[name] = np.ascontiguousarray(tensors[name][:, :-1])
    assert_rejected(system, write_adapter(tmp_path / "adapter", tensors), name)


def test_unknown_tensor_is_rejected_by_its_name(system: System, tmp_path: Path) -> None:
    tensors = lora_tensors(system.base_config, seed=5)
    name = "base_model.model.model.layers.99.self_attn.q_proj.lora_A.weight"
    tensors[name] = np.zeros((4, 8), np.float32)
    assert_rejected(system, write_adapter(tmp_path / "adapter", tensors), name)


def test_unsupported_option_is_rejected_by_its_name(system: System, tmp_path: Path) -> None:
    tensors = lora_tensors(system.base_config, seed=5)
    folder = write_adapter(tmp_path / "adapter", tensors, lora_config(modules_to_save=["score"]))
    assert_rejected(system, folder, "modules_to_save")


def assert_rejected(system: System, folder: Path, named: str) -> None:
    """The version ends `rejected`, for reasons that name `named`, and its name does not answer."""
    with contextlib.closing(system.management("acme")) as client:
        version = client.begin_upload("spoiled", folder, base_model=system.base_model)
        for file in FILES:
            client.put_file(version["uploads"][file], folder / file)
        path = f"adapters/spoiled/versions/{version['number']}"
        client.call("POST", f"{path}/complete")
        found = until(
            lambda: _settled(client.call("GET", path)), "a verdict on the upload", timeout_s=30
        )
    assert found["status"] == "rejected"
    assert any(named in f"{reason['field']} {reason['message']}" for reason in found["reasons"])
    assert all(reason["message"] for reason in found["reasons"])
    body = {"model": "spoiled", "messages": MESSAGES}
    assert_refused(post(system, body), 404, code="model_not_found")


def _settled(version: dict[str, Any]) -> dict[str, Any] | None:
    return version if version["status"] in {"ready", "rejected"} else None


def test_upload_of_another_length_is_refused_by_the_store(system: System, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", lora_tensors(system.base_config, seed=5))
    with contextlib.closing(system.management("acme")) as client:
        version = client.begin_upload("spoiled", folder, base_model=system.base_model)
    upload = version["uploads"]["adapter_config.json"]
    answer = httpx.put(upload["url"], content=b"{}")
    assert answer.status_code == 403


def test_management_api_names_the_field(system: System) -> None:
    headers = {"Authorization": f"Bearer {system.tenants['acme'].api_key}"}
    url = f"{system.base_url}/api/v1/adapters/new/versions"
    missing = httpx.post(url, json={}, headers=headers)
    assert_refused(missing, 400, type="invalid_request_error", param="files")
    foreign = system.tenants["globex"].adapter
    theirs = httpx.get(f"{system.base_url}/api/v1/adapters/{foreign}", headers=headers)
    assert_refused(theirs, 404)
