"""A base model that is small enough to be retrained fifty times in minutes on a CPU."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NAME = "gate-base"


_STEPS, _BATCH, _LEARNING_RATE = 400, 64, 0.01
Row = dict[str, Any]


def write_base(folder: Path, rows: Sequence[Row]) -> Path:
    """Write the model folder: a tokenizer of the rows' words, a model that learned their answers.

    All its parameters are trained, as a base's are; the same rows give the same model.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer(message["content"] for row in rows for message in row["messages"])
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    _learn(model, [_example(tokenizer, row) for row in rows])
    model.save_pretrained(folder)
    (folder / "lorikeet.json").write_text(json.dumps({"name": NAME, "revision": "0" * 64}))
    return folder


def _tokenizer(texts: Iterable[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,  # with fewer words it is as large as they make it
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["user assistant", *texts], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
    )


def _example(tokenizer: Any, row: Row) -> tuple[list[int], int]:
    """Return a row's tokens, and how many of them are the prompt's."""
    prompt, answer = row["messages"]
    first = tokenizer.apply_chat_template([prompt], add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template([prompt, answer], return_dict=False)
    return whole, len(first)


def _learn(model: Any, examples: list[tuple[list[int], int]]) -> None:
    """Train all parameters to write the answers."""
    import torch

    rng = random.Random(0)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, _STEPS)
    for _ in range(_STEPS):
        batch = rng.sample(examples, _BATCH)
        most = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([row + [2] * (most - len(row)) for row, _ in batch])
        labels = torch.tensor(
            [[-100] * n + row[n:] + [-100] * (most - len(row)) for row, n in batch]
        )
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
