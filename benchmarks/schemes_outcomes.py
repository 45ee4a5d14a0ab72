"""Which forms of a scheme does the table of outcomes try that no field says? Highway with a gate that starts nearer to the identity."""

from resjax.residual import CATALOGUE, Scheme
from resjax.residual.gates import Highway


def from_bias(bias: float) -> Scheme:
    """Highway whose gate starts at sigmoid(bias); the deeper, the more negative it should be (Srivastava et al. 2015, 1505.00387)."""
    return CATALOGUE["highway"].but(name=f"highway_{-bias:g}", carry=Highway(bias))


HIGHWAY_3, HIGHWAY_4 = from_bias(-3.0), from_bias(-4.0)
