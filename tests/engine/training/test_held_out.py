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
