"""Where files go: what is refused before anything is run, and what is made only when there is something to save."""

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from gradengine.errors import CallerError
from gradengine.options import print_or_save, refuse_bad_plot, save, writable_json


def test_what_can_be_written_is_left_as_it_is_before_the_run(tmp_path):
    new, old = tmp_path / "far" / "away" / "loss.png", tmp_path / "old.png"
    old.write_bytes(b"a picture")
    refuse_bad_plot(new)
    refuse_bad_plot(old)
    assert writable_json(old) == old
    assert (list(tmp_path.iterdir()), old.read_bytes()) == ([old], b"a picture")


def test_a_plot_that_cannot_be_saved_is_refused(tmp_path):
    with pytest.raises(CallerError, match=r"cannot write .*: it is a folder; pass another --plot FILE"):
        refuse_bad_plot(tmp_path)
    with pytest.raises(CallerError, match=r"cannot plot to .*: got '\.doc', expected one of .*png"):
        refuse_bad_plot(tmp_path / "loss.doc")
    (tmp_path / "file").touch()
    with pytest.raises(CallerError, match="file' is not a folder"):
        refuse_bad_plot(tmp_path / "file" / "loss.png")


def test_a_file_s_folder_is_made_with_it(tmp_path):
    print_or_save("{}", tmp_path / "new" / "run.json")
    assert (tmp_path / "new" / "run.json").read_text() == "{}\n"


def test_a_system_that_refuses_is_an_error_of_the_option(tmp_path):
    def fails(path):
        raise OSError(28, "No space left on device")

    with pytest.raises(CallerError, match=r"cannot write .*: No space left on device; pass another --plot FILE"):
        save(tmp_path / "loss.png", "--plot", fails)
