"""Probe arrays on disk: nothing lost, nothing rewritten, nothing half-written taken for whole."""

import os

import numpy as np
import pytest

from resjax.health.record import HealthRecord, Stream, drop_after, site_names


def fill(record, steps, depth=3):
    for step in steps:
        record.append(
            step,
            {
                "update_ratio": np.full((depth, 2), step, np.float64),
                "update_ratio_block": np.zeros(depth),
                "moved": step / 10,
            },
        )


def save(folder, *groups, depth=3):
    for steps in groups:
        record = HealthRecord()
        fill(record, steps, depth)
        record.flush(folder)


def test_rows_come_back_as_appended(tmp_path):
    record = HealthRecord()
    fill(record, [0, 10])
    path = record.flush(tmp_path / "health")
    assert path is not None and path.name == "00000000-00000010.npz"
    fill(record, [20])
    record.flush(tmp_path / "health")
    read = HealthRecord.load(tmp_path / "health")
    assert read.steps.tolist() == [0, 10, 20] and read.notes == [] and len(read) == 3
    assert read["update_ratio"].shape == (3, 3, 2) and read["update_ratio"].dtype == np.float32
    assert read["update_ratio"][:, 0, 0].tolist() == [0, 10, 20]
    np.testing.assert_allclose(read["moved"], [0, 1, 2])
    assert set(read) == {"update_ratio", "update_ratio_block", "moved"} and "swallowed" not in read


def test_what_a_stream_is_comes_back_wherever_a_record_is_cut(tmp_path):
    save(tmp_path, [0, 1])
    assert HealthRecord.load(tmp_path).stream == (0, "")
    for steps, stream in (([2, 3], Stream(16, "float32")), ([4, 5], Stream(0, "bfloat16")), ([6], Stream())):
        record = HealthRecord(stream=stream)
        fill(record, steps)
        record.flush(tmp_path)
    read = HealthRecord.load(tmp_path)
    assert read.stream == read.until(1).stream == (16, "bfloat16") and not read.notes
    assert set(read) == {"update_ratio", "update_ratio_block", "moved"}
    drop_after(tmp_path, 2)
    assert HealthRecord.load(tmp_path, {"moved"}).stream == (16, "float32")


def test_only_the_named_arrays_are_read(tmp_path):
    save(tmp_path, [0, 1])
    assert set(HealthRecord.load(tmp_path, {"moved"})) == {"moved"}


def test_flush_leaves_old_chunks_alone_and_writes_nothing_for_nothing(tmp_path):
    save(tmp_path, [0, 1])
    first = tmp_path / "00000000-00000001.npz"
    before = (first.read_bytes(), first.stat().st_mtime_ns)
    save(tmp_path, [2, 3])
    assert (first.read_bytes(), first.stat().st_mtime_ns) == before
    assert HealthRecord().flush(tmp_path) is None and len(list(tmp_path.iterdir())) == 2


def test_rows_before_the_flush_can_be_read(tmp_path):
    record = HealthRecord()
    fill(record, [5, 7])
    assert record.steps.tolist() == [5, 7] and record["moved"].shape == (2,) and record.recorded("moved").all()
    with pytest.raises(KeyError):
        record["swallowed"]


@pytest.mark.parametrize("value", [np.float16(1.5), 1.5, np.array([[1.5]]), np.float32("nan"), 1e300])
def test_any_real_dtype_is_kept_as_float32(value):
    record = HealthRecord()
    record.append(0, {"x": value})
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(record["x"][0], np.float32(value))


def test_bfloat16_is_kept_too():
    import ml_dtypes

    record = HealthRecord()
    record.append(0, {"x": np.array([0.5, 3.0], ml_dtypes.bfloat16)})
    assert record["x"].tolist() == [[0.5, 3.0]]


def test_a_row_is_a_copy():
    record, array = HealthRecord(), np.zeros((2, 2), np.float32)
    record.append(0, {"x": array})
    array += 1
    assert (record["x"] == 0).all()


def test_rows_that_do_not_follow_are_refused():
    record = HealthRecord()
    fill(record, [10])
    with pytest.raises(ValueError, match="step 10 does not follow step 10"):
        fill(record, [10])
    with pytest.raises(ValueError, match="other names or shapes"):
        record.append(20, {"update_ratio": np.zeros((3, 1))})


