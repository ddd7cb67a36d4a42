"""Plan the enforcement of a JSON schema in an answer, keyword by keyword.

`plan` bounds a schema, rewrites it for the decoder, and reports for every keyword whether it is
enforced while tokens are chosen, checked when the answer is finished, or unsupported. Pure
functions; `controlplane.management.schemas` is their HTTP view.
"""

from controlplane.schemas.findings import BadSchema, Finding, Status
from controlplane.schemas.plan import Plan, paths, plan

__all__ = ["BadSchema", "Finding", "Plan", "Status", "paths", "plan"]
