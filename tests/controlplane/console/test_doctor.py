"""The doctor's page, and the shapes of its charts."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from controlplane.adapters.models import Adapter, AdapterInspection, AdapterVersion, BaseModel
from controlplane.console import doctor_charts
from controlplane.tenancy.scoping import tenant_scope
from tests.controlplane.conftest import Party
from tests.controlplane.console.conftest import browser_of

RANK, LAYERS = 16, 30
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def modules(layers: int = LAYERS, rank: int = RANK) -> list[dict[str, Any]]:
    """What `worker.inspection.factors` tells of an adapter whose spectra fall off."""
    noise = random.Random(0)
    found = []
    for layer in range(layers):
        for name in NAMES:
            block = "self_attn" if name in NAMES[:4] else "mlp"
            top = (0.2 + 0.8 * layer / layers) * noise.uniform(0.6, 1.4)
            fall = noise.uniform(0.2, 0.5)
            values = [top * math.exp(-fall * i) for i in range(rank)]
            if (layer, name) == (4, "k_proj"):
                values = [0.0] * rank
            shares = [value / (sum(values) or 1) for value in values]
            entropy = -sum(share * math.log(share) for share in shares if share)
            norm = math.sqrt(sum(value * value for value in values))
            found.append(
                {
                    "module": f"model.layers.{layer}.{block}.{name}",
                    "layer": layer,
                    "name": f"{block}.{name}",
                    "rank": rank,
                    "scaling": 2.0,
                    "frobenius": norm,
                    "spectral": max(values),
                    "relative": norm / 40,
                    "effective_rank": math.exp(entropy) if norm else 0.0,
                    "rank_90": 4,
                    "rank_99": 7,
                    "singular_values": values,
                }
            )
    return found


def inspected(status: str = "agreed") -> AdapterVersion:
    """A ready and live version of the tenant in scope, with its report."""
    adapter = Adapter.objects.create(name="invoices", base_model=BaseModel.objects.get())
    version = AdapterVersion.objects.create(
        adapter=adapter,
        number=1,
        status=AdapterVersion.Status.READY,
        digest="d" * 64,
        max_rank=RANK,
        report={"num_parameters": 4_884_480},
        copy_nats=0.0123,
    )
    adapter.live_version = version
    adapter.save()
    noise = random.Random(1)
    peft = [[-abs(noise.gauss(0, 4)) for _ in range(25)] for _ in range(4)]
    AdapterInspection.objects.create(
        version=version,
        status=status,
        why="" if status == "agreed" else "prompt 2, position 5: it is <b>other</b>",
        probe={
            **{"workers": ["worker-0"], "devices": ["cpu"], "dtype": "float32", "values": 100},
            **{"max_difference": 0.00012, "base_max_difference": 0.0001, "tolerance": 0.02},
            **{"relative_tolerance": 0.002, "strength": 1.0, "load_ms": 41.2},
            **{"reference_dtype": "float32", "nats": 0.0312, "base_nats": 0.0298},
            "copy_nats": 0.0123,
            "precisions": [{"weights": "fp8", "kv": "bfloat16", "adapters": "fp8"}],
        },
        compared=[{"token_ids": [1] * 26, "peft": row, "worker": row, "base": row} for row in peft],
        doctor={
            "summary": {
                **{"modules": 210, "layers": LAYERS, "rank": RANK, "frobenius": 20.1},
                **{"mean_effective_rank": 5.43, "largest_relative": 0.0521, "enough_rank": 8},
            },
            "findings": [
                {"code": "dead_modules", "level": "warning", "message": "1 of 210 is unchanged."},
                {"code": "rank_too_large", "level": "note", "message": "Rank 8 would do."},
            ],
            "modules": modules(),
        },
    )
    return version


@pytest.mark.parametrize("status", ["agreed", "mismatch"])
def test_the_page_shows_the_report(acme: Party, base_model: BaseModel, status: str) -> None:
    with tenant_scope(acme.tenant.id):
        inspected(status)
    browser = browser_of(acme.viewer)
    page = browser.get("/console/adapters/invoices/versions/1/doctor")
    text = page.content.decode()
    assert page.status_code == 200
    assert ("A worker computes what PEFT computes" in text) == (status == "agreed")
    assert ("it is &lt;b&gt;other&lt;/b&gt;" in text) == (status == "mismatch")
    for shown in ("5.21%", "rank 8", "18.6\u00a0MB", "41 ms", "Rank 8 would do.", "layer 29"):
        assert shown in text, shown
    assert '0.0312 nats a token <meter min="0" max="0.1" value="0.0312"' in text
    assert "fp8, keys and values in bfloat16, adapters in fp8" in text
    assert "its copy in FP8 <meter" in text and "is 0.0123 nats a token further" in text
    assert text.count("<polyline") == len(NAMES)
    assert text.count('class="point"') == 100
    assert "Inspect again" not in text  # a viewer cannot
    own = browser_of(acme.owner).get("/console/adapters/invoices/versions/1/doctor")
    assert "Inspect again" in own.content.decode()
    version = browser.get("/console/adapters/invoices/versions/1").content.decode()
    assert "/console/adapters/invoices/versions/1/doctor" in version


def test_a_version_without_a_report_says_so(acme: Party, base_model: BaseModel) -> None:
    with tenant_scope(acme.tenant.id):
        inspected()
        AdapterInspection.objects.all().delete()
    browser = browser_of(acme.owner)
    page = browser.get("/console/adapters/invoices/versions/1/doctor")
    assert "Not inspected yet" in page.content.decode()
    answer = browser.post("/console/adapters/invoices/versions/1/inspect", follow=True)
    assert "No inspector is running: try again later." in answer.content.decode()


def test_heat_map() -> None:
    heat = doctor_charts.heat_map(modules())
    assert heat is not None
    assert heat.rows == NAMES and len(heat.cells) == LAYERS * len(NAMES)
    strengths = [cell.strength for cell in heat.cells]
    assert strengths.count(None) == 1
    assert max(strength for strength in strengths if strength is not None) == 1.0
    assert (heat.first_layer, heat.last_layer) == (0, LAYERS - 1)
    assert doctor_charts.heat_map([]) is None


def test_spectra_are_relative_and_marked_at_the_effective_rank() -> None:
    flat = [{**module, "singular_values": [2.0] * 4, "rank": 4} for module in modules(2, 4)]
    found = doctor_charts.spectra([m | {"effective_rank": 4.0, "frobenius": 4.0} for m in flat])
    assert [spectrum.name for spectrum in found] == list(NAMES)
    assert {spectrum.line for spectrum in found} == {"0.0,0.0 53.3,0.0 106.7,0.0 160.0,0.0"}
    assert {spectrum.mark for spectrum in found} == {160.0}


def test_scatter_puts_equal_values_on_the_line() -> None:
    plot = doctor_charts.scatter([{"peft": [-4.0, -1.0], "worker": [-4.0, 0.0]}], size=100)
    assert plot is not None and plot.low == -4.0
    assert [point[:2] for point in plot.points] == [(0.0, 100.0), (75.0, 0.0)]
    assert doctor_charts.scatter([]) is None


def test_effective_ranks_are_on_the_scale_of_the_rank() -> None:
    chart = doctor_charts.effective_ranks(modules())
    assert chart is not None and chart.top == RANK and len(chart.bars) == LAYERS
