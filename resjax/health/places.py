"""Where in the network does an operation stand? Told from the scopes that it bears in the program."""

import re
from dataclasses import dataclass

# The scopes that stack, block, connection, branches, model and step put around their parts, and their names for a person.
PARTS = {
    "embedding": "embedding",
    "open": "start of the stream",
    "read": "reading the stream",
    "norm_in": "norm before the branch",
    "branch": "branch",
    "queries_keys_values": "queries, keys and values",
    "scores": "scores",
    "softmax": "softmax",
    "values": "values",
    "hidden": "hidden layer",
    "output": "output",
    "norm_out": "norm on the branch's output",
    "scale": "scale of the update",
    "add": "residual add",
    "norm_after": "norm after the residual add",
    "close": "end of the stream",
    "final_norm": "final norm",
    "head": "head",
    "loss": "loss",
    "grad_norm": "norm of the gradient",
}
AGAIN = "rematted_computation"  # JAX's own scope
BLOCK, RUN, SITE = re.compile(r"block_(\d+)"), re.compile(r"blocks_(\d+)"), re.compile(r"site_\d+_(.+)")


@dataclass(frozen=True)
class Place:
    """A place in the network: block from 0, sub-layer, part of it; None where the scopes do not tell."""

    block: int | None = None
    site: str | None = None
    part: str | None = None

    def __bool__(self) -> bool:
        return self.block is not None or self.part is not None

    def __str__(self) -> str:
        """'block 7, mlp, output'."""
        words = ["" if self.block is None else f"block {self.block}", self.site or "", PARTS.get(self.part or "", "")]
        return ", ".join(word for word in words if word) or "outside of the model"


def scopes(stack: str) -> list[str]:
    """The scopes and transformations of a name stack such as 'transpose(jvp(blocks_0))/block_3/site_1_mlp', outermost first."""
    return [scope for scope in re.split(r"[/()]+", stack) if scope]


def place(stack: str) -> Place:
    """The place that a name stack tells."""
    block = site = part = None
    for scope in scopes(stack):
        if match := BLOCK.fullmatch(scope):
            block, site, part = int(match[1]), None, None
        elif match := SITE.fullmatch(scope):
            site, part = match[1], None
        elif scope in PARTS:
            part = scope
    return Place(block, site, part)


def first_of_run(stack: str) -> int | None:
    """The first block of the run whose scan bears this name stack; None for any other operation."""
    match = RUN.fullmatch(scopes(stack)[-1]) if scopes(stack) else None
    return None if match is None else int(match[1])


def in_backward_pass(stack: str) -> bool:
    """Whether an operation belongs to the backward pass; what a checkpoint computes again there belongs to the forward pass."""
    found = scopes(stack)
    return "transpose" in found and AGAIN not in found[found.index("transpose") :]
