"""schemathesis over /api/v1: requests made from the OpenAPI document, fitting and misfitting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from django.core.signals import request_finished, request_started
from django.core.wsgi import get_wsgi_application
from django.db import close_old_connections
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from controlplane.adapters.models import BaseModel
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants import key_services
from controlplane.tenants.key_rules import KeyRules
from controlplane.tenants.models import Role, ServiceAccount
from controlplane.tenants.permissions import Permission
from tests.controlplane.conftest import Party
from tests.controlplane.management.test_openapi import DOCUMENT, make_named

#: Of each operation and mode.
NUM_EXAMPLES = [pytest.param(4), pytest.param(60, marks=pytest.mark.long)]
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@schemathesis.serializer("application/jsonl")
def _lines(context: Any, value: Any) -> bytes:
    """A dataset is bytes, whatever they are."""
    return value if isinstance(value, bytes) else str(value).encode(errors="replace")


SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
SCHEMA.app = get_wsgi_application()
OPERATIONS = {
    f"{operation.method} {operation.path}": operation
    for operation in (result.ok() for result in SCHEMA.get_all_operations())
    if operation.path.startswith("/api/v1/")
}


@pytest.fixture(autouse=True)
def _one_connection() -> Iterator[None]:
    """Keep the test's connection, as Django's own client does: its transaction is the test's."""
    for signal in (request_started, request_finished):
        signal.disconnect(close_old_connections)
    yield
    for signal in (request_started, request_finished):
        signal.connect(close_old_connections)


@pytest.fixture
def master_key(acme: Party, base_model: BaseModel) -> str:
    """A key that may do everything, so that no example ends at its permissions."""
    with tenant_scope(acme.tenant.id):
        account = ServiceAccount.objects.create(name="master", role=Role.OWNER)
        rules = KeyRules(scopes=tuple(Permission))
        return key_services.api_key_create(name="master", owner=account, rules=rules)[1]


@pytest.mark.parametrize("num_examples", NUM_EXAMPLES)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=str)
def test_operation_keeps_its_contract(
    name: str,
    mode: GenerationMode,
    num_examples: int,
    acme: Party,
    base_model: BaseModel,
    master_key: str,
) -> None:
    """Examples that fit name things that are there, so that their bodies are what is tried."""
    path = OPERATIONS[name].path
    named: dict[str, Any] = {}
    if "{" in path and mode == GenerationMode.POSITIVE:
        parameter, made = make_named(path, acme, base_model)
        named = {parameter: str(made)} | ({"number": 1} if "{number}" in path else {})

    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=OPERATIONS[name].as_strategy(generation_mode=mode))
    def play(case: Any) -> None:
        case.path_parameters = {**(case.path_parameters or {}), **named}
        response = case.call(headers={"Authorization": f"Bearer {master_key}"})
        case.validate_response(response, checks=CHECKS)

    play()


def test_every_operation_is_played() -> None:
    assert len(OPERATIONS) >= 40
