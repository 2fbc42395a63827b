# SPDX-License-Identifier: Apache-2.0
"""Decomposed checkpoints in files.

A bundle is a safetensors file that holds a checkpoint's tensors, except that
of the projections whose layers share a band it holds the parts of
:class:`.decomposition.Band`, in float32:

- ``<module>.attnquant_w0``: the mean, at the band's first module,
- ``<module>.attnquant_a`` and ``<module>.attnquant_b``: the factors of each
  module of the band, left out at rank 0.

A layer that is a band of its own keeps its weight, name and type. So with as
many bands as layers a bundle holds the very tensors of the checkpoint.

``python -m max.pipelines.architectures.attnquant_common.bundle CHECKPOINT
FOLDER --blocks 13 --rank 32`` makes a folder with one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import decomposition, tensorfile
from .decomposition import Band, FloatArray
from .digests import DamagedFileError, digest
from .projections import Group, group, layers
from .tensor import Tensor, TensorSpec, from_float32
from .tensorfile import Reader

FORMAT = "attnquant-bundle"
VERSION = "1"
FILE = "model.safetensors"
"""A bundle's name in a folder that is served."""

W0, A, B = ".attnquant_w0", ".attnquant_a", ".attnquant_b"
_NO_SOURCE = "0" * 64


class BundleError(ValueError):
    """A file is no bundle that this code reads."""


@dataclass(frozen=True)
class Shared:
    """A band of several layers."""

    dtype: str
    """The type of the weights that it was made from."""

    shape: tuple[int, int]
    rank: int
    modules: tuple[str, ...]

    def specs(self) -> dict[str, TensorSpec]:
        """Returns the tensors that hold it, by name."""
        rows, columns = self.shape
        specs = {self.modules[0] + W0: TensorSpec("F32", self.shape)}
        for module in self.modules if self.rank else ():
            specs[module + A] = TensorSpec("F32", (self.rank, columns))
            specs[module + B] = TensorSpec("F32", (rows, self.rank))
        return specs

    def of(self, module: str) -> list[str]:
        """Returns the tensors that one of its modules is rebuilt from."""
        factors = [module + A, module + B] if self.rank else []
        return [self.modules[0] + W0, *factors]

    def named(self, band: Band) -> Iterator[tuple[str, FloatArray]]:
        """Gives a band's arrays by the names of the tensors that hold them."""
        factors = zip(band.a, band.b, strict=True) if self.rank else ()
        parts = [band.w0, *(part for pair in factors for part in pair)]
        return zip(self.specs(), parts, strict=True)


def shared_bands(
    groups: Sequence[Group], blocks: int, rank: int
) -> list[Shared]:
    """Returns the bands of several layers.

    Args:
        groups: The projections.
        blocks: Bands a group, or one a layer where it has fewer.
        rank: The rank, as in :func:`.decomposition.decompose`.
    """
    return [
        Shared(
            group.dtype,
            group.shape,
            min(rank, *group.shape),
            tuple(group.modules[layer] for layer in band),
        )
        for group in groups
        for band in decomposition.bands(
            len(group.modules), min(blocks, len(group.modules))
        )
        if len(band) > 1
    ]


def bundle_specs(
    specs: Mapping[str, TensorSpec], bands: Sequence[Shared]
) -> dict[str, TensorSpec]:
    """Returns the tensors of a bundle, by name.

    Args:
        specs: The checkpoint's tensors, by name.
        bands: Its bands of several layers.
    """
    replaced = {f"{m}.weight" for band in bands for m in band.modules}
    kept = {n: spec for n, spec in specs.items() if n not in replaced}
    for band in bands:
        kept |= band.specs()
    return kept


def check_checkpoint(names: Iterable[str]) -> None:
    """Checks that tensors are a checkpoint's and no bundle's.

    Raises:
        ValueError: If one is a bundle's.
    """
    for name in names:
        if name.endswith((W0, A, B)):
            raise ValueError(f"{name} is of a bundle; name the checkpoint")


def check_rank(rank: int) -> None:
    """Checks that a number can be a rank.

    Raises:
        ValueError: If it is below 0.
    """
    if rank < 0:
        raise ValueError(f"expected a rank of 0 or more, found {rank}")


