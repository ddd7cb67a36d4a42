"""What a process that computes gets of its parent's environment."""

from __future__ import annotations

from pathlib import Path

from contract.process.child_environment import child_environment

SETTINGS = Path(__file__).parents[2] / ".env.example"


def test_a_child_gets_no_setting_and_so_no_secret() -> None:
    lines = SETTINGS.read_text().splitlines()
    names = [line.lstrip("# ").partition("=")[0] for line in lines if "=" in line]
    assert {"DATABASE_URL", "REDIS_URL", "S3_SECRET_ACCESS_KEY"} <= {*names}
    env = dict.fromkeys(names, "secret") | {"PATH": "/bin", "OMP_NUM_THREADS": "2"}
    assert child_environment(env) == {"PATH": "/bin", "OMP_NUM_THREADS": "2"}
