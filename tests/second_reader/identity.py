"""content_id: FORMAT.md section 9.2."""

from __future__ import annotations

import hashlib
from typing import Any

from second_reader import manifest as tables_of_structs
from second_reader.messagepack import encode_array
from second_reader.tables import Table


def content_id(manifest: dict[str, Any], dense: Table, experts: Table, tokenizer: bytes, template: bytes) -> bytes:
    """The value that the manifest must name.

    Args:
        manifest: as decoded.
        dense: DENSE_TABLE.
        experts: EXPERT_TABLE.
        tokenizer: SHA-256 of the decoded section, of no bytes if there is none.
        template: likewise of the chat template.
    """
    parts = [b"EMOE content_id\0", _sha256(tables_of_structs.MODEL.write(manifest["model"]))]
    encoded = [tables_of_structs.LAYOUT.write(layout) for layout in manifest["layouts"]]
    for table in (dense, experts):
        parts.append(_sha256(encode_array([encoded[each.layout] for each in table.ranges if each.record_count])))
        parts.append(_sha256(table.payload_digests()))
    return _sha256(b"".join([*parts, tokenizer, template]))


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
