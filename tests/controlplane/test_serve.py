"""The one way to start the web server, and that every place takes it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from controlplane import serve, settings

ROOT = Path(__file__).parents[2]
#: Whoever starts a web server, or says how.
PLACES = ("Dockerfile", "demo/platform.py", "tests/live.py", "tests/browser/conftest.py")
#: They speak of uvicorn and start nothing that the platform serves.
EXEMPT = ("CHANGELOG.md", "docs/decisions.md", "tests/controlplane/test_serve.py")


@pytest.mark.parametrize("place", PLACES)
def test_every_place_starts_the_bounded_server(place: str) -> None:
    assert "controlplane.serve" in (ROOT / place).read_text()


def test_nothing_starts_uvicorn_itself() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    starts = re.compile(r"uvicorn[\"',\s]+(?:\w+\.)*\w+:application")
    found = [
        name
        for name in listed.stdout.splitlines()
        if name not in EXEMPT
        and name.endswith((".py", ".md", ".yml", ".sh", "Dockerfile", "Makefile", "run"))
        and (ROOT / name).is_file()
        and starts.search((ROOT / name).read_text())
    ]
    assert found == []


def test_no_option_takes_the_bounds_away() -> None:
    given = serve.arguments(["--http=h11", "--ws=wsproto", "--port=1"])
    assert given[0] == "controlplane.asgi:application"
    assert given.index("--http=controlplane.gateway.bounded_http:BoundedHttp") > given.index(
        "--http=h11"
    )
    assert given.index("--ws=none") > given.index("--ws=wsproto")
    assert serve.arguments(["tests.probed_gateway:application"])[0].startswith("tests.")


def test_nobody_is_believed_who_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--forwarded-allow-ips=" in serve.arguments([])
    monkeypatch.setattr(settings, "FORWARDED_ALLOW_IPS", "10.0.0.1")
    assert "--forwarded-allow-ips=10.0.0.1" in serve.arguments([])


@pytest.mark.parametrize(("base_url", "is_told"), [("https://a", True), ("http://a", False)])
def test_browsers_are_told_to_stay_with_https_where_it_is(
    monkeypatch: pytest.MonkeyPatch, base_url: str, is_told: bool
) -> None:
    monkeypatch.setattr(settings, "BASE_URL", base_url)
    told = [option for option in serve.arguments([]) if "strict-transport-security" in option]
    assert bool(told) == is_told
    assert all(re.search(r":max-age=\d{8}$", option) for option in told)
