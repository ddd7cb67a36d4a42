"""Which system prompts a worker keeps, for how long, and which tokens these are."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from contract.messages.protocol import AdapterRef, Control, ControlMessage
from engine.stats import EngineStats
from engine.text.codec import TextCodec
from tests.fakes import fake_config, write_fake_base
from tests.messages import make_job
from tests.tiny_base import CHAT_TEMPLATE
from tests.worker.serving.test_adapters import Store
from worker.engine_process.channel import Command, KeepPrefixes
from worker.serving.adapters import Adapters
from worker.serving.engine_commands import chat_token_ids, prefix_token_ids
from worker.serving.prefix_pins import MAX_PREFIXES, RETRY_S, PrefixPins
from worker.serving.tasks import Tasks

#: As Mistral's: the system's words are in the user's turn.
INSIDE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] "
    "{% if messages[0]['role'] == 'system' and loop.index0 == 1 %}"
    "{{ messages[0]['content'] + '\\n\\n' }}{% endif %}{{ m['content'] | trim }} [/INST]"
    "{% endif %}{% endfor %}"
)


def codec_of(folder: Path, template: str) -> TextCodec:
    base = write_fake_base(folder / "base")
    file = base / "tokenizer_config.json"
    settings = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(settings | {"chat_template": template}))
    (base / "chat_template.jinja").unlink(missing_ok=True)
    return TextCodec(base)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, INSIDE])
@pytest.mark.parametrize("prompt", ["Be brief.", "Ends in a blank ", "<|end|> is text", "é中"])
def test_it_is_how_every_such_chat_begins(tmp_path: Path, template: str, prompt: str) -> None:
    codec = codec_of(tmp_path, template)
    prefix = prefix_token_ids(prompt, codec)
    words = "what the user says"
    for said in (words, f" {words}", "\n", "0", "é", "中文", "(", '"', "<|end|>"):
        messages = ({"role": "system", "content": prompt}, {"role": "user", "content": said})
        tokens = chat_token_ids(make_job(messages=messages, text=None), codec)
        assert tokens[: len(prefix)] == prefix
    text = codec.decode_whole(prefix)
    assert prompt.strip() in text and "assistant" not in text
    assert "user" in text or "[INST]" in text, "up to where the user's words begin"


class Scene:
    def __init__(self, folder: Path, *, disk_bytes: int = 1 << 20) -> None:
        self.store, self.now = Store(), 100.0
        self.sent: list[Command] = []
        config = dataclasses.replace(
            fake_config(folder, worker_id="w", pool="p", redis_url=""),
            base_revision="r" * 64,
            adapter_cache_bytes=1 << 20,
        )
        self.adapters = Adapters(config, send=self.sent.append, fetch=self.store)
        self.failures: list[BaseException] = []
        self.tasks = Tasks(self.failures.append)
        self.pins = PrefixPins(
            self.adapters,
            codec=codec_of(folder, CHAT_TEMPLATE),
            send=self.sent.append,
            tasks=self.tasks,
            disk_bytes=disk_bytes,
            clock=lambda: self.now,
        )

    def ask(self, prefix: str, *refs: AdapterRef, prompt: str = "Be brief.", **more: Any) -> None:
        given: dict[str, Any] = {"pin_s": 60.0, "tenant_id": "a"} | more
        self.pins.ask(
            ControlMessage(
                action=Control.PIN_PREFIX,
                prefix=prefix,
                adapters=refs,
                system_prompt=prompt,
                **given,
            )
        )

    async def settle(self) -> None:
        async with asyncio.timeout(10):
            while any(pin.token_ids is None for pin in self.pins._pins.values()):
                await asyncio.sleep(0.005)
        self.pins.tend()
        assert not self.failures

    def kept(self) -> list[str]:
        """What the engine was told last."""
        told = [command for command in self.sent if isinstance(command, KeepPrefixes)]
        return [prefix.name for prefix in told[-1].wanted]


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    made = Scene(tmp_path)
    yield made
    await made.tasks.end()


async def test_it_lasts_as_long_as_somebody_asks(scene: Scene) -> None:
    ref = scene.store.add("one")
    scene.ask("p-1", ref)
    scene.ask("p-2", prompt="Be long.")
    await scene.settle()
    assert scene.kept() == ["p-1", "p-2"]
    scene.adapters.note_stats(EngineStats(kept_prefixes=("p-1", "p-2")))
    scene.now += 40
    scene.ask("p-1", ref, prompt="")
    scene.now += 40
    scene.pins.tend()
    assert scene.kept() == ["p-1"], "nobody asked for the other"
    scene.ask("p-1", pin_s=0)
    scene.pins.tend()
    assert scene.kept() == []
    scene.ask("p-1", ref, prompt="")
    assert scene.pins.outcomes == {
        **{"kept": 2, "renewed": 1, "let_go": 1, "ended": 1, "refused": 1, "failed": 0}
    }


async def test_the_engine_is_asked_again_for_what_it_let_go(scene: Scene) -> None:
    scene.ask("p-1")
    await scene.settle()
    scene.pins.tend()
    assert len(scene.sent) == 1
    scene.now += RETRY_S
    scene.pins.tend()
    assert len(scene.sent) == 2, "it does not have it"
    scene.adapters.note_stats(EngineStats(kept_prefixes=("p-1",)))
    scene.now += RETRY_S
    scene.pins.tend()
    assert len(scene.sent) == 2


async def test_bounds(scene: Scene) -> None:
    for number in range(MAX_PREFIXES + 2):
        scene.ask(f"a-{number}")
    scene.ask("b-1", tenant_id="b")
    await scene.settle()
    assert scene.kept() == [*(f"a-{number}" for number in range(MAX_PREFIXES)), "b-1"]
    assert scene.pins.outcomes["refused"] == 2
    big = dataclasses.replace(scene.store.add("big"), num_bytes=1 << 17 | 1)
    scene.ask("c-1", big, tenant_id="c")
    assert scene.pins.outcomes["refused"] == 3, "more than its part of the disk"
    for bad in (
        {"prompt": "x" * 100_000}, {"pin_s": float("nan")}, {"pin_s": "1"}, {"tenant_id": 5},
    ):  # fmt: skip
        scene.ask("d-1", **({"tenant_id": "d"} | bad))
    scene.pins.ask(ControlMessage(action=Control.PIN_PREFIX, prefix="x", adapters=(1,)))  # type: ignore[arg-type]
    assert scene.pins.outcomes["refused"] == 8


async def test_what_is_deleted_or_fails_is_let_go(scene: Scene, tmp_path: Path) -> None:
    ref = scene.store.add("one")
    scene.ask("p-1", ref)
    await scene.settle()
    scene.pins.drop(ref.digest)
    scene.pins.tend()
    assert scene.kept() == []
    missing = dataclasses.replace(ref, digest="f" * 64, tensors_key="nowhere")
    scene.ask("p-2", missing)
    await scene.settle()
    assert scene.pins.outcomes["failed"] == 1
