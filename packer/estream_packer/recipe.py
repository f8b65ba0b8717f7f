"""What to pack, from where and how, as a TOML file or as options.

A recipe says everything that decides the bytes of a package::

    [source]
    checkpoint = "OLMoE-1B-7B-0924"   # a folder, relative to the recipe, or a URL

    [model]
    name = "OLMoE 1B-7B"
    licence = "Apache-2.0"

    [weights]
    experts = "w4g32"                 # f32, w8, w4g32, w4g64
    dense = "w8"                      # f32, w8, w4g32: what is not said of the following
    attention = "w8"                  # the projections of attention and of convolutions
    shared = "w8"                     # dense blocks: shared experts, and layers without routed ones
    head = "w8"
    embedding = "w8"                  # f32, w8
    activations = "dynamic-int8"      # or f32

    [calibration]
    text = "calibration.txt"          # what the model reads to find out which weights matter; relative to the recipe
    tokens = 32768                    # how much of it, at most

    [package]
    page_shift = 14
    prefetch = "router.prefetch"      # a prefetch router that was trained for the checkpoint; relative to the recipe

    [npu]
    targets = ["htp:sm8650"]          # chips to compile the graphs for; see the verb compile

Only `[source]` is required; everything else has the default of the command line.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from estream_packer.checkpoint.files import InputFile
from estream_packer.remote import Location, location
from estream_spec import limits
from estream_spec.constants import DEFAULT_PAGE_SHIFT
from estream_spec.errors import PackError
from estream_spec.manifest import Activations, Name, Text
from estream_spec.weights import Encoding

DenseEncoding = Literal["f32", "w8", "w4g32"]
"""How dense weights may be stored."""
EmbeddingEncoding = Literal["f32", "w8"]
"""How the embedding may be stored: its rows are read singly."""
MAX_JOBS: Final = 1024
MAX_CALIBRATION_TOKENS: Final = 1 << 24
MAX_RECIPE_LENGTH: Final = 1 << 20
"""1 MiB; a recipe has a few hundred bytes."""
Targets = Annotated[tuple[str, ...], Meta(max_length=limits.MAX_BINARIES)]
FileName = Annotated[str, Meta(min_length=1)]
PageShift = Annotated[int, Meta(ge=limits.MIN_PAGE_SHIFT, le=limits.MAX_PAGE_SHIFT)]


class CalibrationTable(Struct, frozen=True, kw_only=True):
    """`[calibration]`: a text that shows which weights matter.

    Attributes:
        text: the file.
        tokens: how much of it is read, at most.
    """

    text: FileName
    tokens: Annotated[int, Meta(ge=2, le=MAX_CALIBRATION_TOKENS)] = 1 << 15


class BuildOptions(Struct, frozen=True, kw_only=True):
    """How to pack a checkpoint.

    Attributes:
        experts: how expert weights are stored.
        dense: how the dense matrices are stored, as far as the next four do not say otherwise.
        attention: the projections of attention and of convolutions.
        shared: the matrices of dense blocks.
        head: the head, unless it is tied to the embedding.
        embedding: the embedding; None takes f32 where `dense` is that, else w8.
        activations: what enters the matrix products of quantised weights; f32 weights always meet f32 activations.
        name: the model's name, for people; None takes the checkpoint family's.
        licence: SPDX expression of the weights' licence; empty where it is not known.
        page_shift: records begin at multiples of `1 << page_shift` bytes.
        targets: accelerators to compile the graphs for, such as `htp:sm8650`.
        jobs: records made at a time; None takes one for each processor this process may use. It never shows in the
            package.
        calibration: what shows which weights matter; None lets all weights of a matrix count alike.
        prefetch: file with a prefetch router that was trained for the checkpoint; None packs none.
    """

    experts: Encoding = "w4g32"
    dense: DenseEncoding = "w8"
    attention: DenseEncoding | None = None
    shared: DenseEncoding | None = None
    head: DenseEncoding | None = None
    embedding: EmbeddingEncoding | None = None
    activations: Activations = "dynamic-int8"
    name: Name | None = None
    licence: Text = ""
    page_shift: PageShift = DEFAULT_PAGE_SHIFT
    targets: Targets = ()
    jobs: Annotated[int, Meta(ge=1, le=MAX_JOBS)] | None = None
    calibration: CalibrationTable | None = None
    prefetch: FileName | None = None

    def encoding_of(self, role: Literal["attention", "shared", "head", "embedding"]) -> Encoding:
        """How the matrices of a role are stored."""
        if role == "embedding":
            return self.embedding or ("f32" if self.dense == "f32" else "w8")
        chosen: DenseEncoding | None = getattr(self, role)
        return chosen or self.dense


DEFAULTS: Final = BuildOptions()


class SourceTable(Struct, frozen=True):
    """`[source]`: the checkpoint folder, relative to the recipe, or its URL."""

    checkpoint: Annotated[str, Meta(min_length=1)]


class ModelTable(Struct, frozen=True):
    """`[model]`: what people are told about the model."""

    name: Name | None = DEFAULTS.name
    licence: Text = DEFAULTS.licence


class WeightsTable(Struct, frozen=True):
    """`[weights]`: how they are stored and what they meet."""

    experts: Encoding = DEFAULTS.experts
    dense: DenseEncoding = DEFAULTS.dense
    attention: DenseEncoding | None = None
    shared: DenseEncoding | None = None
    head: DenseEncoding | None = None
    embedding: EmbeddingEncoding | None = None
    activations: Activations = DEFAULTS.activations


class PackageTable(Struct, frozen=True):
    """`[package]`: the container, and what it holds besides the model."""

    page_shift: PageShift = DEFAULTS.page_shift
    prefetch: FileName | None = DEFAULTS.prefetch


class NpuTable(Struct, frozen=True):
    """`[npu]`: accelerators that the graphs are compiled for."""

    targets: Targets = DEFAULTS.targets


class Recipe(Struct, frozen=True):
    """A recipe file."""

    source: SourceTable
    model: ModelTable = ModelTable()
    weights: WeightsTable = WeightsTable()
    calibration: CalibrationTable | None = None
    package: PackageTable = PackageTable()
    npu: NpuTable = NpuTable()

    def options(self, folder: Path) -> BuildOptions:
        """The options the recipe stands for, which lies in `folder`."""
        calibration, prefetch = self.calibration, self.package.prefetch
        if calibration is not None:
            calibration = msgspec.structs.replace(calibration, text=str(folder / calibration.text))
        return BuildOptions(
            **msgspec.structs.asdict(self.weights),
            calibration=calibration,
            name=self.model.name,
            licence=self.model.licence,
            page_shift=self.package.page_shift,
            prefetch=None if prefetch is None else str(folder / prefetch),
            targets=self.npu.targets,
        )


def check_options(options: BuildOptions) -> None:
    """Refuse options that no package can be made with.

    Raises:
        PackError: an option has a value that is not allowed.
    """
    for field in msgspec.structs.fields(options):
        value = getattr(options, field.name)
        if value is not None:
            _check_choice(value, _required(field.type), f"option {field.name}")
        try:
            msgspec.convert(value, field.type)
            msgspec.msgpack.encode(value)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            raise PackError(f"option {field.name} is {value!r}: {_plain(error)}") from None


def read_recipe(path: Path) -> tuple[Location, BuildOptions]:
    """Read a recipe file.

    Returns:
        The checkpoint folder, and the options.

    Raises:
        PackError: it is not a file of at most `MAX_RECIPE_LENGTH` bytes, cannot be read, is not TOML, has an unknown
            key or a value that is not allowed.
    """
    with InputFile(path) as file:
        data = file.read_all(MAX_RECIPE_LENGTH)
    try:
        document = tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise PackError("recipe is not UTF-8", path=str(path)) from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise PackError(f"recipe is not TOML: {_plain(error)}", path=str(path)) from error
    _check_keys(document, Recipe, str(path), "")
    try:
        recipe = msgspec.convert(document, Recipe)
    except msgspec.ValidationError as error:
        raise PackError(f"recipe is not valid: {_plain(error)}", path=str(path)) from None
    checkpoint = location(recipe.source.checkpoint)
    options = recipe.options(path.parent)
    return path.parent / checkpoint if isinstance(checkpoint, Path) else checkpoint, options


def _check_keys(table: dict[str, Any], struct: type[Struct], path: str, place: str) -> None:
    """Refuse unknown keys, and say which known one was likely meant; refuse unknown choices, and list the known."""
    fields = {field.name: _required(field.type) for field in msgspec.structs.fields(struct)}
    for key, value in table.items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(fields)}"
            raise PackError(f"unknown key {place + key!r} in recipe", path=path, hint=hint)
        inner = fields[key]
        if isinstance(value, dict) and isinstance(inner, type) and issubclass(inner, Struct):
            _check_keys(value, inner, path, f"{place}{key}.")
        _check_choice(value, inner, place + key, path)


def _required(allowed: Any) -> Any:
    """A type without the None that it may allow."""
    given = [each for each in get_args(allowed) if each is not NoneType]
    return given[0] if NoneType in get_args(allowed) and len(given) == 1 else allowed


def _check_choice(value: object, allowed: object, what: str, path: str | None = None) -> None:
    """Refuse a value that is none of those a `Literal` allows; other types are not judged here."""
    if get_origin(allowed) is Literal and value not in get_args(allowed):
        raise PackError(f"{what} is {value!r}, expected one of {', '.join(get_args(allowed))}", path=path)


def _plain(error: Exception) -> str:
    """What a decoder found wrong, as the end of a sentence."""
    text = str(error).replace("`", "'")
    return text[0].lower() + text[1:]
