# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from tests.throughput.fake_driver import compiled

from throughput import driver_calls, launches, sampling
from throughput.server import Arm, Server

DRIVER = """\
#include <string.h>
#include <stdint.h>
int cuStreamSynchronize(void *stream) { return 0; }
int cuGraphLaunch(void *graph, void *stream) { return 0; }
int cuLaunchKernel(void *kernel, unsigned gx, unsigned gy, unsigned gz,
                   unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **values, void **extra) {
  return gx + 2 * gy + 4 * gz + 8 * bx + 16 * by + 32 * bz + 64 * shared +
         128 * (intptr_t)stream + 256 * (intptr_t)values +
         512 * (intptr_t)extra + 1024 * (intptr_t)kernel;
}
static int other(void) { return 7; }
int cuLaunchKernelEx(const void *config, void *kernel, void **values,
                     void **extra) {
  return (intptr_t)config + 2 * (intptr_t)kernel + 4 * (intptr_t)values +
         8 * (intptr_t)extra;
}
int cuMemcpyDtoH_v2(void *to, uint64_t from, uint64_t n) { return 0; }
int cuGetProcAddress_v2(const char *, void **, int, uint64_t, void *);
int cuGetProcAddress(const char *name, void **found, int version,
                     uint64_t flags) {
  *found = NULL;
  if (flags == 2)
    *found = (void *)other;
  else if (!strcmp(name, "cuLaunchKernel"))
    *found = (void *)cuLaunchKernel;
  else if (!strcmp(name, "cuLaunchKernelEx"))
    *found = (void *)cuLaunchKernelEx;
  else if (!strcmp(name, "cuMemcpyDtoH"))
    *found = (void *)cuMemcpyDtoH_v2;
  else if (!strcmp(name, "cuMemcpyDtoHAsync"))
    *found = (void *)other;
  else if (!strcmp(name, "cuGetProcAddress"))
    *found = version < 12000 ? (void *)cuGetProcAddress
                             : (void *)cuGetProcAddress_v2;
  return *found ? 0 : 500;
}
int cuGetProcAddress_v2(const char *name, void **found, int version,
                        uint64_t flags, void *status) {
  *(int *)status = 3;
  return cuGetProcAddress(name, found, version, flags);
}
"""
"""Kernels whose results tell all their arguments apart."""

CALLS = """\
import ctypes, sys
driver = ctypes.CDLL(sys.argv[1])
kernel, *pointers = map(ctypes.c_void_p, (1, 9, 10, 11))
launch = kernel, *range(2, 9), *pointers
launched = 1024 + sum(2**i * (i + 2) for i in range(10))
extended = [ctypes.c_void_p(i) for i in (1, 2, 3, 4)]
assert driver.cuLaunchKernel(*launch) == launched
assert driver.cuLaunchKernelEx(*extended) == 49
assert driver.cuLaunchKernelEx(*extended) == 49
"""

ASKED = (
    CALLS
    + """\
code, status = ctypes.c_int, ctypes.c_int()
kinds = ctypes.c_char_p, ctypes.c_void_p, code, ctypes.c_uint64
first = ctypes.CFUNCTYPE(code, *kinds)(("cuGetProcAddress", driver))
second = ctypes.CFUNCTYPE(code, *kinds, ctypes.c_void_p)(
    ("cuGetProcAddress_v2", driver)
)


def ask(name, flags=0, find=second, version=12000):
    address = ctypes.c_void_p()
    rest = (ctypes.byref(status),) if find is not first else ()
    error = find(name, ctypes.byref(address), version, flags, *rest)
    assert error == (0 if address else 500)
    assert not rest or status.value == 3
    return address.value and address.value


def call(address, *arguments):
    return ctypes.CFUNCTYPE(code)(address)(*arguments)


assert call(ask(b"cuLaunchKernel"), *launch) == launched
assert call(ask(b"cuLaunchKernelEx", find=first), *extended) == 49
again = type(second)(ask(b"cuGetProcAddress"))
assert call(ask(b"cuLaunchKernelEx", find=again), *extended) == 49
again = type(second)(ask(b"cuGetProcAddress", find=first))
assert call(ask(b"cuLaunchKernelEx", find=again), *extended) == 49
again = type(first)(ask(b"cuGetProcAddress", find=first, version=11040))
assert again(b"none", ctypes.byref(ctypes.c_void_p()), 11040, 0) == 500
assert call(ask(b"cuMemcpyDtoH"), None, ctypes.c_uint64(), code()) == 0
# These are others' functions, in spite of their names.
assert call(ask(b"cuMemcpyDtoHAsync")) == 7
assert call(ask(b"cuLaunchKernel", flags=2)) == 7
assert ask(b"cuInit") is None
"""
)

