"""Where in the network does a connection sit, and when is it evaluated?"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax


@dataclass(frozen=True)
class Site:
    """One place where a branch joins the stream; also what rules of (layer, depth, step) are evaluated on.

    The properties are named by what they count, as papers count it (the index trap of DeepNorm, Keel, LayerNorm Scaling,
    Hyper-Connections ...): ``l`` and ``L`` count blocks from 1, ``s`` counts sites from 0, ``M`` is the number of sites.

    Attributes:
      kind: sub-layer kind, such as 'attention' or 'mlp'.
      pos: position of the site in its block, from 0.
      per_block: sites in a block.
      depth: blocks in the stack.
      block: index of the block from 0; an integer, a traced integer (in a scan) or a float32 vector (when rules are evaluated).
      step: optimizer steps done, a scalar, traced or not.
    """

    kind: str
    pos: int
    per_block: int
    depth: int
    block: Any = 0
    step: Any = 0

    @property
    def l(self) -> Any:
        """Block number from 1 to ``L``."""
        return self.block + 1

    @property
    def L(self) -> int:
        """Number of blocks."""
        return self.depth

    @property
    def s(self) -> Any:
        """Site number from 0 to ``M - 1``."""
        return self.block * self.per_block + self.pos

    @property
    def M(self) -> int:
        """Number of sites of the stack (2 L for attention and MLP)."""
        return self.depth * self.per_block

    @property
    def last_in_block(self) -> bool:
        return self.pos == self.per_block - 1

    def on(self, block: int | jax.Array, step: Any = 0) -> "Site":
        """The same site of another block, or of a vector of blocks."""
        return replace(self, block=block, step=step)


Rule = Callable[[Site], Any]
