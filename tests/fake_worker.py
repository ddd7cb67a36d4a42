"""A real worker with an echoing engine: `python -m tests.fake_worker STEP_S LOAD_S MAX_RUNNING`."""

from __future__ import annotations

import sys

from tests.fakes import fake_engine
from worker.config import WorkerConfig, drop_environment
from worker.logs import configure_logs
from worker.serving.service import run

if __name__ == "__main__":
    config = WorkerConfig.from_environment()
    configure_logs(config.log_format, config.log_level)
    drop_environment()
    sys.exit(run(config, engine_factory=fake_engine(*map(float, sys.argv[1:]))))
