"""The Celery application: queues `ingest`, `ops` and `train`; beat fires what settings lists."""

import os
import sys
import tempfile

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
#: Tasks run in children of a worker, which count in files of this folder; empty: not a worker.
#: prometheus_client reads the variable when it is imported.
METRICS_FOLDER = ""
if os.environ.get("LORIKEET_METRICS_PORT") and "worker" in sys.argv:
    METRICS_FOLDER = tempfile.mkdtemp(prefix="lorikeet-metrics-")
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = METRICS_FOLDER

app = Celery("controlplane")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
