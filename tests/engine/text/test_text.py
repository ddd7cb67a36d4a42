"""Prompt and answer text, held against transformers and against the tokenizer's own decoding."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hypothesis")  # GPU machines have none

from tokenizers import Tokenizer, decoders, models

from engine.text.chat_template import PromptError
from engine.text.codec import TextCodec
from tests.fakes import write_fake_base
from tests.tiny_base import write_tiny_base

CONVERSATION = [
    {"role": "system", "content": "Be brief. <b>&amp;</b>"},
    {"role": "user", "content": "Grüße, 世界 🦜\n\n  {{ not jinja }} "},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "  and now? "},
]
TEMPLATES = {
    "plain": "{% for m in messages %}\n  {{ m['role'] }}: {{ m['content'] | trim }}\n{% endfor %}",
    "json": "{{ messages | tojson(indent=2) }}{{ bos_token }}{{ eos_token }}",
    "loop": "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.content }}"
    "{%- endfor %}{% generation %}x{% endgeneration %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}{% if tools is none %} no tools{% endif %}",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec(write_fake_base(tmp_path_factory.mktemp("base")))


def byte_fallback_codec(folder: Path) -> TextCodec:
    """A SentencePiece-like tokenizer, as Llama 2's: unknown characters are bytes."""
    vocab = {"<unk>": 0, "▁a": 1, "▁": 2, "b": 3, "é": 4}
    vocab |= {f"<0x{byte:02X}>": 5 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return TextCodec(folder)


@pytest.mark.parametrize("template", [None, *TEMPLATES])
def test_renders_and_encodes_as_transformers_does(
    tiny: Path, tmp_path: Path, template: str | None
) -> None:
    from transformers import AutoTokenizer

    for file in tiny.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    if template:
        (tmp_path / "chat_template.jinja").write_text(TEMPLATES[template])
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = TextCodec(tmp_path)

    prompt = ours.render(CONVERSATION)

    assert prompt.text == theirs.apply_chat_template(
        CONVERSATION, add_generation_prompt=True, tokenize=False
    )
    assert ours.encode_chat(prompt) == theirs.apply_chat_template(
        CONVERSATION, add_generation_prompt=True, return_dict=False
    )
    assert ours.encode("plain text", add_special_tokens=True) == theirs("plain text").input_ids


def test_a_template_that_refuses_gives_its_own_words(tmp_path: Path) -> None:
    write_fake_base(tmp_path)
    settings = {"chat_template": "{{ raise_exception('roles must alternate') }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(PromptError, match="roles must alternate"):
        TextCodec(tmp_path).render(CONVERSATION)


def test_a_template_cannot_reach_into_python(tmp_path: Path) -> None:
    write_fake_base(tmp_path)
    settings = {"chat_template": "{{ messages.__class__.__mro__ }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(PromptError):
        TextCodec(tmp_path).render(CONVERSATION)


@pytest.mark.parametrize("text", ["the", " é", "🦜", "\n"])
def test_token_bytes_are_the_characters_bytes(codec: TextCodec, text: str) -> None:
    ids = codec.encode(text, add_special_tokens=False)
    pieces = [codec.pieces.of(token_id, is_first=False).bytes for token_id in ids]
    assert bytes(itertools.chain(*pieces)) == text.encode()


def test_byte_tokens_and_special_tokens(codec: TextCodec, tmp_path: Path) -> None:
    half = byte_fallback_codec(tmp_path).pieces.of(5 + 0xE2, is_first=False)
    assert half == ("\ufffd", b"\xe2")
    for is_first in (False, True):  # it has a name, and is no part of the text
        assert codec.pieces.of(2, is_first=is_first) == ("<|end|>", b"")


def test_context_length_and_the_shortest_a_text_can_be(codec: TextCodec) -> None:
    assert codec.context_length == 512
    text = "the quick brown fox " * 50
    assert 0 < codec.min_num_tokens(text) <= len(codec.encode(text, add_special_tokens=False))


def test_a_base_without_a_template_says_so(tmp_path: Path) -> None:
    write_fake_base(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(PromptError, match="no chat template"):
        TextCodec(tmp_path).render(CONVERSATION)


def test_smollm2_is_read_as_transformers_reads_it(request: pytest.FixtureRequest) -> None:
    from transformers import AutoTokenizer

    from worker.base_model import packaged_model

    folder = packaged_model(Path(".cache/base"))
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    ours = TextCodec(folder)
    prompt = ours.render(CONVERSATION[1:])
    assert ours.encode_chat(prompt) == theirs.apply_chat_template(
        CONVERSATION[1:], add_generation_prompt=True, return_dict=False
    )
    text = "Viele Grüße 世界 🦜 — 12,50 €"
    ids = theirs(text).input_ids
    assert ours.decode(ids) == theirs.decode(ids) == text


def test_the_spans_of_tokens_are_the_whole_text(tiny: Path, tmp_path: Path) -> None:
    """Also where the tokenizer leaves the space before a word out of it, puts tokens around a text,
    and a character is of several tokens."""
    from tokenizers import processors

    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    around = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    trim = processors.ByteLevel(trim_offsets=True)
    tokenizer.post_processor = processors.Sequence([trim, around])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = TextCodec(tmp_path)
    text = " hello  world\n☃ you<|im_end|>"
    token_ids, spans = codec.encode_spans(text)
    assert token_ids == codec.encode(text, add_special_tokens=True)
    assert spans[0] == (0, 0) and spans[-1] == (len(text), len(text))
    starts, ends = zip(*spans, strict=True)
    assert list(starts) == sorted(starts) and list(ends) == sorted(ends)
    covered = {i for start, end in spans for i in range(start, end)}
    assert covered == set(range(len(text)))
    snow = text.index("☃")
    assert spans.count((snow, snow + 1)) > 1
    for token_id, (start, end) in zip(token_ids, spans, strict=True):
        if (start, end) != (snow, snow + 1) and start < end:
            assert text[start:end] == codec.pieces.of(token_id, is_first=False).text
