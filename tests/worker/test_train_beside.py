"""`worker.train --worker`: jobs trained by the engine process that serves, in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from contract.adapters.base_model import find_base_model
from contract.training.job import Hyperparameters, TrainJob
from engine import Engine, EngineConfig
from engine.model.config import ModelConfig
from engine.request import Request, SamplingParams
from engine.training.parameters import AdapterLayout
from tests.fakes import fake_config
from tests.tiny_base import TINY_NAME, write_tiny_base
from tests.trainers import train_in_float32
from tests.worker.test_train_many import write_jobs
from tests.worker.test_train_many_join import Orders, is_step, train, write
from tests.worker.training.job_runs import adapter_of, train_here
from tests.worker.training.test_preferences import job as pairs_job
from tests.worker.training.test_preferences import pair
from worker.config import ConfigError, TrainingConfig, WorkerConfig
from worker.engine_process.channel import StepReport
from worker.engine_process.process import EngineProcess, make_host
from worker.engine_process.training_host import TrainingHost
from worker.training import away
from worker.training.disk import CheckpointFolder
from worker.training.jobs import NamedJob, settings_of
from worker.training.remote import RemoteTrainer, TrainerBusy, TrainerRefuses


@pytest.fixture(scope="module")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base") / TINY_NAME)


@pytest.fixture(autouse=True)
def _quick_and_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    train_in_float32(monkeypatch)
    monkeypatch.setattr(away, "_AGAIN_S", 0.02)


@dataclass
class Worker:
    """A worker's engine process, as a thread, and the other end of its pipe."""

    engine: Engine
    socket: Path
    host: TrainingHost
    ours: Connection
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    is_open: bool = True
    is_over: bool = False

    def ask(self, name: str, length: int, count: int) -> None:
        sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        prompt = [(7 * i + len(name)) % 390 for i in range(length)]
        self.tokens[name] = []
        self.ours.send([Request(request_id=name, token_ids=prompt, sampling=sampling)])

    def listen(self) -> None:
        while not self.is_over:
            if not self.ours.poll(0.02):
                continue
            report: StepReport = self.ours.recv()
            for output in report.outputs:
                assert output.error is None
                self.tokens[output.request_id] += output.token_ids
                if output.finish_reason is not None:
                    self.ended.add(output.request_id)

    def wait_for(self, count: int) -> None:
        until = time.monotonic() + 60
        while len(self.ended) < count:
            assert time.monotonic() < until
            time.sleep(0.005)

    def wait_for_pages(self) -> None:
        until = time.monotonic() + 20
        while self.engine.lending.pages:
            assert time.monotonic() < until
            time.sleep(0.005)


@pytest.fixture
def worker(tiny_base: Path, tmp_path: Path) -> Iterator[Worker]:
    engine = Engine(EngineConfig(model_dir=tiny_base, arena_bytes=16 << 20, lends_weights=True))
    ours, theirs = Pipe()
    config = fake_config(tmp_path, worker_id="w", pool="p", redis_url="redis://nowhere")
    path = tmp_path / "training.sock"
    training = TrainingConfig(socket=path)
    config = dataclasses.replace(config, model_dir=tiny_base, training=training)
    loop = EngineProcess(engine, theirs)
    host = make_host(engine, loop, config)
    assert isinstance(host, TrainingHost)
    loop.host = host
    made = Worker(engine, path, host, ours)
    host._is_open = lambda: made.is_open

    def run() -> None:
        try:
            loop.run()
        except (EOFError, OSError):
            return

    serving, listening = (threading.Thread(target=each) for each in (run, made.listen))
    serving.start()
    listening.start()
    yield made
    made.wait_for_pages()
    made.is_over = True
    listening.join()
    host.close()
    ours.close()
    serving.join(20)
    assert not serving.is_alive()
    assert not engine.lending.pages
    engine.check_integrity()
    engine.close()
    theirs.close()


