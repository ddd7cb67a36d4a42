"""`python -m worker`: serve one base model and any number of adapters. See worker/config.py."""

from __future__ import annotations

import logging
import os

from worker.config import ConfigError, WorkerConfig, drop_environment, log_settings
from worker.logs import configure_logs
from worker.serving.service import run


def main() -> int:
    configure_logs()
    try:
        configure_logs(*log_settings())
        config = WorkerConfig.from_environment()
    except ConfigError as error:
        logging.getLogger(__name__).error("%s", error)
        return 2
    drop_environment()
    return run(config)


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    os._exit(status)  # end at once: a running download would keep the process alive
