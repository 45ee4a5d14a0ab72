"""How does the whole suite run? On the CPU, with strict dtype promotion, and with NNX graph mode off where asked.

RESJAX_TEST_GRAPH_MODE=0 runs everything with modules as plain pytrees, which Flax is moving to. Both ways must pass.
"""

import os
import shutil
import subprocess

os.environ["JAX_PLATFORMS"] = "cpu"  # also for the commands that tests start

import jax
import pytest
from flax import nnx

from kit import make

jax.config.update("jax_numpy_dtype_promotion", "strict")  # a silent bfloat16 -> float32 is the fault we look for most
if os.environ.get("RESJAX_TEST_GRAPH_MODE") == "0":
    nnx.set_graph_mode(False)
    nnx.set_graph_updates(False)


@pytest.fixture(scope="session")
def make_model():
    """``make_model(scheme, **shape)``: a small language model, all parameters away from their start; see kit.make."""
    return make


@pytest.fixture(scope="module")
def quick():
    """Runs compile quickly and once; see runs.quick."""
    # Imported here: resjax.train.quiet wraps the hook for unraisable errors, and would come before pytest's own.
    import runs

    with runs.quick():
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The file of a small run with everything random in it."""
    import runs

    return runs.tiny(tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """The file of a small run without chance, and with positions that fit any length."""
    import runs

    return runs.calm(tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="module")
def quickly():
    """Programs that are used once are compiled quickly."""
    was = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", was)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB (root only), and how to make it larger."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        yield place, lambda: subprocess.run(["mount", "-o", "remount,size=64m", str(place)], check=True)
    finally:
        subprocess.run(["umount", str(place)], check=True)
