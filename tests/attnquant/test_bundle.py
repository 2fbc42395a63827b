# SPDX-License-Identifier: Apache-2.0
"""Bundles: what is written is what the checkpoint was, or a clear error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors
from attnquant_common import bundle, decomposition, report
from attnquant_common.bundle import Bundle, BundleError, Checkpoint
from attnquant_common.projections import group, layers
from attnquant_common.tensor import Tensor, TensorSpec, from_float32
from attnquant_common.tensorfile import create
from hypothesis import given, settings
from hypothesis import strategies as st

LAYERS = 6
SHAPES = {
    "self_attn.q_proj": (24, 16),
    "self_attn.k_proj": (9, 16),
    "self_attn.v_proj": (1, 16),
    "self_attn.o_proj": (16, 24),
    "mlp.gate_proj": (33, 16),
    "mlp.up_proj": (33, 16),
    "mlp.down_proj": (16, 33),
}
Tensors = dict[str, Tensor]


def model(dtype: str, prefix: str = "model.", number: int = LAYERS) -> Tensors:
    """A checkpoint's tensors: projections, and what is left alone."""
    random = np.random.default_rng(0)

    def draw(*shape: int) -> Tensor:
        return from_float32(random.standard_normal(shape, np.float32), dtype)

    made = {f"{prefix}embed_tokens.weight": draw(50, 16)}
    for layer in range(number):
        for projection, shape in SHAPES.items():
            made[f"{prefix}layers.{layer}.{projection}.weight"] = draw(*shape)
        made[f"{prefix}layers.{layer}.input_layernorm.weight"] = draw(16)
    vision = "vision_tower.vision_model.encoder.layers"
    for layer in range(2):
        made[f"{vision}.{layer}.self_attn.q_proj.weight"] = draw(8, 8)
    return made