def test_jobs_become_what_they_become_in_a_process_of_their_own(
    worker: Worker, tmp_path: Path, tiny_base: Path
) -> None:
    """One of them is validated, and begins from an adapter; requests get the same tokens."""
    for number in range(6):
        worker.ask(f"before-{number}", 20 + number, 30)
    worker.wait_for(6)
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    wanted, jobs = write_jobs(here, tiny_base), write_jobs(there, tiny_base)
    for written in (wanted, jobs):
        begin_from_noise_and_validate(written["two"], tmp_path / "noise.safetensors")
    code, own = train_here(tmp_path / "own", list(wanted.values()), budget=256)
    assert code == 0
    assert [event["best_loss"] for event in own["two"] if event["event"] == "done"]
    results: list[tuple[int, dict[str, list[dict[str, Any]]]]] = []
    training = threading.Thread(
        target=lambda: results.append(
            train_here(tmp_path / "state", list(jobs.values()), worker=worker.socket)
        )
    )
    training.start()
    for number in range(6):
        worker.ask(f"during-{number}", 20 + number, 30)
        time.sleep(0.03)
    training.join()
    worker.wait_for(12)
    [(code, events)] = results
    assert code == 0 and list((tmp_path / "state").iterdir()) == []
    for name, job in jobs.items():
        assert [event["event"] for event in events[name]] == [each["event"] for each in own[name]]
        for ours, theirs in zip(events[name], own[name], strict=True):
            for figure in ("loss", "validation_loss", "best_step", "best_loss"):
                assert ours.get(figure) == theirs.get(figure)
        for tensor, expected in adapter_of(wanted[name]).items():
            assert torch.equal(adapter_of(job)[tensor], expected)
    for number in range(6):
        assert worker.tokens[f"during-{number}"] == worker.tokens[f"before-{number}"]


def begin_from_noise_and_validate(job: Path, start: Path) -> None:
    fields = json.loads(job.read_text())
    fields["hyperparameters"] |= {"validation_share": 0.4, "eval_steps": 2}
    job.write_text(json.dumps(fields | {"warm_start": str(start)}))
    read = Hyperparameters.from_dict(fields["hyperparameters"])
    config = ModelConfig.from_folder(Path(fields["base_model_dir"]))
    layout = AdapterLayout(config, settings_of(read))
    noise = torch.randn(layout.size, generator=torch.Generator().manual_seed(0)) / 10
    tensors = layout.tensors(noise)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, start)


def test_a_job_joins_those_that_a_worker_trains(
    worker: Worker, tmp_path: Path, tiny_base: Path
) -> None:
    """And one for which the session has too few pages is in the next session."""
    wanted: dict[str, Path] = {}
    jobs: dict[str, Path] = {}
    for made, name in ((wanted, "here"), (jobs, "there")):
        made["first"] = write(tmp_path / name / "first", tiny_base, max_steps=12, rank=1)
        made["second"] = write(tmp_path / name / "second", tiny_base, max_steps=3, rank=1)
        made["large"] = write(tmp_path / name / "large", tiny_base, max_steps=2, rank=32)

    def react(orders: Orders, event: dict[str, Any]) -> None:
        if is_step(event, "first", 3):
            orders.give(add=str(jobs["second"]))
            orders.give(add=str(jobs["large"]))
        elif event["event"] == "done" and orders.num_done == 3:
            orders.give(last=True)

    code, events = train(tmp_path / "state", [jobs["first"]], react, worker=worker.socket)
    assert code == 0
    assert [event["event"] for event in events["large"]] == [
        "later",
        "started",
        *["progress"] * 2,
        "done",
    ]
    assert [event["event"] for event in events["second"]][:1] == ["started"]
    train_here(tmp_path / "own", list(wanted.values()), budget=256)
    for name, job in jobs.items():
        for tensor, expected in adapter_of(wanted[name]).items():
            assert torch.equal(adapter_of(job)[tensor], expected)


