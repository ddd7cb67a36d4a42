"""`python -m tests.fake_worker STEP_SECONDS`: a real worker around an engine that echoes."""

from __future__ import annotations

import logging
import sys

from tests.fakes import fake_engine
from worker.config import WorkerConfig
from worker.service import run

if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s", level="INFO")
    sys.exit(run(WorkerConfig.from_environment(), engine_factory=fake_engine(float(sys.argv[1]))))
