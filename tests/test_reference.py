import json

import pytest

from focus.errors import UserError
from focus.paper import dominance
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


def test_logs_are_kept_where_they_hold_probes(tmp_path):
    """The figure of dominance is then drawn from what was kept."""
    step = {"step": 1, "phase": "everything", "loss": 2.0}
    probed = step | {"step": 2, "probe": {"steps": 1, "ends_phase": True, "layers": []}}
    for method, records in (("plain", [step, step]), ("probed", [step, probed])):
        log = tmp_path / f"results/training/m/c/{method}/seed0/log.jsonl"
        log.parent.mkdir(parents=True)
        log.write_text("".join(json.dumps(record) + "\n" for record in records))
    (kept,) = keep(tmp_path / "results", tmp_path / "reference")
    assert str(kept) == "training/m/c/probed/seed0/log.jsonl"
    assert dominance._probed(tmp_path / "reference" / kept, "probed") == [probed]


@pytest.mark.parametrize(("name", "size", "message"), [("x.txt", 1, "found none"), ("claims.json", 2**20 + 1, "bytes")])
def test_what_cannot_be_kept_leaves_the_old_reference(tmp_path, name, size, message):
    write(tmp_path / "results" / name, size)
    write(tmp_path / "reference/old.md")
    with pytest.raises(UserError, match=message):
        keep(tmp_path / "results", tmp_path / "reference")
    assert (tmp_path / "reference/old.md").exists()
