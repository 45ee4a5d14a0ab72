"""What a branch F can be. Branches know nothing of the residual scheme around them."""

from resjax.branches.attention import Attention
from resjax.branches.mlp import MLP

__all__ = ["MLP", "Attention"]