def test_when_the_hours_end_runs_are_saved_and_go_on_in_the_next(
    worker: Worker, tmp_path: Path, tiny_base: Path
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    wanted = write_jobs(here, tiny_base, max_steps=40, validation_share=0.4)
    train_here(tmp_path / "own", list(wanted.values()), budget=256)
    jobs = write_jobs(there, tiny_base, max_steps=40, validation_share=0.4)
    preferences = {"method": "dpo", "max_steps": 40, "validation_share": 0.4}
    for folder, made in ((here, wanted), (there, jobs)):
        rows = [pair(number) for number in range(12)]
        made["pairs"] = pairs_job(folder / "pairs", tiny_base, rows, **preferences)
    train_here(tmp_path / "own", [wanted["pairs"]], budget=256)
    worker.is_open = False
    results: list[Any] = []
    training = threading.Thread(
        target=lambda: results.append(
            train_here(tmp_path / "state", list(jobs.values()), worker=worker.socket)
        )
    )
    training.start()
    pauses = 0
    while training.is_alive():
        time.sleep(0.15)
        worker.is_open = not worker.is_open
        pauses += 1
    training.join()
    [(code, events)] = results
    assert code == 0 and pauses > 3
    for name, job in jobs.items():
        kinds = [event["event"] for event in events[name]]
        assert kinds[0] == "warning" and kinds.count("started") == kinds.count("done") == 1
        assert "saved" in kinds
        for tensor, expected in adapter_of(wanted[name]).items():
            assert torch.equal(adapter_of(job)[tensor], expected)


def test_who_leaves_gives_the_memory_back(worker: Worker, tiny_base: Path) -> None:
    revision = find_base_model(tiny_base).revision
    with pytest.raises(TrainerRefuses, match="another base"):
        RemoteTrainer.open(worker.socket, revision="f" * 64, sizes=[1024])
    with pytest.raises(TrainerBusy, match="too few free pages"):
        RemoteTrainer.open(worker.socket, revision=revision, sizes=[1 << 40])
    one = RemoteTrainer.open(worker.socket, revision=revision, sizes=[4096])
    assert one.device == "cpu" and len(worker.engine.lending.pages) > 0
    with pytest.raises(TrainerBusy, match="other runs"):
        RemoteTrainer.open(worker.socket, revision=revision, sizes=[1024])
    one._connection.shutdown(socket.SHUT_RDWR)
    one.close()
    worker.wait_for_pages()
    RemoteTrainer.open(worker.socket, revision=revision, sizes=[1024]).close()


@pytest.mark.parametrize(
    "sent",
    [b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff", b"\x00\x00\x00\x02{}", b"\x00\x00"],
    ids=["http", "long", "no tensors", "cut"],
)
def test_what_is_no_message_ends_its_own_connection(
    worker: Worker, tiny_base: Path, sent: bytes
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(worker.socket))
        connection.sendall(sent)
        with contextlib.suppress(OSError):  # it is closed with some of this unread
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100) == b""
    worker.ask("after", 10, 3)
    worker.wait_for(1)


def test_where_no_worker_answers_jobs_wait_and_can_be_cancelled(
    tmp_path: Path, tiny_base: Path
) -> None:
    jobs = write_jobs(tmp_path, tiny_base)
    heard: list[tuple[str, str]] = []
    training = away.AwayTraining(
        tmp_path / "nobody", tiny_base, CheckpointFolder(None),
        lambda name, event, **fields: heard.append((name, event)), 60.0,
    )  # fmt: skip
    named = [NamedJob(str(path), TrainJob.read(path)) for path in jobs.values()]
    thread = threading.Thread(target=lambda: training.run(named))
    thread.start()
    while len(heard) < len(named):
        time.sleep(0.005)
    for each in named:
        training.cancel(each.name)
    thread.join(20)
    assert not thread.is_alive() and training.failures == len(named)
    assert [event for _, event in heard] == ["warning"] * 3 + ["error"] * 3


@pytest.fixture
def environment(tiny_base: Path, tmp_path: Path) -> dict[str, str]:
    return {
        "LORIKEET_BASE_MODEL": str(tiny_base),
        "REDIS_URL": "redis://nowhere",
        "S3_ENDPOINT_URL": "http://nowhere",
        "S3_ACCESS_KEY_ID": "a",
        "S3_SECRET_ACCESS_KEY": "b",
        "LORIKEET_TRAINING_SOCKET": str(tmp_path / "worker.sock"),
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LORIKEET_TRAINING_SHARE", "1"),
        ("LORIKEET_TRAINING_SHARE", "nan"),
        ("LORIKEET_TRAINING_WINDOW", "25:00-06:00"),
    ],
)
def test_a_wrong_setting_is_named(environment: dict[str, str], name: str, value: str) -> None:
    config = WorkerConfig.from_environment(environment)
    path = environment["LORIKEET_TRAINING_SOCKET"]
    assert config.training == TrainingConfig(socket=Path(path))
    with pytest.raises(ConfigError, match=name):
        WorkerConfig.from_environment({**environment, name: value})


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("nowhere/worker.sock", "cannot make a file in the folder"),
        ("x" * 200, "longer than 107 bytes"),
        ("file", "is not a socket"),
    ],
)
def test_a_place_for_no_socket_is_named_before_the_model_is_loaded(
    environment: dict[str, str], place: str, said: str
) -> None:
    path = Path(environment["LORIKEET_TRAINING_SOCKET"]).with_name("file")
    path.write_text("precious")
    environment["LORIKEET_TRAINING_SOCKET"] = str(path.parent / place)
    with pytest.raises(ConfigError, match=f"LORIKEET_TRAINING_SOCKET is .*{said}"):
        WorkerConfig.from_environment(environment)
    assert path.read_text() == "precious"


def test_a_socket_that_a_killed_worker_left_is_taken_over(environment: dict[str, str]) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(environment["LORIKEET_TRAINING_SOCKET"])
    assert WorkerConfig.from_environment(environment).training is not None


def test_a_worker_that_trains_leaves_room_for_it_wherever_the_trainer_is(
    environment: dict[str, str],
) -> None:
    environment |= {"LORIKEET_TRAINER_GPU_SHARE": "0.2", "LORIKEET_GPU": "0"}
    environment["LORIKEET_TRAINER_GPU"] = "1"
    assert WorkerConfig.from_environment(environment).reserved_share == 0.2
    del environment["LORIKEET_TRAINING_SOCKET"]
    assert WorkerConfig.from_environment(environment).reserved_share == 0.0
