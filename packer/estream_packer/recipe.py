"""What to pack, from where and how, as a TOML file or as options.

A recipe says everything that decides the bytes of a package::

    [source]
    checkpoint = "OLMoE-1B-7B-0924"   # a folder, relative to the recipe

    [model]
    name = "OLMoE 1B-7B"
    licence = "Apache-2.0"

    [weights]
    experts = "w4g32"                 # f32, w8, w4g32, w4g64
    dense = "w8"                      # f32, w8, w4g32
    activations = "dynamic-int8"      # or f32

    [package]
    page_shift = 14

    [npu]
    targets = ["htp:sm8650"]          # chips to compile the graphs for; see the verb compile

Only `[source]` is required; everything else has the default of the command line.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from estream_packer.checkpoint.files import InputFile
from estream_spec import limits
from estream_spec.constants import DEFAULT_PAGE_SHIFT
from estream_spec.errors import PackError
from estream_spec.manifest import Activations, Name, Text
from estream_spec.weights import Encoding

DenseEncoding = Literal["f32", "w8", "w4g32"]
"""How dense weights may be stored."""
MAX_JOBS: Final = 1024
MAX_RECIPE_LENGTH: Final = 1 << 20
"""1 MiB; a recipe has a few hundred bytes."""
Targets = Annotated[tuple[str, ...], Meta(max_length=limits.MAX_BINARIES)]
PageShift = Annotated[int, Meta(ge=limits.MIN_PAGE_SHIFT, le=limits.MAX_PAGE_SHIFT)]


class BuildOptions(Struct, frozen=True, kw_only=True):
    """How to pack a checkpoint.

    Attributes:
        experts: how expert weights are stored.
        dense: how the dense matrices are stored. The embedding is f32 with `f32`, else w8: its rows are read singly.
        activations: what enters the matrix products of quantised weights; f32 weights always meet f32 activations.
        name: the model's name, for people; None takes the checkpoint family's.
        licence: SPDX expression of the weights' licence; empty where it is not known.
        page_shift: records begin at multiples of `1 << page_shift` bytes.
        targets: accelerators to compile the graphs for, such as `htp:sm8650`.
        jobs: records made at a time; None takes one for each processor this process may use. It never shows in the
            package.
    """

    experts: Encoding = "w4g32"
    dense: DenseEncoding = "w8"
    activations: Activations = "dynamic-int8"
    name: Name | None = None
    licence: Text = ""
    page_shift: PageShift = DEFAULT_PAGE_SHIFT
    targets: Targets = ()
    jobs: Annotated[int, Meta(ge=1, le=MAX_JOBS)] | None = None

    @property
    def embedding(self) -> Encoding:
        """How the embedding is stored."""
        return "f32" if self.dense == "f32" else "w8"


DEFAULTS: Final = BuildOptions()


class SourceTable(Struct, frozen=True):
    """`[source]`: the checkpoint folder, relative to the recipe."""

    checkpoint: Annotated[str, Meta(min_length=1)]


class ModelTable(Struct, frozen=True):
    """`[model]`: what people are told about the model."""

    name: Name | None = DEFAULTS.name
    licence: Text = DEFAULTS.licence


class WeightsTable(Struct, frozen=True):
    """`[weights]`: how they are stored and what they meet."""

    experts: Encoding = DEFAULTS.experts
    dense: DenseEncoding = DEFAULTS.dense
    activations: Activations = DEFAULTS.activations


class PackageTable(Struct, frozen=True):
    """`[package]`: the container."""

    page_shift: PageShift = DEFAULTS.page_shift


class NpuTable(Struct, frozen=True):
    """`[npu]`: accelerators that the graphs are compiled for."""

    targets: Targets = DEFAULTS.targets


class Recipe(Struct, frozen=True):
    """A recipe file."""

    source: SourceTable
    model: ModelTable = ModelTable()
    weights: WeightsTable = WeightsTable()
    package: PackageTable = PackageTable()
    npu: NpuTable = NpuTable()

    def options(self) -> BuildOptions:
        """The options the recipe stands for."""
        return BuildOptions(
            experts=self.weights.experts,
            dense=self.weights.dense,
            activations=self.weights.activations,
            name=self.model.name,
            licence=self.model.licence,
            page_shift=self.package.page_shift,
            targets=self.npu.targets,
        )


def check_options(options: BuildOptions) -> None:
    """Refuse options that no package can be made with.

    Raises:
        PackError: an option has a value that is not allowed.
    """
    for field in msgspec.structs.fields(options):
        value = getattr(options, field.name)
        _check_choice(value, field.type, f"option {field.name}")
        try:
            msgspec.convert(value, field.type)
            msgspec.msgpack.encode(value)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            raise PackError(f"option {field.name} is {value!r}: {_plain(error)}") from None


def read_recipe(path: Path) -> tuple[Path, BuildOptions]:
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
    return path.parent / recipe.source.checkpoint, recipe.options()


def _check_keys(table: dict[str, Any], struct: type[Struct], path: str, place: str) -> None:
    """Refuse unknown keys, and say which known one was likely meant; refuse unknown choices, and list the known."""
    fields = {field.name: field.type for field in msgspec.structs.fields(struct)}
    for key, value in table.items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(fields)}"
            raise PackError(f"unknown key {place + key!r} in recipe", path=path, hint=hint)
        inner = fields[key]
        if isinstance(value, dict) and isinstance(inner, type) and issubclass(inner, Struct):
            _check_keys(value, inner, path, f"{place}{key}.")
        _check_choice(value, inner, place + key, path)


def _check_choice(value: object, allowed: object, what: str, path: str | None = None) -> None:
    """Refuse a value that is none of those a `Literal` allows; other types are not judged here."""
    if get_origin(allowed) is Literal and value not in get_args(allowed):
        raise PackError(f"{what} is {value!r}, expected one of {', '.join(get_args(allowed))}", path=path)


def _plain(error: Exception) -> str:
    """What a decoder found wrong, as the end of a sentence."""
    text = str(error).replace("`", "'")
    return text[0].lower() + text[1:]
