"""Cases of matching packages with devices: facts, a header, and what must come out. MATCHING.md section 5."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FILE: Final = Path(__file__).parent / "matching.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchCase:
    """One case.

    Attributes:
        name: what is special about it, in a few words joined by `_`.
        about: the same as a sentence.
        package: the header, in the keys of LOADER-CLI.md section 3.
        device: facts of the device, MATCHING.md section 2.
        match: what must come out.
    """

    name: str
    about: str
    package: dict[str, Any]
    device: dict[str, Any]
    match: dict[str, Any]


def load_match_cases() -> list[MatchCase]:
    """All cases, in the order of the file."""
    text = json.loads(FILE.read_text(encoding="utf-8"))
    return [MatchCase(**{**case, "package": text["packages"][case["package"]]}) for case in text["cases"]]
