"""Measure each precision on a real base and a real adapter: the numbers, not the speed.

    python -m bench.quality --base .cache/base/smollm2-135m-instruct [--adapters F] [--device cuda]

`python -m worker.base_model --out=.cache/base` makes the base. Without a folder of adapters, they
are trained as the demo trains its tenants', over the base as it is. For each precision: perplexity
of the base on the demo's training chats, and of acme's adapter on the answers that were held out;
the share of the invoices' fields that its answers have right; the differences that a worker reports
at load (`engine.execution.precision_check`), of the same chats and of its own texts; and of the
inspector's prompts, with and without an adapter, by how many nats a token is less likely than as
stored, and by how many it changes. `int4` is the base rounded to the nearest of 16 steps, a scale
for each 32 columns, as compressed-tensors stores it: GPTQ and AWQ lose less. Writes
bench/results/quality-cpu.json, or quality-DEVICE.json for another device.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from bench.device import provenance
from bench.machine import environment, write_result
from demo.data.jobs import HYPERPARAMETERS
from demo.data.score import heldout, invoice_fields, share
from engine.config import EngineConfig
from engine.dash.config import DashConfig
from engine.dash.engine import DashEngine
from engine.execution.precision_check import PrecisionCheck
from engine.model.config import ModelConfig
from engine.model.weights import load_weights
from engine.request import SamplingParams
from engine.text.codec import TextCodec
from kernels.int4 import pack_int4
from worker.engine_process.precision import precision_prompts
from worker.inspection.reference import probe_prompts

DATA = Path(__file__).parent.parent / "demo" / "data"
RESULTS = Path(__file__).parent / "results"
#: Name -> (is the base in 4 bits, the engine's settings).
PRECISIONS: dict[str, tuple[bool, dict[str, str]]] = {
    "as stored": (False, {}),
    "fp8": (False, {"base_precision": "fp8"}),
    "int4": (True, {}),
    "fp8 adapters": (False, {"adapter_precision": "fp8"}),
    "fp8, fp8 kv": (False, {"base_precision": "fp8", "kv_precision": "fp8"}),
    "all in fp8": (
        False, {"base_precision": "fp8", "kv_precision": "fp8", "adapter_precision": "fp8"},
    ),
}  # fmt: skip
TENANTS = ("acme", "globex")
GROUP = 32
_KINDS = ("attention", "mlp", "kv")
#: Chats of each tenant of the demo whose perplexity is computed.
NUM_CHATS = 10
MAX_TOKENS = 96


def save_int4(base: Path, folder: Path) -> None:
    """Write the base with its layers' linears in 4 bits, each rounded to the nearest step."""
    tensors = {}
    for name, tensor in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            tensors[name] = tensor
            continue
        parts = tensor.float().unflatten(1, (-1, GROUP))
        peak = parts.abs().amax(dim=2).clamp(min=1e-6)
        scale = (peak / 7.5).to(torch.bfloat16)
        numbers = (parts / scale[..., None].float()).round().clamp(-8, 7) + 8
        tensors[f"{module}.weight_packed"] = pack_int4(numbers.flatten(1))
        tensors[f"{module}.weight_scale"] = scale
        tensors[f"{module}.weight_shape"] = torch.tensor(tensor.shape)
    weights = {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP,
    }  # fmt: skip
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    folder.mkdir()
    for file in base.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


def train(base: Path, folder: Path) -> Path:
    """Train the demo's adapters as it does, over the base as it is stored; return their folder."""
    for tenant in TENANTS:
        job = {
            "base_model_dir": str(base),
            "dataset": str(DATA / f"{tenant}.jsonl"),
            "output_dir": str(folder / tenant),
            "hyperparameters": HYPERPARAMETERS[tenant],
        }
        path = folder / "job.json"
        path.write_text(json.dumps(job))
        subprocess.run([sys.executable, "-m", "worker.train", str(path)], check=True)
    return folder


class Texts:
    """The chats as token ids.

    chats    whole
    prompts  of the held-out invoices, and `expected` of each
    answers  (tokens before it, all tokens) of the same with their answers
    probe    the inspector's prompts
    at_load  the texts on which a worker compares its base
    """

    def __init__(self, base: Path) -> None:
        self._codec = TextCodec(base)
        self.chats = []
        for tenant in TENANTS:
            lines = (DATA / f"{tenant}.jsonl").read_text(encoding="utf-8").splitlines()
            chats = [json.loads(line)["messages"] for line in lines[:NUM_CHATS]]
            self.chats += [self._tokens(chat, has_more=False) for chat in chats]
        self.probe = [(1, ids) for ids in probe_prompts(base, {})]
        self.at_load = precision_prompts(base)
        rows = heldout("acme")
        self.expected = [row["expected"] for row in rows]
        self.prompts = [self._tokens(row["messages"], has_more=True) for row in rows]
        self.answers = []
        for row, prompt in zip(rows, self.prompts, strict=True):
            answer = {"role": "assistant", "content": json.dumps(row["expected"])}
            whole = self._tokens([*row["messages"], answer], has_more=False)
            self.answers.append((len(prompt), whole))

    def _tokens(self, messages: Any, *, has_more: bool) -> list[int]:
        return self._codec.encode_chat(self._codec.render(messages, generation_prompt=has_more))


