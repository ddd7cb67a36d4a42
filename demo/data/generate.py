"""Write the sample datasets: invoices to JSON for acme, a support voice for globex.

    python -m demo.data.generate [FOLDER]

Each tenant gets `<tenant>.jsonl`, the chats it trains on, and `<tenant>.heldout.jsonl`, 20 prompts
that training never sees (no text and, for acme, no vendor in common). A held-out row of acme also
carries the expected fields. Everything follows from the seed, so the committed files are exactly
what this script writes. Rows are short on purpose: the demo trains on them on two CPU cores.
"""

from __future__ import annotations

import datetime as dt
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SEED = 20261121
NUM_TRAIN = 300
NUM_HELDOUT = 20

Row = dict[str, Any]

ACME_SYSTEM = (
    "Answer with the invoice as JSON: vendor, invoice_number, date, currency, total, items."
)

VENDOR_NAMES = (
    "Alder", "Birch", "Cobalt", "Delta", "Ember", "Falcon", "Granite", "Harbor", "Ivory", "Jade",
    "Kestrel", "Lumen", "Maple", "Nordic", "Orchid", "Pioneer", "Quill", "Raven", "Summit", "Tulip",
)  # fmt: skip
VENDOR_KINDS = (
    "Logistics", "Paper", "Tools", "Foods", "Print", "Energy", "Cloth", "Labs", "Motors", "Media",
)  # fmt: skip
#: What an invoice may write for each currency, before or after the amount.
CURRENCIES = {
    "EUR": ("€{}", "EUR {}", "{} euros", "{} EUR"),
    "USD": ("${}", "USD {}", "{} dollars", "{} USD"),
    "GBP": ("£{}", "GBP {}", "{} pounds", "{} GBP"),
}
GOODS = (
    "toner",
    "paper",
    "cables",
    "chairs",
    "lamps",
    "gloves",
    "boxes",
    "tape",
    "filters",
    "pens",
)
NUMBER_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ACME_TEMPLATES = (
    "Invoice {number} from {vendor}, {date}: {items}, total {total}.",
    "{vendor} billed us {total} on {date} for {items}. Ref {number}.",
    "Please book {number} by {vendor}: {items}, {total}, dated {date}.",
    "FROM {vendor} / NO {number} / DATE {date} / {items} / DUE {total}",
    "On {date} {vendor} sent invoice {number} over {total} for {items}.",
    "{total} is owed to {vendor}. {items}, invoice {number}, {date}.",
    "Bill no. {number}\n{vendor}\n{date}\n{items}\nAmount: {total}",
    "Got a bill from {vendor} ({number}): {items} for {total}. It says {date}.",
    "Re {number}: we shipped {items} on {date}, please pay {total}. Regards, {vendor}",
)

GLOBEX_PRODUCTS = (
    "router", "printer", "thermostat", "doorbell", "speaker", "camera", "tablet", "vacuum", "scale",
    "projector", "keyboard", "headset",
)  # fmt: skip
#: A complaint, then the two steps that answer it.
GLOBEX_ISSUES = (
    ("won't turn on", "Hold the power button for ten seconds", "Try another wall socket"),
    ("keeps disconnecting", "Move the {p} closer to the hub", "Restart the {p} once"),
    ("is making a loud noise", "Switch the {p} off and clean it", "Put it on a flat surface"),
    ("shows a red light", "Unplug the {p} for one minute", "Install the latest update"),
    ("gets very hot", "Switch the {p} off until it cools", "Keep its air vents free"),
    ("arrived broken", "Send us a photo of the {p}", "Print the free return label"),
    ("is really slow", "Close what you do not need", "Install the latest update"),
    ("is not found by the app", "Turn Bluetooth off and on", "Add the {p} again in the app"),
    ("has a flat battery", "Charge the {p} for two hours", "Dim its light to save power"),
    ("was charged to me twice", "Tell us your order number", "Watch your inbox for the refund"),
    ("never arrived", "Check the tracking link", "Tell us your order number"),
    ("forgot its settings", "Sign in on the {p} again", "Restore the backup in the app"),
)
GLOBEX_QUESTIONS = (
    "My {p} {issue}. What should I do?",
    "Help! The {p} {issue}.",
    "The new {p} {issue}, any idea?",
    "Hello, our {p} {issue}.",
    "Why is it that my {p} {issue}?",
    "I bought a {p} and it {issue}.",
)
GREETING = "Ahoy, friend!"
SIGN_OFF = "Fair winds, your Globex crew"


def _money(rng: random.Random) -> float:
    return rng.randrange(1, 1000) + rng.choice((0.0, 0.5, 0.25, 0.99, 0.4))


