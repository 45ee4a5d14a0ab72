"""Does the loop write down what happened, and no more? Signals between two looks at them, steps that were passed over."""

import signal

import numpy as np

from resjax.train import assemble
from resjax.train.loop import Loop
from runs import health, quick, rows, run, steps, summary, tiny


def test_a_signal_between_two_looks_at_it_loses_no_row(tmp_path, monkeypatch):
    """It comes when the loop has decided that nothing is due after step 7, and before it asks whether to stop."""
    serve = Loop._serve

    def late(self: Loop, last: bool) -> None:
        if self.number == 7:
            self.signals.stop = signal.SIGTERM
        serve(self, last)

    monkeypatch.setattr(Loop, "_serve", late)
    with quick():
        assert run(tiny(tmp_path), tmp_path / "run") == 143
    assert rows(tmp_path / "run")[-1]["step"] == steps(tmp_path / "run")[-1] == 8


def test_an_overflow_of_the_loss_scale_is_no_finding(tmp_path, monkeypatch):
    """The gradients of such a step are infinite by design, and thrown away: they are no part of the run's health."""
    monkeypatch.setattr(assemble, "FIRST_DYNAMIC_SCALE", 2.0**24)
    half = {"precision__compute": "float16", "precision__loss_scale": "dynamic", "health__every": 1}
    with quick():
        assert run(tiny(tmp_path), tmp_path / "run", **half) == 0
    overflows = {row["step"] for row in rows(tmp_path / "run") if row.get("update_applied") is False}
    seen = health(tmp_path / "run")
    assert 1 in overflows and set(seen["steps"].tolist()) == set(range(1, 21)) - overflows
    assert np.all(np.isfinite(seen["stream_grad"]))
    assert "non-finite value" not in [finding["kind"] for finding in summary(tmp_path / "run")["health"]["findings"]]
