import pytest

from focus.errors import UserError
from focus.paper.reference import keep


def write(path, size=10):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)


def test_small_files_are_kept_and_weights_are_not(tmp_path):
    for name in ("tables/table1.md", "claims.json", "training/m/c/focus/seed0/result.json", "models/m.json"):
        write(tmp_path / "results" / name)
    write(tmp_path / "results/training/m/c/focus/seed0/weights/focus.json")
    write(tmp_path / "results/models/m/model.safetensors")
    write(tmp_path / "reference/old.md")
    keep(tmp_path / "results", tmp_path / "reference")
    kept = {str(path.relative_to(tmp_path / "reference")) for path in (tmp_path / "reference").rglob("*.*")}
    assert kept == {"tables/table1.md", "claims.json", "training/m/c/focus/seed0/result.json", "models/m.json"}


@pytest.mark.parametrize(("name", "size", "message"), [("x.txt", 1, "found none"), ("claims.json", 2**20 + 1, "bytes")])
def test_what_cannot_be_kept_leaves_the_old_reference(tmp_path, name, size, message):
    write(tmp_path / "results" / name, size)
    write(tmp_path / "reference/old.md")
    with pytest.raises(UserError, match=message):
        keep(tmp_path / "results", tmp_path / "reference")
    assert (tmp_path / "reference/old.md").exists()
