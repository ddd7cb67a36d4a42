"""Ask the new model what the old one was asked, and compare: one suite, two evaluations."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from typing import Any

from lorikeet_cli import progress
from lorikeet_cli.errors import ApiError, CliError, Interrupted
from lorikeet_cli.output import Column, shown
from lorikeet_cli.session import Session

WATCH_INTERVAL_S = 1.0
_ACTIVE = ("queued", "running", "judging")
_MAX_NAME = 63
_MAX_RESULTS = 2000
NUM_WORST = 5
#: Smallest and largest limit of tokens for a generated answer.
LEAST_TOKENS, MOST_TOKENS = 16, 4096
COLUMNS: list[Column] = [
    ("CHECK", "check"),
    ("BASE", "base"),
    ("NEW", "new"),
    ("DIFFERENCE", "difference"),
    ("95 % FROM", "low"),
    ("TO", "high"),
]
WORST_COLUMNS: list[Column] = [
    ("CASE", "case"),
    ("SCORE", "score"),
    ("OLD ANSWER", lambda row: _short(row["old"])),
    ("NEW ANSWER", lambda row: _short(row["new"])),
]


@dataclasses.dataclass(frozen=True, slots=True)
class Replay:
    """The result of the comparison. The score is 1 where every new answer equals the old one."""

    suite: dict[str, Any]
    base: dict[str, Any]
    new: dict[str, Any]
    comparison: dict[str, Any]
    worst: list[dict[str, Any]]

    @property
    def score(self) -> float:
        return float(self.new["summary"].get("score") or 0.0)

    def rows(self) -> list[dict[str, Any]]:
        """Return the table's rows: each check, then what the comparison knows intervals of."""
        base, new = self.base["summary"], self.new["summary"]
        rows: list[dict[str, Any]] = [
            {"check": kind, "base": base["checks"].get(kind), "new": value}
            for kind, value in new["checks"].items()
        ]
        for row in rows:
            if row["base"] is not None and row["new"] is not None:
                row["difference"] = row["new"] - row["base"]
        for each in self.comparison["differences"]:
            if not each["slice"]:
                told = each["interval"]
                rows.append(
                    {
                        "check": {"score": "all", "logprob": "log-probability"}[each["metric"]],
                        "base": each["before"],
                        "new": each["after"],
                        "difference": told["mean"],
                        "low": told["low"],
                        "high": told["high"],
                    }
                )
        return rows


def replay(
    session: Session,
    *,
    adapter: str,
    model: str,
    base_model: str,
    cases: list[dict[str, Any]],
) -> Replay:
    """Run the cases on the new model and on its base. Raises CliError when one of them fails."""
    # A token has at least one character, so each answer could equal the old one.
    longest = max(len(case["expected"]) for case in cases)
    max_tokens = min(max(longest, LEAST_TOKENS), MOST_TOKENS)
    suite = _suite(session, f"imported-{adapter}"[:_MAX_NAME].rstrip("._-"), cases)
    begun = [
        session.send(
            "POST",
            "evaluations",
            body={
                "model": name,
                "suite": suite["suite"],
                "suite_version": suite["version"],
                "max_tokens": max_tokens,
            },
        )
        for name in (base_model, model)
    ]
    base, new = (_wait(session, evaluation) for evaluation in begun)
    comparison = session.get("evaluations", "compare", before=base["id"], after=new["id"])
    return Replay(suite, base, new, comparison, _worst(session, new, cases))


def _suite(session: Session, name: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the suite's newest version if it has these cases; else create one."""
    digest = hashlib.sha256(json.dumps(cases, sort_keys=True).encode()).hexdigest()
    description = f"Old answers, {digest[:16]}"
    try:
        if session.get("suites", name)["description"] == description:
            found = session.items("suites", name, "versions", limit=1)["data"]
            if found and found[0]["num_cases"] == len(cases):
                return dict(found[0])
    except ApiError as error:
        if error.status != 404:
            raise
    body = {"description": description, "cases": cases}
    made: dict[str, Any] = session.send("POST", "suites", name, "versions", body=body)
    return made


def _wait(session: Session, evaluation: dict[str, Any]) -> dict[str, Any]:
    name = shown(evaluation["model"])
    try:
        with progress.bar(f"asking {name}", total=evaluation["num_cases"]) as bar:
            while evaluation["status"] in _ACTIVE:
                time.sleep(WATCH_INTERVAL_S)
                evaluation = session.get("evaluations", evaluation["id"])
                bar.show(evaluation["num_done"], evaluation["num_cases"], "")
    except KeyboardInterrupt:
        raise Interrupted(
            "Interrupted: the evaluation continues. Run the same command again to compare."
        ) from None
    if evaluation["status"] != "succeeded":
        why = shown(evaluation["error"])
        raise CliError(f"The evaluation of {name} is {evaluation['status']}: {why}")
    return evaluation


def _worst(
    session: Session, evaluation: dict[str, Any], cases: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the answers that differ most from the old ones."""
    found = session.items("evaluations", evaluation["id"], "results", limit=_MAX_RESULTS)["data"]
    rows = [
        {
            "case": each["position"] + 1,
            "score": each["score"],
            "old": cases[each["position"]]["expected"],
            "new": each["output"] or each["error"],
        }
        for each in found
    ]
    rows.sort(key=lambda row: (row["score"] if row["score"] is not None else -1.0, row["case"]))
    return [row for row in rows if row["score"] != 1.0][:NUM_WORST]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 40 else f"{line[:39]}…"
