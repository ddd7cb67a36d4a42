"""Builds the images and brings one installation up, once for this folder's tests.

What is left behind: the images (building them takes minutes), and the engine if it was there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compose import standins
from tests.compose.docker import Missing, engine, host_address
from tests.compose.stack import Client, Stack
from tests.receiver import Receiver, receiving

SCRATCH = standins.ROOT / ".test" / "compose"
BUILD_TIMEOUT_S = 3600


@pytest.fixture(scope="session")
def images() -> Iterator[str]:
    """Options for pip under which the images were built."""
    try:
        with engine(SCRATCH / "docker"):
            made = standins.ensure_images(SCRATCH)
            if made:
                print(f"stand-ins, as no registry is reached: {', '.join(made)}")  # noqa: T201
            with standins.local_wheels() as options:
                yield options
    except Missing as error:
        pytest.fail(str(error))


@pytest.fixture(scope="session")
def receiver(images: str) -> Iterator[Receiver]:
    """A server outside, on this machine, to which the platform's webhooks go."""
    with receiving(address=host_address()) as found:
        yield found


@pytest.fixture(scope="session")
def stack(images: str, receiver: Receiver) -> Iterator[Stack]:
    """Everything by one command, from nothing, with what the example asks for and little more."""
    address = host_address()
    variables = {
        "LORIKEET_PIP_OPTIONS": images,
        "LORIKEET_OPERATOR_EMAIL": "ops@example.com",
        "LORIKEET_SPECULATION": "on",  # so that the dashboard has drafts to show
        # As docs/webhooks.md has an operator allow an address that is not public.
        "LORIKEET_OUTBOUND_HOSTS": f"{address}:{receiver.port}",
        "LORIKEET_OUTBOUND_ALLOWED_NETWORKS": f"{address}/32",
    }
    stack = Stack(SCRATCH / "main", variables=variables, project=f"lorikeet-test-{os.getpid()}")
    try:
        began = time.monotonic()
        stack.compose("build", timeout_s=BUILD_TIMEOUT_S)
        built = time.monotonic()
        stack.compose("up", "--detach", timeout_s=BUILD_TIMEOUT_S)
        stack.wait_until_well()
        done = time.monotonic()
        print(f"built in {built - began:.0f} s, up in {done - built:.0f} s")  # noqa: T201
        yield stack
    finally:
        stack.down("--volumes", "--remove-orphans", check=False)
        print(f"what it logged is in {stack.log}")  # noqa: T201


@pytest.fixture(scope="session")
def acme(stack: Stack) -> Client:
    """A tenant's program, made as docs/deploy.md has the operator do it."""
    stack.manage("tenant_create", "--slug", "acme", "--name", "Acme")
    made = stack.manage("api_key_create", "--tenant", "acme", "--name", "first")
    return Client(stack, made["key"])


@pytest.fixture(scope="session")
def globex(stack: Stack) -> Client:
    """A second tenant's program: it releases versions."""
    stack.manage("tenant_create", "--slug", "globex", "--name", "Globex")
    made = stack.manage("api_key_create", "--tenant", "globex", "--name", "first")
    return Client(stack, made["key"])


@pytest.fixture(scope="session")
def scratch() -> Path:
    return SCRATCH
