"""An installation for manage.py: a database and a bucket of its own on the tests' servers."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import boto3
import psycopg
import pytest

from demo.commands import Commands
from demo.errors import StepFailed
from demo.stack import EmbeddedStack
from tests.conftest import ROOT
from tests.database import migrated_database, operator_url, own_database


class Installation:
    """A database and a bucket of its own, and a process that runs manage.py for them."""

    def __init__(self, stack: EmbeddedStack, name: str, *, is_migrated: bool = True) -> None:
        database = migrated_database if is_migrated else own_database
        redis = stack.env["REDIS_URL"].removesuffix("/0")
        self.env = {
            **os.environ,
            **stack.env,
            **database(stack.env, f"lorikeet_{name}"),
            "S3_BUCKET": f"backup-{name}",
            "REDIS_URL": f"{redis}/11",
            "CELERY_BROKER_URL": f"{redis}/11",
            "LORIKEET_BASE_MODEL": "",
        }
        self._commands: Commands | None = None
        self.s3 = boto3.client(
            "s3",
            endpoint_url=self.env["S3_ENDPOINT_URL"],
            aws_access_key_id=self.env["S3_ACCESS_KEY_ID"],
            aws_secret_access_key=self.env["S3_SECRET_ACCESS_KEY"],
            region_name=self.env["S3_REGION"],
        )
        with contextlib.suppress(self.s3.exceptions.BucketAlreadyOwnedByYou):
            self.s3.create_bucket(Bucket=self.env["S3_BUCKET"])

    def manage(self, *argv: str) -> str:
        """Output of a command. Raises StepFailed, whose details are its error."""
        if self._commands is None:
            self._commands = Commands(self.env)
        return self._commands.run(*argv)

    def close(self) -> None:
        """End the process; the next command starts another one."""
        if self._commands is not None:
            self._commands.close()
            self._commands = None

    def refused(self, *argv: str) -> str:
        with pytest.raises(StepFailed) as failed:
            self.manage(*argv)
        return str(failed.value.details)

    def python(self, *argv: str) -> str:
        return subprocess.run(
            [sys.executable, *argv],
            cwd=ROOT,
            env=self.env,
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    def query(self, text: str, *parameters: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(operator_url(self.env["DATABASE_URL"])) as connection:
            return connection.execute(text.encode(), parameters).fetchall()

    def rows(self) -> dict[str, int]:
        tables = self.query(
            "select relname from pg_class where relkind in ('r', 'p') and not relispartition "
            "and relnamespace = 'public'::regnamespace"
        )
        return {name: self.query(f'select count(*) from "{name}"')[0][0] for (name,) in tables}

    def objects(self) -> dict[str, bytes]:
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=self.env["S3_BUCKET"])
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
        return {key: self.read(key) for key in keys}

    def read(self, key: str) -> bytes:
        body: bytes = self.s3.get_object(Bucket=self.env["S3_BUCKET"], Key=key)["Body"].read()
        return body

    def put(self, key: str, data: bytes) -> None:
        self.s3.put_object(Bucket=self.env["S3_BUCKET"], Key=key, Body=data)


Make = Callable[..., Installation]
