"""What do the config files share? Sizes and training, said once; a file says what is its own."""

from resjax.config.tree import Section, default
from resjax.errors import not_one_of

VARIANTS = ("accelerator",)


def deep(scheme: str, variant: str | None = None) -> Section:
    """24 blocks of width 64 on the standard library's text, for a CPU with 2 cores; or the accelerator's size."""
    config = default()
    config.residual.name = scheme
    config.model.depth, config.model.width, config.model.heads = 24, 64, 4
    config.data.length, config.data.batch = 128, 16
    config.train.steps = 600
    config.train.eval_batches = 32
    if variant is not None:
        accelerator(config, variant)
    return config


def accelerator(config: Section, variant: str = "accelerator") -> None:
    """Width 1024, 8 heads x 128, SwiGLU 4096, length 1024, bfloat16 branches on a float32 stream; the depth stays.

    The batch is 2 sequences a chip on 8 chips: data.batch is that of all chips together.
    """
    if variant not in VARIANTS:
        raise not_one_of("the variant", variant, VARIANTS)
    config.model.width, config.model.heads = 1024, 8
    config.model.mlp, config.model.mlp_ratio, config.model.remat = "swiglu", 4.0, "auto"
    config.data.length, config.data.batch = 1024, 16
    config.precision.compute, config.precision.stream = "bfloat16", "float32"
    config.optimizer.lr = 3e-4
    config.train.steps = 10_000
    config.train.eval_every, config.train.save_every = 500, 500


def grid(variant: str | None = None) -> Section:
    """A cell of the ready-made grids: 12 blocks of width 32 on the Markov text, whose floors are known; or the accelerator's size."""
    config = default()
    config.data.source, config.data.length, config.data.batch = "markov", 32, 16
    config.model.depth, config.model.width, config.model.heads = 12, 32, 4
    config.train.steps, config.train.eval_every, config.train.eval_batches = 300, 50, 16
    if variant is not None:
        accelerator(config, variant)
    return config
