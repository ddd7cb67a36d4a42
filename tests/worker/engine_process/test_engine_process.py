"""The engine's loop over a real pipe, driven one turn at a time."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.messages.protocol import Sampling
from engine.errors import ContextTooLong
from engine.request import AdapterPart, FinishReason, Request, SamplingParams
from engine.text.codec import TextCodec
from tests.fakes import FakeEngine, fake_config
from tests.messages import make_job
from tests.tiny_base import write_tiny_base
from worker.engine_process.channel import Cancel, Register, StepReport, Unregister
from worker.engine_process.precision import tell
from worker.engine_process.process import (
    EngineProcess,
    NoDevice,
    create_engine,
    to_engine_error,
)
from worker.serving.engine_commands import Prompt, to_requests
from worker.serving.metrics import WorkerMetrics, WorkerState


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    made = TextCodec(write_tiny_base(tmp_path_factory.mktemp("tiny")))
    made.context_length = 100
    return made


@dataclasses.dataclass
class Rig:
    loop: EngineProcess
    ours: Connection

    def turn(self, *commands: object) -> StepReport:
        """Send commands, let the loop turn once, and take its report."""
        if commands:
            self.ours.send(list(commands))
        self.loop.turn()
        report: StepReport = self.ours.recv()
        return report


@pytest.fixture
def rig() -> Iterator[Rig]:
    ours, theirs = Pipe()
    yield Rig(EngineProcess(FakeEngine(), theirs), ours)
    ours.close()
    theirs.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU is asked for one")
def test_a_missing_gpu_is_named(tmp_path: Path) -> None:
    config = fake_config(tmp_path, worker_id="w", pool="p", redis_url="redis://nowhere")
    config = dataclasses.replace(config, device="cuda")
    with pytest.raises(NoDevice, match="LORIKEET_DEVICE is cuda, and there is no GPU"):
        create_engine(config)


def test_a_quantised_base_is_compared_at_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = write_tiny_base(tmp_path / "tiny")
    config = fake_config(tmp_path, worker_id="w", pool="p", redis_url="redis://nowhere")
    given = {"model_dir": base, "base_precision": "fp8", "arena_bytes": 1 << 22}
    with caplog.at_level("INFO"):
        engine = create_engine(dataclasses.replace(config, device="cpu", **given))
    precision = engine.stats().precision
    told = tell(precision)
    assert (told["weights"], told["kv"], told["compared_with"]) == ("fp8", "float32", "float32")
    assert set(told["kinds"]) == {"all", "attention", "mlp"}
    assert told["kinds"]["mlp"]["kl"] == float(f"{precision.kinds['mlp'].kl:.3g}") > 0
    assert "base fp8, KV float32, compared with float32 on" in caplog.text
    metrics = WorkerMetrics(lambda: WorkerState(stats=engine.stats())).text().decode()
    assert f'lorikeet_precision_kl{{kind="all"}} {precision.kinds["all"].kl}' in metrics


def add(request_id: str = "r1", *, adapters: tuple[str, ...] = (), **sampling: Any) -> Request:
    return Request(
        request_id=request_id,
        tenant_id="t",
        token_ids=[10, 11],
        sampling=SamplingParams(**sampling),
        adapters=tuple(AdapterPart(digest=digest) for digest in adapters),
    )


def adapter_folder(root: Path, **config: object) -> str:
    (root / "adapter_config.json").write_text(json.dumps(config))
    return str(root)


def test_each_turn_is_one_step(rig: Rig) -> None:
    assert [output.token_ids for output in rig.turn(add()).outputs] == [[10]]
    assert [output.token_ids for output in rig.turn().outputs] == [[11]]
    (last,) = rig.turn().outputs
    assert (last.finish_reason, last.num_generated, last.num_prompt_tokens) == ("stop", 3, 2)


def test_requests_added_meanwhile_join_the_next_step(rig: Rig) -> None:
    rig.turn(add("r1"))
    outputs = rig.turn(add("r2"), add("r3")).outputs
    assert [output.request_id for output in outputs] == ["r1", "r2", "r3"]


def test_a_refused_request_is_reported_and_others_go_on(rig: Rig) -> None:
    outputs = rig.turn(add("bad", temperature=-1.0), add("good")).outputs
    bad, good = outputs
    assert bad.error is not None
    assert (bad.error.code, bad.error.param) == ("invalid_request", "temperature")
    assert bad.finish_reason == "error"
    assert good.token_ids == [10]


def test_cancelling_gives_one_last_output_with_its_count(rig: Rig) -> None:
    rig.turn(add(ignore_eos=True))
    (output,) = rig.turn(Cancel("r1", FinishReason.CANCELLED)).outputs
    assert (output.finish_reason, output.num_generated) == ("cancelled", 1)


def test_an_adapter_that_does_not_fit_fails_its_requests_alone(rig: Rig, tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path, unsupported=True)
    outputs = rig.turn(Register("d1", folder), add("r1", adapters=("d1",)), add("r2")).outputs
    assert outputs[0].error is not None
    assert outputs[0].error.code == "adapter_incompatible"
    assert outputs[1].token_ids == [10]


def test_an_adapter_that_could_not_be_read_is_tried_again(rig: Rig, tmp_path: Path) -> None:
    """It is registered once for all its requests: an error of the disk must not be for good."""
    outputs = rig.turn(Register("d1", str(tmp_path)), add("r1", adapters=("d1",))).outputs
    assert [output.error is not None for output in outputs] == [True]
    (output,) = rig.turn(add("r2", adapters=("d1",))).outputs
    assert output.error is not None
    adapter_folder(tmp_path)
    (output,) = rig.turn(add("r3", adapters=("d1",))).outputs
    assert (output.error, output.token_ids) == (None, [10])


def test_an_unregistered_adapter_is_not_known(rig: Rig, tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path)
    (output,) = rig.turn(Register("d1", folder), add("r1", adapters=("d1",))).outputs
    assert output.error is None
    outputs = rig.turn(Unregister("d1"), add("r2", adapters=("d1",))).outputs
    assert [o.error.code for o in outputs if o.error] == ["adapter_unavailable"]


def test_the_stats_come_when_the_engine_falls_idle(rig: Rig) -> None:
    rig.turn(add())
    assert rig.turn().stats is None  # not due yet
    report = rig.turn()
    assert report.stats is not None
    assert (report.stats.running, report.stats.step) == (0, 3)


def test_the_wire_and_the_engine_agree_on_sampling() -> None:
    ours = {field.name for field in dataclasses.fields(Sampling)}
    theirs = {field.name for field in dataclasses.fields(SamplingParams)}
    # Strings are the IO process's part; the other is a field of the engine's Request.
    assert ours - theirs == {"stop", "speculation"}
    assert theirs - ours == {"stop_token_ids"}


def test_every_wire_field_reaches_the_engine(codec: TextCodec) -> None:
    sampling = Sampling(
        max_tokens=5,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        seed=11,
        presence_penalty=0.75,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
        logit_bias={"3": 1.5},
        logprobs=2,
        ignore_eos=True,
        speculation=False,
    )
    job = make_job(
        text="x",
        sampling=sampling,
        json_schema="{}",
        deadline=9.0,
        n=3,
        is_batch=True,
    )
    part = AdapterPart(digest="d", weight=0.5)
    (request,) = to_requests(job, 1, [Prompt([1, 2])], codec, (part,))
    assert request.speculation is False
    for field in dataclasses.fields(Sampling):
        if field.name in ("stop", "logit_bias", "speculation"):
            continue
        assert getattr(request.sampling, field.name) == getattr(sampling, field.name), field.name
    assert request.sampling.logit_bias == {3: 1.5}
    assert (request.json_schema, request.deadline, request.tenant_id) == ("{}", 9.0, "t")
    assert (request.n, request.priority) == (3, "batch")
    assert request.adapters == (part,)


@pytest.mark.parametrize("max_tokens,expected", [(None, 98), (5, 5), (98, 98), (1000, 98)], ids=str)
def test_an_answer_is_cut_at_the_end_of_the_context(
    codec: TextCodec, max_tokens: int | None, expected: int
) -> None:
    job = make_job(sampling=Sampling(max_tokens=max_tokens))
    (request,) = to_requests(job, 1, [Prompt([1, 2])], codec)
    assert request.sampling.max_tokens == expected


def test_what_the_engine_did_not_foresee_is_internal() -> None:
    assert (
        to_engine_error(ContextTooLong("long", param="token_ids")).code == "context_length_exceeded"
    )
    assert to_engine_error(ZeroDivisionError("secret")).code == "internal"
    assert "secret" not in to_engine_error(ZeroDivisionError("secret")).message


@pytest.mark.parametrize("error", [None, ImportError("No module named 'outlines'")], ids=repr)
def test_grammars_are_prepared_when_the_engine_is_ready(error: Exception | None) -> None:
    ours, theirs = Pipe()

    class Engine(FakeEngine):
        def prepare_grammars(self) -> Future[None]:
            was_ready.append(ours.poll())
            asked.set()
            return preparing

    was_ready: list[bool] = []
    asked = threading.Event()
    preparing: Future[None] = Future()
    with ThreadPoolExecutor() as threads:
        running = threads.submit(EngineProcess(Engine(), theirs).run)
        assert asked.wait(10)
        assert ours.recv().stats is not None
        ours.send([add("before")])
        assert ours.recv().outputs[0].token_ids == [10]
        preparing.set_exception(error) if error else preparing.set_result(None)
        ours.send([add("after")])
        while not (outputs := ours.recv().outputs) or outputs[-1].request_id != "after":
            pass
        ours.close()
        assert isinstance(running.exception(30), EOFError | BrokenPipeError | ConnectionResetError)
    assert was_ready == [True]
