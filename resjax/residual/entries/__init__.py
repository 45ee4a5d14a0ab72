"""The catalogue: every residual scheme that resjax knows, by name, as one record each."""

from resjax.residual.entries import gates, placement, points, scaling, streams
from resjax.residual.scheme import Scheme

FAMILIES: dict[str, tuple[Scheme, ...]] = {
    "where the norms stand": placement.ENTRIES,
    "how branches are scaled, how weights start": scaling.ENTRIES,
    "gates, random depth, parallel and reversible blocks": gates.ENTRIES,
    "several streams, and mixing over depth": streams.ENTRIES,
    "inside attention": points.ENTRIES,
}
CATALOGUE: dict[str, Scheme] = {scheme.name: scheme for entries in FAMILIES.values() for scheme in entries}

# Forms of some entries, chosen by residual.form; the first is what the bare name means.
FORMS: dict[str, dict[str, Scheme]] = {
    name: forms for module in (placement, scaling, gates, streams, points) for name, forms in module.FORMS.items()
}
