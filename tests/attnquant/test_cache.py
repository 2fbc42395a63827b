# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import fcntl
import gc
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors
from attnquant_common import cache as cache_module
from attnquant_common import digests as digests_module
from attnquant_common import progress as progress_module
from attnquant_common.cache import (
    Cache,
    Layout,
    Plan,
    PlanError,
    Weights,
    entry_key,
    layout,
)
from attnquant_common.digests import TensorDigest
from attnquant_common.tensor import STORED_AS, Tensor, TensorSpec
from hypothesis import given
from hypothesis import strategies as st

# Of odd sizes, so that not every tensor is a multiple of the alignment.
MADE = {
    "a.weight": Tensor(np.arange(96, dtype=np.uint8).reshape(6, 16), "U8"),
    "a.weight_scale": Tensor(np.full((6, 1), 0x38, np.uint8), "F8_E4M3"),
    "a.weight_scale_2": Tensor(np.array(0.25, np.float32), "F32"),
    "b.weight": Tensor(np.arange(640, dtype=np.uint16), "BF16"),
    "empty": Tensor(np.empty((0, 4), np.float32), "F32"),
}
PLAN = {name: TensorSpec(t.dtype, t.shape) for name, t in MADE.items()}
LABEL = {"model": "toy", "settings": "nvfp4"}
KEYS = [digit * 64 for digit in "0123"]
KEY = KEYS[0]
SIZE = layout(KEY, PLAN).size

# What a child process runs: loads the entry and says how it went. Each call
# of `produce` appends a line to the file `made`, and after its first tensor
# waits until the file `gate` is there.
CHILD = """
import logging, os, sys, time
from pathlib import Path
import numpy as np
from attnquant_common.cache import Cache
from attnquant_common.tensor import TensorSpec
from attnquant_common.tensor import Tensor

folder, made, key, gate = sys.argv[1:]
tensors = {n: Tensor(np.full(64, ord(n), np.uint8), "U8") for n in "ab"}

def produce():
    with open(made, "a") as file:
        file.write("call\\n")
    for name, tensor in tensors.items():
        yield name, tensor
        while not os.path.exists(gate):
            time.sleep(0.01)

logging.basicConfig(level=logging.INFO, stream=sys.stderr)
plan = {n: TensorSpec("U8", (64,)) for n in tensors}
weights = Cache(Path(folder)).load(key, plan, produce, {"model": "toy"})
assert {n: bytes(t.data) for n, t in weights.items()} == {
    n: bytes(t.data) for n, t in tensors.items()
}
print(weights.outcome, flush=True)
"""

Start = Callable[[], "subprocess.Popen[str]"]


def produce() -> Iterable[tuple[str, Tensor]]:
    return MADE.items()


def never() -> Iterable[tuple[str, Tensor]]:
    raise AssertionError("the weights were made although they were there")


def load(
    cache: Cache,
    key: str = KEY,
    make: Callable[[], Iterable[tuple[str, Tensor]]] = produce,
) -> Weights:
    return cache.load(key, PLAN, make, LABEL)


def contents(weights: Weights) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {n: (t.dtype, t.shape, t.data.tobytes()) for n, t in weights.items()}


EXPECTED = {n: (t.dtype, t.shape, t.data.tobytes()) for n, t in MADE.items()}


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name != "CACHEDIR.TAG")


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """The file in which child processes note that they make the weights."""
    file = tmp_path / "made"
    file.touch()
    return file


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """The file that child processes wait for while they make the weights."""
    return tmp_path / "gate"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The child processes' log."""
    return tmp_path / "log"


