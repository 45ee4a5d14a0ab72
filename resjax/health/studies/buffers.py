"""Which part of what is carried is the stream, where what is carried is a buffer of earlier outputs?"""

from typing import Any

from resjax.health.studies.walk import Walk


def row(walk: Walk, place: int) -> int:
    """The row of the buffer that was written last before block ``place`` (the depth: after the last); row 0 is the embedding."""
    carry, units = walk.stack.carry, place * walk.stack.units // walk.depth
    length = carry.length(walk.stack.units) if hasattr(carry, "length") else 1  # rows that are sums of so many outputs
    return -(-units // length)


def newest(walk: Walk, stream: Any, place: int) -> Any:
    """Of a buffer (rows, ...) the row written last before block ``place``; any other stream, or its gradient, as it is."""
    return stream[row(walk, place)] if walk.stack.carry.rows else stream