def test_a_failed_write_leaves_nothing_behind_and_keeps_the_rows(tmp_path, monkeypatch):
    record = HealthRecord()
    fill(record, [0, 1])

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        record.flush(tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    record.flush(tmp_path)
    assert HealthRecord.load(tmp_path).steps.tolist() == [0, 1]


def test_truncated_chunk_and_unfinished_file_are_skipped_with_a_line_each(tmp_path):
    save(tmp_path, [0, 1], [2, 3], [4, 5])
    middle = tmp_path / "00000002-00000003.npz"
    middle.write_bytes(middle.read_bytes()[:-100])
    (tmp_path / "00000006-00000007.npz.tmp").write_bytes(b"PK half")
    (tmp_path / "00000008-00000009.npz").write_bytes(b"")
    read = HealthRecord.load(tmp_path)
    assert read.steps.tolist() == [0, 1, 4, 5]
    assert [note.split(":")[0] for note in read.notes] == [
        "00000006-00000007.npz.tmp",
        "00000002-00000003.npz",
        "00000008-00000009.npz",
    ]
    assert all("\n" not in note and "skipped" in note for note in read.notes)


def test_corrupted_bytes_inside_a_chunk_are_noticed(tmp_path):
    save(tmp_path, [0, 1], [2, 3])
    path = tmp_path / "00000002-00000003.npz"
    data = bytearray(path.read_bytes())
    data[300] ^= 0xFF
    path.write_bytes(bytes(data))
    read = HealthRecord.load(tmp_path)
    assert read.steps.tolist() == [0, 1] and len(read.notes) == 1


def test_missing_folder_is_an_empty_record(tmp_path):
    read = HealthRecord.load(tmp_path / "nothing")
    assert len(read) == 0 and list(read) == [] and read.steps.tolist() == []


def test_a_probe_that_is_switched_on_later_is_nan_before(tmp_path):
    save(tmp_path, [0, 1])
    record = HealthRecord()
    record.append(2, {"swallowed": np.ones((3, 2))})
    record.flush(tmp_path)
    read = HealthRecord.load(tmp_path)
    assert read.recorded("swallowed").tolist() == [False, False, True] and read.recorded("moved").tolist() == [
        True,
        True,
        False,
    ]
    assert np.isnan(read["swallowed"][:2]).all() and (read["swallowed"][2] == 1).all()


def test_a_chunk_of_another_model_is_skipped(tmp_path):
    save(tmp_path, [0, 1])
    save(tmp_path, [2, 3], depth=4)
    read = HealthRecord.load(tmp_path)
    assert read.steps.tolist() == [0, 1] and "shape (4, 2), not (3, 2)" in read.notes[0]


@pytest.mark.parametrize(("step", "kept"), [(100, [0, 1, 2, 3, 4, 5]), (3, [0, 1, 2, 3]), (2, [0, 1, 2]), (-1, [])])
def test_rows_after_the_restored_step_are_dropped(tmp_path, step, kept):
    save(tmp_path, [0, 1], [2, 3], [4, 5])
    (tmp_path / "00000006-00000007.npz.tmp").write_bytes(b"half")
    first = (tmp_path / "00000000-00000001.npz").stat().st_mtime_ns
    assert drop_after(tmp_path, step) == []
    read = HealthRecord.load(tmp_path)
    assert read.steps.tolist() == kept and read.notes == []
    if kept:
        assert (tmp_path / "00000000-00000001.npz").stat().st_mtime_ns == first
        assert read["update_ratio"][:, 0, 0].tolist() == kept


def test_dropping_survives_a_crash_between_the_cut_and_the_removal(tmp_path, monkeypatch):
    save(tmp_path, [0, 1, 2, 3])
    monkeypatch.setattr("pathlib.Path.unlink", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        drop_after(tmp_path, 1)
    monkeypatch.undo()
    assert HealthRecord.load(tmp_path).steps.tolist() == [0, 1, 2, 3]  # rows found twice count once
    drop_after(tmp_path, 1)
    assert HealthRecord.load(tmp_path).steps.tolist() == [0, 1] and len(list(tmp_path.iterdir())) == 1


def test_an_unreadable_chunk_is_left_as_it_is(tmp_path):
    save(tmp_path, [0, 1, 2, 3])
    path = tmp_path / "00000000-00000003.npz"
    path.write_bytes(path.read_bytes()[:50])
    notes = drop_after(tmp_path, 1)
    assert len(notes) == 1 and "left as it is" in notes[0] and path.exists()


def test_a_deep_record_is_written_without_rewriting(tmp_path):
    record, sizes = HealthRecord(), []
    row = {
        name: np.random.default_rng(0).random((1000, 2), np.float32)
        for name in ("update_ratio", "stream_rms", "stream_grad")
    }
    for chunk in range(4):
        for i in range(25):
            record.append(25 * chunk + i, row)
        path = record.flush(tmp_path)
        assert path is not None
        sizes.append(path.stat().st_size)
    assert max(sizes) < 1.01 * 25 * 3 * 2000 * 4 and len(HealthRecord.load(tmp_path, {"stream_rms"})) == 100


def test_names_of_sites():
    assert (
        site_names(2) == ("attention", "mlp")
        and site_names(1) == ("block",)
        and site_names(3) == ("site 0", "site 1", "site 2")
    )


# ---- arrays by role


def by_role(folder, steps, roles=("q", "write"), **more):
    record = HealthRecord(roles=roles)
    for step in steps:
        record.append(step, {"role_grad": np.full((3, len(roles)), step), "moved": 1.0} | more)
    record.flush(folder)


def test_names_of_roles_come_back_and_survive_a_cut(tmp_path):
    by_role(tmp_path, [0, 10, 20])
    read = HealthRecord.load(tmp_path)
    assert read.roles == ("q", "write") and set(read) == {"role_grad", "moved"} and not read.notes
    assert read.axis_names("role_grad", 2) == ("q", "write")
    assert drop_after(tmp_path, 10) == []
    cut = HealthRecord.load(tmp_path)
    assert cut.roles == ("q", "write") and cut["role_grad"][:, 0, 1].tolist() == [0, 10]


def test_a_chunk_without_arrays_by_role_names_none(tmp_path):
    record = HealthRecord(roles=("q", "write"))
    fill(record, [0])
    path = record.flush(tmp_path)
    assert "roles" not in np.load(path).files
    assert HealthRecord.load(tmp_path).roles == ()


def test_chunks_from_before_and_arrays_unheard_of_load(tmp_path):
    """Groups may be switched on between sessions; what a later version adds is an array like any other."""
    save(tmp_path, [0, 1])
    by_role(tmp_path, [2, 3], novelty=np.ones((3, 5)))
    read = HealthRecord.load(tmp_path)
    assert read.steps.tolist() == [0, 1, 2, 3] and not read.notes and read.roles == ("q", "write")
    assert read.recorded("role_grad").tolist() == [False, False, True, True] and np.isnan(read["role_grad"][:2]).all()
    assert read["novelty"].shape == (4, 3, 5)
    assert HealthRecord().axis_names("role_grad", 3) == ("role 0", "role 1", "role 2"), "names that were lost"


def test_other_roles_are_not_taken_for_the_same(tmp_path):
    by_role(tmp_path, [0])
    by_role(tmp_path, [1], ("k", "v"))
    read = HealthRecord.load(tmp_path)
    assert read.steps.tolist() == [0] and "its roles are k, v, not q, write" in read.notes[0]


def test_the_record_up_to_a_step_keeps_what_was_not_recorded(tmp_path):
    record = HealthRecord(("mixer",))
    for step in (1, 2):
        record.append(step, {"stream_rms": np.ones((2, 1))})
    record.flush(tmp_path)
    record = HealthRecord(("mixer",))
    for step in (3, 4):
        record.append(step, {"stream_rms": np.ones((2, 1)), "stream_grad": np.ones((2, 1))})
    record.flush(tmp_path)
    cut = HealthRecord.load(tmp_path).until(3)
    assert cut.steps.tolist() == [1, 2, 3] and cut.sites == ("mixer",) and set(cut) == {"stream_rms", "stream_grad"}
    assert cut.recorded("stream_grad").tolist() == [False, False, True] and cut.recorded("stream_rms").all()
    assert HealthRecord.load(tmp_path).until(2).recorded("stream_grad").tolist() == [False, False]