@pytest.fixture
def start(
    cache: Cache, made: Path, gate: Path, log: Path, package_path: Path
) -> Iterator[Start]:
    """Starts a child process that loads an entry."""
    children = []

    def call() -> subprocess.Popen[str]:
        with log.open("a") as file:
            child = subprocess.Popen(
                [sys.executable, "-c", CHILD, cache.folder, made, KEY, gate],
                env={**os.environ, "PYTHONPATH": str(package_path)},
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        children.append(child)
        return child

    yield call
    for child in children:
        child.kill()
        child.communicate()


@pytest.fixture
def maker(start: Start, made: Path) -> subprocess.Popen[str]:
    """A child process that is in the midst of making the entry."""
    child = start()
    wait_for(lambda: made.read_text() != "", "the child made nothing")
    return child


def result(child: subprocess.Popen[str]) -> str:
    """Waits for a child process and returns how it had its weights."""
    out, _ = child.communicate(timeout=60)
    return out.strip()


def test_warm_equals_cold(cache: Cache) -> None:
    """What is stored is loaded again bit for bit, without being made."""
    cold = load(cache)
    assert cold.outcome == "miss"
    warm = load(cache, make=never)
    assert warm.outcome == "hit"
    assert contents(cold) == contents(warm) == EXPECTED


def test_writes_do_not_reach_the_file(cache: Cache) -> None:
    """Arrays can be written to, as MAX needs, but not the file by them."""
    for weights in (load(cache), load(cache)):
        for tensor in weights.values():
            tensor.data[...] = 1
    assert contents(load(cache, make=never)) == EXPECTED


def test_entry_is_a_safetensors_file(cache: Cache) -> None:
    """The safetensors library reads an entry's tensors as they were made."""
    load(cache)
    data = (cache.folder / KEY / "tensors.safetensors").read_bytes()
    read = {
        name: (found["dtype"], tuple(found["shape"]), bytes(found["data"]))
        for name, found in safetensors.deserialize(data)
    }
    assert read == EXPECTED


@given(
    st.dictionaries(
        st.text(max_size=20),
        st.builds(
            TensorSpec,
            st.sampled_from(sorted(STORED_AS)),
            st.lists(st.integers(0, 70), max_size=3).map(tuple),
        ),
        max_size=8,
    )
)
def test_layout_is_aligned(plan: dict[str, TensorSpec]) -> None:
    """A tensor starts at a multiple of its elements' size, or of 64 bytes."""
    found = layout(KEY, plan)
    for name, spec in plan.items():
        alignment = STORED_AS[spec.dtype].itemsize
        if spec.nbytes % 64 == 0:
            alignment = 64
        assert found.offsets[name] % alignment == 0
    size = len(found.header) + sum(spec.nbytes for spec in plan.values())
    assert found.size == size


def test_made_once_by_two_processes(
    start: Start, made: Path, gate: Path, log: Path, cache: Cache
) -> None:
    """Of two that start at once, one makes the weights; both have them."""
    children = [start() for _ in range(2)]
    wait_for(lambda: "waiting" in log.read_text(), "neither waited")
    gate.touch()
    results = [result(child) for child in children]
    assert sorted(results) == ["hit", "miss"], log.read_text()
    assert made.read_text() == "call\n"
    assert names(cache.folder) == [KEY]
    pid = children[results.index("miss")].pid
    assert f"waiting for process {pid}, which makes" in log.read_text()


def test_killed_while_making(
    start: Start, maker: subprocess.Popen[str], gate: Path, cache: Cache
) -> None:
    """After kill -9 there is no entry, and the next start makes it."""
    maker.kill()
    maker.wait()
    assert names(cache.folder) == [f"{KEY}.lock", f"{KEY}.partial"]
    assert cache.entries() == []
    gate.touch()
    assert result(start()) == "miss"
    assert names(cache.folder) == [KEY]


def test_killed_while_another_waits(
    start: Start, maker: subprocess.Popen[str], gate: Path, log: Path
) -> None:
    """A killed maker's lock goes away: who waited makes the weights."""
    second = start()
    wait_for(lambda: "waiting" in log.read_text(), "the second did not wait")
    maker.kill()
    gate.touch()
    assert result(second) == "miss"


def test_killed_ones_are_swept(
    maker: subprocess.Popen[str], cache: Cache
) -> None:
    """What a killed process left of one entry, the next made entry removes."""
    maker.kill()
    maker.wait()
    load(cache, KEYS[1])
    assert names(cache.folder) == [KEYS[1]]


def test_one_in_the_making_is_not_swept(
    maker: subprocess.Popen[str], gate: Path, cache: Cache
) -> None:
    """An entry that a living process makes is left alone."""
    load(cache, KEYS[1])
    cache.sweep()
    assert cache.remove(KEY) is False
    gate.touch()
    assert result(maker) == "miss"


def flip(path: Path, offset: int) -> None:
    """Changes a byte and puts the mtime back, as a careful vandal would."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def cut(path: Path, size: int) -> None:
    os.truncate(path, path.stat().st_size + size)


def amend(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    content = json.loads(path.read_bytes())
    change(content)
    path.write_text(json.dumps(content))


def other_key(content: dict[str, object]) -> None:
    content["key"] = KEYS[1]


def other_digest(content: dict[str, object]) -> None:
    content["tensors"]["b.weight"][2] = "0" * 64


def other_shape(content: dict[str, object]) -> None:
    content["tensors"]["b.weight"][1] = [320]


FAULTS: dict[str, Callable[[Path], object]] = {
    "first byte of the data": lambda e: flip(
        e / "tensors.safetensors", len(layout(KEY, PLAN).header)
    ),
    "last byte of the data": lambda e: flip(e / "tensors.safetensors", -1),
    "header length": lambda e: flip(e / "tensors.safetensors", 0),
    "header": lambda e: flip(e / "tensors.safetensors", 40),
    "truncated by one byte": lambda e: cut(e / "tensors.safetensors", -1),
    "truncated to nothing": lambda e: cut(e / "tensors.safetensors", -SIZE),
    "longer": lambda e: cut(e / "tensors.safetensors", 1),
    "no tensors": lambda e: (e / "tensors.safetensors").unlink(),
    "no manifest": lambda e: (e / "manifest.json").unlink(),
    "empty manifest": lambda e: (e / "manifest.json").write_text(""),
    "manifest of another type": lambda e: (e / "manifest.json").write_text(
        "[]"
    ),
    "manifest of another entry": lambda e: amend(
        e / "manifest.json", other_key
    ),
    "manifest with another digest": lambda e: amend(
        e / "manifest.json", other_digest
    ),
    "manifest with another shape": lambda e: amend(
        e / "manifest.json", other_shape
    ),
    "manifest without a tensor": lambda e: amend(
        e / "manifest.json", lambda content: content["tensors"].popitem()
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_is_found_and_mended(
    cache: Cache, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """A damaged entry is never served: it is named in the log, made anew."""
    load(cache)
    FAULTS[fault](cache.folder / KEY)
    mended = load(cache)
    assert mended.outcome == "miss"
    assert contents(mended) == EXPECTED
    assert contents(load(cache, make=never)) == EXPECTED
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{cache.folder / KEY} is damaged and made anew" in record.message
    assert names(cache.folder) == [KEY]


def test_entry_under_another_key(cache: Cache) -> None:
    """An entry that was renamed is not taken for the other one."""
    load(cache)
    (cache.folder / KEY).rename(cache.folder / KEYS[1])
    assert load(cache, KEYS[1]).outcome == "miss"


def test_other_plan(cache: Cache) -> None:
    """An entry with other tensors than are asked for is made anew."""
    load(cache)
    plan = {**PLAN, "empty": TensorSpec("F32", (0, 5))}
    others = {**MADE, "empty": Tensor(np.empty((0, 5), np.float32), "F32")}
    weights = cache.load(KEY, plan, others.items, LABEL)
    assert weights.outcome == "miss"
    assert weights["empty"].shape == (0, 5)


def test_other_layout(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are found where they are, not where they would be put today."""
    tensors = {n: Tensor(np.full(64, ord(n), np.uint8), "U8") for n in "xy"}
    plan = dict.fromkeys("xy", TensorSpec("U8", (64,)))

    def other(key: str, plan: Plan) -> Layout:
        made = layout(key, plan)
        header = made.header.replace(b'"x"', b'"?"').replace(b'"y"', b'"x"')
        offsets = {"x": made.offsets["y"], "y": made.offsets["x"]}
        return Layout(header.replace(b'"?"', b'"y"'), offsets, made.size)

    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "layout", other)
        cache.load(KEY, plan, tensors.items, LABEL)
    assert contents(cache.load(KEY, plan, tensors.items, LABEL)) == {
        name: ("U8", (64,), name.encode() * 64) for name in "xy"
    }


