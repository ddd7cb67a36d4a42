"""The streams that answers are written to: a gateway's, and a batch's. Standard library only.

To a worker a batch is a gateway with an id (`batch_stream_id`) and a stream, but one that outlives
its processes: its requests continue while nobody reads, and their answers stay until they are read.
The lines under way are in a hash beside the stream, written by the script that admits them
(`controlplane.queue.batch_reply_stream`):

    key                  type    written by    what
    out:batch-<batch>    stream  worker        as any gateway's; entries stay until they are kept
    fly:{p}:<batch>      hash    runner        line -> its attempt that is under way, with what
                                               answers it; `fence`, the lowest fencing token that
                                               may still admit lines

The size of both is bounded by the lines under way; both are removed when the batch ends.
"""

from __future__ import annotations

from contract.messages.protocol import OUT_STREAM_TTL_S

_PREFIX = "batch-"
#: Seconds that a batch's stream is kept: the longest time of a batch, and as long again for a
#: runner to read its answers.
BATCH_STREAM_TTL_S = 2 * 24 * 3600


def batch_stream_id(batch_id: str) -> str:
    """Return the gateway id of a batch."""
    return f"{_PREFIX}{batch_id}"


def is_batch_stream(gateway_id: str) -> bool:
    """Return whether the stream belongs to a batch: its requests continue when no gateway lives."""
    return gateway_id.startswith(_PREFIX)


def out_ttl_s(gateway_id: str) -> int:
    """Return how long a gateway's stream is kept after its last entry."""
    return BATCH_STREAM_TTL_S if is_batch_stream(gateway_id) else OUT_STREAM_TTL_S


def pending_lines_key(pool: str, batch_id: str) -> str:
    return f"fly:{{{pool}}}:{batch_id}"
