"""Are papers cited as they are? Every number of arXiv in what is said of runs, with its author and year, is one that was looked up."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLACES = [
    ROOT / place
    for place in ("resjax/health", "resjax/propagation", "docs/doctor.md", "docs/probes.md", "docs/propagation.md")
]
# number: authors and year as cited (of the conference where that is the usual one), and what the paper is.
SOURCES = {
    "1211.5063": ("Pascanu et al. 2013", "On the difficulty of training recurrent neural networks: clips the gradient's norm"),
    "1312.6120": ("Saxe et al. 2014", "Exact solutions to the nonlinear dynamics of learning in deep linear neural networks"),
    "1603.05027": ("He et al. 2016", "Identity mappings in deep residual networks"),
    "1605.06431": ("Veit et al. 2016", "Residual networks behave like ensembles: blocks taken out, and reordered"),
    "1606.05340": ("Poole et al. 2016", "Exponential expressivity in deep neural networks through transient chaos"),
    "1610.01644": ("Alain and Bengio 2016", "Understanding intermediate layers using linear classifier probes"),
    "1711.04735": ("Pennington et al. 2017", "Resurrecting the sigmoid through dynamical isometry"),
    "1712.08969": ("Yang and Schoenholz 2017", "Mean field residual networks: on the edge of chaos"),
    "1812.06162": ("McCandlish et al. 2018", "An empirical model of large-batch training: gradient noise scale"),
    "1901.09321": ("Zhang et al. 2019", "Fixup"),
    "1905.00414": ("Kornblith et al. 2019", "Similarity of neural network representations revisited: linear CKA"),
    "1905.12322": ("Kalamkar et al. 2019", "A study of BFLOAT16 for deep learning training: the range is float32's"),
    "2002.04745": ("Xiong et al. 2020", "On layer normalization in the Transformer architecture: warm-up, gradients"),
    "2002.10444": ("De and Smith 2020", "Batch normalization biases residual blocks towards the identity: SkipInit"),
    "2003.04887": ("Bachlechner et al. 2020", "ReZero is all you need"),
    "2004.08249": ("Liu et al. 2020", "Understanding the difficulty of training Transformers: Admin"),
    "2010.04245": ("Henry et al. 2020", "Query-key normalization for Transformers: a softmax that saturates less"),
    "2103.03404": ("Dong et al. 2021", "Attention is not all you need: residual norm, collapse without skips"),
    "2103.17239": ("Touvron et al. 2021", "Going deeper with image Transformers: LayerScale"),
    "2105.13290": ("Ding et al. 2021", "CogView: Sandwich-LN"),
    "2110.04369": ("Gilmer et al. 2021", "A loss curvature perspective on training instability: warm-up"),
    "2203.00555": ("Wang et al. 2022", "DeepNet: DeepNorm, and bounds on the model's update"),
    "2206.03126": ("Noci et al. 2022", "Signal propagation in Transformers: rank collapse, vanishing gradients of queries and keys"),
    "2302.05442": ("Dehghani et al. 2023", "ViT-22B: a loss that diverges with large attention logits, normalised queries and keys"),
    "2303.06296": ("Zhai et al. 2023", "Attention entropy collapse: low entropy goes with a loss that oscillates or diverges"),
    "2304.13013": ("Wortsman et al. 2023", "Loss spikes follow squared gradients that AdamW's second moment underestimates"),
    "2309.14322": ("Wortsman et al. 2023", "Small-scale proxies for large-scale Transformer training instabilities"),
    "2310.04415": ("Andriushchenko et al. 2023", "Why do we need weight decay in modern deep learning: no sudden divergence in bfloat16"),
    "2402.17762": ("Sun et al. 2024", "Massive activations: above 100, and about 1,000 times the median"),
    "2403.03853": ("Men et al. 2024", "ShortGPT: block influence"),
    "2403.17887": ("Gromov et al. 2024", "The unreasonable ineffectiveness of the deeper layers: angular distance"),
    "2409.19606": ("Zhu et al. 2024", "Hyper-Connections"),
    "2410.01131": ("Loshchilov et al. 2024", "nGPT"),
    "2412.13795": ("Li et al. 2024", "Mix-LN"),
    "2502.02732": ("Kim et al. 2025", "Peri-LN"),
    "2502.05795": ("Sun et al. 2025", "The curse of depth: layer-norm scaling"),
    "2601.19895": ("Keel 2026", "Post-LN with a highway-like skip"),
    "2603.15031": ("Kimi team 2026", "Attention residuals"),
}  # fmt: skip
NUMBER = re.compile(r"(?<![\d.])\d{4}\.\d{4,5}(?![\d.])")
JOIN = re.compile(r"\"\s*\n\s*f?\"|\s*\n\s*(?:# )?")  # between the parts of a text, or its lines


def files() -> list[Path]:
    return [file for place in PLACES for file in ([place] if place.is_file() else sorted(place.rglob("*.py")))]


@pytest.mark.parametrize("file", files(), ids=lambda file: str(file.relative_to(ROOT)))
def test_papers_are_cited_by_author_and_year_as_they_are_known(file):
    text = JOIN.sub(lambda found: "" if '"' in found[0] else " ", file.read_text())
    for found in NUMBER.finditer(text):
        assert found[0] in SOURCES, f"{found[0]}: look the paper up, and add it here"
        author, _ = SOURCES[found[0]]
        assert re.search(rf"{re.escape(author)}[ ,(]+$", text[: found.start()]), f"{found[0]} is {author}"


def test_no_source_is_listed_that_nobody_cites():
    cited = {number for file in files() for number in NUMBER.findall(file.read_text())}
    assert cited >= SOURCES.keys()
