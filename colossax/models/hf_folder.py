"""Hugging Face folders as a reader sees them: checked as a whole, read one tensor at a time."""

import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from colossax.documents import read_json
from colossax.errors import InputError, WeightsError
from colossax.models.conversion import Conversion, Tensor
from colossax.models.conversions import CONVERSIONS
from colossax.models.embedding import head_of_folder
from colossax.models.packed import Format, Packed, format_of, packed_among
from colossax.models.registry import maker
from colossax.models.safetensors import DTYPES, Reader
from colossax.nn import DualEncoderConfig, ModelSpec, SeeingConfig, describe
from colossax.typing import ParamInfo


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A folder whose configuration and tensors fit one of our models.

    Attributes:
        config: Configuration of our model.
        spec: Our model, as one segment of layers.
        tensors: What to read, in the family's order.
        names: Name in the files, per tensor name.
        reader: The files.
        packed: By name, the tensors that are stored in codes.
    """

    config: Any
    spec: ModelSpec
    tensors: list[Tensor]
    names: Mapping[str, str]
    reader: Reader
    packed: Mapping[str, Packed] = dataclasses.field(default_factory=dict)

    @property
    def infos(self) -> dict[str, ParamInfo]:
        """Our parameters by path."""
        return by_path(self.spec)

    @functools.cached_property
    def dtypes(self) -> dict[str, np.dtype]:
        """Type per path: that of its tensors, the wider where layers differ."""
        dtypes: dict[str, np.dtype] = {}
        for tensor in self.tensors:
            dtype = self._stored_dtype(tensor)
            for info in tensor.infos:
                dtypes[info.path] = np.promote_types(dtypes.get(info.path, dtype), dtype)
        return dtypes

    def ours(self, tensor: Tensor) -> list[np.ndarray]:
        """The parameters a tensor holds.

        Raises:
            WeightsError: A number in it is not finite.

        Cost: the bytes of the tensor and of two blocks; of a matrix in codes see `packed`.
        """
        name, packed = self.names[tensor.name], self.packed.get(tensor.name)
        dtype = self._stored_dtype(tensor)
        arrays = [
            np.empty(shape, self.dtypes[info.path])
            for shape, info in zip(tensor.shapes, tensor.infos, strict=True)
        ]
        for block in tensor.blocks(dtype.itemsize):
            if packed is None:
                rows = self.reader.read(name, block.first_row, block.rows)
            else:
                rows = packed.rows(block.first_row, block.rows)
            _check_finite(rows, name)
            for array, part in zip(arrays, block.ours(rows), strict=True):
                array[block.index] = part
        return arrays

    def _stored_dtype(self, tensor: Tensor) -> np.dtype:
        if tensor.name in self.packed:
            return self.packed[tensor.name].dtype
        return DTYPES[self.reader.tensors[self.names[tensor.name]].dtype]


def open_folder(folder: str | Path) -> Source:
    """Check a folder against the model it says it holds; reads no numbers but those of a tied head.

    Raises:
        InputError: config.json is missing, unreadable, or of a model or setting not supported, or
            says that weights are stored in codes that are not read.
        WeightsError: Tensors are missing, extra, wrongly shaped or typed, or files damaged.
    """
    folder = Path(folder)
    settings = read_settings(folder)
    conversion = conversion_of(settings)
    config = conversion.config_from(settings)
    if (head := head_of_folder(folder)) is not None and hasattr(config, "head"):
        config = dataclasses.replace(config, head=head)
    conversion, form = conversion.of(config), format_of(settings, conversion)
    reader = Reader(folder)
    _check_counts(conversion, config, reader)
    spec = describe(maker(config))
    tensors = conversion.tensors(by_path(spec), config.decoder().layer_kinds)
    names, packed = _match(conversion, tensors, reader, form)
    source = Source(
        config=config, spec=spec, tensors=tensors, names=names, reader=reader, packed=packed
    )
    _check_tied(source, conversion.head)
    return source


def _check_counts(conversion: Conversion, config: Any, reader: Reader) -> None:
    """Refuse counts that the files cannot hold before anything is made of them."""
    stored = len(reader.tensors)
    if config.layers > stored:
        raise WeightsError(
            f"{reader.folder}: config.json gives {config.layers} layers, and the weights are"
            f" {stored} tensors; correct config.json or the weights"
        )
    mixture = config.decoder().mixture
    if mixture is None or not conversion.lone_experts:
        return
    experts = sum(mixture.experts_of(config.layers))
    if experts > stored:
        raise WeightsError(
            f"{reader.folder}: config.json gives {mixture.experts} experts of a layer, {experts} of"
            f" all, and the weights are {stored} tensors; correct config.json or the weights"
        )


def _check_finite(rows: np.ndarray, name: str) -> None:
    count = rows.size - np.count_nonzero(np.isfinite(rows))
    if count:
        raise WeightsError(
            f"{name}: {count} of {rows.size} numbers that were read are not finite; copy the"
            " weights again, or repair the model"
        )


def read_settings(folder: Path) -> dict[str, Any]:
    """config.json of a folder.

    Raises:
        InputError: It is missing or no JSON object.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise InputError(f"{file}: is missing; name a folder with a model and its config.json")
    return read_json(file, remedy="copy the file again")


def conversion_of(settings: Mapping[str, Any]) -> Conversion:
    """The table of the family that config.json names.

    Raises:
        InputError: No such family here.
    """
    name = settings.get("model_type")
    known = CONVERSIONS.get(name) if isinstance(name, str) else None
    sees = known is not None and issubclass(known.config, DualEncoderConfig | SeeingConfig)
    if settings.get("vision_config") is not None and not sees:
        raise InputError(
            f"config.json: {name} with vision_config is not supported; only text models are: give"
            " what text_config holds as config.json, with its own weights"
        )
    if known is None:
        raise InputError(
            f"config.json: model_type {name!r} is not among the families here; known:"
            f" {', '.join(CONVERSIONS)}"
        )
    return known


