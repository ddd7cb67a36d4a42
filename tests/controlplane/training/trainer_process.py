"""Celery's worker of the queue `train`, which looks more often and waits less: for tests that kill
it."""

from __future__ import annotations

import datetime as dt
import sys

from controlplane.celery import app


def main() -> None:
    app.loader.import_default_modules()
    from controlplane.training import execution, lease

    execution.TICK_S = 0.2
    execution.CHECKPOINT_S = 0.5
    lease.RETRY_S = 0.2
    short = dt.timedelta(seconds=5)
    execution.RUNNING_LEASE = execution.PUBLISHING_LEASE = short
    lease._DURATIONS.update(dict.fromkeys(lease._DURATIONS, short))
    app.worker_main(["worker", "-Q", "train", "-P", "solo", "-n", sys.argv[1], "-l", "INFO"])


if __name__ == "__main__":
    main()
