"""Celery's worker of the queue `train`, which looks more often and waits less: for tests that kill
it."""

from __future__ import annotations

import datetime as dt
import sys

from controlplane.celery import app


def main() -> None:
    app.loader.import_default_modules()
    from controlplane.training.runs import batch_child, lease, picking, publishing, running

    running.TICK_S = 0.2
    batch_child.CHECKPOINT_S = 0.5
    lease.RETRY_S = 0.2
    short = dt.timedelta(seconds=5)
    picking.RUNNING_LEASE = publishing.PUBLISHING_LEASE = short
    lease._DURATIONS.update(dict.fromkeys(lease._DURATIONS, short))
    app.worker_main(["worker", "-Q", "train", "-P", "solo", "-n", sys.argv[1], "-l", "INFO"])


if __name__ == "__main__":
    main()
