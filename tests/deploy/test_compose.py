"""docker-compose.yml and .env.example fit the Dockerfile, the settings and each other."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.deploy.dockerfile import ROOT, stages

EXAMPLE = {
    line.partition("=")[0]
    for line in (ROOT / ".env.example").read_text().splitlines()
    if "=" in line and not line.startswith("#")
}
READERS = {
    "controlplane/settings.py": r'\benv(?:_bool|_int)?\(\s*"([A-Z0-9_]+)"',
    "worker/config.py": r'\bread\.\w+\(\s*"([A-Z0-9_]+)"',
}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded


@pytest.mark.parametrize("path", READERS)
def test_every_variable_that_is_read_is_in_the_example(path: str) -> None:
    read = set(re.findall(READERS[path], (ROOT / path).read_text()))
    assert len(read) > 5, "the pattern above no longer fits how variables are read"
    assert read <= EXAMPLE


def test_example_has_nothing_that_is_not_read() -> None:
    read = {
        name
        for path, pattern in READERS.items()
        for name in re.findall(pattern, (ROOT / path).read_text())
    }
    in_compose = set(re.findall(r"\$\{(\w+)", (ROOT / "docker-compose.yml").read_text()))
    assert EXAMPLE - read - in_compose == set()


def test_every_process_of_the_platform_is_a_service(compose: dict[str, Any]) -> None:
    assert set(compose["services"]) >= {
        "postgres",
        "redis",
        "seaweedfs",
        "migrate",
        "web",
        "accountant",
        "batch-runner",
        "celery",
        "beat",
        "trainer",
        "worker",
    }


def test_services_build_stages_that_exist(compose: dict[str, Any]) -> None:
    targets = {
        name: service["build"]["target"]
        for name, service in compose["services"].items()
        if "build" in service
    }
    assert set(targets.values()) == {"controlplane", "trainer", "worker"}
    assert set(targets.values()) <= set(stages())
    assert targets["worker"] == "worker"
    assert targets["trainer"] == "trainer"


def test_dependencies_are_services(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for name, service in services.items():
        for other, wait in service.get("depends_on", {}).items():
            assert other in services, name
            if wait["condition"] == "service_healthy":
                assert "healthcheck" in services[other], other


def test_named_volumes_are_declared(compose: dict[str, Any]) -> None:
    used = {
        volume.partition(":")[0]
        for service in compose["services"].values()
        for volume in service.get("volumes", [])
        if not volume.startswith(".")
    }
    assert used == set(compose["volumes"])


def test_worker_gets_a_gpu(compose: dict[str, Any]) -> None:
    reservations = compose["services"]["worker"]["deploy"]["resources"]["reservations"]
    assert reservations["devices"][0]["capabilities"] == ["gpu"]


def test_interpolated_variables_are_in_the_example() -> None:
    paths = ("docker-compose.yml", "deploy/seaweedfs.sh", "deploy/postgres.sh")
    text = "".join((ROOT / path).read_text() for path in paths)
    names = set(re.findall(r"\$\{?([A-Z][A-Z0-9_]+)", text))
    assert names <= EXAMPLE


def test_files_mounted_from_the_repository_exist(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            if volume.startswith("./"):
                assert (ROOT / volume.partition(":")[0]).is_file()


def test_only_the_migrations_know_the_owner_of_the_tables(compose: dict[str, Any]) -> None:
    knowing = {
        name
        for name, service in compose["services"].items()
        if "DATABASE_OWNER_URL" in service.get("environment", {})
    }
    assert knowing == {"migrate"}
