"""Locks of a process that stands still in the middle of a transaction."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from urllib.parse import quote

import pytest
from django.db import connection, transaction

from controlplane.infra.locks import lock_until_commit

HOLDER = """
import time
import django
django.setup()
from django.db import transaction
from controlplane.infra.locks import lock_until_commit
with transaction.atomic():
    lock_until_commit("held by one that stands still")
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.django_db(transaction=True)
def test_a_process_that_stands_still_loses_its_locks() -> None:
    with connection.cursor() as cursor:
        cursor.execute("show idle_in_transaction_session_timeout")
        assert cursor.fetchone() == ("1min",)
    url, database = os.environ["DATABASE_URL"], connection.settings_dict["NAME"]
    option = quote("-c idle_in_transaction_session_timeout=2s")
    env = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "controlplane.settings",
        "DATABASE_URL": f"{url}{'&' if '?' in url else '?'}options={option}&dbname={database}",
    }
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True, env=env
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.send_signal(signal.SIGSTOP)
        with connection.cursor() as cursor:
            cursor.execute(
                "select count(*) from pg_locks join pg_database d on d.oid = database"
                " where locktype = 'advisory' and datname = current_database()"
            )
            assert cursor.fetchone() == (1,)
        with transaction.atomic():
            lock_until_commit("held by one that stands still")
    finally:
        holder.kill()
        holder.communicate()
