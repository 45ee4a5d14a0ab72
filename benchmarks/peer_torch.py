"""The peer: a Pre-LN decoder in eager PyTorch, of the same arithmetic as resjax's. Serves timed rounds; needs torch, not resjax.

RMSNorm, fused QKV, causal attention, GELU MLP x 4, no positions, untied byte head, AdamW without decay, float32. ``speed.py`` starts it
in an interpreter that has torch and talks to it over its standard input and output, one JSON line a round.
"""

import argparse
import json
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, h):
        batch, length, width = h.shape
        q, k, v = (
            x.view(batch, length, self.heads, -1).transpose(1, 2)
            for x in self.qkv(self.norm_attention(h)).split(width, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return h + self.down(F.gelu(self.up(self.norm_mlp(h)), approximate="tanh"))


class Decoder(nn.Module):
    def __init__(self, vocab, depth, width, heads):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("depth", "width", "length", "batch", "heads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    a = parser.parse_args()
    model = Decoder(256, a.depth, a.width, a.heads)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)
    tokens = torch.randint(0, 256, (a.batch, a.length + 1))

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    step(), step()
    print(json.dumps({"peer": f"torch {torch.__version__}", "threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        steps = int(line)
        start = time.perf_counter()
        for _ in range(steps):
            step()
        print(json.dumps({"ms": 1e3 * (time.perf_counter() - start) / steps}), flush=True)


if __name__ == "__main__":
    main()
