# SPDX-License-Identifier: Apache-2.0
"""The counting library against a driver that stands in for libcuda."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.throughput.fake_driver import compiled

from throughput import driver_calls
from throughput.server import MeasureError

DRIVER = """\
#include <stdint.h>
int cuInit(unsigned flags) { return 10 + flags; }
int cuStreamSynchronize(void *stream) { return 20 + (intptr_t)stream; }
int cuCtxSynchronize(void) { return 30; }
int cuMemcpyDtoH_v2(void *to, uint64_t from, uint64_t n) {
  return 1 + (intptr_t)to + 2 * from + 4 * n;
}
"""

CALLS = """\
import ctypes, sys
driver = ctypes.CDLL(sys.argv[1])
assert driver.cuInit(1) == 11
assert driver.cuStreamSynchronize(ctypes.c_void_p(1)) == 21
assert driver.cuStreamSynchronize(ctypes.c_void_p(2)) == 22
assert driver.cuCtxSynchronize() == 30
to, source, size = ctypes.c_void_p(1), ctypes.c_uint64(2), ctypes.c_size_t(3)
assert driver.cuMemcpyDtoH_v2(to, source, size) == 18
assert not hasattr(driver, "cuGraphLaunch")
"""

COUNTS = {
    "cuStreamSynchronize": 2,
    "cuCtxSynchronize": 1,
    "cuEventSynchronize": 0,
    "cuMemcpyDtoH_v2": 1,
    "cuGraphLaunch": 0,
}

NEXT = """\
#define _GNU_SOURCE
#include <dlfcn.h>
int getppid(void) {
  int (*next)(void) = (int (*)(void))dlsym(RTLD_NEXT, "getppid");
  return -next();
}
"""


@pytest.fixture
def counts(tmp_path: Path) -> Path:
    """The folder that receives the counts."""
    folder = tmp_path / "counts"
    folder.mkdir()
    return folder


@pytest.fixture
def env(tmp_path: Path, counts: Path) -> dict[str, str]:
    """The environment of a process that counts."""
    library = driver_calls.build(tmp_path)
    return {**os.environ, **driver_calls.environment(library, counts)}


def python(
    env: dict[str, str], code: str, *arguments: str | Path
) -> subprocess.CompletedProcess[str]:
    """Runs code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_calls_are_counted_and_go_on_to_the_driver(
    tmp_path: Path, counts: Path, env: dict[str, str]
) -> None:
    """Each call counts once and keeps its arguments and its result."""
    driver = compiled(tmp_path, "libcuda.so.1", DRIVER)
    done = python(env, CALLS, driver)
    assert done.returncode == 0, done.stderr
    assert driver_calls.read(counts) == COUNTS


def test_processes_add_up(
    tmp_path: Path, counts: Path, env: dict[str, str]
) -> None:
    """A server's calls are those of its workers, whichever one made them."""
    driver = compiled(tmp_path, "libcuda.so.1", DRIVER)
    workers = (
        "import subprocess, sys\n"
        "for _ in range(2):\n"
        "    subprocess.run([sys.executable, '-c', *sys.argv[1:]], check=True)"
    )
    done = python(env, workers, CALLS, driver)
    assert done.returncode == 0, done.stderr
    assert driver_calls.read(counts) == {k: 2 * n for k, n in COUNTS.items()}


def test_counts_of_threads_are_exact(
    tmp_path: Path, counts: Path, env: dict[str, str]
) -> None:
    """No call is lost when threads call at once."""
    driver = compiled(tmp_path, "libcuda.so.1", DRIVER)
    code = (
        "import ctypes, sys, threading\n"
        "sync = ctypes.CDLL(sys.argv[1]).cuStreamSynchronize\n"
        "def work():\n"
        "    for _ in range(20000): sync(None)\n"
        "threads = [threading.Thread(target=work) for _ in range(4)]\n"
        "for t in threads: t.start()\n"
        "for t in threads: t.join()\n"
    )
    done = python(env, code, driver)
    assert done.returncode == 0, done.stderr
    assert driver_calls.read(counts)["cuStreamSynchronize"] == 80000


def test_counts_are_visible_while_the_process_runs(
    tmp_path: Path, counts: Path, env: dict[str, str]
) -> None:
    """A request's calls are what the counts grew by, the server running on."""
    driver = compiled(tmp_path, "libcuda.so.1", DRIVER)
    code = (
        "import ctypes, sys\n"
        "sync = ctypes.CDLL(sys.argv[1]).cuStreamSynchronize\n"
        "for line in sys.stdin:\n"
        "    sync(None)\n"
        "    print('done', flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, driver],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for made in (1, 2, 3):
            process.stdin.write("call\n")
            process.stdin.flush()
            assert process.stdout.readline() == "done\n"
            assert driver_calls.read(counts)["cuStreamSynchronize"] == made
        process.stdin.close()
    assert process.returncode == 0


@pytest.mark.parametrize("first", [True, False])
def test_other_preloaded_libraries_keep_working(
    tmp_path: Path, env: dict[str, str], first: bool
) -> None:
    """dlsym(RTLD_NEXT) goes by its caller, before and after ours.

    MAX 26.7 preloads jemalloc, which looks functions up that way.
    """
    other = str(compiled(tmp_path, "next.so", NEXT))
    ours = env["LD_PRELOAD"].split(":")[0]
    env["LD_PRELOAD"] = ":".join([ours, other] if first else [other, ours])
    done = python(env, "import os; print(os.getppid())")
    assert done.stdout == f"-{os.getpid()}\n", done


def test_a_preloaded_library_of_the_caller_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What LD_PRELOAD names already is kept."""
    library = tmp_path / "driver_calls.so"
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    found = driver_calls.environment(library, tmp_path)
    assert found["LD_PRELOAD"] == str(library)
    monkeypatch.setenv("LD_PRELOAD", "a.so b.so")
    found = driver_calls.environment(library, tmp_path)
    assert found["LD_PRELOAD"] == f"{library}:a.so b.so"


def test_a_server_without_the_driver_is_no_server_without_calls(
    counts: Path, env: dict[str, str]
) -> None:
    """No count is an error, never a zero."""
    done = python(env, "import ctypes; ctypes.CDLL(None).getpid()")
    assert done.returncode == 0, done.stderr
    with pytest.raises(MeasureError, match="nothing is known of its calls"):
        driver_calls.read(counts)


def test_calls_that_cannot_be_counted_end_the_process(
    tmp_path: Path, counts: Path, env: dict[str, str]
) -> None:
    """So does a folder that is not there, and it is named."""
    driver = compiled(tmp_path, "libcuda.so.1", DRIVER)
    counts.rmdir()
    done = python(env, CALLS, driver)
    assert done.returncode < 0
    assert f"driver_calls: DRIVER_CALLS={counts}: cannot map" in done.stderr


def test_no_compiler_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what is missing."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MeasureError, match="a C compiler named cc"):
        driver_calls.build(tmp_path)


def test_what_the_compiler_says_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing compiler's message is part of the error."""
    monkeypatch.setattr(driver_calls, "SOURCE", tmp_path / "gone.c")
    with pytest.raises(MeasureError, match=r"(?s)cannot compile .*gone\.c"):
        driver_calls.build(tmp_path)
