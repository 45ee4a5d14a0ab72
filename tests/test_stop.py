"""Is a stop complete, whenever its signal arrives? What is saved of the last step, and what is written of it."""

import signal

from runs import quick, rows, run, steps, tiny

from resjax.train.loop import Loop


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
