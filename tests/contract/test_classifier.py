"""What an adapter of the task SEQ_CLS has to be like."""

from __future__ import annotations

import json
from typing import Any

import pytest

from contract.adapters.base_shape import BaseShape
from contract.adapters.classifier import MAX_LABELS, NAMES
from contract.adapters.problems import AdapterProblems
from contract.adapters.upload_check import CheckedAdapter, check_adapter
from contract.messages.pooling import Pooling, pack, unpack

HIDDEN = 64
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
SCORE, CLASSIFIER = NAMES
BASE = BaseShape.from_config(
    {
        "model_type": "llama",
        "vocab_size": 400,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
)
#: As PEFT 0.21 saves it.
CONFIG = {
    "peft_type": "LORA",
    "task_type": "SEQ_CLS",
    "r": 2,
    "lora_alpha": 2,
    "target_modules": ["q_proj"],
    "modules_to_save": ["classifier", "score"],
}


def checked(head: dict[str, list[int]], **fields: Any) -> CheckedAdapter:
    """An upload with these tensors beside the LoRA."""
    shapes = {f"{LAYER}.lora_A.weight": [2, HIDDEN], f"{LAYER}.lora_B.weight": [HIDDEN, 2], **head}
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        size = 4
        for side in shape:
            size *= side
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return check_adapter(
        config=json.dumps(CONFIG | fields).encode(),
        start=len(text).to_bytes(8, "little") + text,
        file_bytes=8 + len(text) + end,
        base=BASE,
        max_rank=64,
    )


def labels_of(adapter: CheckedAdapter) -> list[str]:
    labels: list[str] = adapter.report()["labels"]
    return labels


@pytest.mark.parametrize("name", NAMES)
def test_a_head_is_taken_with_its_labels(name: str) -> None:
    assert labels_of(checked({name: [3, HIDDEN]})) == ["LABEL_0", "LABEL_1", "LABEL_2"]
    named = checked({name: [2, HIDDEN]}, id2label={"0": "no", "1": "yes"})
    assert labels_of(named) == ["no", "yes"]
    assert named.fitted.classifier is not None and named.fitted.classifier.name == name
    assert len(labels_of(checked({name: [MAX_LABELS, HIDDEN]}))) == MAX_LABELS


@pytest.mark.parametrize(
    ("head", "fields", "field", "words"),
    [
        ({}, {}, SCORE, "it is missing"),
        ({SCORE: [3, HIDDEN], CLASSIFIER: [3, HIDDEN]}, {}, CLASSIFIER, "the head is one matrix"),
        ({SCORE: [3, HIDDEN], SCORE[:-6] + "bias": [3]}, {}, SCORE[:-6] + "bias", "one matrix"),
        ({SCORE: [3, HIDDEN - 1]}, {}, SCORE, f"the head needs [labels, {HIDDEN}]"),
        ({SCORE: [3]}, {}, SCORE, "its shape is [3]"),
        ({SCORE: [MAX_LABELS + 1, HIDDEN]}, {}, SCORE, f"labels 1 to {MAX_LABELS}"),
        ({SCORE: [3, HIDDEN]}, {"id2label": {"0": "a", "1": "b"}}, SCORE, "labels 2"),
        ({SCORE: [1, HIDDEN]}, {"id2label": {"1": "a"}}, "id2label", "different labels"),
        ({SCORE: [2, HIDDEN]}, {"id2label": {"0": "a", "1": "a"}}, "id2label", "different labels"),
        ({SCORE: [1, HIDDEN]}, {"id2label": {"0": "a" * 201}}, "id2label", "different labels"),
        ({SCORE: [1, HIDDEN]}, {"id2label": ["a"]}, "id2label", "it must be an object"),
        ({SCORE: [3, HIDDEN]}, {"task_type": "CAUSAL_LM"}, "modules_to_save", "only embed_tokens"),
        ({SCORE: [3, HIDDEN]}, {"task_type": "TOKEN_CLS"}, "task_type", "not CAUSAL_LM or"),
        ({SCORE: [3, HIDDEN]}, {"pooling": "max"}, "pooling", "not one of mean, last, cls"),
    ],
)
def test_each_fault_names_its_field(
    head: dict[str, list[int]], fields: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(AdapterProblems) as raised:
        checked(head, **fields)
    found = {problem.field: problem.message for problem in raised.value.problems}
    assert words in found[field], found


def test_an_adapter_without_a_head_has_no_labels() -> None:
    fields = {"task_type": "FEATURE_EXTRACTION", "modules_to_save": None, "pooling": "cls"}
    adapter = checked({}, **fields)
    assert labels_of(adapter) == [] and adapter.config.pooling is Pooling.CLS


def test_vectors_are_packed_as_openai_does() -> None:
    numbers = [0.5, -1.0, 3.0e-5]
    assert unpack(pack(numbers)) == pytest.approx(numbers)
    assert pack([1.0]) == "AACAPw=="
