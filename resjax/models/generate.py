"""How does a language model write? Token by token, from a window of its own length that slides over the text."""

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from resjax.models.lm import LM
from resjax.residual import Context

NOT_FINITE = -1  # in place of a token, where the logits hold a NaN or an infinity


def generate(
    model: LM,
    prompt: Sequence[int] | np.ndarray,
    count: int,
    *,
    key: jax.Array,
    temperature: float = 1.0,
    top_k: int | None = None,
    vocab: int | None = None,
    step: int = 0,
    compute: str = "float32",
) -> Iterator[int]:
    """The next ``count`` tokens after ``prompt``, as they are drawn; one compiled program, whatever the lengths.

    The model reads the last ``model.shape.length`` tokens at most, so position 0 of a longer text moves along with it.
    The same arguments give the same tokens on the same machine.

    Args:
      model: a trained language model.
      prompt: tokens below ``vocab``, at least one.
      count: how many tokens to draw.
      key: of the draws; token i folds in i.
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: draw among the k likeliest tokens only; None = among all.
      vocab: tokens from this number on are never drawn; None = all are allowed.
      step: optimizer steps that the model has done, for rules that move with training.
      compute: dtype of the branches.

    Yields:
      Tokens; ``NOT_FINITE`` once, as the last, if the logits are not finite.

    Raises:
      ValueError: an empty prompt, a token outside of the vocabulary, a negative temperature, a ``top_k`` out of range.
    """
    vocab = vocab or model.shape.vocab
    text = np.asarray(prompt, np.int32)
    if text.ndim != 1 or not len(text) or text.min() < 0 or text.max() >= vocab:
        raise ValueError(f"the prompt must be one or more tokens from 0 to {vocab - 1}")
    if not temperature >= 0:
        raise ValueError(f"the temperature is {temperature}; it must be 0 or more")
    if top_k is not None and not 1 <= top_k <= vocab:
        raise ValueError(f"top_k is {top_k}; it must be from 1 to {vocab}")
    length = model.shape.length
    seen = text[-length:]
    window = jnp.asarray(np.pad(seen, (0, length - len(seen))))
    last = jnp.int32(len(seen) - 1)
    following = functools.partial(_next, top_k=top_k, vocab=vocab, compute=compute)
    heat, done = jnp.float32(temperature), jnp.int32(step)
    for i in range(count):
        window, last, token = following(model, window, last, jax.random.fold_in(key, i), heat, done)
        yield int(token)
        if int(token) == NOT_FINITE:
            return


@functools.partial(jax.jit, static_argnames=("top_k", "vocab", "compute"))
def _next(
    model: LM,
    window: jax.Array,
    last: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
    step: jax.Array,
    *,
    top_k: int | None,
    vocab: int,
    compute: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The window (T,) with one token more, where its last token now is, and that token.

    What lies behind ``last`` does not matter: the model is causal.
    """
    logits, _ = model(window[None], Context(step=step, compute=jnp.dtype(compute)))
    row = logits[0, last, :vocab].astype(jnp.float32)
    finite = jnp.all(jnp.isfinite(row))
    if top_k is not None:
        row = jnp.where(row >= jax.lax.top_k(row, top_k)[0][-1], row, -jnp.inf)
    cold = temperature < jnp.finfo(jnp.float32).tiny
    below = row - jnp.max(row)  # so that a low temperature leads to -inf, never to inf - inf
    drawn = jax.random.categorical(key, below / jnp.where(cold, jnp.float32(1), temperature))
    token = jnp.where(cold, jnp.argmax(row), drawn).astype(jnp.int32)
    full = last == len(window) - 1
    last = jnp.where(full, last, last + 1)
    window = jnp.where(full, jnp.roll(window, -1), window).at[last].set(token)
    return window, last, jnp.where(finite, token, NOT_FINITE)
