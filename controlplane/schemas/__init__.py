"""What can be promised of an answer that is to obey a JSON schema, keyword by keyword.

`plan` bounds a schema, writes the one that the decoder gets, and says of every keyword whether it
is enforced while tokens are chosen, checked when the answer is finished, or unsupported. Pure
functions; the HTTP view of them is `controlplane.management.schemas`.
"""

from controlplane.schemas.findings import BadSchema, Finding, Status
from controlplane.schemas.plan import Plan, paths, plan

__all__ = ["BadSchema", "Finding", "Plan", "Status", "paths", "plan"]
