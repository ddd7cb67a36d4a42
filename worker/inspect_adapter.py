"""Inspect a LoRA adapter: PEFT's results with it, and the properties of its weights.

    python -m worker.inspect_adapter JOB.json

JOB.json is `contract.adapters.inspection.InspectJob`: the folders of the base model and of the
adapter's two files. Standard output carries one JSON object and nothing else:

    {"reference": {"dtype", "prompts": [{"token_ids", "adapter", "base"}]},
     "doctor": {"summary", "modules", "findings"}}

`adapter` and `base` of a prompt are {"logprobs": of each token but the first, "top": [[token id,
log-probability]] of the last position}, with the adapter and without it. A part that failed is
{"error": …} instead.

`worker.one_job` has the exit codes.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

from contract.adapters.inspection import InspectJob
from worker.one_job import answer_job


def inspect(job: InspectJob) -> dict[str, Any]:
    """Return the report on the adapter. Raises AdapterProblems if it does not fit the base."""
    # Imported here, so that the limit of memory holds for them, too.
    from worker.inspection.factors import Adapter
    from worker.inspection.findings import findings_of, summary_of
    from worker.inspection.reference import base_norms, load_base, probe_prompts, reference_of

    config = json.loads((job.base_model_dir / "config.json").read_text())
    adapter = Adapter(job.adapter_dir, config)
    base = load_base(job.base_model_dir)

    def doctor() -> dict[str, Any]:
        modules = list(adapter.modules(base_norms(base)))
        summary = summary_of(modules) | {"use_dora": adapter.config.use_dora}
        return {"summary": summary, "modules": modules, "findings": findings_of(modules)}

    def reference() -> dict[str, Any]:
        prompts = probe_prompts(job.base_model_dir, adapter.config.token_ids)
        return reference_of(base, job.adapter_dir, prompts)

    # The order matters: the second part changes the base.
    return {"doctor": _part(doctor), "reference": _part(reference)}


def _part(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `work`, or its error, so that one part does not end the other."""
    try:
        return work()
    except MemoryError:
        raise
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def main() -> int:
    return answer_job(InspectJob.read, inspect)


if __name__ == "__main__":
    sys.exit(main())