def _date_text(rng: random.Random, day: dt.date) -> str:
    month = day.strftime("%B")
    return rng.choice(
        (
            f"{day.day} {month} {day.year}",
            f"{month} {day.day}, {day.year}",
            f"{day.day} {month[:3]} {day.year}",
            f"{day.day:02}.{day.month:02}.{day.year}",
            day.isoformat(),
        )
    )


def _items_text(rng: random.Random, count: int) -> str:
    if count <= 4 and rng.random() < 0.4:
        goods = rng.sample(GOODS, count)
        return goods[0] if count == 1 else f"{', '.join(goods[:-1])} and {goods[-1]}"
    number = str(count) if rng.random() < 0.6 else NUMBER_WORDS[count - 1]
    return f"{number} item{'s' if count > 1 else ''}"


def _invoice(rng: random.Random, vendor: str) -> tuple[str, dict[str, Any]]:
    day = dt.date(2025, 1, 1) + dt.timedelta(days=rng.randrange(730))
    currency = rng.choice(tuple(CURRENCIES))
    count = rng.randrange(1, 10) if rng.random() < 0.5 else rng.randrange(1, 5)
    fields = {
        "vendor": vendor,
        "invoice_number": f"{rng.choice('ABCDEFGHKMRSTX')}-{rng.randrange(100, 1000)}",
        "date": day.isoformat(),
        "currency": currency,
        "total": _money(rng),
        "items": count,
    }
    text = rng.choice(ACME_TEMPLATES).format(
        number=fields["invoice_number"],
        vendor=vendor,
        date=_date_text(rng, day),
        items=_items_text(rng, count),
        total=rng.choice(CURRENCIES[currency]).format(f"{fields['total']:.2f}"),
    )
    return text, fields


def acme_rows(rng: random.Random) -> Iterator[Row]:
    """Yield invoices without end: training rows first, then held-out ones with other vendors."""
    vendors = [f"{name} {kind}" for name in VENDOR_NAMES for kind in VENDOR_KINDS]
    rng.shuffle(vendors)
    heldout_vendors, vendors = vendors[:NUM_HELDOUT], vendors[NUM_HELDOUT:]
    index = 0
    while True:
        heldout = index >= NUM_TRAIN
        vendor = heldout_vendors[index % NUM_HELDOUT] if heldout else rng.choice(vendors)
        text, fields = _invoice(rng, vendor)
        messages = [{"role": "user", "content": text}]
        # A third of the rows have no instruction, so that the adapter does not depend on it.
        if heldout or rng.random() < 2 / 3:
            messages.insert(0, {"role": "system", "content": ACME_SYSTEM})
        answer = {"role": "assistant", "content": json.dumps(fields)}
        if heldout:
            yield {"messages": messages, "expected": fields}
        else:
            yield {"messages": [*messages, answer]}
        index += 1


def globex_rows(rng: random.Random) -> Iterator[Row]:
    """Yield every (question, product, complaint) once, shuffled: training rows, then held-out."""
    cases = [
        (question, product, issue)
        for question in GLOBEX_QUESTIONS
        for product in GLOBEX_PRODUCTS
        for issue in GLOBEX_ISSUES
    ]
    rng.shuffle(cases)
    for index, (question, product, (issue, first, second)) in enumerate(cases):
        prompt = {"role": "user", "content": question.format(p=product, issue=issue)}
        answer = (
            f"{GREETING} Sorry about your {product}.\n"
            f"1. {first.format(p=product)}.\n"
            f"2. {second.format(p=product)}.\n"
            f"{SIGN_OFF}"
        )
        if index < NUM_TRAIN:
            yield {"messages": [prompt, {"role": "assistant", "content": answer}]}
        else:
            yield {"messages": [prompt]}


TENANTS: dict[str, Callable[[random.Random], Iterator[Row]]] = {
    "acme": acme_rows,
    "globex": globex_rows,
}


def files() -> dict[str, str]:
    """Return all sample files: name -> content."""
    contents = {}
    for tenant, rows_of in TENANTS.items():
        rows = rows_of(random.Random(f"{SEED} {tenant}"))
        lines = [json.dumps(next(rows), ensure_ascii=False) for _ in range(NUM_TRAIN + NUM_HELDOUT)]
        contents[f"{tenant}.jsonl"] = "\n".join(lines[:NUM_TRAIN]) + "\n"
        contents[f"{tenant}.heldout.jsonl"] = "\n".join(lines[NUM_TRAIN:]) + "\n"
    return contents


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, content in files().items():
        (folder / name).write_text(content, encoding="utf-8")
        print(folder / name)


if __name__ == "__main__":
    main()