def specs(tensors: Tensors) -> dict[str, TensorSpec]:
    return {name: tensor.spec for name, tensor in tensors.items()}


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def same(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.shape, one.data.tobytes()) == (
        other.dtype,
        other.shape,
        other.data.tobytes(),
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "bundle" / "model.safetensors"
    path.parent.mkdir()
    return path


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_a_band_a_layer_gives_the_checkpoint(path: Path, dtype: str) -> None:
    """With as many bands as layers a bundle holds the checkpoint's tensors,
    bit for bit, under their names, for any reader of safetensors."""
    tensors = model(dtype)
    bundle.write(path, tensors, LAYERS, 4)
    found = dict(Bundle(path).state_dict())
    assert found.keys() == tensors.keys()
    assert all(same(found[name], tensors[name]) for name in tensors)
    assert {
        name: bytes(entry["data"])
        for name, entry in safetensors.deserialize(path.read_bytes())
    } == {name: tensor.data.tobytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize(("blocks", "rank"), [(1, 0), (2, 3), (4, 2), (5, 99)])
def test_weights_are_those_of_the_decomposition(
    path: Path, dtype: str, blocks: int, rank: int
) -> None:
    """A bundle gives what decomposing gives, rounded to the type; all else
    that the checkpoint has is as it was."""
    tensors = model(dtype)
    bundle.write(path, tensors, blocks, rank, seed=3)
    found = dict(Bundle(path).state_dict())
    assert found.keys() == tensors.keys()
    decomposed = set()
    for projection in SHAPES:
        names = [
            f"model.layers.{layer}.{projection}.weight"
            for layer in range(LAYERS)
        ]
        whole = decomposition.decompose(
            [tensors[name].float32() for name in names], blocks, rank, seed=3
        )
        for layer, name in enumerate(names):
            expected = from_float32(whole.reconstruct(layer), dtype)
            assert same(found[name], expected)
            decomposed.add(name)
    for name in tensors.keys() - decomposed:
        assert same(found[name], tensors[name])


def test_the_seed_decides_in_a_bundle_too(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices that are decomposed at random are so by the bundle's seed."""
    monkeypatch.setattr(decomposition, "EXACT_SIZE", 1)
    monkeypatch.setattr(decomposition, "OVERSAMPLING", 1)
    tensors = model("F32")
    names = [
        f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(LAYERS)
    ]
    weights = [tensors[name].float32() for name in names]

    def factor(seed: int) -> bytes:
        whole = decomposition.decompose(weights, 1, 2, seed)
        return whole.bands[0].a[0].tobytes()

    bundle.write(path, tensors, 1, 2, seed=3)
    with safetensors.safe_open(path, framework="numpy") as file:
        name = f"model.layers.0.mlp.up_proj{bundle.A}"
        found = file.get_tensor(name).tobytes()
    assert Bundle(path).seed == 3
    assert found == factor(3)
    assert found != factor(4)


def test_bands_are_served_in_float32(path: Path) -> None:
    """The runtime path gets the parts, mapped; layers alone have none."""
    tensors = model("BF16")
    bundle.write(path, tensors, 4, 2)
    opened = Bundle(path)
    assert (opened.layers, opened.blocks, opened.rank) == (LAYERS, 4, 2)
    assert len(opened.shared) == 2 * len(SHAPES)
    (shared,) = [
        s
        for s in opened.shared
        if s.modules[0] == "model.layers.2.self_attn.v_proj"
    ]
    assert shared.modules[1] == "model.layers.3.self_attn.v_proj"
    assert (shared.dtype, shared.shape, shared.rank) == ("BF16", (1, 16), 1)
    band = opened.band(shared)
    pair = [tensors[f"{module}.weight"].float32() for module in shared.modules]
    np.testing.assert_array_equal(band.w0, (pair[0] + pair[1]) / 2)
    assert not band.w0.flags.writeable
    np.testing.assert_allclose(band.reconstruct(1), pair[1], atol=1e-6)


def test_rank_0_keeps_only_means(path: Path) -> None:
    """At rank 0 there are no factors in the file, and layers are the mean."""
    bundle.write(path, model("F32"), 1, 0)
    opened = Bundle(path)
    with safetensors.safe_open(path, framework="numpy") as file:
        names = set(file.keys())
    assert not [n for n in names if n.endswith((bundle.A, bundle.B))]
    assert len([n for n in names if n.endswith(bundle.W0)]) == len(SHAPES)
    band = opened.band(opened.shared[0])
    assert band.rank == 0
    np.testing.assert_array_equal(band.reconstruct(5), band.w0)


def test_bytes_are_those_of_the_tensors(path: Path) -> None:
    """A band costs float32: 4 N K once, and 4 r (N + K) a layer."""
    tensors = model("BF16")
    bundle.write(path, tensors, 2, 1)
    banded = sum(
        2 * 4 * n * k + LAYERS * 4 * (n + k) for n, k in SHAPES.values()
    )
    projections = {
        module + ".weight" for s in Bundle(path).shared for module in s.modules
    }
    kept = sum(t.nbytes for n, t in tensors.items() if n not in projections)
    assert len(projections) == LAYERS * len(SHAPES)
    assert Bundle(path).nbytes == banded + kept
    (row,) = report.report(tensors, [2], [1])
    assert row.bundle_bytes == banded + kept
    assert row.checkpoint_bytes == sum(t.nbytes for t in tensors.values())


def test_the_source_is_known_by_its_content(tmp_path: Path) -> None:
    """The source digest is the content's: not the number of bands decides it,
    but every name, type and byte."""

    def source(name: str, tensors: Tensors, blocks: int) -> str:
        bundle.write(tmp_path / name, tensors, blocks, 1)
        return Bundle(tmp_path / name).source

    tensors = model("BF16")
    first = source("a", tensors, 2)
    assert source("b", dict(reversed(tensors.items())), 6) == first
    changed = tensors["model.layers.0.mlp.up_proj.weight"].data.copy()
    changed[0, 0] ^= 1
    name = "model.layers.0.mlp.up_proj.weight"
    assert source("c", tensors | {name: Tensor(changed, "BF16")}, 2) != first
    assert source("d", tensors | {"x": tensors[name]}, 2) != first


def test_equal_checkpoints_make_equal_bundles(tmp_path: Path) -> None:
    """Nothing but the tensors and the numbers is in the bytes."""
    for name in ("a", "b"):
        bundle.write(tmp_path / name, model("BF16"), 3, 2)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_no_changed_byte_is_served(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever byte is changed, opening or reading says so and by what to
    replace the file, or that it is none of ours."""
    path = tmp_path_factory.mktemp("changed") / "b.safetensors"
    bundle.write(path, model("BF16", number=2), 1, 1)
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with pytest.raises(BundleError, match=r"b\.safetensors"):
        list(Bundle(path).state_dict())


def test_a_cut_file_is_damaged(path: Path) -> None:
    """A download that broke off is found at opening, with what to do."""
    bundle.write(path, model("BF16"), 2, 1)
    content = path.read_bytes()
    for length in (0, 7, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(BundleError, match="make the bundle again"):
            Bundle(path)


def test_a_tampered_weight_is_named(path: Path) -> None:
    """One changed bit of a weight is an error with the tensor's name."""
    bundle.write(path, model("BF16"), 2, 1)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(BundleError, match=r"damaged: in \S+weight"):
        list(Bundle(path).state_dict())


def test_another_version_is_said(path: Path) -> None:
    """A bundle of a later version is not called damaged."""
    metadata = {"format": bundle.FORMAT, "version": "2"}
    with create(path, {}, metadata):
        pass
    with pytest.raises(BundleError, match=r"version 2; .* reads version 1"):
        Bundle(path)


def test_a_checkpoint_is_no_bundle(path: Path) -> None:
    """A safetensors file of other making is told apart from a damaged one."""
    with create(path, {}, {"format": "pt"}):
        pass
    with pytest.raises(BundleError, match="a safetensors file, but no bundle"):
        Bundle(path)


@pytest.mark.parametrize(
    ("blocks", "rank", "message"),
    [
        (0, 1, "6 layers cannot make 0 bands"),
        (7, 1, "6 layers cannot make 7 bands"),
        (2, -1, "rank of 0 or more, found -1"),
    ],
)
def test_numbers_out_of_range_are_errors(
    path: Path, blocks: int, rank: int, message: str
) -> None:
    """Bands and rank are checked before anything is written."""
    with pytest.raises(ValueError, match=message):
        bundle.write(path, model("BF16"), blocks, rank)
    assert listing(path.parent) == []


def test_nan_names_the_tensor_and_leaves_nothing(path: Path) -> None:
    """A weight that holds NaN ends the work, and there is no file."""
    tensors = model("BF16")
    name = "model.layers.4.mlp.down_proj.weight"
    bits = tensors[name].data.copy()
    bits[3, 3] = 0x7FC0
    tensors[name] = Tensor(bits, "BF16")
    with pytest.raises(ValueError, match=f"{name} holds NaN"):
        bundle.write(path, tensors, 2, 1)
    assert listing(path.parent) == []


def save(folder: Path, name: str, tensors: Tensors) -> None:
    with create(folder / name, specs(tensors), {}) as file:
        for key, tensor in tensors.items():
            file.put(key, tensor)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder as from a hub: two shards, an index, a configuration."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    tensors = model("BF16")
    names = list(tensors)
    shards = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    for file, keys in shards.items():
        save(folder, file, {key: tensors[key] for key in keys})
    index = {"weight_map": {k: f for f, keys in shards.items() for k in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "original").mkdir()
    return folder


def test_a_folder_to_serve(checkpoint: Path, tmp_path: Path) -> None:
    """The bundle stands alone as the weights, beside the configuration and
    the tokenizer; no index points to shards that are not there."""
    folder = tmp_path / "made" / "bundle"
    bundle.create(checkpoint, folder, 2, 1)
    assert listing(folder) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (folder / "tokenizer.json").read_text() == '{"a": 1}'
    found = dict(Bundle(folder / bundle.FILE).state_dict())
    assert found.keys() == model("BF16").keys()


def test_the_command_makes_the_folder(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command makes what the function makes; an error is one line."""
    folder = tmp_path / "bundle"
    arguments = [str(checkpoint), str(folder), "--blocks", "3", "--rank", "2"]
    assert bundle.main(arguments) == 0
    opened = Bundle(folder / bundle.FILE)
    assert (opened.blocks, opened.rank, opened.seed) == (3, 2, 0)
    assert bundle.main(arguments) == 1
    shown = capsys.readouterr()
    assert shown.err == f"bundle: {folder} exists; remove it or name another\n"


def test_a_folder_that_is_there_is_kept(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Nothing is overwritten."""
    folder = tmp_path / "bundle"
    folder.mkdir()
    with pytest.raises(FileExistsError, match="remove it or name another"):
        bundle.create(checkpoint, folder, 2, 1)
    assert listing(folder) == []


def test_a_failed_folder_leaves_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error while the folder is made leaves no folder, whole or part."""

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundle.shutil, "copyfile", full)
    before = listing(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        bundle.create(checkpoint, tmp_path / "bundle", 2, 1)
    assert listing(tmp_path) == before


def test_a_folder_without_weights_is_an_error(tmp_path: Path) -> None:
    """What is no checkpoint is said to be none."""
    with pytest.raises(ValueError, match="holds no safetensors file"):
        Checkpoint(tmp_path)


def test_a_tensor_in_two_files_is_an_error(checkpoint: Path) -> None:
    """It is not left to the order of files which of the two counts."""
    save(
        checkpoint,
        "x.safetensors",
        {"a": model("F32")["model.embed_tokens.weight"]},
    )
    save(
        checkpoint,
        "y.safetensors",
        {"a": model("F32")["model.embed_tokens.weight"]},
    )
    with pytest.raises(ValueError, match=r"a is in y.* and in x"):
        Checkpoint(checkpoint)


@pytest.mark.parametrize(
    "prefix", ["model.", "language_model.model.", "model.language_model."]
)
def test_projections_are_the_language_models(prefix: str) -> None:
    """All seven projections of each layer, in the layers' order, under each
    prefix that Gemma's checkpoints have; none of a vision tower."""
    tensors = model("BF16", prefix, number=12)
    groups = group(specs(dict(sorted(tensors.items()))))
    assert layers(specs(tensors)) == 12
    assert {g.projection: g.shape for g in groups} == SHAPES
    for found in groups:
        assert found.dtype == "BF16"
        assert found.modules == tuple(
            f"{prefix}layers.{layer}.{found.projection}" for layer in range(12)
        )


def test_shapes_that_differ_are_groups_of_their_own(path: Path) -> None:
    """Layers of two kinds, as in Gemma 4, share bands only with their own; a
    kind with fewer layers than bands has a band for each."""
    tensors = model("F32")
    for layer in (2, 5):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        tensors[name] = Tensor(np.ones((48, 16), np.float32), "F32")
    found = [
        g.modules
        for g in group(specs(tensors))
        if g.projection == "self_attn.q_proj"
    ]
    assert [len(modules) for modules in found] == [4, 2]
    bundle.write(path, tensors, 3, 0)
    assert dict(Bundle(path).state_dict()).keys() == tensors.keys()
    alone = {s.modules for s in Bundle(path).shared if "q_proj" in s.modules[0]}
    assert alone == {
        ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj")
    }


def test_a_quantized_checkpoint_is_refused(path: Path) -> None:
    """What is packed in bytes already is named, not decomposed as numbers."""
    tensors = model("BF16")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = Tensor(np.zeros((33, 8), np.uint8), "U8")
    with pytest.raises(ValueError, match=f"{name} is U8"):
        bundle.write(path, tensors, 2, 1)


def test_a_bundle_is_not_decomposed_again(path: Path) -> None:
    """What is decomposed already has no weights to decompose."""
    bundle.write(path, model("BF16"), 2, 1)
    with pytest.raises(ValueError, match="is of a bundle; name the checkpoint"):
        bundle.write(path, Checkpoint(path.parent), 3, 1)


def test_the_report_takes_what_a_bundle_takes(path: Path) -> None:
    """A bundle has no weights to decompose, and a rank is not negative."""
    with pytest.raises(ValueError, match="a rank of 0 or more, found -1"):
        report.report(model("BF16"), [2], [-1])
    bundle.write(path, model("BF16"), 2, 1)
    with pytest.raises(ValueError, match="is of a bundle; name the checkpoint"):
        report.report(Checkpoint(path.parent), [2], [1])


def test_what_is_not_decomposed_is_verified(path: Path) -> None:
    """Whoever reads the file by other means can know of damage in it."""
    bundle.write(path, model("BF16"), 2, 1)
    Bundle(path).verify()
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    name = "model.embed_tokens.weight"
    start, _ = json.loads(content[8 : 8 + length])[name]["data_offsets"]
    content[8 + length + start] ^= 1
    path.write_bytes(content)
    with pytest.raises(BundleError, match=f"in {name}"):
        Bundle(path).verify()


def test_no_projections_is_an_error(path: Path) -> None:
    """A checkpoint of another kind has no layers to share."""
    tensors = {"x": model("F32")["model.embed_tokens.weight"]}
    with pytest.raises(ValueError, match="0 layers cannot make 1 bands"):
        bundle.write(path, tensors, 1, 1)


def test_the_report_measures_what_is_served(path: Path) -> None:
    """Errors are those of a bundle's weights, in float32; the worst weight is
    the one that loses most; nothing is lost with a band a layer."""
    tensors = model("F32")
    rows = report.report(tensors, [1, 3, LAYERS], [0, 2])
    assert [(r.blocks, r.rank) for r in rows] == [
        (1, 0),
        (1, 2),
        (3, 0),
        (3, 2),
        (6, 0),
        (6, 2),
    ]
    bundle.write(path, tensors, 3, 2)
    found = dict(Bundle(path).state_dict())
    names = [
        n
        for g in group(specs(tensors))
        for n in (m + ".weight" for m in g.modules)
    ]
    lost = sum(np.sum((found[n].data - tensors[n].data) ** 2.0) for n in names)
    whole = sum(np.sum(tensors[n].data ** 2.0) for n in names)
    assert rows[3].error == pytest.approx((lost / whole) ** 0.5, rel=1e-4)
    each = {
        n: np.linalg.norm(found[n].data - tensors[n].data)
        / np.linalg.norm(tensors[n].data)
        for n in names
    }
    worst = max(each, key=each.__getitem__)
    assert rows[3].worst + ".weight" == worst
    assert rows[3].worst_error == pytest.approx(each[worst], rel=1e-4)
    assert [r.error for r in rows[4:]] == [0, 0]
    assert rows[4].bundle_bytes == rows[4].checkpoint_bytes
    assert rows[0].error > rows[1].error > rows[3].error


def test_the_report_is_printed_and_kept(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command prints a table of a row each and writes the same rows."""
    kept = tmp_path / "report.json"
    arguments = [str(checkpoint), "--blocks", "2", "6", "--ranks", "1"]
    assert report.main([*arguments, "--json", str(kept)]) == 0
    table = capsys.readouterr().out.splitlines()
    rows = json.loads(kept.read_text())
    assert [(r["blocks"], r["rank"]) for r in rows] == [(2, 1), (6, 1)]
    for line, row in zip(table[2:], rows, strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[:2] == [str(row["blocks"]), str(row["rank"])]
        assert float(cells[2]) == pytest.approx(row["error"], rel=1e-3)
        assert cells[4] == str(row["bundle_bytes"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: [*a[:1], "--blocks", "7", "--ranks", "1"], "cannot make 7"),
        (lambda a: ["/nowhere", *a[1:]], "holds no safetensors file"),
    ],
)
def test_the_report_ends_in_one_line_of_error(
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[list[str]], list[str]],
    message: str,
) -> None:
    """What is wrong with the arguments is a line and exit status 1."""
    arguments = [str(checkpoint), "--blocks", "2", "--ranks", "1"]
    assert report.main(change(arguments)) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert len(shown.err.splitlines()) == 1
