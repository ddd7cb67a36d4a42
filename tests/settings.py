"""The control plane's settings without an installation: mypy's plugin, the OpenAPI document."""

import os

from tests.required_settings import REQUIRED

for _name, _value in REQUIRED.items():
    os.environ.setdefault(_name, _value)

from controlplane.settings import *  # noqa: E402, F403