def measure(
    base: Path, adapters: Path, texts: Texts, settings: dict[str, str], device: str
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Return the figures of one precision, and the probe's log-probabilities by adapter."""
    engine = DashEngine(
        base,
        DashConfig(device=device, max_context=512, kv_pool="512MiB", **settings),  # type: ignore[arg-type]
    )
    try:
        for tenant in TENANTS:
            engine.register_adapter(tenant, adapters / tenant)
        answers = engine.generate(
            texts.prompts,
            "acme",
            max_new_tokens=MAX_TOKENS,
            sampling=SamplingParams(temperature=0.0),
            progress=False,
        )
        found = [
            invoice_fields(answer.text, expected)
            for answer, expected in zip(answers, texts.expected, strict=True)
        ]
        whole = [(1, chat) for chat in texts.chats]
        figures: dict[str, Any] = {
            "base_perplexity": round(perplexity(logprobs_of(engine, whole, None)), 3),
            "answer_perplexity": round(perplexity(logprobs_of(engine, texts.answers, "acme")), 4),
            "field_accuracy": round(share(found), 3),
        }
        probed = {
            name or "base": logprobs_of(engine, texts.probe, name) for name in (None, *TENANTS)
        }
    finally:
        engine.close()
    figures["compared"] = compare(base, tuple(map(tuple, texts.chats)), settings, device)
    figures["at_load"] = compare(base, texts.at_load, settings, device)
    return figures, probed


def perplexity(logprobs: list[float]) -> float:
    """Return the perplexity of tokens with these log-probabilities."""
    return math.exp(-sum(logprobs) / len(logprobs))


def changes(
    stored: dict[str, list[float]], probed: dict[str, list[float]]
) -> dict[str, dict[str, float]]:
    """Return what the doctor says of a probe: nats a token, signed and by how many it changes."""
    found = {}
    for name, values in probed.items():
        lost = [a - b for a, b in zip(stored[name], values, strict=True)]
        count = len(lost)
        found[name] = {
            "nats": round(sum(lost) / count, 5),
            "change": round(sum(map(abs, lost)) / count, 5),
        }
    return found


def logprobs_of(
    engine: DashEngine, texts: list[tuple[int, list[int]]], adapter: str | None
) -> list[float]:
    """Return the log-probability of each text's tokens from a place on, counted from 1."""
    outputs = engine.generate(
        [ids for _, ids in texts],
        adapter,
        max_new_tokens=1,
        sampling=SamplingParams(temperature=0.0, prompt_logprobs=0),
        progress=False,
    )
    logprobs: list[float] = []
    for (first, _), output in zip(texts, outputs, strict=True):
        if output.error or output.prompt_logprobs is None:
            raise RuntimeError(f"no answer: {output.error}")
        # The first token of a prompt has no log-probability.
        logprobs += [token.logprob for token in output.prompt_logprobs[first - 1 :]]
    return logprobs


def compare(
    base: Path, prompts: tuple[tuple[int, ...], ...], settings: dict[str, str], device: str
) -> dict[str, Any]:
    """Return what a worker reports at load, on these prompts."""
    config = EngineConfig(model_dir=base, device=device, precision_prompts=prompts, **settings)  # type: ignore[arg-type]
    model = ModelConfig.from_folder(base)
    if model.scheme is None and not settings.keys() & {"base_precision", "kv_precision"}:
        return {}
    dtype = torch.float32 if config.dtype_name == "float32" else torch.bfloat16
    check = PrecisionCheck(config, model, dtype)
    in_fp8 = config.base_precision == "fp8"
    weights = load_weights(base, model, device, dtype, in_fp8=in_fp8, watch=check)
    found = check.finish(weights.norm, weights.lm_head)
    return {
        kind: {name: float(f"{value:.3g}") for name, value in dataclasses.asdict(each).items()}
        for kind, each in found.kinds.items()
    }


def table(report: dict[str, Any]) -> str:
    """Return the rows of docs/models.md."""
    lines = []
    for row in report["precisions"]:
        found = row["compared"]
        kinds = [found.get(kind, {"kl": 0.0})["kl"] for kind in ("all", *_KINDS)]
        kl, *own = (f"{each:g}" if each else "–" for each in kinds)
        agreement = f"{found['all']['agreement']:.1%}" if kinds[0] else "–"
        at_load = row["at_load"].get("all", {"kl": 0.0})["kl"]
        probed = [row["probe"][name]["change"] for name in ("base", *TENANTS)]
        own += [f"{each:.3g}" if each else "–" for each in (at_load, *probed)]
        lines.append(
            f"| {row['precision']} | {row['base_perplexity']:.2f} | {row['answer_perplexity']:.4f} "
            f"| {row['field_accuracy']:.1%} | {kl} | {agreement} | {' | '.join(own)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--adapters", type=Path, help="the demo's; trained if left out")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report = environment("bench.quality")
    if args.device != "cpu":
        report |= provenance(args.device)
    out = args.out or RESULTS / f"quality-{args.device.partition(':')[0]}.json"
    texts = Texts(args.base)
    report |= {
        "base": args.base.name,
        "tokens": sum(map(len, texts.chats)),
        "invoices": len(texts.prompts),
        "precisions": [],
    }
    with tempfile.TemporaryDirectory(prefix="bench-quality-") as made:
        folder = Path(made)
        adapters = args.adapters or train(args.base, folder)
        stored: dict[str, list[float]] = {}
        save_int4(args.base, folder / "int4")
        for name, (is_int4, settings) in PRECISIONS.items():
            base = folder / "int4" if is_int4 else args.base
            figures, probed = measure(base, adapters, texts, settings, args.device)
            stored = stored or probed
            figures["probe"] = changes(stored, probed)
            report["precisions"].append({"precision": name, **figures})
            print(name, figures, flush=True)
            write_result(out, report)


if __name__ == "__main__":
    main()
