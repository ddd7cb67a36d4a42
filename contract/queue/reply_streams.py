"""Where the answers to a batch's lines wait, whoever runs the batch. Standard library only.

To a worker a batch is a gateway like any other, with an id (`batch_stream_id`) and a stream, but
one that outlives its processes: its requests go on while nobody reads, and their answers stay
until somebody has. What is under way is in a hash beside the stream, written by the script that
admits it (`controlplane.queue.batch_reply_stream`):

    key                  type    written by    what
    out:batch-<batch>    stream  worker        as any gateway's; entries stay until they are kept
    fly:{p}:<batch>      hash    runner        line -> its attempt that is under way, with what
                                               answers it; `fence`, the lowest fencing token that
                                               may still admit lines

Both are bounded by what is under way at a time, not by the batch, and go with its end.
"""

from __future__ import annotations

from contract.protocol import OUT_STREAM_TTL_S

_PREFIX = "batch-"
#: Longer than any batch may take, and then as long again for somebody to find what came of it.
BATCH_STREAM_TTL_S = 2 * 24 * 3600


def batch_stream_id(batch_id: str) -> str:
    """The gateway id of a batch."""
    return f"{_PREFIX}{batch_id}"


def is_batch_stream(gateway_id: str) -> bool:
    """Whether answers wait there for whoever comes next: nobody's silence means anything."""
    return gateway_id.startswith(_PREFIX)


def out_ttl_s(gateway_id: str) -> int:
    """How long a gateway's stream stays after its last entry."""
    return BATCH_STREAM_TTL_S if is_batch_stream(gateway_id) else OUT_STREAM_TTL_S


def pending_lines_key(pool: str, batch_id: str) -> str:
    return f"fly:{{{pool}}}:{batch_id}"
