# SPDX-License-Identifier: Apache-2.0
"""The pinned releases and the download of their wheels."""

from __future__ import annotations

import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version

from maxpatch.errors import ReleaseError
from maxpatch.release import Releases, WheelPin, fetch, host_platform, sha256_of
from tests.maxpatch import toy as made
from tests.maxpatch.toy import Toy


def pin_of(path: Path) -> WheelPin:
    """Returns the pin of a wheel as it is."""
    return WheelPin.parse(path.name, sha256_of(path))


@pytest.fixture
def index(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An index on a loopback port that serves the toy's wheels; its folder."""
    folder = toy.root.parent / "index/simple/max"
    folder.mkdir(parents=True)
    for path in (toy.root / "build/work/downloads").iterdir():
        shutil.copy(path, folder)
    links = "".join(
        f'<a href="{p.name}">{p.name}</a>' for p in folder.iterdir()
    )
    (folder / "index.html").write_text(links)
    other = folder.with_name("max-mojo-libs")
    other.mkdir()
    (other / "index.html").write_text(links.replace('href="', 'href="../max/'))

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0),
        functools.partial(Handler, directory=folder.parents[1]),
    )
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}/simple"
    monkeypatch.setenv("PIP_INDEX_URL", url)
    yield folder
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("filename", "python", "platform"),
    [
        (
            "max-26.7.0-cp311-cp311-manylinux_2_34_x86_64.whl",
            "3.11",
            "linux-x86_64",
        ),
        (
            "max-26.7.0-cp314-cp314-manylinux_2_34_aarch64.whl",
            "3.14",
            "linux-aarch64",
        ),
        ("max-26.7.0-cp310-cp310-macosx_13_0_arm64.whl", "3.10", "macos-arm64"),
        ("max-26.7.0-cp310-cp310-win_amd64.whl", "3.10", "win_amd64"),
    ],
)
def test_pin_knows_python_and_platform(
    filename: str, python: str, platform: str
) -> None:
    """Python and platform of a wheel come from its file name."""
    pin = WheelPin.parse(filename, "")
    assert (pin.python, pin.platform) == (python, platform)


@pytest.mark.parametrize("name", ["max-1.whl", "max-1.0-py2.py3-none-any.whl"])
def test_pin_must_name_a_wheel_with_one_tag(name: str) -> None:
    """A name that isn't a wheel's, or has several tags, is refused."""
    with pytest.raises(ValueError):
        WheelPin.parse(name, "")


@pytest.mark.parametrize(
    ("system", "machine", "platform"),
    [
        ("Linux", "x86_64", "linux-x86_64"),
        ("Darwin", "arm64", "macos-arm64"),
    ],
)
def test_host_platform_is_named_as_pins_are(
    system: str, machine: str, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host has the name that its wheels have."""
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert host_platform() == platform


def test_table_is_read(toy: Toy) -> None:
    """A row becomes a release with its wheels."""
    releases = toy.project.releases()
    release = releases.get(None)
    assert release is releases.get("1.0")
    assert release.version == Version("1.0")
    assert release.mojo_compiler == made.MOJO_COMPILER
    assert release.upstream_tag == "v1.0"
    assert release.redistributable
    assert not releases.get("2.0").redistributable
    pin = release.wheel(made.host_python(), made.FOREIGN)
    assert pin == pin_of(toy.base())
    assert release.mojo_libs == pin_of(toy.base_libraries())
    assert release.source_commits == ""


def test_committed_table_is_sound() -> None:
    """Our own table has, for every release, each Python on each platform."""
    root = Path(__file__).parents[2]
    releases = Releases.load(root / "build/releases.toml")
    assert releases.default in releases.rows
    for release in releases.rows.values():
        pins = release.wheels
        assert len({(p.python, p.platform) for p in pins}) == len(pins) == 15
        assert {len(pin.sha256) for pin in pins} == {64}
        assert len({pin.sha256 for pin in pins}) == len(pins)
        assert all(f"max-{release.version}-" in p.filename for p in pins)
        libraries = release.mojo_libs
        assert f"max_mojo_libs-{release.version}-" in libraries.filename
        assert libraries.platform == "any"
        assert len(libraries.sha256) == 64


def test_missing_wheel_names_what_there_is(toy: Toy) -> None:
    """A Python or platform without a wheel gets the list of those with one."""
    with pytest.raises(ReleaseError) as caught:
        toy.project.releases().get("1.0").wheel("3.9", "win-amd64")
    message = str(caught.value)
    assert "Python 3.9 on win-amd64" in message
    assert f"one of {made.host_python()} on " in message
    assert made.FOREIGN in message and made.PLATFORM in message


def test_download_is_checked_and_kept(toy: Toy, index: Path) -> None:
    """A wheel comes from the user's index, once, and leaves nothing else."""
    pin = pin_of(toy.base())
    cache = toy.root.parent / "cache"
    path = fetch(pin, cache, offline=False)
    assert sha256_of(path) == pin.sha256
    assert [p.name for p in cache.iterdir()] == [pin.filename]
    shutil.rmtree(index)
    assert fetch(pin, cache, offline=False) == path
    assert fetch(pin, cache, offline=True) == path


def test_wheel_for_every_machine_is_downloaded_too(
    toy: Toy, index: Path
) -> None:
    """The Mojo packages' wheel comes from the index under its own name."""
    pin = pin_of(toy.base_libraries())
    path = fetch(pin, toy.root.parent / "cache", offline=False)
    assert sha256_of(path) == pin.sha256


def test_download_with_another_digest_is_refused(toy: Toy, index: Path) -> None:
    """What the index serves under the name must be the pinned file."""
    pin = pin_of(toy.base())
    served = index / pin.filename
    served.write_bytes(served.read_bytes() + b"\0")
    cache = toy.root.parent / "cache"
    with pytest.raises(ReleaseError, match=r"cannot download max-1.0"):
        fetch(pin, cache, offline=False)
    assert list(cache.iterdir()) == []


def test_wheel_that_left_the_index_is_named(toy: Toy, index: Path) -> None:
    """A release that the index no longer has is a clear error."""
    pin = pin_of(toy.base())
    (index / "index.html").write_text("")
    with pytest.raises(ReleaseError, match="cannot download") as caught:
        fetch(pin, toy.root.parent / "cache", offline=False)
    assert "max==1.0" in str(caught.value)
    assert caught.value.hint and "pip config" in caught.value.hint
