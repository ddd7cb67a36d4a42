"""One child, `python -m worker.primitives`, that many threads ask. Does not use the database."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from controlplane.training.runs.batch_child import ALLOCATOR, stop_child

#: Seconds between two looks whether the base is loaded.
_LOOK_S = 0.1


class ChildLost(Exception):
    """Raised when the child has ended: what was in its memory is gone."""


class Child:
    """A child that trains.

    device  its name, once it runs
    """

    def __init__(
        self, base: Path, share: float, environment: Mapping[str, str], stderr: Path
    ) -> None:
        self.device = ""
        self._ids = itertools.count(1)
        self._answers: dict[int, SimpleQueue[dict[str, Any] | None]] = {0: SimpleQueue()}
        self._lock = threading.Lock()
        self._has_ended = False
        with stderr.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "worker.primitives", str(base), "--gpu-share", str(share)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**ALLOCATOR, **environment},
            )
        threading.Thread(target=self._read, name="answers", daemon=True).start()

    def wait(self, beside: Callable[[], object]) -> None:
        """Wait until the base is loaded; call `beside` now and then. Raises ChildLost."""
        while self._answers[0].empty():
            beside()
            time.sleep(_LOOK_S)
        self.device = str(self._answer(0)["device"])

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    def ask(self, **order: Any) -> dict[str, Any]:
        """Have an order done, and wait for its answer. Raises ChildLost."""
        number = next(self._ids)
        with self._lock:
            if self._has_ended:
                raise ChildLost
            self._answers[number] = SimpleQueue()
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps({"id": number, **order}).encode() + b"\n")
                self._process.stdin.flush()
            except OSError as error:
                raise ChildLost from error
        return self._answer(number)

    def _answer(self, number: int) -> dict[str, Any]:
        answer = self._answers[number].get()
        del self._answers[number]
        if answer is None:
            raise ChildLost
        return answer

    def _read(self) -> None:
        """Hand out the answers until the child ends."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            self._answers[answer["id"]].put(answer)
        with self._lock:
            self._has_ended = True
            for answers in self._answers.values():
                answers.put(None)

    def close(self) -> None:
        """End the child."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        stop_child(self._process)
