"""Makes tensors of a batch's examples: padded, or packed into sequences."""

from __future__ import annotations

import torch

from worker.training.example_store import IGNORED

Inputs = list[dict[str, list[int]]]


def collate(examples: Inputs, pad_id: int) -> dict[str, torch.Tensor]:
    """Make a batch, padded on the right to its longest row; every tensor is [S, T]."""
    width = max(len(example["input_ids"]) for example in examples)

    def padded(name: str, fill: int) -> torch.Tensor:
        return torch.tensor(
            [example[name] + [fill] * (width - len(example[name])) for example in examples]
        )

    return {
        "input_ids": padded("input_ids", pad_id),
        "labels": padded("labels", IGNORED),
        "attention_mask": padded("attention_mask", 0),
    }


def collate_packed(examples: Inputs, pad_id: int, most: int) -> dict[str, torch.Tensor]:
    """Make a batch of sequences that have several rows each; every tensor is [S', T].

    most  tokens of a sequence; a longer row has one of its own
    There is no mask: where `position_ids` begin anew, transformers begins another row, and no row
    attends to another. What pads a sequence on the right is such a row, without labels.
    """
    sequences = _packed([len(example["input_ids"]) for example in examples], most)
    width = max(sum(len(examples[at]["input_ids"]) for at in rows) for rows in sequences)
    batch: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "position_ids": []}
    for rows in sequences:
        token_ids: list[int] = []
        labels: list[int] = []
        positions: list[int] = []
        for at in rows:
            row = examples[at]
            token_ids += row["input_ids"]
            # The last token of the row before does not predict a row's first one.
            labels += [IGNORED, *row["labels"][1:]]
            positions += range(len(row["input_ids"]))
        rest = width - len(token_ids)
        batch["input_ids"].append(token_ids + [pad_id] * rest)
        batch["labels"].append(labels + [IGNORED] * rest)
        batch["position_ids"].append(positions + list(range(rest)))
    return {name: torch.tensor(values) for name, values in batch.items()}


def _packed(lengths: list[int], most: int) -> list[list[int]]:
    """Return the rows of each sequence: the longest first, each where it still has room."""
    sequences: list[tuple[int, list[int]]] = []
    for at in sorted(range(len(lengths)), key=lambda at: -lengths[at]):
        for number, (used, rows) in enumerate(sequences):
            if used + lengths[at] <= most:
                sequences[number] = (used + lengths[at], [*rows, at])
                break
        else:
            sequences.append((lengths[at], [at]))
    return [rows for _, rows in sequences]
