"""Rows that adapters replace, by the Triton kernels, against the references."""

from __future__ import annotations

import os

import pytest
import torch

from kernels import RowTable
from kernels.lora.rows import (
    replace_embedded_ref,
    replace_embedded_triton,
    replace_logits_ref,
    replace_logits_triton,
)

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"

if torch.cuda.is_available():
    pytestmark = pytest.mark.gpu

VOCAB, WIDTH = 300, 72
# Of each virtual adapter its tokens, and of each token the weights of the parts that have a row.
ADAPTERS: list[dict[int, list[float]]] = [
    {5: [1.0], 299: [1.0], 0: [1.0]},
    {},
    {7: [0.5, -0.25], 5: [2.0]},
    {token: [1.0] for token in range(1, 290, 3)},
]
ROWS = [0, -1, 2, 2, 3, 1, 0, 3]
TOKENS = [5, 5, 7, 5, 100, 7, 6, 2]


def make_table(dtype: torch.dtype) -> tuple[torch.Tensor, RowTable]:
    """An arena of rows and the table over it."""
    torch.manual_seed(0)
    fields: dict[str, list[float]] = {name: [] for name in RowTable.__dataclass_fields__}
    for tokens in ADAPTERS:
        fields["first"].append(len(fields["token_id"]))
        fields["count"].append(len(tokens))
        for token, weights in tokens.items():
            fields["token_id"].append(token)
            fields["part_start"].append(len(fields["weight"]))
            fields["num_parts"].append(len(weights))
            for weight in weights:
                fields["offset"].append(len(fields["weight"]) * WIDTH)
                fields["weight"].append(weight)
    dtypes = {"offset": torch.int64, "weight": torch.float32}
    table = RowTable(
        **{
            name: torch.tensor(values, dtype=dtypes.get(name, torch.int32), device=DEVICE)
            for name, values in fields.items()
        }
    )
    return torch.randn(len(fields["weight"]), WIDTH, device=DEVICE, dtype=dtype), table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_embeddings(dtype: torch.dtype) -> None:
    arena, table = make_table(dtype)
    row_adapter = torch.tensor(ROWS, dtype=torch.int32, device=DEVICE)
    token_ids = torch.tensor(TOKENS, device=DEVICE)
    before = torch.randn(len(ROWS), WIDTH, device=DEVICE, dtype=dtype)
    wanted, got = before.clone(), before.clone()
    replace_embedded_ref(wanted, token_ids, arena, table, row_adapter)
    replace_embedded_triton(got, token_ids, arena, table, row_adapter)
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-2)
    for row in (1, 5, 6, 7):  # of the base, of no rows, of other tokens
        assert torch.equal(got[row], before[row])
    assert torch.equal(got[0], arena[0])  # a weight of one leaves nothing of the base


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits(dtype: torch.dtype) -> None:
    arena, table = make_table(dtype)
    row_adapter = torch.tensor(ROWS, dtype=torch.int32, device=DEVICE)
    x = torch.randn(len(ROWS), WIDTH, device=DEVICE, dtype=dtype)
    before = torch.randn(len(ROWS), VOCAB, device=DEVICE, dtype=dtype)
    before[0, 5] = float("inf")  # what is replaced does not matter
    wanted, got = before.clone(), before.clone()
    replace_logits_ref(wanted, x, arena, table, row_adapter)
    replace_logits_triton(got, x, arena, table, row_adapter)
    torch.testing.assert_close(got, wanted, atol=1e-4 if dtype == torch.float32 else 0.1, rtol=1e-2)
    for row, adapter in enumerate(ROWS):
        others = [t for t in range(VOCAB) if adapter < 0 or t not in ADAPTERS[adapter]]
        assert torch.equal(got[row, others], before[row, others])
    assert got.isfinite().all()