SERVER = """\
import ctypes, json, os, sys
from pathlib import Path
from max._entrypoints import fake_server

driver = ctypes.CDLL({driver!r})
launch, extended = driver.cuLaunchKernel, driver.cuLaunchKernelEx
step = fake_server.Request.step
model = Path(sys.argv[sys.argv.index("--model") + 1], "config.json")
layers = json.loads(model.read_text())["num_hidden_layers"]
bands = int(os.environ.get("BANDS", 0))


def calling(self, rows, row):
    for _ in range(40 if self.given == 0 else layers * 3 + bands + 5):
        launch(*[None] * 11)
    for _ in range(0 if self.given == 0 else layers):
        extended(*[None] * 4)
    if os.environ.get("REPLAYS"):
        driver.cuGraphLaunch(None, None)
    step(self, rows, row)


fake_server.Request.step = calling
fake_server.main()
"""
"""Launches four kernels a layer, one a band, and five more."""

TABLE = """\
| kernels launched | a step, 2 layers | a step, 6 layers | a layer \
| beside the layers | MiB, 6 layers |
| --- | --- | --- | --- | --- | --- |
| built-in | 13.00 | 29.00 | 4.00 | 5.00 | - |
| bands | 14.00 | 32.00 | 4.50 | 5.00 | - |
"""
"""What the program has to say of that server."""


@pytest.fixture
def site(fake_site: Callable[..., str], tmp_path: Path) -> str:
    """A fake MAX that launches kernels."""
    path = Path(fake_site(supports_capture=True))
    entry = path / "max" / "_entrypoints" / "pipelines.py"
    entry.rename(entry.with_name("fake_server.py"))
    driver = compiled(tmp_path, "libcuda.so.1", DRIVER)
    entry.write_text(SERVER.format(driver=str(driver)))
    return str(path)


def checkpoint(folder: Path, layers: int, *, nested: bool = False) -> str:
    """Writes a checkpoint's configuration, and returns the folder."""
    folder.mkdir(exist_ok=True)
    config: dict[str, object] = {"num_hidden_layers": layers}
    config = {"text_config": config} if nested else config
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture
def run(
    site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., int]:
    """Runs the program with flags, on checkpoints of 6 and 2 layers."""
    monkeypatch.setattr(sampling, "_SETTLE_S", 0.05)
    more, less = checkpoint(tmp_path / "6", 6), checkpoint(tmp_path / "2", 2)

    def call(*flags: str) -> int:
        command = (
            *("launches", "--patched", sys.executable),
            *("--patched-path", site, "--model", more, less),
            *("--output", str(tmp_path / "results.json"), *flags),
        )
        monkeypatch.setattr(sys, "argv", list(command))
        return launches.main()

    return call


@pytest.fixture
def counted(tmp_path: Path) -> Callable[..., dict[str, int]]:
    """Runs code that calls the fake driver, and returns the counts."""

    def call(code: str, *, count_launches: bool = True) -> dict[str, int]:
        driver = compiled(tmp_path, "libcuda.so.1", DRIVER)
        library = driver_calls.build(tmp_path, launches=count_launches)
        counts = tmp_path / "counts"
        counts.mkdir()
        env = {**os.environ, **driver_calls.environment(library, counts)}
        command = [sys.executable, "-c", code, str(driver)]
        subprocess.run(command, env=env, check=True)
        return driver_calls.read(counts)

    return call


