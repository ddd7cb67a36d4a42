"""The demo's own training of its tenants' adapters."""

from __future__ import annotations

from demo.stack import EmbeddedStack
from demo.training import without_secrets


def test_the_trainer_gets_no_secret(stack: EmbeddedStack) -> None:
    env = {**stack.env, "PATH": "/bin", "OMP_NUM_THREADS": "2"}
    assert without_secrets(env) == {"PATH": "/bin", "OMP_NUM_THREADS": "2"}
