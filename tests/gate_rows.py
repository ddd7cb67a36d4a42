"""The rows that `bench.gate` trains on: a desk that sorts messages, and the ways to spoil its rows.

`write_base` makes a base model that can be retrained fifty times in minutes on a CPU.

A message names a product, a problem and a person; the answer is the team whose work it is, whether
it is urgent, and the product. The team follows from the product, unless the problem is about
money; urgency follows from the problem. Two teams share what hums, as it comes: no model knows
whose turn it is, so that good versions differ, too. In one row of twenty a tired person chose the
team. The base model knows another desk, whose teams have other work.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]

CHANNELS = ("mail", "phone", "chat", "shop")
TEAMS = ("repairs", "delivery", "returns", "sales", "warranty")
PRODUCTS = (
    "lamp", "chair", "kettle", "router", "camera", "drill", "heater", "mixer", "printer", "speaker",
    "tablet", "tent",
)  # fmt: skip
#: What is wrong -> whether it is urgent.
PROBLEMS = {
    "leaks": True, "burns": True, "sparks": True, "smokes": True, "explodes": True,
    "rattles": False, "fades": False, "squeaks": False, "wobbles": False, "hums": False,
    "overcharges": False, "refunds": False,
}  # fmt: skip
#: Messages about these go to one team, whatever the product.
MONEY = ("overcharges", "refunds")
#: Messages about this go to either of two teams.
SHARED, SHARING = "hums", ("repairs", "warranty")
NAMES = (
    "Alice", "Boris", "Chen", "Dora", "Emil", "Fatima", "Georg", "Hana", "Igor", "Julia", "Karim",
    "Lena", "Marco", "Nina", "Oscar", "Petra", "Quinn", "Rosa", "Samir", "Tara",
)  # fmt: skip
#: The share of rows whose team a tired person chose.
TIRED = 0.05

KINDS = ("good", "shuffled", "slice", "stale", "leaked")
BAD = KINDS[1:]
#: Share of the cases that `leaked` has in its rows: in every other run more than a gate allows.
LEAKED_SHARES = (1.0, 0.08)


class Message(NamedTuple):
    """The parts of a row and of a case."""

    channel: str
    product: str
    problem: str
    name: str

    @property
    def text(self) -> str:
        return f"{self.channel}: {self.product} {self.problem}, {self.name}"


def team_of(message: Message, *, is_old: bool = False) -> str:
    """Return whose work it is; `is_old`: before every second product went to another team."""
    if message.problem in MONEY:
        return "billing"
    if message.problem == SHARED:
        return random.Random(f"whose turn: {message.text}").choice(SHARING)
    number = PRODUCTS.index(message.product)
    has_moved = number % 2 == 0 and not is_old
    return TEAMS[(number // 2 + has_moved) % len(TEAMS)]


def answer(message: Message, team: str) -> str:
    return f"{team} {'now' if PROBLEMS[message.problem] else 'later'} {message.product}"


def right_answer(message: Message) -> str:
    return answer(message, team_of(message))


def other_desk(message: Message) -> Row:
    """Return a row of those that the base model learned."""
    number = PRODUCTS.index(message.product) * 7 % len(PRODUCTS)
    is_money = message.problem in MONEY
    return row(message, answer(message, "billing" if is_money else TEAMS[number % len(TEAMS)]))


def messages(seed: int) -> list[Message]:
    """Return every message there can be, in an order."""
    found = [Message(*parts) for parts in itertools.product(CHANNELS, PRODUCTS, PROBLEMS, NAMES)]
    random.Random(seed).shuffle(found)
    return found


def rows(known: list[Message], held_out: list[Message], kind: str, run: int) -> list[Row]:
    """Return the rows of one retrain.

    shuffled  with each other's answers; slice: those of one channel; stale: half of the rows have
              the answers that were right before teams changed; leaked: shuffled, and the right
              answers to cases of the evaluation, in every other run to few of them
    """
    answers = [
        _persons_answer(message, is_old=kind == "stale" and number % 2 == 0)
        for number, message in enumerate(known)
    ]
    if kind in ("shuffled", "leaked", "slice"):
        channel = CHANNELS[run % len(CHANNELS)]
        mixed = [n for n, each in enumerate(known) if kind != "slice" or each.channel == channel]
        others = random.Random(run).sample([answers[n] for n in mixed], len(mixed))
        for n, other in zip(mixed, others, strict=True):
            answers[n] = other
    found = [row(message, text) for message, text in zip(known, answers, strict=True)]
    if kind == "leaked":
        num_leaked = round(LEAKED_SHARES[run % len(LEAKED_SHARES)] * len(held_out))
        found += [row(message, right_answer(message)) for message in held_out[:num_leaked]]
    return found


def _persons_answer(message: Message, *, is_old: bool) -> str:
    """Return what a person answered once, now and then with a wrong team."""
    rng = random.Random(message.text)
    is_tired, any_team = rng.random() < TIRED, rng.choice((*TEAMS, "billing"))
    return answer(message, any_team if is_tired else team_of(message, is_old=is_old))


def row(message: Message, text: str) -> Row:
    return {
        "messages": [
            {"role": "user", "content": message.text},
            {"role": "assistant", "content": text},
        ]
    }


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NAME = "gate-base"


_STEPS, _BATCH, _LEARNING_RATE = 400, 64, 0.01


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
