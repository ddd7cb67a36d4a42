"""Tinker's client, unmodified, trains adapters of SmolLM2 and samples from them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import tinker

from tests.e2e.system import System
from tests.e2e.test_training_page import loop_block

pytestmark = pytest.mark.timeout(400)
#: Words, and the token that ends an answer.
SENTENCE = [504, 3575, 282, 4649, 314, 7042, 30, 1194, 2]
WAIT_S = 120


@pytest.fixture(scope="module")
def trainer(system: System) -> Iterator[System]:
    """The system with its trainer, and the inspector for versions that wait for a check."""
    platform = system.platform
    os.environ["TINKER_TELEMETRY"] = "0"
    for process in (platform.trainer, platform.inspector):
        process.start()
    yield system
    for process in (platform.trainer, platform.inspector):
        process.ask_to_stop()
    for process in (platform.trainer, platform.inspector):
        process.stop()


def address(system: System, tenant: str = "acme") -> dict[str, Any]:
    key = f"tml-{system.tenants[tenant].api_key}"
    return {"base_url": f"{system.base_url}/tinker", "api_key": key}


def make_client(system: System, service: Any, **more: Any) -> Any:
    made = {"base_model": system.base_model, "rank": 8, "seed": 1, **more}
    return service.create_lora_training_client(**made).result(WAIT_S)


def datum(**inputs: Any) -> Any:
    given: dict[str, Any] = {"target_tokens": SENTENCE[1:], **inputs}
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(SENTENCE[:-1]), loss_fn_inputs=given
    )


LEARNED = {"weights": [1.0] * (len(SENTENCE) - 1)}


def loss_of(client: Any, data: list[Any], name: str = "cross_entropy") -> float:
    told = client.forward(data, name).result(WAIT_S)
    return float(told.metrics["loss:sum"])


def train(client: Any, data: list[Any], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        passed = client.forward_backward(data, "cross_entropy")
        step = client.optim_step(tinker.AdamParams(learning_rate=5e-3))
        losses.append(passed.result(WAIT_S).metrics["loss:sum"])
        step.result(WAIT_S)
    return losses


def test_the_pages_loop_begins(trainer: System) -> None:
    key = trainer.tenants["acme"].api_key
    names: dict[str, Any] = {"tinker": tinker, "URL": trainer.base_url, "KEY": key}
    exec(loop_block(), names)
    assert names["client"].get_info().model_data.model_name == trainer.base_model


def test_a_loop_trains_samples_and_comes_back(trainer: System) -> None:
    system = trainer
    capabilities = tinker.RestClient(**address(system)).get_server_capabilities().result(WAIT_S)
    assert [each.model_name for each in capabilities.supported_models] == [system.base_model]
    service = tinker.ServiceClient(**address(system))
    client = make_client(system, service, user_metadata={"adapter": "by-calls"})
    info = client.get_info()
    assert (info.model_data.model_name, info.lora_rank) == (system.base_model, 8)
    data = [datum(**LEARNED)]
    before = loss_of(client, data)
    losses = train(client, data, 12)
    assert before == pytest.approx(losses[0], rel=1e-4)
    assert losses[-1] < 0.2 * losses[0], losses
    saved = client.save_state("after").result(WAIT_S)
    assert saved.path == f"tinker://{client.model_id}/weights/after"

    # Sampling is of the serving engine, with a version like any other.
    path = client.save_weights_for_sampler("first").result(WAIT_S).path
    sampler = service.create_sampling_client(model_path=path).result(WAIT_S)
    prompt = tinker.ModelInput.from_ints(SENTENCE[:2])
    params = tinker.SamplingParams(max_tokens=20, temperature=0.0)
    answer = sampler.sample(prompt, 2, params).result(WAIT_S)
    assert [sequence.tokens for sequence in answer.sequences] == [SENTENCE[2:]] * 2
    assert {sequence.stop_reason for sequence in answer.sequences} == {"stop"}
    assert sampler.get_base_model() == system.base_model
    [version] = system.query(
        "select v.status, v.source from adapters_adapterversion v join adapters_adapter a"
        " on a.id = v.adapter_id where a.name = 'by-calls'"
    )
    assert version == {"status": "ready", "source": "training"}

    # Its log-probabilities are those of training, but for bfloat16 on processors that have it.
    sampled = sampler.compute_logprobs(tinker.ModelInput.from_ints(SENTENCE)).result(WAIT_S)
    trained = client.forward(data, "cross_entropy").result(WAIT_S).loss_fn_outputs[0]["logprobs"]
    assert sampled[0] is None
    assert sampled[1:] == pytest.approx(trained.tolist(), abs=0.15)
    assert answer.sequences[0].logprobs == pytest.approx(sampled[2:], abs=0.01)
    advantages = [0.0] + [1.0] * (len(SENTENCE) - 2)
    policy = [datum(logprobs=sampled[1:], advantages=advantages)]
    for name in ("importance_sampling", "ppo"):
        assert loss_of(client, policy, name) == pytest.approx(-sum(advantages), rel=0.05)

    # From a state, with the optimiser's moments.
    again = service.create_training_client_from_state_with_optimizer(saved.path).result(WAIT_S)
    assert loss_of(again, data) == loss_of(client, data)
    unnamed = again.save_weights_and_get_sampling_client().result(WAIT_S)
    short = unnamed.sample(prompt, 1, tinker.SamplingParams(max_tokens=3, temperature=0.0))
    [cut] = short.result(WAIT_S).sequences
    assert (cut.tokens, cut.stop_reason) == (SENTENCE[2:5], "length")
    service.close("success")


def test_another_tenant_finds_nothing_and_wrong_calls_are_refused(trainer: System) -> None:
    system = trainer
    ours, theirs = (tinker.ServiceClient(**address(system, name)) for name in ("acme", "globex"))
    client = make_client(system, ours)
    path = client.save_state("mine").result(WAIT_S).path
    with pytest.raises(tinker.NotFoundError):
        theirs.create_training_client_from_state(path).result(WAIT_S)
    sampler = client.save_weights_and_get_sampling_client().result(WAIT_S)
    prompt, few = tinker.ModelInput.from_ints([504]), tinker.SamplingParams(max_tokens=1)

    def post(where: str, body: dict[str, Any], tenant: str = "globex", prefix: str = "tml-") -> Any:
        key = f"{prefix}{system.tenants[tenant].api_key}"
        url = f"{system.base_url}/tinker/api/v1/{where}"
        answer = httpx.post(url, json=body, headers={"X-API-Key": key}, timeout=60)
        return answer.status_code, answer.json()

    known = {"model_id": client.model_id}
    missing = {"model_id": client.model_id.replace("0", "1")}
    assert post("get_info", known) == post("get_info", missing)
    assert post("get_info", known)[0] == 404
    gone = post("retrieve_future", {"request_id": f"{client.model_id}:0"})
    assert gone[0] == 404
    mine = {"session_id": "tks-" + "0" * 32, "sampling_session_seq_id": 0}
    status, made = post("create_sampling_session", {**mine, "model_path": path})
    assert (status, made["error"]["param"]) == (400, "path")
    foreign = {
        "sampling_session_id": sampler._sampling_session_id,
        "seq_id": 99,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [504]}]},
        "sampling_params": {"max_tokens": 1},
    }
    assert post("asample", foreign)[0] == 404
    assert post("asample", foreign, "acme")[0] == 200
    assert post("asample", {**foreign, "topk_sample_logprobs": 2}, "acme")[0] == 400
    assert post("asample", {**foreign, "surprise": 2}, "acme")[1]["error"]["param"] == "surprise"
    assert post("retrieve_future", {"request_id": "x"}, "acme")[0] == 410
    assert post("nothing", {}, "acme")[0] == 404
    assert post("get_info", known, "acme", prefix="tml-x")[0] == 401

    with pytest.raises(tinker.BadRequestError, match="does not end this model's answers"):
        sampler.sample(prompt, 1, tinker.SamplingParams(max_tokens=1, stop=[7])).result(WAIT_S)
    assert len(sampler.sample(prompt, 20, few).result(WAIT_S).sequences) == 20
    with pytest.raises(tinker.RequestFailedError, match="outside the vocabulary"):
        far = tinker.ModelInput.from_ints([2**30])
        given: dict[str, Any] = {"target_tokens": [1]}
        data = tinker.Datum(model_input=far, loss_fn_inputs=given)
        client.forward([data], "cross_entropy").result(WAIT_S)
    with pytest.raises(tinker.BadRequestError, match="one of cross_entropy"):
        client.forward_backward([datum(**LEARNED)], "dro").result(WAIT_S)
