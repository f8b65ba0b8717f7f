"""A checkpoint folder as Hugging Face lays it out: configuration, weights in one file or in shards, tokenizer.

Where there is a `model.safetensors.index.json`, it says which weight files count; no other is opened, so a second copy
of the weights in the folder does no harm. Nothing in the folder is ever executed or unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from estream_packer.checkpoint.files import InputFile
from estream_packer.checkpoint.header import TensorInfo
from estream_packer.checkpoint.json_strict import parse_object
from estream_packer.checkpoint.problems import Problems
from estream_packer.checkpoint.safetensors import SafetensorsFile
from estream_packer.checkpoint.special_tokens import TOKENIZER_CONFIG, SpecialTokens, read_special_tokens
from estream_packer.checkpoint.tokenizer import completed_json, converted_json, with_tokens_set
from estream_packer.remote import Location, RemotePath
from estream_spec import limits
from estream_spec.errors import PackError, reason
from estream_spec.manifest import Source

CONFIG: Final = "config.json"
GENERATION_CONFIG: Final = "generation_config.json"
TOKENIZER: Final = "tokenizer.json"
TOKENIZER_MODEL: Final = "tokenizer.model"
SPECIAL_TOKENS: Final = "special_tokens_map.json"
ADDED_TOKENS: Final = "added_tokens.json"
CHAT_TEMPLATE: Final = "chat_template.jinja"
SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
TENSORS: Final = "tensors"
"""What the provenance calls all tensors together."""

DOCUMENTS: Final = (
    *(CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_MODEL, TOKENIZER_CONFIG),
    *(SPECIAL_TOKENS, ADDED_TOKENS, CHAT_TEMPLATE, INDEX),
)
"""Files that are read where they exist, besides the weights."""

MAX_JSON_LENGTH: Final = 1 << 25
"""32 MiB: any JSON document but the tokenizer."""


class Checkpoint:
    """An open checkpoint folder. Close it, or use it as a context manager.

    Attributes:
        folder: where it is.
        config: `config.json`.
        generation_config: `generation_config.json`; empty where there is none.
        tokenizer: the tokenizer as the bytes of a `tokenizer.json`, made of a `tokenizer.model` where there is only
            that; None where there is neither.
        chat_template: the Jinja text that turns a conversation into a prompt, the special tokens it names included;
            None where there is none.
        tensors: every tensor of the weight files, by name.
    """

    def __init__(self, folder: Location, documents: Mapping[str, InputFile], shards: Mapping[str, SafetensorsFile]):
        """Take over open files; `open_checkpoint` is the usual way.

        Raises:
            PackError: a document cannot be read or understood.
        """
        self.folder = folder
        self._documents = {name: file for name, file in documents.items() if name != INDEX}
        self._files = (*documents.values(), *(shard.file for shard in shards.values()))
        self._shard_of = {name: shard for shard in shards.values() for name in shard.tensors}
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {name: shard.tensors[name] for name, shard in self._shard_of.items()}
        )
        self.config = _read_json(documents[CONFIG])
        generation = documents.get(GENERATION_CONFIG)
        self.generation_config = _read_json(generation) if generation else {}
        tokens = _special_tokens(documents, folder)
        self.tokenizer = _tokenizer(documents, tokens)
        template = _chat_template(documents)
        self.chat_template = None if template is None else with_tokens_set(template, tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give all descriptors back."""
        for file in self._files:
            file.close()

    def paths(self) -> tuple[Location, ...]:
        """Every file that makes up the checkpoint: documents, index and weights."""
        return tuple(file.path for file in self._files)

    def fingerprint(self) -> bytes:
        """SHA-256 of what tells this checkpoint from another, or from a later one, without reading its weights.

        It is the same on every machine that sees the same files: their names, lengths and times, and where each tensor
        lies.
        """
        files = sorted((file.path.name, file.length, file.version) for file in self._files)
        tensors = sorted((name, tensor.dtype, tensor.shape, tensor.begin) for name, tensor in self.tensors.items())
        return sha256(repr((files, tensors)).encode()).digest()

    def identity(self) -> bytes | None:
        """SHA-256 of what tells this checkpoint from any other that this machine sees; None where nothing surely does.

        Another checkpoint of one shape may have the same fingerprint: downloads and archives set the times of files.
        """
        folder = self.folder.absolute() if isinstance(self.folder, Path) else self.folder
        files = sorted((file.path.name, file.identity) for file in self._files)
        if not all(identity for _, identity in files):
            return None
        return sha256(self.fingerprint() + repr((str(folder), files)).encode()).digest()

    def check_unchanged(self) -> None:
        """Refuse a checkpoint of which a file is no longer what it was when it was opened.

        Raises:
            PackError: a file changed, or that cannot be known.
        """
        for file in self._files:
            file.check_unchanged()

    def read(self, name: str, rows: slice | None = None, index: int | None = None) -> NDArray[np.float32]:
        """A tensor, or some rows of it, as finite f32. See `SafetensorsFile.read`.

        Raises:
            PackError: there is no such tensor, its dtype or a value is refused, or the file cannot be read.
        """
        return self._shard(name).read(name, rows, index)

    def read_bytes(self, name: str, rows: slice | None = None, index: int | None = None) -> NDArray[np.uint8]:
        """A tensor of bytes, or some rows of it, as they are. See `SafetensorsFile.read_bytes`.

        Raises:
            PackError: there is no such tensor, or the file cannot be read.
        """
        return self._shard(name).read_bytes(name, rows, index)

    def check_finite(
        self, values: NDArray[np.float32], name: str, rows: slice | None = None, index: int | None = None
    ) -> None:
        """Refuse values that are not finite, made of `read(name, rows, index)`. See `SafetensorsFile.check_finite`.

        Raises:
            NotFiniteError: some value is not finite.
        """
        self._shard(name).check_finite(values, name, rows, index)

    def _shard(self, name: str) -> SafetensorsFile:
        if name not in self._shard_of:
            raise PackError(f"checkpoint has no tensor {name!r}", path=str(self.folder))
        return self._shard_of[name]

    def sources(self) -> tuple[Source, ...]:
        """Name, length and SHA-256 of every document by name, and of all tensors together as `tensors`. Reads them all.

        The tensors' digest is the same however many files they are spread over. Spec: FORMAT.md section 6.9.

        Raises:
            PackError: a file cannot be read.
        """
        found = []
        for name, file in sorted(self._documents.items()):
            digest = sha256()
            file.update(digest, 0, file.length)
            found.append(Source(name=name, length=file.length, sha256=digest.digest()))
        digest, length = sha256(), 0
        for name in sorted(self.tensors):
            tensor = self.tensors[name]
            digest.update(f"{name}\0{tensor.dtype}\0{','.join(map(str, tensor.shape))}\n".encode())
            self._shard_of[name].file.update(digest, tensor.begin, tensor.end)
            length += tensor.end - tensor.begin
        return (*found, Source(name=TENSORS, length=length, sha256=digest.digest()))