def test_launches_are_counted_and_go_on_to_the_driver(
    counted: Callable[..., dict[str, int]],
) -> None:
    """Each launch counts once and keeps its arguments and its result."""
    counts = counted(CALLS)
    assert {name: n for name, n in counts.items() if n} == {
        "cuLaunchKernel": 1,
        "cuLaunchKernelEx": 2,
    }


def test_functions_that_the_driver_is_asked_for_count_too(
    counted: Callable[..., dict[str, int]],
) -> None:
    """So do the launches of libraries that go by cuGetProcAddress."""
    counts = counted(ASKED)
    assert {name: n for name, n in counts.items() if n} == {
        "cuLaunchKernel": 2,
        "cuLaunchKernelEx": 5,
        "cuMemcpyDtoH_v2": 1,
    }


def test_launches_count_only_if_asked_for(
    counted: Callable[..., dict[str, int]],
) -> None:
    """Who counts waits does not slow each launch down."""
    code = CALLS + "driver.cuStreamSynchronize(None)\n"
    counts = counted(code, count_launches=False)
    assert not set(counts) & set(driver_calls.LAUNCHES)
    assert counts["cuStreamSynchronize"] == 1


def test_launches_of_a_layer_are_found(
    run: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Those of a prefill and those beside the layers are left out."""
    words = (
        *("--arm", "built-in"),
        *("--arm", "bands", "BANDS@2=1", "BANDS@6=3", "MORE=a=b"),
    )
    assert run(*words) == 0
    assert capsys.readouterr().out.endswith(TABLE)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["arms"]["bands"]["variables"] == {
        "2": [["BANDS", "1"], ["MORE", "a=b"]],
        "6": [["BANDS", "3"], ["MORE", "a=b"]],
    }
    # A second run has nothing left to count.
    assert run(*words) == 0
    assert capsys.readouterr().out == TABLE


def test_flags_can_name_arm_and_layers(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each server has files of its own, such as precompiled graphs."""
    seen = []
    real = sampling.serve

    def spy(
        arm: Arm,
        model: Path,
        log: Path,
        *,
        flags: Sequence[str],
        env: Mapping[str, str],
    ) -> AbstractContextManager[Server]:
        seen.append((arm.name, model.name, flags[-2:]))
        return real(arm, model, log, flags=flags, env=env)

    monkeypatch.setattr(sampling, "serve", spy)
    flags = ("--serve-flag=--mefs", "--serve-flag={arm}-{layers}")
    assert run("--arm", "a", *flags) == 0
    assert seen == [
        ("a", "2", ["--mefs", "a-2"]),
        ("a", "6", ["--mefs", "a-6"]),
    ]


def test_kernels_of_captured_graphs_are_no_kernels_less(
    run: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A step that replays a graph is refused, not undercounted."""
    assert run("--arm", "a", "REPLAYS=1") == 1
    assert "expected kernels and no captured graph" in capsys.readouterr().err
    assert not (tmp_path / "results.json").exists()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--arm", "a", "B"), "arm a: 'B' is no environment variable"),
        (("--arm", "a", "=1"), "arm a: '=1' is no environment variable"),
        (("--arm", "a", "B@3=1"), "which are 2 and 6"),
        (("--arm", "a", "--arm", "a", "B=1"), "two arms have one name"),
    ],
)
def test_arms_must_be_told_apart(
    run: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    error: str,
) -> None:
    """What an arm asks for in vain ends the program before it serves."""
    with pytest.raises(SystemExit) as caught:
        run(*words)
    assert caught.value.code == 2
    assert error in capsys.readouterr().err


def test_models_of_one_size_are_refused(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a difference of layers there is none of launches."""
    checkpoint(tmp_path / "2", 6, nested=True)
    with pytest.raises(SystemExit):
        run("--arm", "a")
    assert "both models have 6 layers" in capsys.readouterr().err


def test_memory_is_what_the_key_value_cache_leaves() -> None:
    """The most in use, less the cache, in MiB; without a GPU a dash."""
    counted = {
        "samples": [{"memory_mib": [used]} for used in ("4000", "4020")],
        "kv_cache": "cache_memory: 1.50 GiB",
    }
    assert launches.memory(counted) == "2484"
    assert (
        launches.memory({"samples": [{"memory_mib": []}], "kv_cache": ""})
        == "-"
    )
