"""Check at the start whether the servers behind the control plane can be used."""

from __future__ import annotations

import time
from collections.abc import Mapping

import psycopg
import redis
from botocore.exceptions import BotoCoreError, ClientError
from django.conf import settings

from controlplane.infra import storage

#: The time limit of a server's answer.
ANSWER_S = 5


class NotReady(Exception):
    """Raised when a server cannot be used; the message names the setting and says what to do."""


def check_database(role: str, address: dict[str, object]) -> None:
    """Check that PostgreSQL lets this role in. Raises NotReady."""
    place = f"{address['HOST']}:{address['PORT'] or 5432}"
    try:
        connect_once(address, ANSWER_S)
    except psycopg.OperationalError as error:
        said = str(error).strip().splitlines()[0].removeprefix("connection failed: ")
        hint = (
            "The database was made with another password: put that one into .env, or change the "
            f"role's with `alter role {address['USER']} password '…'`."
            if "password" in said
            else "Check that it runs and that the address is right."
        )
        raise NotReady(
            f"{role} cannot use PostgreSQL at {place}: {said.rstrip('.')}. {hint}"
        ) from error


def connect_once(address: Mapping[str, object], answer_s: int) -> None:
    """Connect to the database and leave. Raises psycopg.OperationalError.

    address  an entry of Django's DATABASES
    """
    psycopg.connect(
        host=str(address["HOST"]),
        port=int(str(address["PORT"] or 5432)),
        user=str(address["USER"]),
        password=str(address["PASSWORD"]),
        dbname=str(address["NAME"]),
        connect_timeout=answer_s,
    ).close()


def check_redis(name: str, url: str) -> None:
    """Check that Redis answers. Raises NotReady."""
    try:
        with redis.Redis.from_url(
            url, socket_timeout=ANSWER_S, socket_connect_timeout=ANSWER_S
        ) as client:
            client.ping()
    except redis.AuthenticationError as error:
        raise NotReady(f"{name}: Redis refuses the password: {error}") from error
    except (redis.RedisError, OSError) as error:
        raise NotReady(f"{name}: Redis does not answer: {error}") from error


def check_store(*, patience_s: float = ANSWER_S) -> None:
    """Make the bucket if there is none, and write into it. Raises NotReady.

    patience_s  limit of each answer, and of the time in which a new store becomes ready
    """
    place = f"S3 at {settings.S3_ENDPOINT_URL}, bucket {settings.S3_BUCKET}"
    try:
        _write_into_store(patience_s)
    except ClientError as error:
        raise NotReady(f"{place}: {_meaning(error)}") from error
    except BotoCoreError as error:
        raise NotReady(
            f"{place} cannot be reached: {error}. Check S3_ENDPOINT_URL, and that the store runs."
        ) from error


def allow_uploads() -> str:
    """Set the bucket's CORS rule for the console's pages. -> a note for the operator, or "".

    A key with narrow rights may not do that; then the operator must. Raises NotReady.
    """
    try:
        storage.cors_allow()
    except ClientError as error:
        origins = ", ".join(storage.console_origins())
        return (
            f"The bucket's CORS rules were not changed: {_meaning(error)}. Let pages of {origins} "
            "send files: docs/deploy.md, CORS."
        )
    except BotoCoreError as error:
        raise NotReady(f"S3 at {settings.S3_ENDPOINT_URL} cannot be reached: {error}") from error
    return ""


def _write_into_store(patience_s: float) -> None:
    """Retry for a while: a store that has just started answers before it accepts objects."""
    give_up_at = time.monotonic() + patience_s
    while True:
        try:
            storage.probe(patience_s=patience_s)
            return
        except ClientError as error:
            is_its_fault = error.response["ResponseMetadata"]["HTTPStatusCode"] >= 500
            if not is_its_fault or time.monotonic() > give_up_at:
                raise
        time.sleep(0.5)


_MEANINGS = {
    "InvalidAccessKeyId": "it does not know S3_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "S3_SECRET_ACCESS_KEY is not the one of S3_ACCESS_KEY_ID",
    "AccessDenied": "the key may not write here",
    "AuthorizationHeaderMalformed": "it is of another region than S3_REGION",
    "PermanentRedirect": "it is of another region than S3_REGION",
    "IllegalLocationConstraintException": "it is of another region than S3_REGION",
}


def _meaning(error: ClientError) -> str:
    code = error.response.get("Error", {}).get("Code", "")
    return f"{_MEANINGS.get(code, 'it refuses')} ({error})"
