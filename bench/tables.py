"""Write the figures of the committed runs into README.md and docs/performance.md.

    python -m bench.tables [--check]

The parts between `<!-- bench.tables: NAME -->` and `<!-- end -->` are generated from the files in
bench/results, so that no figure is copied by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.engine import TARGETS, VLLM_TUNED
from bench.offline import VLLM

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
DOCUMENTS = ("README.md", "docs/performance.md")
# Lines of prose are as wide as people read.
WIDTH = 100
# (batch, adapters) of the README's table.
CHOSEN = ((64, 0), (1, 1), (64, 64), (256, 64))

Row = dict[str, Any]
PrecisionCase = tuple[str, int, int]  # kind, batch, adapters
# Name, target of an FP8 base, and vLLM 0.26's figure in FP8.
PRECISION_TARGETS: dict[PrecisionCase, tuple[str, str, str]] = {
    ("decode", 1, 0): ("1 / 0, ms a step", "3.1", "3.51"),
    ("decode", 64, 0): ("64 / 0", "3.5", "4.51"),
    ("decode", 256, 0): ("256 / 0", "7.0", "8.87"),
    ("decode", 64, 1): ("64 / 1", "4.2", "8.31"),
    ("decode", 64, 64): ("64 / 64", "5.4; FP8 adapters 4.9", "31.6"),
    ("decode", 256, 64): ("256 / 64", "9.5", ""),
    ("context", 32, 0): ("32 / 0, contexts of 4,096 tokens", "5.8 with FP8 KV", "8.24"),
    ("prefill", 16, 0): ("prefill of 16 × 1024, tokens/s", "78,000", "70,500"),
    ("prefill", 16, 16): ("the same with 16 adapters", "72,000", "27,300"),
    ("offline", 512, 0): ("512 prompts at once, output tokens/s", "9,000", "7,660"),
    ("offline", 512, 64): ("the same with 64 adapters", "7,500", ""),
}
# What a column shows: a precision of bench.engine, and its title.
PRECISION_COLUMNS = {
    "bf16": "bf16",
    "fp8": "**FP8 base**",
    "fp8, fp8 adapters": "FP8 adapters too",
    "fp8, fp8 kv": "FP8 KV too",
    "int4": "4 bits",
}


# Other shapes than Llama's, and their results.
SHAPES = {"Qwen3.5-9B": "hybrid-h200", "Qwen3-30B-A3B": "experts-h200"}
SHAPE_ROWS = {
    ("decode", 1, 0): "1 / 0",
    ("decode", 64, 0): "64 / 0",
    ("decode", 64, 64): "64 / 64",
    ("context", 32, 0): "32 / 0, contexts of 4,096 tokens",
    ("prefill", 16, 0): "prefill of 16 × 1024, tokens/s",
    ("prefill", 16, 16): "the same with 16 adapters",
}


class Figures:
    """The result files, by case."""

    def __init__(self, files: dict[str, dict[str, Any]]) -> None:
        targets, many, cpu = files["targets-h200"], files["many-h200"], files["cpu"]
        self.offline: dict[int, Row] = {
            row["adapters"]: row for row in files["offline-h200"]["results"]
        }
        self.offline_host: Row = files["offline-h200"]["host"]
        self.starts: list[Row] = files["start-h200"]["results"]
        self.host: Row = targets["host"]
        self.precision: Row = files["precision-h200"]
        self.shapes = {name: files[file] for name, file in SHAPES.items()}
        rows = targets["results"]
        self.decode: dict[tuple[int, int], Row] = {}
        self.mixed: Row | None = None
        self.again: Row | None = None  # batch 64 without adapters, beside resident ones
        self.prefill: dict[int, Row] = {}
        self.first: dict[int, Row] = {}
        for row in rows:
            key = (row["batch"], row["adapters"])
            if row["kind"] == "prefill":
                self.prefill[row["adapters"]] = row
            elif row["kind"] == "first":
                self.first[row["adapters"]] = row
            elif not isinstance(row["rank"], int):
                self.mixed = row
            elif key in self.decode:
                self.again = row
            else:
                self.decode[key] = row
        self.many: dict[str, Row] = {row["case"]: row for row in many["results"]}
        self.cpu: dict[tuple[str, int, int], Row] = {
            (row["system"], row["batch"], row["adapters"]): row for row in cpu["cases"]
        }
        self.cpu_ratios: dict[tuple[str, str], Row] = {
            (row["case"], row["compared_with"]): row for row in cpu["ratios"]
        }
        self.cpu_host: Row = cpu
        self.gateway: Row = files["gateway"]
        self.grammar: Row = files["grammar"]
        self.refusals: dict[str, float] = {
            row["case"]: row["p50_ms"] for row in files["refusals"]["cases"]
        }

    @property
    def mixed_share(self) -> float | None:
        """The share of the copy bandwidth at which adapters of mixed ranks are read."""
        base = self.decode.get((64, 0))
        if self.mixed is None or base is None:
            return None
        least: float = self.mixed["floor_ms"] - base["floor_ms"]
        return least / float(self.mixed["ms_step"] - base["ms_step"])


def gpu(figures: Figures) -> str:
    return str(figures.host["gpu"].removeprefix("NVIDIA "))


def machine(figures: Figures) -> str:
    host = figures.host
    return (
        f"one {gpu(figures)} (copy bandwidth {host['copy_tb_s']:.2f} TB/s, "
        f"torch {host['torch'].split('+')[0]}, triton {host['triton']}, commit {host['commit']})"
    )


def decode_table(figures: Figures, chosen: tuple[tuple[int, int], ...] | None = None) -> list[str]:
    lines = [
        "| batch / distinct adapters | floor | vLLM 0.26 | target | **ms a step** | × own base |",
        "|---|---|---|---|---|---|",
    ]
    for batch, adapters, target, vllm in TARGETS:
        row = figures.decode.get((batch, adapters))
        if row is not None and (chosen is None or (batch, adapters) in chosen):
            lines.append(
                f"| {batch} / {adapters} | {row['floor_ms']:.2f} | {vllm} | {target} "
                f"| **{row['ms_step']:.2f}** | {row.get('base_ratio', 1.0):.2f} |"
            )
    mixed = figures.mixed
    if mixed is not None:
        lines.append(
            f"| 64 / 64 of ranks 4 to 128 | {mixed['floor_ms']:.2f} | | "
            f"| **{mixed['ms_step']:.2f}** | {mixed.get('base_ratio', 0):.2f} |"
        )
    return lines


def sentences(figures: Figures) -> list[str]:
    """Return sentences for figures that the decode table lacks, each with its target."""
    lines = []
    prefill, first = figures.prefill, figures.first
    if 0 in prefill:
        text = f"Prefill of 16 × 1024 tokens: {prefill[0]['tok_s']:,} tokens/s (target 45,000)"
        if 16 in prefill:
            share = prefill[16]["base_ratio"]
            text += (
                f", {prefill[16]['tok_s']:,} with 16 distinct adapters ({share:.1%} of the base; "
                "target 92%)"
            )
        lines.append(text + ".")
    if 0 in first and 1 in first:
        lines.append(
            f"First token of a prompt of 32: {first[0]['ms_first']:.1f} ms, with a resident "
            f"adapter {first[1]['ms_first']:.1f} ms."
        )
    if figures.mixed_share is not None:
        lines.append(
            f"Mixed ranks move their bytes at {figures.mixed_share:.0%} of the copy bandwidth "
            "(target 75%)."
        )
    if figures.again is not None and (64, 0) in figures.decode:
        lines.append(
            "A step of 64 without adapters beside resident ones: "
            f"{figures.again['ms_step']:.3f} ms, without any "
            f"{figures.decode[64, 0]['ms_step']:.3f} ms."
        )
    return [
        *lines,
        *many_sentences(figures),
        *offline_sentences(figures),
        *other_sentences(figures),
    ]


def many_sentences(figures: Figures) -> list[str]:
    lines, many = [], figures.many
    if {"none", "few", "many"} <= many.keys():
        none, few, all_ = (many[name]["tok_s"] for name in ("none", "few", "many"))
        lines.append(
            f"S-LoRA's workload with {many['many']['adapters']} registered adapters: {all_:,} "
            f"tokens/s, {all_ / few:.1%} of that with 5 (target 95%) and {all_ / none:.1%} of that "
            f"with none (target 90%; commit {many['many']['commit']})."
        )
    if {"resident", "overcommitted"} <= many.keys():
        here, over = (many[name]["ttft_p99_ms"] for name in ("resident", "overcommitted"))
        lines.append(
            f"TTFT p99 with 16 times more adapters than fit: {over:.0f} ms, {over / here:.2f} × "
            "that with all resident (target 2)."
        )
    return lines


def offline_sentences(figures: Figures) -> list[str]:
    parts = []
    for adapters, theirs in VLLM.items():
        row = figures.offline[adapters]
        who = f"with {adapters} adapters" if adapters else "without adapters"
        parts.append(
            f"{row['output_tok_s']:,} output tokens/s {who}, "
            f"{row['output_tok_s'] / theirs:.2f} × vLLM's {theirs:,}"
        )
    return [
        "DashEngine, 512 prompts of 128 to 1024 tokens at once, 32 to 256 new ones each: "
        f"{'; '.join(parts)} (commit {figures.offline_host['commit']})."
    ]


def other_sentences(figures: Figures) -> list[str]:
    lines = [
        f"vLLM at {batch} / {adapters} with its own options `VLLM_LORA_ENABLE_DUAL_STREAM=1` and "
        f"`specialize_active_lora`: {tuned} ms a step."
        for (batch, adapters), tuned in VLLM_TUNED.items()
    ]
    [empty] = [row["start_s"] for row in figures.starts if row["kernel_cache"] == "empty"]
    own = [row["start_s"] for row in figures.starts if row["kernel_cache"] == "own"]
    lines.append(
        f"A worker's engine is ready in {empty:.0f} s where Triton's cache is empty, in "
        f"{max(own):.0f} s with a cache of its own, beside reading the weights."
    )
    return lines


def many_table(figures: Figures) -> list[str]:
    lines = [
        "| case | registered | tok/s | ms a step | running | TTFT p50 | p99 |",
        "|---|---|---|---|---|---|---|",
    ]
    return lines + [
        f"| {name} | {row['adapters']} | {row['tok_s']:,} | {row['ms_step']} "
        f"| {row['mean_running']} | {row['ttft_p50_ms']:.0f} | {row['ttft_p99_ms']:.0f} |"
        for name, row in figures.many.items()
    ]


def readme(figures: Figures) -> str:
    head = (
        "Milliseconds a step of the whole engine: Llama-3.1-8B's shape in bf16 on one "
        f"{gpu(figures)}, prompts of 32 tokens, adapters of rank 16 on all projections. vLLM ran "
        "on another card of this kind."
    )
    few, many = figures.many["few"], figures.many["many"]
    [*_, adapters] = VLLM
    offline, theirs = figures.offline[adapters]["output_tok_s"], VLLM[adapters]
    lines = [
        f"{many['adapters']} registered adapters, S-LoRA's workload: {many['tok_s']:,} tokens/s, "
        f"{many['tok_s'] / few['tok_s']:.1%} of that with 5.",
        f"512 prompts at once, {adapters} adapters: {offline:,} tokens/s, "
        f"{offline / theirs:.2f} × vLLM's {theirs:,}.",
        cpu_sentence(figures),
    ]
    table = decode_table(figures, CHOSEN)[:-1]
    return "\n".join([textwrap.fill(head, WIDTH), "", *table, "", *bullets(lines)])


def bullets(lines: list[str]) -> list[str]:
    """Return each line as an item of a list, wrapped."""
    return [
        textwrap.fill(line, WIDTH, initial_indent="- ", subsequent_indent="  ") for line in lines
    ]


def cpu_sentence(figures: Figures) -> str:
    def times(case: str, other: str) -> str:
        return f"{figures.cpu_ratios[case, other]['ratio']:.1f} ×"

    return (
        f"On {figures.cpu_host['cpus']} CPU cores, SmolLM2-135M in fp32: 16 requests with 16 "
        f"adapters {times('ours 16 adapters', 'peft 16 adapters')} PEFT, one request of the base "
        f"{times('ours 1 base', 'hf 1 base')} Hugging Face's `generate`."
    )


def stands(figures: Figures) -> str:
    head = f"On {machine(figures)}:"
    return "\n".join([head, "", *decode_table(figures), "", *bullets(sentences(figures))])


def precision_table(figures: Figures) -> str:
    found = {(row["precision"], _case(row)): row for row in figures.precision["results"]}
    for adapters, row in figures.offline.items():
        found["bf16", ("offline", row["prompts"], adapters)] = {"tok_s": row["output_tok_s"]}

    def cell(name: str, case: PrecisionCase) -> str:
        row = found.get((name, case))
        if row is None:
            return ""
        text = f"{row['ms_step']:.2f}" if "ms_step" in row else f"{row['tok_s']:,}"
        return f"**{text}**" if name == "fp8" else text

    host = figures.precision["host"]
    commits: dict[str, set[str]] = {}
    for row in figures.precision["results"]:
        commits.setdefault(row["commit"], set()).add(row["precision"])
    titles = {name: title.strip("*") for name, title in PRECISION_COLUMNS.items()}
    measured = "; ".join(
        f"{commit} ({', '.join(titles[name] for name in titles if name in own)})"
        for commit, own in commits.items()
    )
    head = f"On one {host['gpu'].removeprefix('NVIDIA ')} at a time; commits {measured}:"
    lines = [
        *(textwrap.fill(head, WIDTH), ""),
        f"| batch / distinct adapters | {' | '.join(PRECISION_COLUMNS.values())} | target "
        "| vLLM FP8 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, (name, target, vllm) in PRECISION_TARGETS.items():
        cells = " | ".join(cell(each, case) for each in PRECISION_COLUMNS)
        lines.append(f"| {name} | {cells} | {target} | {vllm} |")
    return "\n".join(lines)


def shapes_table(figures: Figures) -> str:
    columns, titles = [], []
    for name, report in figures.shapes.items():
        columns.append({_case(row): row for row in report["results"]})
        titles.append(f"{name} ({report['host']['commit']})")

    def cell(row: Row | None) -> str:
        if row is None:
            return ""
        if "ms_step" not in row:
            return f"{row['tok_s']:,}"
        ratio = f", {row['base_ratio']:.2f} × base" if row["adapters"] else ""
        return f"{row['ms_step']:.2f} ({row['floor_ms']:.2f}){ratio}"

    lines = [f"| one H200, bf16 | {' | '.join(titles)} |", "|---|---|---|"]
    for case, name in SHAPE_ROWS.items():
        lines.append(f"| {name} | {' | '.join(cell(rows.get(case)) for rows in columns)} |")
    return "\n".join(lines)


def _case(row: Row) -> PrecisionCase:
    return row["kind"], row["batch"], row["adapters"]


def many_adapters(figures: Figures) -> str:
    commits = sorted({row["commit"] for row in figures.many.values()})
    return "\n".join([f"Commit {', '.join(commits)}:", "", *many_table(figures)])


def cpu_table(figures: Figures) -> str:
    host = figures.cpu_host

    def tok_s(system: str, batch: int, adapters: int = 0) -> str:
        return f"{figures.cpu[system, batch, adapters]['tok_s']:.0f}"

    def times(case: str, other: str, digits: int = 1) -> str:
        return f"{figures.cpu_ratios[case, other]['ratio']:.{digits}f} ×"

    base = figures.cpu_ratios["ours 16 adapters", "ours 16 base"]
    return "\n".join(
        [
            f"| {host['cpus']} CPU cores, SmolLM2-135M, fp32, greedy, side by side | tokens/s | |",
            "|---|---|---|",
            f"| 16 requests with 16 adapters of rank 16 | {tok_s('ours', 16, 16)} "
            f"| {times('ours 16 adapters', 'peft 16 adapters')} PEFT `adapter_names` "
            f"({tok_s('peft', 16, 16)}); {times('ours 16 adapters', 'ours 16 base', 2)} the base "
            f"beside it (target {base['at_least']}) |",
            f"| 16 requests, base model | {tok_s('ours', 16)} "
            f"| {times('ours 16 base', 'hf 16 base')} Hugging Face `generate` "
            f"({tok_s('hf', 16)}) |",
            f"| 1 request, base model | {tok_s('ours', 1)} "
            f"| {times('ours 1 base', 'hf 1 base')} Hugging Face `generate` ({tok_s('hf', 1)}) |",
        ]
    )


# The cases of bench.refusals by the place that decides them.
REFUSALS = (
    (
        "a malformed key or body, an unknown field, a bad value, a missing scope (in memory)",
        ("malformed key", "malformed body", "unknown field", "bad value", "missing scope"),
    ),
    (
        "a rate limit, a spent budget, no worker (in Redis)",
        ("rate limit", "budget", "no worker"),
    ),
    (
        "an unknown or revoked key, an unknown model or version, another tenant's model "
        "(in PostgreSQL)",
        (
            "unknown key", "revoked key", "unknown model", "unknown model, again",
            "unknown model, new key", "unknown version", "another tenant's model",
        ),
    ),
    ("a prompt that is too long (by the worker's tokenizer)", ("long prompt",)),
)  # fmt: skip


def gateway_table(figures: Figures) -> str:
    gateway, steps = figures.gateway, figures.grammar["steps"]
    lines = [
        f"| {gateway['cpus']} CPU cores for all processes | |",
        "|---|---|",
        f"| one gateway process adds to a token, p50 and p99 | {gateway['overhead_p50_ms']:.1f} "
        f"and {gateway['overhead_p99_ms']:.1f} ms |",
        f"| it passes on, with {gateway['streams']} streams | {gateway['tokens_per_s']:,.0f} "
        f"tokens/s ({gateway['rounds']} rounds: {gateway['tokens_per_s_slowest']:,.0f} to "
        f"{gateway['tokens_per_s_fastest']:,.0f}) |",
    ]
    for text, cases in REFUSALS:
        waits = [figures.refusals[case] for case in cases]
        least, most = f"{min(waits):.1f}", f"{max(waits):.1f}"
        span = most if least == most else f"{least} to {most}"
        lines.append(f"| refuses {text}, p50 | {span} ms |")
    compiling = figures.grammar["compile"]
    lines += [
        f"| masks of {steps['requests']} requests with {steps['requests']} JSON schemas | "
        f"{steps['overhead']:.1%} of a step (target {steps['at_most']:.0%}) |",
        f"| a new schema of {compiling['properties']} properties, median and worst | "
        f"{compiling['median_ms']:.1f} and {compiling['worst_ms']:.1f} ms "
        f"(target {compiling['at_most']:.0f}) |",
    ]
    return "\n".join(lines)


PARTS: dict[str, Callable[[Figures], str]] = {
    "readme": readme,
    "stands": stands,
    "many": many_adapters,
    "precision": precision_table,
    "shapes": shapes_table,
    "cpu": cpu_table,
    "gateway": gateway_table,
}


def fill(text: str, figures: Figures) -> str:
    """Return the document with its generated parts written from the results."""

    def part(match: re.Match[str]) -> str:
        return f"{match[1]}\n{PARTS[match[2]](figures)}\n<!-- end -->"

    return re.sub(r"(<!-- bench\.tables: (\w+) -->)\n.*?<!-- end -->", part, text, flags=re.S)


def load() -> Figures:
    names = (
        "targets-h200", "many-h200", "cpu", "offline-h200", "start-h200",
        "gateway", "refusals", "grammar", "precision-h200", *SHAPES.values(),
    )  # fmt: skip
    return Figures({n: json.loads((RESULTS / f"{n}.json").read_text()) for n in names})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only check; exit with 1 if stale")
    check = parser.parse_args().check
    figures, stale = load(), []
    for name in DOCUMENTS:
        path = ROOT / name
        text = path.read_text()
        filled = fill(text, figures)
        if filled != text:
            stale.append(name)
            if not check:
                path.write_text(filled)
    print("\n".join(f"{'stale' if check else 'written'}: {name}" for name in stale) or "up to date")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