def open_checkpoint(folder: Location) -> Checkpoint:
    """Open a checkpoint folder: read its documents and the headers of its weight files, and hold all files open.

    Raises:
        PackError: the folder, a document or a weight file is missing or faulty. What index and shards say differently
            is told in one message.
    """
    names = _list(folder)
    with ExitStack() as opened:
        documents: Mapping[str, InputFile] = {
            name: opened.enter_context(InputFile(folder / name))
            for name in DOCUMENTS
            if name in names and not (name == TOKENIZER_MODEL and TOKENIZER in names)
        }
        if CONFIG not in documents:
            raise PackError(f"folder has no {CONFIG}", path=str(folder), hint="is this a Hugging Face checkpoint?")
        if INDEX in documents:
            weight_map = _read_weight_map(documents[INDEX])
            shards = _open_shards(folder, weight_map, opened)
        elif SINGLE in names:
            shards = {SINGLE: _open_shard(folder / SINGLE, opened)}
        else:
            raise _no_weights(folder, names)
        checkpoint = Checkpoint(folder, documents, shards)
        opened.pop_all()
    return checkpoint


def _list(folder: Location) -> list[str]:
    if isinstance(folder, RemotePath):
        return folder.names()
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except NotADirectoryError:
        hint = "give the folder, or a recipe whose name ends in .toml"
        raise PackError("neither a checkpoint folder nor a .toml recipe", path=str(folder), hint=hint) from None
    except (OSError, ValueError) as error:
        hint = "a checkpoint is a local folder; download it first"
        raise PackError(f"folder cannot be read: {reason(error)}", path=str(folder), hint=hint) from None


