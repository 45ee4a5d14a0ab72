"""What do depth and probes cost? Probes at the default cadence, compile time at 10 and 1,000 blocks, memory a block under full remat.

python benchmarks/cost.py
"""

import statistics

import jax

from bench import Step, pairs, write

PROBED = {"health.groups": ("forward", "backward")}
SIZES = {
    "24x64x64x16": {"model.depth": 24, "model.width": 64, "model.heads": 2, "data.length": 64, "data.batch": 16},
    "12x256x256x8": {"model.depth": 12, "model.width": 256, "model.heads": 8, "data.length": 256, "data.batch": 8},
}
CADENCE = 10


def probes() -> dict:
    """Time of a step with probes in every tenth over the time of a step of a program without probes."""
    result = {}
    for name, size in SIZES.items():
        bare, probed = Step(size), Step(size | PROBED)
        steps = CADENCE * max(1, round(2e3 / bare.run(3) / CADENCE))
        result[name] = pairs(lambda p=probed, n=steps: p.run(n, CADENCE), lambda b=bare, n=steps: b.run(n)) | {
            "goal": 1.03
        }
        print(name, result[name], flush=True)
    return result


def compile_times() -> dict:
    """Trace and compile seconds of the step at 1,000 blocks over those at 10, medians of 5 in turn."""
    size = {"model.width": 32, "model.heads": 2, "data.length": 64, "data.batch": 4, **PROBED}
    seconds: dict[int, list[float]] = {10: [], 1000: []}
    for _ in range(5):
        for depth in seconds:
            seconds[depth].append(Step(size | {"model.depth": depth}).compile_seconds)
    medians = {depth: statistics.median(values) for depth, values in seconds.items()}
    return {
        "seconds": {str(k): round(v, 2) for k, v in medians.items()},
        "ratio": round(medians[1000] / medians[10], 3),
        "goal": 1.5,
    }


def memory() -> dict:
    """Temporary bytes a block under full remat, in arrays of (batch, length, width) float32, from depth 32 to 128."""
    batch, length, width = 4, 64, 64
    size = {"model.width": width, "model.heads": 2, "data.length": length, "data.batch": batch, "model.remat": "full"}
    temporary = {}
    for depth in (32, 128):
        step = Step(size | {"model.depth": depth})
        parameters = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(step.parts.abstract.params))
        temporary[depth] = step.compiled.memory_analysis().temp_size_in_bytes, parameters
    unit = batch * length * width * 4
    growth = (temporary[128][0] - temporary[32][0]) / 96 / unit
    gradient = (temporary[128][1] - temporary[32][1]) / 96 / unit
    return {
        "units_a_block": round(growth, 3),
        "of_which_gradient": round(gradient, 3),
        "stream": round(growth - gradient, 3),
        "goal": 1.15,
    }


if __name__ == "__main__":
    write("cost", {"memory": memory(), "compile": compile_times(), "probes": probes()})
