"""Where does the text come from? `load` names a source, `Pipeline` cuts it into batches."""

from resjax.data.baselines import Baselines, Floors
from resjax.data.corpus import Corpus
from resjax.data.pipeline import Pipeline, check_seed
from resjax.errors import Refused, nearest

__all__ = ["FORMS", "Baselines", "Corpus", "Floors", "Pipeline", "load"]

FORMS = ("stdlib", "markov", "files:PATH", "tfds:NAME[/CONFIG]")


def load(source: str, field: str | None = None, seed: int = 0) -> Corpus:
    """The corpus that `data.source` names; nothing is fetched from a network.

    Args:
      source: one of
        stdlib: the source of the running Python's standard library;
        markov: a synthetic text of known entropy (`markov.py`), the only source that depends on the seed;
        files:PATH: a file, a folder or a glob pattern;
        tfds:NAME[/CONFIG]: a TFDS set that was prepared as array_record before.
      field: data.field, the text feature of a TFDS set; None takes the first.
      seed: of the training text of `markov`; its law and its held-out text are the same for all seeds.

    Raises:
      Refused: for an unknown form, and for a source that is missing, empty or unreadable.
    """
    kind, colon, _ = source.partition(":")
    form = f"{kind}:" if colon else kind
    known = {form.partition(":")[0] + (":" if ":" in form else ""): form for form in FORMS}
    if form not in known:
        raise Refused(f"data.source is '{source}'; the forms are {', '.join(FORMS)}{nearest(form, known)}")
    if field is not None and form != "tfds:":
        raise Refused(
            f"data.field is '{field}', but data.source '{source}' has no features; only tfds:NAME takes data.field"
        )
    check_seed(seed)
    # imported here: TFDS takes half a second, which other sources and an early refusal need not
    if form == "markov":
        return _markov(seed)
    if form == "tfds:":
        from resjax.data import prepared

        return prepared.load(source, field)
    from resjax.data import texts

    text = texts.standard_library() if form == "stdlib" else texts.own_files(source)
    from resjax.data import builders

    return builders.load(text, builders.ResjaxStdlib if form == "stdlib" else builders.ResjaxFiles)


def _markov(seed: int) -> Corpus:
    from resjax.data import corpus, markov

    law = markov.law()
    return corpus.make(
        "markov",
        markov.sample(law, markov.TRAIN_SYMBOLS, seed),
        markov.sample(law, markov.HELD_OUT_SYMBOLS, markov.HELD_OUT_SEED),
        description=f"synthetic text of order two over {markov.VOCAB} symbols, training text drawn with seed {seed}",
        vocab=markov.VOCAB,
        floors=markov.floors(law),
    )