def _exists(path: Location) -> bool:
    """Whether something is there; also true where that cannot be known, so that opening it says why."""
    try:
        return path.exists()
    except OSError:
        return True


def _read_json(file: InputFile) -> dict[str, object]:
    return parse_object(file.read_all(MAX_JSON_LENGTH), str(file.path))


def _read_weight_map(file: InputFile) -> dict[str, str]:
    """The file name of each tensor, as the index says."""
    weight_map = _read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise PackError(
            "found no weights, expected an object of tensor and file names", path=f"{file.path}: weight_map"
        )
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_inside(shard):
            raise PackError(
                f"tensor {name!r} is in {shard!r}, expected a file inside the folder", path=f"{file.path}: weight_map"
            )
    return weight_map


def _is_inside(name: str) -> bool:
    """Whether a file name of the index stays inside the folder."""
    parts = PurePosixPath(name).parts
    return bool(parts) and ".." not in parts and not name.startswith("/") and not set("\\\0") & set(name)


def _open_shards(folder: Location, weight_map: dict[str, str], opened: ExitStack) -> dict[str, SafetensorsFile]:
    """Open every file the index names, and compare what it holds with what the index says."""
    expected: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        expected.setdefault(shard, set()).add(name)
    problems = Problems()
    shards: dict[str, SafetensorsFile] = {}
    for shard, names in sorted(expected.items()):
        if not _exists(folder / shard):
            problems.add("missing files", f"{shard!r} with {len(names)} tensors")
            continue
        shards[shard] = _open_shard(folder / shard, opened)
        found = shards[shard].tensors.keys()
        for name in sorted(names - found):
            problems.add("tensors not in the file the index names", f"{name!r} in {shard!r}")
        for name in sorted(found - names):
            problems.add("tensors not where the index has them", f"{name!r} in {shard!r}")
    problems.refuse("index and weight files disagree", str(folder / INDEX), "download the folder again")
    return shards


def _open_shard(path: Location, opened: ExitStack) -> SafetensorsFile:
    shard = SafetensorsFile(path)
    opened.callback(shard.close)
    return shard


def _no_weights(folder: Location, names: list[str]) -> PackError:
    """Why a folder without the weights looked for is refused, by what lies there instead."""
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    loose = [name for name in names if name.endswith(".safetensors")]
    message, hint = f"folder has neither {SINGLE} nor {INDEX}", "is the download complete?"
    if loose:
        message += f"; {len(loose)} other .safetensors files such as {loose[0]!r} are not listed by any index"
    elif pickled:
        message += f"; {pickled[0]!r} is a PyTorch pickle, which is never opened"
        hint = "convert it: load it with transformers and call save_pretrained"
    return PackError(message, path=str(folder), hint=hint)


def _special_tokens(documents: Mapping[str, InputFile], folder: Location) -> SpecialTokens:
    names = (TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS)
    settings, special, added = (_read_json(documents[name]) if name in documents else {} for name in names)
    return read_special_tokens(settings, special, added, str(folder))


def _tokenizer(documents: Mapping[str, InputFile], tokens: SpecialTokens) -> bytes | None:
    """The tokenizer, `tokenizer.json` before `tokenizer.model`."""
    for name, read in ((TOKENIZER, completed_json), (TOKENIZER_MODEL, converted_json)):
        if file := documents.get(name):
            return read(file.read_all(limits.MAX_SMALL_SECTION_LENGTH), tokens, str(file.path))
    return None


def _chat_template(documents: Mapping[str, InputFile]) -> str | None:
    """The chat template: its own file, else the tokenizer's configuration (of several, the one named `default`)."""
    if CHAT_TEMPLATE in documents:
        file = documents[CHAT_TEMPLATE]
        try:
            return file.read_all(MAX_JSON_LENGTH).decode("utf-8")
        except UnicodeDecodeError as error:
            raise PackError("text is not UTF-8", path=str(file.path), offset=error.start) from None
    if TOKENIZER_CONFIG not in documents:
        return None
    template = _read_json(documents[TOKENIZER_CONFIG]).get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template is not None and not isinstance(template, str):
        path = f"{documents[TOKENIZER_CONFIG].path}: chat_template"
        raise PackError(f"found {type(template).__name__}, expected a text", path=path)
    return template
