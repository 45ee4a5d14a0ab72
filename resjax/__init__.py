"""resjax: the laboratory for residual connections in deep networks, in JAX and Flax."""

__version__ = "0.1.0"
