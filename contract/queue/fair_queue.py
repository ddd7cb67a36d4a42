"""Keys and constants of the fair queue; `contract.queue.scripts` loads its Lua.

Requests wait per base model, class and tenant, and a worker with room pulls those of the tenants
that have been served least. "Served" is a virtual counter of tokens (Sheng et al., "Fairness in
Serving Large Language Models", 2024): charged when a request is dispatched, corrected when it
ends. A tenant that becomes active starts no lower than the lowest active one, so that no tenant
saves up service by being idle.

    key (`q` is `queue_key(pool, base model)`)   type    what
    q:<class>               zset    tenant -> counter, of the tenants that have something waiting
    q:<class>:vt            zset    tenant -> counter, of the others that were served lately
    q:<class>:<tenant>      list    "<request id> <tokens> <digest,…>", the next first
    q:<class>:skip          hash    tenant -> times another was preferred for its adapter
    q:sums                  hash    waiting tokens by "<class>:<tenant>"; "*" tokens and "n"
                                    requests of all; "floor:<class>", the lowest counter then
    q:idle                  zset    workers that found nothing -> when
    res:{p}:<worker>        set     digests in that worker's memory, as of its last heartbeat
    lim:{p}:<tenant>:<id>   hash    one policy's rates: `r`, `t`, times at which they are full again
    qs:{p}                  set     the queues that something was put into
    srv:{p}                 zset    queue -> when a worker of its base model was last heard of
    reap:{p}                hash    when a reaper last looked, and `since` when without a break
    quar:{p}                hash    adapter digest -> when it was quarantined
    in:{p}                  set     workers whose inboxes may hold something
    lim:…:run, lim:…:wait   zset    requests of a policy that run or wait -> their deadline
    bud:{p}:<tenant>:<id>:… hash    one budget's period: tokens `spent` and `reserved`

Further fields of the job hash: `m` the job, `q`, `class`, `tenant`, `item` (as in the list),
`tokens` (those it may generate), `cost` (charged at dispatch), `charged`, `deadline`, `hold` (what
its end gives back: lines of "run|rate|budget key seconds-per-token reserved-tokens"), `waits`
(zsets to leave at dispatch), `since` (when it was admitted).
"""

from __future__ import annotations

INTERACTIVE = "i"
BATCH = "b"

#: Number of prompt tokens that a generated token counts as.
OUTPUT_WEIGHT = 2
#: Number of the least served tenants among which a worker looks for an adapter that it has.
AFFINITY_WINDOW = 16
#: Number of times in a row that a tenant may be passed over for such an adapter.
MAX_SKIPS = 4
#: Largest number of requests in one pull, to keep the script short.
PULL_COUNT = 4
#: While both classes wait, one of this number of dispatches is of the batch class.
BATCH_SHARE = 16

#: Ends of the keys of a queue, of its classes and of a policy.
SUMS, IDLE = ":sums", ":idle"
LATELY, SKIPS = ":vt", ":skip"
WAITING = ":wait"


def queue_key(pool: str, base_model: str) -> str:
    return f"q:{{{pool}}}:{base_model}"


def residents_key(pool: str, worker_id: str) -> str:
    return f"res:{{{pool}}}:{worker_id}"


def inboxes_key(pool: str) -> str:
    return f"in:{{{pool}}}"


def queues_key(pool: str) -> str:
    return f"qs:{{{pool}}}"


def served_key(pool: str) -> str:
    return f"srv:{{{pool}}}"


def quarantine_key(pool: str) -> str:
    return f"quar:{{{pool}}}"


def limit_key(pool: str, tenant_id: str, policy_id: str) -> str:
    return f"lim:{{{pool}}}:{tenant_id}:{policy_id}"


def budget_key(pool: str, tenant_id: str, budget_id: str, period: str) -> str:
    return f"bud:{{{pool}}}:{tenant_id}:{budget_id}:{period}"
