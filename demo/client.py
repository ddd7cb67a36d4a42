"""A client of the management API: upload an adapter and wait until it is ready."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx

from demo.errors import StepFailed

FILES = ("adapter_config.json", "adapter_model.safetensors")
VALIDATION_TIMEOUT_S = 240.0  # it may wait 120 s for its probe


class ManagementClient:
    """/api/v1 with one tenant's key. Raises StepFailed with the API's error message."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self._http = httpx.Client(
            base_url=f"{base_url}/api/v1/",
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=30,
        )

    def close(self) -> None:
        self._http.close()

    def upload_adapter(self, name: str, folder: Path, *, base_model: str) -> dict[str, Any]:
        """Make the PEFT folder the adapter's next version and return it once it is ready."""
        number = self.send_adapter(name, folder, base_model=base_model)
        return self.wait_until_ready(name, number)

    def send_adapter(self, name: str, folder: Path, *, base_model: str) -> int:
        """Make the PEFT folder the adapter's next version. -> its number; it is not checked yet."""
        version = self.begin_upload(name, folder, base_model=base_model)
        for file in FILES:
            self.put_file(version["uploads"][file], folder / file)
        number: int = version["number"]
        self.call("POST", f"adapters/{name}/versions/{number}/complete")
        return number

    def begin_upload(self, name: str, folder: Path, *, base_model: str) -> dict[str, Any]:
        """State the files' lengths; the answer has a presigned URL for each."""
        files = {file: (folder / file).stat().st_size for file in FILES}
        body = {"base_model": base_model, "files": files}
        return self.call("POST", f"adapters/{name}/versions", body)

    def put_file(self, upload: dict[str, Any], path: Path) -> None:
        """PUT one file to the object store; the URL needs no API key."""
        answer = httpx.put(
            upload["url"],
            content=path.read_bytes(),
            headers=upload["headers"],
            timeout=120,
        )
        if answer.status_code >= 300:
            raise StepFailed(
                f"the object store refused {path.name} with status {answer.status_code}",
                details=answer.text[:2000],
                advice="see .demo/stack/logs/seaweedfs.log",
            )

    def wait_until_ready(self, name: str, number: int) -> dict[str, Any]:
        """Wait until a version that was sent is checked, and return it. Raises StepFailed."""
        path = f"adapters/{name}/versions/{number}"
        give_up_at = time.monotonic() + VALIDATION_TIMEOUT_S
        while time.monotonic() < give_up_at:
            version = self.call("GET", path)
            if version["status"] == "ready":
                return version
            if version["status"] == "rejected":
                raise StepFailed(
                    "the adapter was rejected",
                    details=json.dumps(version["reasons"], indent=2),
                    advice="the reasons say what is wrong with the file",
                )
            time.sleep(0.25)
        raise StepFailed(
            f"the adapter was not checked within {VALIDATION_TIMEOUT_S:.0f} s",
            advice="see .demo/logs/celery.log",
        )

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.TransportError as error:
            raise StepFailed(
                f"{method} /api/v1/{path}: {error!r}", advice="see .demo/logs/web.log"
            ) from error
        if response.status_code >= 300:
            raise StepFailed(
                f"{method} /api/v1/{path} answered {response.status_code}",
                details=response.text[:2000],
                advice="see .demo/logs/web.log",
            )
        answer: dict[str, Any] = response.json()
        return answer
