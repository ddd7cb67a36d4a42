"""Held-out rows are judged under many adapters at once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from peft import set_peft_model_state_dict

from engine.training.errors import RunRefused
from engine.training.held_out import Judged, held_out_losses
from engine.training.run import RunSettings
from tests.engine.training.scenes import (
    eight_runs,
    load,
    make_rows,
    make_trainer,
    peft_model,
    train,
)


def test_the_losses_are_those_of_peft_under_each_adapter(tiny: Path) -> None:
    model, asked = load(tiny), eight_runs()[:4]
    trained = train(make_trainer(model), asked)
    judged = [
        Judged(
            name=each.run_id,
            rows=make_rows(100 + number, 5),
            settings=each.settings,
            adapter=trained[each.run_id].adapter,
        )
        for number, each in enumerate(asked)
    ]
    judged.append(dataclasses.replace(judged[0], name="base", adapter=None))
    largest = 40_000  # room for two or three of them at a time
    found = {
        each.name: each
        for each in held_out_losses(model, judged, token_budget=50, pool_elements=largest)
    }
    assert found.keys() == {each.name for each in judged}
    for each in judged:
        peft = peft_model(tiny, each.settings)
        if each.adapter is not None:
            set_peft_model_state_dict(peft, dict(each.adapter))
        wanted = []
        for start, end in zip(each.rows.starts, each.rows.starts[1:], strict=False):
            tokens = each.rows.token_ids[start:end].long()
            with torch.no_grad():
                logits = peft(tokens[None]).logits[0, :-1]
            losses = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")
            wanted.append(losses[each.rows.is_answer[start + 1 : end]])
        assert torch.allclose(found[each.name].token_losses, torch.cat(wanted), atol=1e-4)
        assert found[each.name].mean == pytest.approx(float(torch.cat(wanted).mean()), abs=1e-4)


def test_an_adapter_that_does_not_fit_is_refused(tiny: Path) -> None:
    judged = Judged(name="a", rows=make_rows(0, 2), settings=RunSettings(rank=64))
    with pytest.raises(RunRefused, match="there is room for 1000"):
        list(held_out_losses(load(tiny), [judged], token_budget=50, pool_elements=1000))


def test_an_adapter_that_overflows_spoils_nobody_else(tiny: Path) -> None:
    """Their rows share every pass, and a row under one adapter attends to none under another."""
    model, asked = load(tiny), eight_runs()[:3]
    trained = train(make_trainer(model), asked)
    judged = [
        Judged(
            name=each.run_id,
            rows=make_rows(100 + number, 6),
            settings=each.settings,
            adapter=trained[each.run_id].adapter,
        )
        for number, each in enumerate(asked)
    ]

    def found(given: list[Judged]) -> dict[str, torch.Tensor]:
        losses = held_out_losses(model, given, token_budget=300, pool_elements=1 << 20)
        return {each.name: each.token_losses for each in losses}

    spoilt, adapter = judged[1], judged[1].adapter
    assert adapter is not None
    huge = {name: torch.full_like(tensor, 1e30) for name, tensor in adapter.items()}
    together = found([judged[0], dataclasses.replace(spoilt, adapter=huge), judged[2]])
    assert together[spoilt.name].isnan().any()
    for each in (judged[0], judged[2]):
        alone = found([each])[each.name]
        assert alone.isfinite().all()
        assert torch.allclose(together[each.name], alone, atol=1e-5)
