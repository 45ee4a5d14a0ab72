"""How is a Linen model watched without a change to its code? Its blocks are met from outside, by their names."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn

from resjax.errors import Refused
from resjax.watch import context


@contextlib.contextmanager
def blocks(pattern: str, site: str = "block") -> Iterator[None]:
    r"""Inside, every submodule whose path matches is watched as one site: the stream is its first argument, and what it returns.

    The update is the difference of the two, so that what an add swallowed cannot be told. Where the adds themselves matter, or blocks
    are scanned (they then share one path), call :func:`resjax.watch.add` in the module's ``__call__``; it works in Linen as it is.

    Args:
      pattern: regular expression for the whole path, such as ``r"block_(\d+)"`` or ``r"decoder/Block_(\d+)"``; its group is the
        block's number.
      site: name of the site.

    Raises:
      Refused: the pattern has no group, or not a number in it; a block that returns another shape than it is given.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise Refused(f"pattern is '{pattern}', which is no regular expression ({error})") from None
    if compiled.groups != 1:
        raise Refused(f"pattern is '{pattern}', and has to have one group, the block's number, such as 'block_(\\d+)'")

    def watching(next_call: Callable, args: tuple, kwargs: dict, about: nn.module.InterceptorContext) -> Any:
        out = next_call(*args, **kwargs)
        path = "/".join(about.module.path)
        match = compiled.fullmatch(path) if about.method_name == "__call__" else None
        if match is None:
            return out
        if not match[1].isdigit():
            raise Refused(
                f"pattern is '{pattern}', whose group is '{match[1]}' in '{path}', and has to be the block's number"
            )
        before, after = (args[0] if args else next(iter(kwargs.values()))), (out[0] if isinstance(out, tuple) else out)
        if getattr(before, "shape", None) != getattr(after, "shape", None):
            raise Refused(
                f"'{path}' is given {_shape(before)} and returns {_shape(after)}: not the stream before and after a block"
            )
        after = context.change(before, after, block=int(match[1]), site=site)
        return (after, *out[1:]) if isinstance(out, tuple) else after

    with nn.intercept_methods(watching):
        yield


def _shape(x: Any) -> str:
    return f"an array {x.shape}" if hasattr(x, "shape") else f"a {type(x).__name__}"
