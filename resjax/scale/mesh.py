"""Which devices does a run use, and where do its arrays lie? Today: batches split over one data axis, the state on every device."""

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from resjax.errors import Refused

DATA = "data"


def make_mesh(data: int, rows: int) -> Mesh:
    """The mesh of a run.

    Args:
      data: devices to split a batch over; -1 = all that are visible.
      rows: sequences that are processed at once (a batch, or one slice of an accumulated batch).

    Raises:
      Refused: more devices than there are, or rows that they cannot share evenly.
    """
    visible = jax.device_count()
    count = visible if data == -1 else data
    if not 1 <= count <= visible:
        seen = f"{visible} device{'s are' if visible > 1 else ' is'} visible"
        raise Refused(f"mesh.data is {data}, but {seen}; give 1 to {visible}, or -1 for all")
    if rows % count:
        raise Refused(
            f"mesh.data spreads a batch over {count} devices, but data.batch / train.accumulate is {rows}, which {count} "
            "does not divide; change data.batch, or mesh.data"
        )
    # Auto: the compiler places what is inside the step. JAX's default for a new mesh is Explicit.
    return jax.make_mesh((count,), (DATA,), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def by_rows(mesh: Mesh) -> NamedSharding:
    """For arrays whose first axis counts sequences."""
    return NamedSharding(mesh, PartitionSpec(DATA))
