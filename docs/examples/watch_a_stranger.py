"""A decoder that knows nothing of resjax, but for one call at each residual add; one of its blocks is broken, and is named.

    python docs/examples/watch_a_stranger.py [FOLDER]

Model, data and training loop are as somebody else might have them: Flax NNX, a list of blocks, nnx.jit and nnx.Optimizer. The lines that
watch it end in "# <-". Block 3 has lost its weights, as after a checkpoint that was loaded by names that did not match.
At the end its state is studied: what each block is worth, and more. Takes about a minute on a CPU; FOLDER (runs/stranger) then holds
report.html, and ``python -m resjax.doctor FOLDER`` says what is wrong.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from resjax import watch  # <-

N_LAYER, N_EMBD, N_HEAD, CONTEXT, BATCH = 6, 48, 4, 64, 16


class SelfAttention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.qkv = nnx.Linear(N_EMBD, 3 * N_EMBD, use_bias=False, rngs=rngs)
        self.proj = nnx.Linear(N_EMBD, N_EMBD, use_bias=False, rngs=rngs)

    def __call__(self, x):
        b, t, _ = x.shape
        q, k, v = jnp.split(self.qkv(x).reshape(b, t, N_HEAD, -1), 3, axis=-1)
        return self.proj(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(b, t, -1))


class FeedForward(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(N_EMBD, 4 * N_EMBD, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * N_EMBD, N_EMBD, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class DecoderLayer(nnx.Module):
    def __init__(self, index: int, rngs: nnx.Rngs):
        self.index = index
        self.ln_1, self.ln_2 = nnx.RMSNorm(N_EMBD, rngs=rngs), nnx.RMSNorm(N_EMBD, rngs=rngs)
        self.attn, self.ffn = SelfAttention(rngs), FeedForward(rngs)

    def __call__(self, x):
        x = watch.add(x, self.attn(self.ln_1(x)), block=self.index, site="attention")  # <- was x + self.attn(...)
        return watch.add(x, self.ffn(self.ln_2(x)), block=self.index, site="mlp")  # <-


class TinyDecoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.wte = nnx.Embed(256, N_EMBD, rngs=rngs)
        self.wpe = nnx.Embed(CONTEXT, N_EMBD, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(i, rngs) for i in range(N_LAYER)])
        self.ln_f = nnx.RMSNorm(N_EMBD, rngs=rngs)
        self.head = nnx.Linear(N_EMBD, 256, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.wte(tokens) + self.wpe(jnp.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.ln_f(x))


def text(rng: np.random.Generator, sentences: int = 4000) -> np.ndarray:
    """Sums in words, as bytes."""
    pairs = rng.integers(0, 50, (sentences, 2))
    return np.frombuffer("".join(f"{a} plus {b} is {a + b}. " for a, b in pairs).encode(), np.uint8)


def next_byte_loss(model, chunk):
    logits = model(chunk[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, chunk[:, 1:]).mean()


@nnx.jit
def train_step(model, optimizer, chunk, taps):
    def objective(model, taps):
        with watch.into(taps):  # <-
            return next_byte_loss(model, chunk)

    loss, (grads, found) = nnx.value_and_grad(objective, argnums=(0, 1))(model, taps)  # <- was argnums=0
    optimizer.update(model, grads)
    return loss, found


def break_block(layer: DecoderLayer) -> None:
    for linear in (layer.attn.qkv, layer.attn.proj, layer.ffn.up, layer.ffn.down):
        linear.kernel[...] = jnp.zeros_like(linear.kernel[...])


def main(folder: str = "runs/stranger", steps: int = 100) -> dict:
    rng = np.random.default_rng(0)
    data = text(rng)
    model = TinyDecoder(nnx.Rngs(0))
    break_block(model.layers[3])
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    plan = watch.find(
        next_byte_loss, model, jnp.zeros((BATCH, CONTEXT + 1), jnp.int32)
    )  # <- 6 blocks with attention, mlp
    with watch.Log(
        folder, config={"model": {"depth": N_LAYER, "width": N_EMBD}, "train": {"steps": steps}}
    ) as log:  # <-
        for step in range(1, steps + 1):
            starts = rng.integers(0, len(data) - CONTEXT - 1, BATCH)
            chunk = jnp.asarray(np.stack([data[s : s + CONTEXT + 1] for s in starts]), jnp.int32)
            loss, found = train_step(model, optimizer, chunk, plan.taps(on=step % 5 == 0 or step == 1))  # <-
            log.write(step, found, loss=loss)  # <-
        held_out = jnp.asarray(text(rng)[: 4 * BATCH * (CONTEXT + 1)].reshape(4, BATCH, CONTEXT + 1), jnp.int32)
        found = watch.study(next_byte_loss, model, held_out, tokens=lambda chunk: chunk)  # <-
        log.studied(steps, found)  # <-
        summary = log.close()  # <-
        print(f"loss {summary['train_loss']:.3f}; {log.report()}")  # <-
    for finding in summary["health"]["findings"]:  # <-
        print(f"{finding['kind']}: {finding['where']}: {finding['evidence']}")  # <-
    for i, worth in enumerate(found["ablation"]["delta"]):  # <-
        print(f"block {i} is worth {worth:.3f} nats{' (dead)' if found['ablation']['dead'][i] else ''}")  # <-
    return summary


if __name__ == "__main__":
    main(*sys.argv[1:2])
