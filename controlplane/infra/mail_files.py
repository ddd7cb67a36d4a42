"""Write mail to files that only their owner may read: a link in it can open an account."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.mail.backends import filebased


class EmailBackend(filebased.EmailBackend):
    """Django's file backend, with files of mode 0600 in a folder of mode 0700 that it makes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        folder = kwargs.get("file_path") or getattr(settings, "EMAIL_FILE_PATH", None)
        Path(folder or "").mkdir(mode=0o700, parents=True, exist_ok=True)
        super().__init__(*args, **kwargs)

    def open(self) -> bool:
        if self.stream is None:
            # The file is created with its mode, so that nobody can open it before a change of mode.
            self.stream = open(self._get_filename(), "ab", opener=_private)  # type: ignore[attr-defined]
            return True
        return False


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
