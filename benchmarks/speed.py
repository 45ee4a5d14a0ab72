"""How fast is a training step against eager PyTorch? Interleaved rounds, equal arithmetic, median of 7 pairs.

python benchmarks/speed.py --torch-python PATH_TO_A_PYTHON_WITH_TORCH
"""

import argparse
import json
import subprocess
from pathlib import Path

from bench import Step, pairs, write

CASES = {  # depth, width, length, batch, heads, and the ratio that is the goal
    "128x64x64x4": (128, 64, 64, 4, 2, 0.75),
    "24x64x64x16": (24, 64, 64, 16, 2, 0.90),
    "12x256x256x8": (12, 256, 256, 8, 8, 1.00),
}
SECONDS_A_ROUND = 2.0


class Peer:
    """The PyTorch program in its own process, idle between rounds."""

    def __init__(self, python: str, sizes: dict[str, int]):
        words = [
            python,
            str(Path(__file__).with_name("peer_torch.py")),
            *(f"--{name}={value}" for name, value in sizes.items()),
        ]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.facts = self._answer()

    def _answer(self) -> dict:
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())

    def run(self, steps: int) -> float:
        assert self.process.stdin
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return self._answer()["ms"]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch-python", required=True, help="interpreter that has torch")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--remat", help="checkpoint policy, instead of auto")
    a = parser.parse_args()
    result = {}
    for name, (depth, width, length, batch, heads, goal) in CASES.items():
        if a.only not in (None, name):
            continue
        sizes = {"depth": depth, "width": width, "length": length, "batch": batch, "heads": heads}
        peer = Peer(a.torch_python, sizes)
        fields = {f"model.{k}": sizes[k] for k in ("depth", "width", "heads")} | {
            f"data.{k}": sizes[k] for k in ("length", "batch")
        }
        step = Step(fields | ({"model.remat": a.remat} if a.remat else {}))
        steps = max(2, round(1e3 * SECONDS_A_ROUND / step.run(3)))
        result[name] = {
            **pairs(
                lambda step=step, steps=steps: step.run(steps), lambda peer=peer, steps=steps: peer.run(steps), a.pairs
            ),
            "goal": goal,
            "remat": step.parts.remat,
            **peer.facts,
        }
        print(name, result[name], flush=True)
        peer.close()
    if not a.only and not a.remat:
        write("speed", {"what": "resjax ms / PyTorch ms a training step; below 1 is faster", "cases": result})


if __name__ == "__main__":
    main()