def forbid_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("the contents were read")

    monkeypatch.setattr(cache_module, "file_digests", read)


def test_untouched_is_not_read(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load of files that nobody wrote to does not read the contents."""
    load(cache)
    forbid_reading(monkeypatch)
    assert load(cache, make=never).outcome == "hit"


@pytest.mark.parametrize("size", [-1, 1])
def test_wrong_size_is_found_at_once(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """A truncated or longer file is not read to be found damaged."""
    load(cache)
    cut(cache.folder / KEY / "tensors.safetensors", size)
    forbid_reading(monkeypatch)
    assert load(cache).outcome == "miss"


def test_copy_is_read_once(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copied cache serves, after its contents were read once."""
    load(cache)
    copy = Cache(tmp_path / "copy")
    shutil.copytree(cache.folder, copy.folder)
    time.sleep(0.2)  # or the copy could still change under the same stamp
    with monkeypatch.context() as patch:
        forbid_reading(patch)
        with pytest.raises(AssertionError, match="were read"):
            load(copy)
    assert load(copy, make=never).outcome == "hit"
    forbid_reading(monkeypatch)
    assert load(copy, make=never).outcome == "hit"


def test_fresh_copy_is_not_trusted(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a file might change and keep its stamp, it is read each time."""
    monkeypatch.setattr(digests_module, "SETTLED", 3600 * 10**9)
    load(cache)
    copy = Cache(tmp_path / "copy")
    shutil.copytree(cache.folder, copy.folder)
    assert load(copy, make=never).outcome == "hit"
    forbid_reading(monkeypatch)
    with pytest.raises(AssertionError, match="were read"):
        load(copy)


def test_made_entry_has_settled(cache: Cache) -> None:
    """An entry's stamps are taken when a change would show in them."""
    load(cache)
    verified = cache.folder / KEY / "verified.json"
    stamps = json.loads(verified.read_bytes())
    for stamp in stamps.values():
        passed = verified.stat().st_mtime_ns - stamp["ctime_ns"]
        assert passed > digests_module.SETTLED - 10**7


def test_damaged_copy(cache: Cache, tmp_path: Path) -> None:
    """A copy with a changed byte is found, whatever its stamp."""
    load(cache)
    copy = Cache(tmp_path / "copy")
    shutil.copytree(cache.folder, copy.folder)
    flip(copy.folder / KEY / "tensors.safetensors", -1)
    assert load(copy).outcome == "miss"


def test_least_recently_used_goes(cache: Cache) -> None:
    """Over the limit, the entry goes that was not used for longest."""
    for key in KEYS[:3]:
        load(cache, key)
    time.sleep(0.05)  # more than the kernel's step
    load(cache, KEYS[0], never)
    order = [KEYS[1], KEYS[2], KEYS[0]]
    assert [entry.key for entry in cache.entries()] == order
    gc.collect()
    cache.limit = sum(entry.nbytes for entry in cache.entries())
    load(cache, KEYS[3])
    assert [e.key for e in cache.entries()] == [*order[1:], KEYS[3]]


def test_entry_in_use_stays(cache: Cache) -> None:
    """An entry of which an array lives is passed over, however old."""
    weight = load(cache, KEYS[0])["b.weight"].data[100:]
    load(cache, KEYS[1])
    cache.limit = sum(entry.nbytes for entry in cache.entries())
    load(cache, KEYS[2])
    assert [entry.key for entry in cache.entries()] == [KEYS[0], KEYS[2]]
    assert cache.remove(KEYS[0]) is False
    assert weight.tobytes() == EXPECTED["b.weight"][2][200:]
    del weight
    gc.collect()
    assert cache.remove(KEYS[0]) is True


def test_too_large_for_the_limit(
    cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    """What can never fit is served from memory and displaces nothing."""
    load(cache, KEYS[1])
    gc.collect()
    cache.limit = SIZE - 1
    weights = load(cache)
    assert (weights.outcome, contents(weights)) == ("off", EXPECTED)
    assert [entry.key for entry in cache.entries()] == [KEYS[1]]
    (record,) = caplog.records
    assert "going on without the weight cache" in record.message


def test_disk_smaller_than_the_limit(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old entries also make way where the disk would be full."""
    for key in KEYS[:2]:
        load(cache, key)
    gc.collect()
    usage = shutil.disk_usage(cache.folder)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    assert load(cache, KEYS[2]).outcome == "miss"
    assert [entry.key for entry in cache.entries()] == KEYS[1:3]


def test_removed_while_read(cache: Cache) -> None:
    """Arrays keep their bytes though someone removes the files by hand."""
    weights = load(cache)
    shutil.rmtree(cache.folder)
    assert contents(weights) == EXPECTED
    assert load(cache).outcome == "miss"


def test_reader_meets_remover(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry that goes while it is opened is no entry, not a broken one."""
    load(cache)
    gc.collect()
    lock = fcntl.flock

    def remove_first(file: int, operation: int) -> None:
        if operation == fcntl.LOCK_SH:
            monkeypatch.setattr(fcntl, "flock", lock)
            assert cache.remove(KEY)
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    again = load(cache)
    assert (again.outcome, contents(again)) == ("miss", EXPECTED)


def test_one_tensor_at_a_time(cache: Cache) -> None:
    """A stored tensor is let go of before the next but one is made."""
    plan = {str(i): TensorSpec("U8", (1000,)) for i in range(20)}
    made: list[weakref.ref[object]] = []

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name in plan:
            tensor = Tensor(np.zeros(1000, np.uint8), "U8")
            made.append(weakref.ref(tensor.data))
            assert sum(array() is not None for array in made) <= 2
            yield name, tensor

    assert cache.load(KEY, plan, stream, LABEL).outcome == "miss"


WRONG = {
    "twice": ([*MADE.items(), ("empty", MADE["empty"])], "made twice"),
    "unplanned": ([("c", MADE["empty"])], "not planned"),
    "missing": ([*MADE.items()][1:], "not made: a.weight"),
    "type": ([("b.weight", MADE["empty"])], r"BF16 \[640\] and is F32 \[0, 4"),
    "shape": (
        [("empty", Tensor(np.empty((4, 0), np.float32), "F32"))],
        r"F32 \[0, 4\] and is F32 \[4, 0\]",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_other_than_planned(cache: Cache, wrong: str) -> None:
    """Tensors that were not planned are an error, and leave nothing."""
    tensors, message = WRONG[wrong]
    with pytest.raises(PlanError, match=message):
        load(cache, make=lambda: tensors)
    assert names(cache.folder) == []


@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt()])
def test_failing_producer(cache: Cache, error: BaseException) -> None:
    """An error of the producer is its own: passed on, and leaves nothing."""

    def fail() -> Iterator[tuple[str, Tensor]]:
        yield "empty", MADE["empty"]
        raise error

    with pytest.raises(type(error)):
        load(cache, make=fail)
    assert names(cache.folder) == []


def test_disk_fails_midway(
    cache: Cache,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If writing fails, the weights come from memory and nothing is left."""
    write, calls = os.pwrite, []

    def fail(file: int, data: bytes, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 4:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(file, data, offset)

    monkeypatch.setattr(os, "pwrite", fail)
    weights = load(cache)
    assert (weights.outcome, contents(weights)) == ("off", EXPECTED)
    assert names(cache.folder) == []
    (record,) = caplog.records
    assert "Input/output error" in record.message


def test_full_disk(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    """Without room the work is not begun for the disk, but done once."""
    calls = []

    def count() -> Iterable[tuple[str, Tensor]]:
        calls.append(1)
        return MADE.items()

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE - 1, hard))
    try:
        weights = load(cache, make=count)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (weights.outcome, contents(weights)) == ("off", EXPECTED)
    assert len(calls) == 1
    assert names(cache.folder) == []
    (record,) = caplog.records
    assert "File too large" in record.message


@pytest.fixture
def as_nobody() -> Iterator[None]:
    """Root may write anywhere, so the test is not root for a while."""
    if os.geteuid() == 0:
        os.seteuid(65534)
    yield
    if os.getuid() == 0:
        os.seteuid(0)


@pytest.fixture
def open_path(tmp_path: Path) -> Path:
    """The test's folder, which everyone may enter."""
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.owner() == Path.home().owner() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
        if folder.name.startswith("pytest-of"):
            break
    return tmp_path


def test_read_only_folder(
    cache: Cache,
    open_path: Path,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> None:
    """A read-only cache serves what it has, and all else from memory."""
    load(cache)
    for path in [cache.folder, *cache.folder.rglob("*")]:
        path.chmod(path.stat().st_mode & ~0o222)
    request.getfixturevalue("as_nobody")
    warm = load(cache, make=never)
    assert (warm.outcome, contents(warm)) == ("hit", EXPECTED)
    assert caplog.records == []
    other = load(cache, KEYS[1])
    assert (other.outcome, contents(other)) == ("off", EXPECTED)
    (record,) = caplog.records
    assert "Permission denied" in record.message


def test_forbidden_folder(
    cache: Cache,
    open_path: Path,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> None:
    """A folder that may not be entered is said so, in one line."""
    cache.folder.mkdir(mode=0)
    request.getfixturevalue("as_nobody")
    assert load(cache).outcome == "off"
    (record,) = caplog.records
    assert str(cache.folder) in record.message
    assert "Permission denied" in record.message


def test_folder_is_a_file(
    cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    """A cache folder that is a file does not keep a server from starting."""
    cache.folder.write_text("")
    assert load(cache).outcome == "off"
    (record,) = caplog.records
    assert str(cache.folder) in record.message


def test_tagged_for_backups(cache: Cache) -> None:
    """Backup programs find the tag by which they skip caches."""
    load(cache)
    tag = (cache.folder / "CACHEDIR.TAG").read_bytes()
    assert tag.startswith(b"Signature: 8a477f597d28d172789f06886806bc55")


DIGESTS = st.dictionaries(
    st.text(max_size=4),
    st.builds(
        TensorDigest,
        st.sampled_from(["U8", "BF16"]),
        st.lists(st.integers(0, 9), max_size=3).map(tuple),
        st.sampled_from([digit * 64 for digit in "abc"]),
    ),
    max_size=3,
)
SETTING = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.text(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=4,
)
SETTINGS = st.dictionaries(st.text(max_size=2), SETTING, max_size=3)
SOURCE = st.tuples(DIGESTS, SETTINGS, st.text(max_size=2))


def distinct(value: object) -> object:
    """A value that equals another's only if both are the same: 1 != True."""
    if isinstance(value, dict):
        return {k: distinct(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [distinct(v) for v in value]
    return type(value), value


@given(SOURCE, SOURCE)
def test_keys_differ_when_anything_does(
    one: tuple[dict[str, TensorDigest], dict[str, object], str],
    other: tuple[dict[str, TensorDigest], dict[str, object], str],
) -> None:
    """Two keys are equal exactly if all that went into them is."""
    same = distinct(one) == distinct(other)
    assert (entry_key(*one) == entry_key(*other)) is same


@given(SOURCE, st.data())
def test_any_change_changes_the_key(
    source: tuple[dict[str, TensorDigest], dict[str, object], str],
    data: st.DataObject,
) -> None:
    """A changed tensor, name, setting or version gives another key."""
    tensors, settings, version = source
    key = entry_key(tensors, settings, version)
    assert entry_key(tensors, settings, version + "1") != key
    assert entry_key(tensors, {**settings, "new": 1}, version) != key
    assert entry_key(tensors, {"nested": settings}, version) != key
    for name, tensor in tensors.items():
        rest = {n: t for n, t in tensors.items() if n != name}
        changed = [
            {},
            {name + "x": tensor},
            {name: tensor._replace(dtype="F16")},
            {name: tensor._replace(shape=(*tensor.shape, 1))},
            {name: tensor._replace(sha256="d" * 64)},
        ]
        for change in changed:
            if not change.keys() & rest.keys():
                assert entry_key(rest | change, settings, version) != key


@given(SOURCE, st.randoms(use_true_random=False))
def test_order_does_not_change_the_key(
    source: tuple[dict[str, TensorDigest], dict[str, object], str],
    random: object,
) -> None:
    """The order in which tensors and settings were put does not matter."""

    def shuffled(mapping: dict[str, object]) -> dict[str, object]:
        items = list(mapping.items())
        random.shuffle(items)
        return dict(items)

    tensors, settings, version = source
    again = entry_key(shuffled(tensors), shuffled(settings), version)
    assert again == entry_key(tensors, settings, version)


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        (float("nan"), ValueError),
        ({1: "a"}, TypeError),
        ({"a"}, TypeError),
        (Path("a"), TypeError),
    ],
)
def test_settings_without_a_form(
    setting: object, error: type[Exception]
) -> None:
    """What has no one form in JSON is an error, not half a key."""
    with pytest.raises(error):
        entry_key({}, {"setting": setting}, "1")


def test_progress_in_a_log(
    cache: Cache,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without a terminal, a line says how far it is, now and then only."""
    caplog.set_level(logging.INFO)
    load(cache)
    assert caplog.messages == []
    monkeypatch.setattr(progress_module, "INTERVAL", 0)
    load(cache, KEYS[1])
    assert len(caplog.messages) == len(MADE)
    assert "AttnQuant: preparing weights: 100%" in caplog.messages[-1]


def test_progress_on_a_terminal(
    cache: Cache, made: Path, gate: Path, package_path: Path
) -> None:
    """On a terminal a bar is drawn."""
    gate.touch()
    ours, theirs = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, cache.folder, made, KEY, gate],
        env={
            **os.environ,
            "PYTHONPATH": str(package_path),
            "TERM": "xterm",
            "COLUMNS": "100",
        },
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    ) as child:
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 1 << 16):
                shown += part
        except OSError:  # Linux's way to say that the child is gone
            pass
        os.close(ours)
    assert child.returncode == 0, shown
    assert b"AttnQuant: preparing weights" in shown
    assert "━".encode() in shown


@pytest.fixture
def tool(
    cache: Cache, package_path: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs ``python -m attnquant_common cache``."""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "attnquant_common", "cache", *arguments],
            env={
                **os.environ,
                "PYTHONPATH": str(package_path),
                "ATTNQUANT_CACHE_DIR": str(cache.folder),
            },
            capture_output=True,
            text=True,
            check=False,
        )

    return call


Tool = Callable[..., "subprocess.CompletedProcess[str]"]


def test_ls(cache: Cache, tool: Tool) -> None:
    """``ls`` says key, size, age and what an entry is, oldest first."""
    assert tool("ls").stdout.splitlines()[1:] == [
        f"0 entries, 0 B, in {cache.folder}"
    ]
    for key in KEYS[:2]:
        load(cache, key)
    os.utime(cache.folder / KEYS[1], (0, time.time() - 7 * 86400 - 60))
    (cache.folder / KEYS[0] / "manifest.json").write_text("")
    done = tool("ls")
    assert (done.returncode, done.stderr) == (0, "")
    head, old, new, total = done.stdout.splitlines()
    assert head.split("  ")[-1] == "WHAT"
    size = sum(f.stat().st_size for f in (cache.folder / KEYS[1]).iterdir())
    assert old.startswith(KEYS[1][:12])
    assert f"{size / 1000:.1f} kB" in old
    assert old.endswith("7d ago  model toy, settings nvfp4")
    assert new.startswith(KEYS[0][:12])
    assert new.endswith("damaged")
    assert total.startswith("2 entries, ")


def test_rm(cache: Cache, tool: Tool) -> None:
    """``rm`` takes keys or their first digits, and says what it did."""
    for key in KEYS[:3]:
        load(cache, key)
    gc.collect()
    done = tool("rm", KEYS[0], "1", "f", "")
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        f"removed {'0' * 12}",
        f"removed {'1' * 12}",
    ]
    assert done.stderr.splitlines() == [
        "error: the keys of 0 entries begin with 'f'",
        "error: the keys of 3 entries begin with ''",
    ]
    assert names(cache.folder) == [KEYS[2]]


def test_rm_by_age_and_all(cache: Cache, tool: Tool) -> None:
    """``--older-than`` goes by the last use; ``--all`` takes all."""
    for key in KEYS[:3]:
        load(cache, key)
    gc.collect()
    os.utime(cache.folder / KEYS[1], (0, time.time() - 3601))
    assert tool("rm", "--older-than", "1h").stdout == f"removed {'1' * 12}\n"
    assert tool("rm", "--all").returncode == 0
    assert names(cache.folder) == []


def test_rm_in_use(cache: Cache, tool: Tool) -> None:
    """``rm`` leaves an entry in use, and says so."""
    weights = load(cache)
    done = tool("rm", "--all")
    assert done.returncode == 1
    assert done.stderr == f"error: {'0' * 12} is in use\n"
    assert contents(load(cache, make=never)) == contents(weights)


@pytest.mark.parametrize(
    "arguments",
    [
        ("rm",),
        ("rm", "--all", "--older-than", "1d"),
        ("rm", "0", "--all"),
        ("rm", "--older-than", "soon"),
        (),
    ],
)
def test_misuse(tool: Tool, arguments: tuple[str, ...]) -> None:
    """A command that is not understood does nothing and exits with 2."""
    assert tool(*arguments).returncode == 2