def write(
    path: Path,
    checkpoint: Mapping[str, Tensor],
    blocks: int,
    rank: int,
    seed: int = 0,
) -> None:
    """Decomposes a checkpoint into a bundle.

    One weight is in memory at a time, with its band's mean. The file appears
    under its name when it is complete.

    Args:
        path: The bundle.
        checkpoint: Its tensors, by name; read once or twice each.
        blocks: The number of bands, up to the number of layers.
        rank: The rank, as in :func:`.decomposition.decompose`.
        seed: Likewise.

    Raises:
        ValueError: If there is no projection, a number is out of range, a
            projection holds NaN or infinity, or the checkpoint is a bundle.
        OSError: If the file cannot be written.
    """
    specs = {name: tensor.spec for name, tensor in checkpoint.items()}
    check_checkpoint(specs)
    count = layers(specs)
    if not 1 <= blocks <= count:
        raise ValueError(f"{count} layers cannot make {blocks} bands")
    check_rank(rank)
    bands = shared_bands(group(specs), blocks, rank)
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "layers": str(count),
        "blocks": str(blocks),
        "rank": str(rank),
        "seed": str(seed),
        "source": _NO_SOURCE,
        "bands": json.dumps([vars(band) for band in bands]),
    }
    source: dict[str, str] = {}
    with tensorfile.create(path, bundle_specs(specs, bands), metadata) as file:
        for band in bands:
            names = [f"{module}.weight" for module in band.modules]
            for name in names:
                source[name] = digest(checkpoint[name]).sha256
            parts = decomposition.decompose_band(
                Widened(checkpoint, names), band.rank, seed, names
            )
            for name, part in band.named(parts):
                file.put(name, Tensor(part, "F32"))
        for name in specs.keys() - source.keys():
            source[name] = file.put(name, checkpoint[name])
        file.amend("source", _source_digest(specs, source))


def create(
    checkpoint: Path, folder: Path, blocks: int, rank: int, seed: int = 0
) -> None:
    """Makes a folder that is served in a checkpoint's place.

    It has the bundle and whatever lies beside the checkpoint's weights:
    configuration, tokenizer. It appears under its name when it is complete.

    Args:
        checkpoint: A folder with safetensors files.
        folder: The folder to make.
        blocks: As in :func:`write`.
        rank: Likewise.
        seed: Likewise.

    Raises:
        FileExistsError: If the folder is there.
        ValueError: If the checkpoint is no such folder, or as in
            :func:`write`.
        OSError: If it cannot be written; nothing is left behind.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists; remove it or name another")
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
    tensors = Checkpoint(checkpoint)
    try:
        temporary.mkdir(parents=True)
        write(temporary / FILE, tensors, blocks, rank, seed)
        for path in sorted(checkpoint.iterdir()):
            weights = path.name.endswith(_WEIGHT_FILES)
            if path.is_file() and not weights:
                shutil.copyfile(path, temporary / path.name)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


_WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".gguf", ".bin")


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a folder's safetensors files, mapped into memory."""

    def __init__(self, folder: Path) -> None:
        """Maps the files.

        Raises:
            ValueError: If there are none, one is damaged, or two of them hold
                a tensor of the same name.
        """
        self._files: dict[str, Reader] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = Reader(path)
            twice = self._files.keys() & file.keys()
            if twice:
                raise ValueError(
                    f"{min(twice)} is in {path.name} and in "
                    f"{self._files[min(twice)].path.name} of {folder}"
                )
            self._files.update(dict.fromkeys(file, file))
        if not self._files:
            raise ValueError(f"{folder} holds no safetensors file")

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


