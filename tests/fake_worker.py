"""A real worker with an echoing engine: `python -m tests.fake_worker STEP_S LOAD_S MAX_RUNNING`."""

from __future__ import annotations

import logging
import sys

from tests.fakes import fake_engine
from worker.config import WorkerConfig, drop_environment
from worker.serving.service import run

if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s", level="INFO")
    config = WorkerConfig.from_environment()
    drop_environment()
    sys.exit(run(config, engine_factory=fake_engine(*map(float, sys.argv[1:]))))
