"""The demo's state between runs: passwords, keys, and what is trained and uploaded."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from demo.ports import are_free, choose_ports


@dataclasses.dataclass(slots=True, kw_only=True)
class TenantState:
    """One tenant of the demo; `api_key` is empty until it is made."""

    slug: str
    name: str
    adapter: str
    email: str
    password: str
    api_key: str = ""
    digest: str = ""  # the uploaded adapter's, once it is ready


@dataclasses.dataclass(slots=True, kw_only=True)
class DemoState:
    """The state in `.demo/state.json`, which only its owner can read."""

    web_port: int
    operator_email: str
    operator_password: str
    tenants: list[TenantState]
    is_seeded: bool = False
    #: Whether the tenants' schedules are set, and were run once.
    is_scheduled: bool = False
    #: Shares of right fields, and numbers of held-out invoices, as `ask.measure` returns them.
    measured: dict[str, Any] | None = None
    #: The number of acme's second version, which is held back; None until it is ready.
    held_version: int | None = None

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.web_port}"

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load the state of `path`, or make a new one; replace a web port that is taken."""
        if not path.exists():
            return cls._new()
        fields = json.loads(path.read_text())
        fields["tenants"] = [TenantState(**tenant) for tenant in fields["tenants"]]
        state = cls(**fields)
        if not are_free([state.web_port]):
            [state.web_port] = choose_ports(1)
        return state

    @classmethod
    def _new(cls) -> Self:
        [web_port] = choose_ports(1)
        tenants = [
            TenantState(
                slug=slug,
                name=name,
                adapter=adapter,
                email=f"admin@{slug}.example",
                password=secrets.token_urlsafe(12),
            )
            for slug, name, adapter in (
                ("acme", "Acme Accounting", "invoices"),
                ("globex", "Globex Support", "support"),
            )
        ]
        return cls(
            web_port=web_port,
            operator_email="operator@lorikeet.example",
            operator_password=secrets.token_urlsafe(12),
            tenants=tenants,
        )

    def save(self, path: Path) -> None:
        write_private(path, dataclasses.asdict(self))

    def ready(self, metrics_ports: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Return the content of `.demo/ready.json`."""
        return {
            "metrics_urls": {
                name: f"http://127.0.0.1:{port}/metrics"
                for name, port in (metrics_ports or {}).items()
            },
            "base_url": self.base_url,
            "console_url": f"{self.base_url}/console/",
            "operator": {"email": self.operator_email, "password": self.operator_password},
            "tenants": {
                tenant.slug: {
                    "api_key": tenant.api_key,
                    "adapter": tenant.adapter,
                    "email": tenant.email,
                    "password": tenant.password,
                }
                for tenant in self.tenants
            },
        }


def write_private(path: Path, value: Any) -> None:
    """Write JSON atomically, to a file that only its owner can read."""
    staging = path.with_name(path.name + ".tmp")
    staging.unlink(missing_ok=True)
    staging.touch(mode=0o600)
    staging.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(staging, path)
