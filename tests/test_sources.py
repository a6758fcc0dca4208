"""Fetching: the first source that works, verified, shared by processes, never half there."""

import errno
import gzip
import hashlib
import lzma
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import pytest

from focus import cache, sources
from focus.cache import built, cache_root, damage, describe
from focus.errors import UserError
from focus.sources import DebianPackage, PackageArchive, Unreachable, fetch, member, members

CONTENT = b"weights" * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@dataclass(frozen=True)
class Fake(sources._Archive):
    """A source that writes `content`, or fails with it when it is an exception; notes each download in `notes`."""

    content: object = CONTENT
    notes: Path | None = None
    seconds: float = 0.0

    def __str__(self):
        return f"fake {self.package} {self.version}"

    def _download(self, folder):
        if self.notes:
            with open(self.notes, "a") as file:
                file.write("download\n")
        if isinstance(self.content, Exception):
            raise self.content
        with open(folder / self.filename, "wb") as file:
            file.write(self.content[: len(self.content) // 2])
            file.flush()
            time.sleep(self.seconds)
            file.write(self.content[len(self.content) // 2 :])


def fake(name="a", **settings):
    return Fake(name, "1", f"{name}.bin", DIGEST, **settings)


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("FOCUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FOCUS_ARCHIVES", raising=False)
    return tmp_path / "cache"


def leftovers(root):
    return [path for path in root.rglob("*") if ".part-" in path.name]


def test_cache_root_follows_the_environment(monkeypatch, tmp_path):
    assert cache_root() == tmp_path / "cache"
    monkeypatch.delenv("FOCUS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_root() == Path("/elsewhere/focus")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache/focus"


def test_first_reachable_source_wins_and_is_named(root):
    first, second = fake("a", content=Unreachable("is down")), fake("b")
    path, source = fetch([first, second, fake("c")])
    assert source == second
    assert path == root / "archives/b.bin"
    assert path.read_bytes() == CONTENT
    assert not (root / "archives/c.bin").exists()


def test_second_fetch_downloads_nothing(tmp_path):
    source = fake(notes=tmp_path / "notes")
    assert fetch([source])[0] == fetch([source])[0]
    assert (tmp_path / "notes").read_text() == "download\n"


def test_all_sources_failing_names_each_reason_in_one_line(root):
    with pytest.raises(UserError) as caught:
        fetch([fake("a", content=Unreachable("is down")), fake("b", content=b"other")])
    message = str(caught.value)
    assert "\n" not in message
    for part in (
        "fake a 1: is down",
        "fake b 1: b.bin has sha256",
        f"expected {DIGEST}",
        "FOCUS_ARCHIVES",
        "a.bin or b.bin",
    ):
        assert part in message
    assert not (root / "archives/b.bin").exists()
    assert not leftovers(root)


def test_truncated_cached_archive_is_fetched_again(root, tmp_path):
    source = fake(notes=tmp_path / "notes")
    path, _ = fetch([source])
    path.write_bytes(CONTENT[:100])
    assert fetch([source])[0].read_bytes() == CONTENT
    assert (tmp_path / "notes").read_text() == "download\n" * 2


def test_archives_the_user_provides_come_before_the_network(monkeypatch, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "b.bin").write_bytes(CONTENT)
    monkeypatch.setenv("FOCUS_ARCHIVES", str(folder))
    source = fake("b", notes=tmp_path / "notes")
    assert fetch([fake("a", notes=tmp_path / "notes"), source]) == (folder / "b.bin", source)
    assert not (tmp_path / "notes").exists()


def test_a_bad_provided_archive_is_named_and_not_used(monkeypatch, tmp_path):
    (tmp_path / "a.bin").write_bytes(b"cut")
    monkeypatch.setenv("FOCUS_ARCHIVES", str(tmp_path))
    with pytest.raises(UserError, match=rf"FOCUS_ARCHIVES {tmp_path}: a.bin has sha256"):
        fetch([fake(content=Unreachable("is down"))])


def test_a_whole_cache_needs_no_writing(monkeypatch):
    path, source = fetch([fake()])
    monkeypatch.setattr(sources, "locked", lambda target: pytest.fail("took a lock"))
    monkeypatch.setattr(cache, "locked", lambda target: pytest.fail("took a lock"))
    assert fetch([source]) == (path, source)


def test_a_cache_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FOCUS_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=rf"{tmp_path}/file/archives: cannot write to the cache \(Not a directory\)"):
        fetch([fake()])


def test_a_full_disk_is_named_and_leaves_nothing(root):
    with pytest.raises(UserError, match=r"archives/a\.bin: cannot write to the cache \(No space left on device\)"):
        fetch([fake(content=OSError(errno.ENOSPC, "No space left on device")), fake("b")])
    assert not leftovers(root)


def test_a_downloader_that_fills_the_disk_does_not_pass_for_an_unreachable_source(tmp_path):
    script = "import sys; sys.exit('OSError: [Errno 28] No space left on device')"
    with pytest.raises(OSError, match="No space left") as caught:
        sources._run([sys.executable, "-c", script], tmp_path, "x")
    assert caught.value.errno == errno.ENOSPC


def test_a_failing_downloader_gives_its_last_error(tmp_path):
    script = "import sys; print('ERROR: no such version\\nbye'); sys.exit(3)"
    with pytest.raises(Unreachable, match=r"^no such version$"):
        sources._run([sys.executable, "-c", script], tmp_path, "x")
    with pytest.raises(Unreachable, match="no-such-program is not installed"):
        sources._run(["no-such-program"], tmp_path, "x")


SLOW = """
import sys
sys.path.insert(0, {tests!r})
from test_sources import fake, fetch
from pathlib import Path
path, _ = fetch([fake(notes=Path({notes!r}), seconds={seconds})])
print(path)
"""


def start(tmp_path, seconds):
    script = SLOW.format(tests=str(Path(__file__).parent), notes=str(tmp_path / "notes"), seconds=seconds)
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_parallel_processes_share_one_download(tmp_path):
    processes = [start(tmp_path, 1.0) for _ in range(3)]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert len({output.splitlines()[-1] for output in outputs}) == 1
    assert (tmp_path / "notes").read_text() == "download\n"


def test_a_killed_download_is_redone_and_leaves_nothing(root, tmp_path):
    process = start(tmp_path, 60.0)
    wait_for(lambda: any(path.suffix == ".bin" and path.stat().st_size for path in root.rglob(".a.bin.part-*/*")))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert leftovers(root)
    assert not (root / "archives/a.bin").exists()
    path, _ = fetch([fake()])
    assert path.read_bytes() == CONTENT
    assert not leftovers(root)


def test_built_folder_is_whole_or_absent(root):
    calls = []

    def make(folder):
        calls.append(folder)
        (folder / "one.txt").write_text("one")
        if len(calls) == 1:
            raise RuntimeError("cut")
        return {"fact": 1}

    with pytest.raises(RuntimeError):
        built("things/x", make)
    assert not (root / "things/x").exists()
    assert not leftovers(root)
    record = built("things/x", make)
    assert record == {"fact": 1, "files": {"one.txt": {"size": 3, "sha256": hashlib.sha256(b"one").hexdigest()}}}
    assert built("things/x", make) == record
    assert len(calls) == 2
    (root / "things/x/one.txt").write_text("two")
    assert built("things/x", make) == record
    assert (root / "things/x/one.txt").read_text() == "one"


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (lambda path: path.unlink(), "expected a file of 3 bytes, found none"),
        (lambda path: path.write_text("on"), "expected 3 bytes, got 2"),
        (lambda path: path.write_text("two"), "expected sha256"),
    ],
)
def test_damage_names_the_file_and_both_values(tmp_path, harm, expected):
    (tmp_path / "one.txt").write_text("one")
    files = describe(tmp_path)
    assert damage(tmp_path, files) is None
    harm(tmp_path / "one.txt")
    assert f"{tmp_path}/one.txt: {expected}" in damage(tmp_path, files)


def test_large_files_are_hashed_only_on_demand(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "ALWAYS_HASHED", 2)
    (tmp_path / "one.txt").write_text("one")
    files = describe(tmp_path)
    (tmp_path / "one.txt").write_text("two")
    assert damage(tmp_path, files) is None
    assert "sha256" in damage(tmp_path, files, thorough=True)


def ar(*entries):
    archive = b"!<arch>\n"
    for name, content in entries:
        archive += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode() + content
        archive += b"\n" * (len(content) % 2)
    return archive


def test_members_of_every_kind_of_archive_and_of_a_folder(tmp_path):
    files = {"pack/a.txt": b"A", "pack/sub/b.txt": b"BB", "pack/c.bin": b"C"}
    folder, wheel, debian = tmp_path / "folder", tmp_path / "x.whl", tmp_path / "x.deb"
    data = BytesIO()
    with zipfile.ZipFile(wheel, "w") as archive, tarfile.open(fileobj=data, mode="w:xz") as tar:
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
            archive.writestr(name, content)
            tar.add(folder / name, f"./{name}")
    debian.write_bytes(ar(("debian-binary", b"2.0\n"), ("control.tar.xz", b"odd"), ("data.tar.xz", data.getvalue())))
    source = tmp_path / "x.tar.gz"
    source.write_bytes(gzip.compress(lzma.decompress(data.getvalue())))
    for path in (folder, wheel, debian, source):
        found = {name.removeprefix("./"): content for name, content in members(path, "*.txt")}
        assert found == {"pack/a.txt": b"A", "pack/sub/b.txt": b"BB"}
        assert member(path, "*/c.bin", "absent") == b"C"
        with pytest.raises(UserError, match=r"expected one file like \*.txt, found 2"):
            member(path, "*.txt")


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb to build a package")
def test_members_of_a_package_built_by_dpkg(tmp_path):
    (tmp_path / "tree/DEBIAN").mkdir(parents=True)
    (tmp_path / "tree/usr").mkdir()
    (tmp_path / "tree/usr/text").write_bytes(b"hello")
    (tmp_path / "tree/DEBIAN/control").write_text(
        "Package: x\nVersion: 1\nArchitecture: all\nMaintainer: x <x@example.org>\nDescription: x\n"
    )
    command = ["dpkg-deb", "-Zxz", "--root-owner-group", "-b", tmp_path / "tree", tmp_path / "x.deb"]
    subprocess.run(command, check=True, capture_output=True)
    assert dict(members(tmp_path / "x.deb", "*")) == {"./usr/text": b"hello"}


@pytest.mark.parametrize(("filename", "option"), [("x-1.whl", "--only-binary=:all:"), ("x-1.tar.gz", "--no-binary=x")])
def test_pip_is_asked_for_the_kind_of_archive_that_is_pinned(monkeypatch, tmp_path, filename, option):
    commands = []
    monkeypatch.setattr(sources, "_run", lambda command, folder, what: commands.append(command))
    PackageArchive("x", "1", filename, DIGEST)._download(tmp_path)
    assert [part for part in commands[0] if "binary" in part] == [option]
    assert (tmp_path / "requirement.txt").read_text() == f"x==1 --hash=sha256:{DIGEST}\n"


def test_unknown_version_of_a_real_package_is_unreachable():
    source = PackageArchive("pip", "0.0.0.dev999", "pip-0.0.0.dev999-py3-none-any.whl", "0" * 64)
    with pytest.raises(UserError, match=r"PyPI pip 0\.0\.0\.dev999: No matching distribution found"):
        fetch([source])


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt-get")
def test_unknown_debian_package_is_unreachable(root):
    with pytest.raises(UserError, match="Debian no-such-package-x 1: "):
        fetch([DebianPackage("no-such-package-x", "1", "no-such-package-x_1_all.deb", "0" * 64)])
    assert not leftovers(root)