class Bundle:
    """A bundle, mapped into memory.

    A tensor's bytes are compared with their digest when they are read here.
    Whoever reads the file otherwise, as MAX does, asks :meth:`verify`.
    """

    def __init__(self, path: Path) -> None:
        """Opens a bundle and checks all but the tensors' bytes.

        Raises:
            BundleError: If it is no bundle, of another version, or damaged.
            OSError: If it cannot be read.
        """
        try:
            self._file = Reader(path)
        except DamagedFileError as error:
            raise BundleError(f"{error}; {_AGAIN}") from error
        metadata = self._file.metadata
        if metadata.get("format") != FORMAT:
            raise BundleError(f"{path} is a safetensors file, but no bundle")
        if metadata.get("version") != VERSION:
            raise BundleError(
                f"{path} is a bundle of version {metadata.get('version')}; "
                f"this AttnQuant reads version {VERSION}; {_AGAIN}"
            )
        try:
            self._file.verify_header()
        except DamagedFileError as error:
            raise BundleError(f"{error}; {_AGAIN}") from error
        self.path = path
        self.layers = int(metadata["layers"])
        self.blocks = int(metadata["blocks"])
        self.rank = int(metadata["rank"])
        self.seed = int(metadata["seed"])
        self.source = metadata["source"]
        self.shared = [
            Shared(
                band["dtype"],
                tuple(band["shape"]),
                band["rank"],
                tuple(band["modules"]),
            )
            for band in json.loads(metadata["bands"])
        ]

    layers: int
    blocks: int
    rank: int
    seed: int
    source: str
    """Digest of the names, types, shapes and bytes of the source's tensors."""

    shared: list[Shared]
    """The bands of several layers."""

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(self._file.spec(name).nbytes for name in self._file)

    @property
    def source_nbytes(self) -> int:
        """The bytes of all tensors of the checkpoint that it was made from."""
        nbytes = self.nbytes
        for shared in self.shared:
            parts = shared.specs().values()
            weight = TensorSpec(shared.dtype, shared.shape)
            nbytes += len(shared.modules) * weight.nbytes
            nbytes -= sum(part.nbytes for part in parts)
        return nbytes

    def band(self, shared: Shared) -> Band:
        """Returns the parts of a band, as they are mapped.

        Raises:
            BundleError: If they are damaged.
        """
        first, *factors = (
            self._read(name).float32() for name in shared.specs()
        )
        if not shared.rank:
            rows, columns = shared.shape
            pair = np.zeros((0, columns), "f4"), np.zeros((rows, 0), "f4")
            factors = [*pair] * len(shared.modules)
        return Band(first, tuple(factors[::2]), tuple(factors[1::2]))

    def state_dict(self) -> Iterator[tuple[str, Tensor]]:
        """Gives the checkpoint's tensors by name, one by one.

        Weights of shared bands are rebuilt in float32 and rounded to the type
        that they had; all else is as it was.

        Raises:
            BundleError: If a tensor is damaged.
        """
        for name in self._kept():
            yield name, self._read(name)
        for shared in self.shared:
            band = self.band(shared)
            for layer, module in enumerate(shared.modules):
                weight = from_float32(band.reconstruct(layer), shared.dtype)
                yield f"{module}.weight", weight

    def verify(self) -> None:
        """Checks the tensors that are the checkpoint's as they were.

        Raises:
            BundleError: If one is damaged.
        """
        for name in self._kept():
            self._read(name)

    def _kept(self) -> Iterator[str]:
        parts = {name for s in self.shared for name in s.specs()}
        return (name for name in self._file if name not in parts)

    def _read(self, name: str) -> Tensor:
        try:
            return self._file.verified(name)
        except DamagedFileError as error:
            raise BundleError(f"{error}; {_AGAIN}") from error


_AGAIN = "make the bundle again from its checkpoint"


def find_bundle(paths: Sequence[Path]) -> Bundle | None:
    """Returns the bundle that a model's weights are, if they are one.

    Args:
        paths: The model's files of weights.

    Raises:
        BundleError: If the file is a bundle of another version, or damaged.
        OSError: If it cannot be read.
    """
    if len(paths) != 1 or paths[0].suffix != ".safetensors":
        return None
    try:
        metadata = Reader(paths[0]).metadata
    except DamagedFileError:
        return None  # MAX, which reads it too, says what is wrong.
    return Bundle(paths[0]) if metadata.get("format") == FORMAT else None


@dataclass(frozen=True)
class Widened(Sequence[FloatArray]):
    """Some weights in float32, each made when it is asked for."""

    tensors: Mapping[str, Tensor]
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> FloatArray:  # type: ignore[override]
        return self.tensors[self.names[index]].float32()


def _source_digest(
    specs: Mapping[str, TensorSpec], digests: Mapping[str, str]
) -> str:
    listed: list[tuple[Any, ...]] = [
        (name, specs[name].dtype, specs[name].shape, digests[name])
        for name in sorted(specs)
    ]
    text = json.dumps(listed).encode()
    return hashlib.sha256(text).hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes a folder with a bundle from a checkpoint's folder."""
    parser = argparse.ArgumentParser(
        prog="bundle", description="Decompose a checkpoint into a bundle."
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args(arguments)
    try:
        create(
            parsed.checkpoint,
            parsed.folder,
            parsed.blocks,
            parsed.rank,
            parsed.seed,
        )
    except (OSError, ValueError) as error:
        print(f"bundle: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
