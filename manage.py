#!/usr/bin/env python
"""Django's command line."""

import os
import signal
import sys
from types import FrameType

from django.core.management import execute_from_command_line


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    # A container's first process is deaf to SIGTERM unless it listens; its command does so later.
    signal.signal(signal.SIGTERM, _end)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
    execute_from_command_line(sys.argv)
