"""Steps of numbers: what is enforced is what the decoder reads, to the last digit."""

from __future__ import annotations

from decimal import Decimal

from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.schemas import Status, plan
from tests.controlplane.schemas.test_dead_ends import BYTES, start


@settings(max_examples=25, deadline=None)
@given(units=st.integers(1, 300), places=st.integers(0, 9), times=st.integers(0, 10**6))
def test_an_enforced_step_is_the_decoders(units: int, places: int, times: int) -> None:
    step = Decimal(units).scaleb(-places)
    planned = plan({"type": "number", "multipleOf": float(step)})
    if not planned.is_enforced:
        return
    matcher = start(planned.decoding)

    def is_read(text: str) -> bool:
        ids, copy = BYTES.tokenize_bytes(text.encode()), matcher.deep_copy()
        return bool(copy.try_consume_tokens(ids) == len(ids) and copy.is_accepting())

    multiple, other = step * times, step * times + step / 10
    assert is_read(format(multiple, "f")) or is_read(format(multiple.normalize(), "f"))
    assert not is_read(format(other, "f")) and not is_read(format(other.normalize(), "f"))


def test_a_step_that_binary_numbers_miss_is_named() -> None:
    """The decoder would read 0.07 as 0.07000000000000001, and refuse the schema for its digits."""
    (finding,) = plan({"multipleOf": 0.07}).with_status(Status.CHECKED)
    assert finding.path == "/multipleOf" and "exactly" in finding.reason
    for step in (0.1, 0.01, 1e-7, 0.25, 7, 2.5):
        assert plan({"multipleOf": step}).is_enforced, step
