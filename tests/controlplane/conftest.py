"""Two tenants with people and keys, seen by every control plane test: acme, and globex the
stranger."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from allauth.mfa.totp.internal.auth import TOTP, generate_totp_secret
from django.test import Client
from rest_framework.test import APIClient

from controlplane.adapters.models import BaseModel
from controlplane.tenants import auth, services
from controlplane.tenants.models import User
from tests.controlplane.parties import PASSWORD, Party, make_party

#: A Llama small enough to make adapters for in no time.
TINY_CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}


def make_operator(email: str = "op@example.com") -> User:
    """Somebody who runs the platform, with the second factor that they need."""
    operator = services.user_create(email=email, password=PASSWORD, is_operator=True)
    TOTP.activate(operator, generate_totp_secret())
    return operator


@pytest.fixture(autouse=True)
def _fast_passwords(settings: Any) -> None:
    # The real hasher is slow on purpose, and every test makes people.
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]


@pytest.fixture(autouse=True)
def _no_cached_keys() -> Iterator[None]:
    yield
    auth._keys.forget(*auth._keys.keys())


@pytest.fixture
def acme(db: None) -> Party:
    return make_party("acme")


@pytest.fixture
def globex(db: None) -> Party:
    return make_party("globex")


@pytest.fixture
def base_model(db: None) -> BaseModel:
    return BaseModel.objects.create(
        name="tiny", revision="0" * 64, config=TINY_CONFIG, context_length=128, max_rank=256
    )


def as_key(party: Party) -> APIClient:
    """A client of /api that sends the party's key."""
    client = APIClient()
    client.credentials(HTTP_AUTHORIZATION=party.header)
    return client


def as_user(user: User) -> APIClient:
    """A client of /api with the person's session, CSRF checks off."""
    client = APIClient()
    Client.force_login(client, user)
    return client


def assert_error(answer: Any, status: int, param: str | None = None) -> Any:
    """The answer's error, in OpenAI's form, after comparing its status and field."""
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert set(error) == {"message", "type", "param", "code"}
    return error
