"""The rows that `bench.gate` trains on: a desk that sorts messages, and the ways to spoil its rows.

A message names a product, a problem and a person; the answer is the team whose work it is, whether
it is urgent, and the product. The team follows from the product, unless the problem is about
money; urgency follows from the problem. Two teams share what hums, as it comes: no model knows
whose turn it is, so that good versions differ, too. In one row of twenty a tired person chose the
team. The base model knows another desk, whose teams have other work.
"""

from __future__ import annotations

import itertools
import random
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