def by_path(spec: ModelSpec) -> dict[str, ParamInfo]:
    """The parameters of a model of one segment, by path, of all layers of a kind together."""
    return {info.path: _of_all_layers(info) for info in jax.tree.leaves(spec.infos)}


def _of_all_layers(info: ParamInfo) -> ParamInfo:
    """The parameter as if the layers of its kind, which others may part, were one stack."""
    total = info.total_layers
    if total is None or total == 1 or (info.stacked and info.shape[0] == total):
        return info
    shape, dims = info.shape[info.stacked :], info.dims[info.stacked :]
    return dataclasses.replace(info, shape=(total, *shape), dims=("layers", *dims), first_layer=0)


def _own_layers(info: ParamInfo, whole: np.ndarray) -> np.ndarray:
    """Of all layers of a kind those that a leaf holds."""
    if whole.shape == info.shape:
        return whole
    first = info.first_layer or 0
    return whole[first : first + info.shape[0]] if info.stacked else whole[first]


def _match(
    conversion: Conversion, tensors: list[Tensor], reader: Reader, form: Format
) -> tuple[dict[str, str], dict[str, Packed]]:
    """Name in the files per tensor, and those that are stored in codes.

    Every wrong, missing or extra one is refused by name.
    """
    names = _names_in_files(conversion, reader)
    wanted = {tensor.name for tensor in tensors}
    packed, parts = packed_among(form, conversion, tensors, names, reader)
    names = {name: file for name, file in names.items() if name not in parts}
    names |= {name: name for name in packed}
    missing = sorted(wanted - names.keys(), key=_natural)
    extra = sorted(names.keys() - wanted - {conversion.head}, key=_natural)
    extra = [name for name in extra if not any(re.fullmatch(p, name) for p in conversion.ignored)]
    if missing or extra:
        parts = [_listed("lacks", missing), _listed("has besides", extra)]
        raise WeightsError(
            f"{reader.folder}: a {conversion.model_type} with this config.json"
            f" {' and '.join(filter(None, parts))}; correct config.json or the weights"
        )
    for tensor in tensors:
        if tensor.name not in packed:
            _check_tensor(tensor, names[tensor.name], reader)
    return {name: names[name] for name in wanted}, packed


def _names_in_files(conversion: Conversion, reader: Reader) -> dict[str, str]:
    """Name in the files per full name: some files leave out the family's prefix."""
    prefix = conversion.prefix
    prefixed = any(name.startswith(prefix) for name in reader.tensors)
    skip = "" if prefixed else prefix
    names = {name if name == conversion.head else skip + name: name for name in reader.tensors}
    return {_respelt(name, conversion): file for name, file in names.items()}


def _respelt(name: str, conversion: Conversion) -> str:
    """A name as it is written now."""
    for old, new in conversion.begun.items():
        if name.startswith(old):
            name = new + name.removeprefix(old)
            break
    for old, new in conversion.spelt.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _natural(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _listed(verb: str, names: list[str]) -> str:
    if not names:
        return ""
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{verb} {', '.join(names[:5])}{rest}"


def _check_tensor(tensor: Tensor, name: str, reader: Reader) -> None:
    stored = reader.tensors[name]
    if stored.shape != tensor.shape:
        raise WeightsError(
            f"{name}: has shape {list(stored.shape)} where config.json gives {list(tensor.shape)};"
            f" correct config.json or the weights"
        )
    if stored.dtype not in DTYPES:
        raise WeightsError(
            f"{name}: is stored as {stored.dtype}, which is not supported; convert it to one of"
            f" {', '.join(DTYPES)}"
        )


def _check_tied(source: Source, head: str) -> None:
    """Some files store a tied head too; then it must be the embedding."""
    reader = source.reader
    if not source.config.decoder().tied or head not in reader.tensors:
        return
    table = source.tensors[0]
    name = source.names[table.name]
    one, other = reader.tensors[head], reader.tensors[name]
    same = (one.shape, one.dtype) == (other.shape, other.dtype)
    if not same or not _equal(reader, table, head, name):
        raise WeightsError(
            f"{head}: differs from {name} although config.json ties them; set"
            f" tie_word_embeddings to false there or drop {head}"
        )


def _equal(reader: Reader, table: Tensor, one: str, other: str) -> bool:
    itemsize = DTYPES[reader.tensors[one].dtype].itemsize
    return all(
        np.array_equal(
            reader.read(one, b.first_row, b.rows), reader.read(other, b.first_row, b.rows)
        )
        for b in table.blocks(itemsize)
    )


def read_params(folder: str | Path) -> tuple[Any, dict[str, Any]]:
    """Configuration and parameters of a folder, in host memory: for models that fit there.

    Returns:
        The configuration, and NumPy arrays in the structure of the model as one segment, each in
        the type of its tensors.

    Raises:
        InputError: As `open_folder`.
    """
    source = open_folder(folder)
    arrays = {
        path: np.empty(info.shape, source.dtypes[path]) for path, info in source.infos.items()
    }
    for tensor in source.tensors:
        for info, value in zip(tensor.infos, source.ours(tensor), strict=True):
            place = (tensor.layer,) if info.stacked else ()
            place += () if tensor.expert is None else (tensor.expert,)
            arrays[info.path][place or ...] = value
    params = jax.tree.map(lambda info: _own_layers(info, arrays[info.path]), source.spec.infos)
    return source.config, params
