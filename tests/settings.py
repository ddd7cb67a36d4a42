"""The control plane's settings as mypy's Django plugin loads them: the example environment's."""

import os
from pathlib import Path

for _line in (Path(__file__).parent.parent / ".env.example").read_text().splitlines():
    if "=" in _line and not _line.startswith("#"):
        _name, _, _value = _line.partition("=")
        os.environ.setdefault(_name, _value)

from controlplane.settings import *  # noqa: E402, F403
