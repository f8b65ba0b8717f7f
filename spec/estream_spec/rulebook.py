"""Every check of a package, in the order in which a reader makes them, with the class of its refusal.

This is the table of FORMAT.md section 9.4. A refusal is made from its rule, so its class cannot be another one than the
text says; ids are never reused.
"""

from __future__ import annotations

from typing import Final

from estream_spec.errors import (
    EmoeError,
    IntegrityError,
    InvalidError,
    LimitError,
    MalformedError,
    TrustError,
    UnsupportedError,
)

RULES: Final[dict[str, type[EmoeError]]] = {
    # Twins
    "EMOE-SUP-001": MalformedError,
    "EMOE-SUP-002": IntegrityError,
    "EMOE-SUP-003": MalformedError,
    "EMOE-SUP-004": InvalidError,
    # Superblock
    "EMOE-SUP-005": UnsupportedError,
    "EMOE-SUP-006": UnsupportedError,
    "EMOE-SUP-007": LimitError,
    "EMOE-SUP-008": LimitError,
    "EMOE-SUP-009": LimitError,
    "EMOE-SUP-010": InvalidError,
    "EMOE-SUP-011": IntegrityError,
    # Directory
    "EMOE-DIR-001": IntegrityError,
    "EMOE-DIR-002": MalformedError,
    "EMOE-DIR-003": LimitError,
    "EMOE-DIR-004": MalformedError,
    "EMOE-DIR-005": MalformedError,
    # Each entry
    "EMOE-SEC-001": InvalidError,
    "EMOE-SEC-002": InvalidError,
    "EMOE-SEC-003": UnsupportedError,
    "EMOE-SEC-004": UnsupportedError,
    "EMOE-SEC-005": InvalidError,
    "EMOE-SEC-006": InvalidError,
    "EMOE-SEC-007": InvalidError,
    "EMOE-SEC-008": InvalidError,
    "EMOE-SEC-009": InvalidError,
    "EMOE-SEC-010": LimitError,
    "EMOE-SEC-011": LimitError,
    "EMOE-SEC-012": InvalidError,
    "EMOE-SEC-013": InvalidError,
    # All entries
    "EMOE-SEC-014": InvalidError,
    "EMOE-SEC-015": InvalidError,
    "EMOE-SEC-016": InvalidError,
    "EMOE-SEC-017": LimitError,
    # Any section
    "EMOE-SEC-018": IntegrityError,
    "EMOE-SEC-019": IntegrityError,
    # Signatures
    "EMOE-SIG-001": MalformedError,
    "EMOE-SIG-002": TrustError,
    "EMOE-SIG-003": TrustError,
    # Manifest
    "EMOE-MAN-001": MalformedError,
    "EMOE-MAN-002": InvalidError,
    "EMOE-MAN-003": InvalidError,
    # Model
    "EMOE-MOD-001": InvalidError,
    "EMOE-MOD-002": InvalidError,
    "EMOE-MOD-003": InvalidError,
    "EMOE-MOD-004": InvalidError,
    "EMOE-MOD-005": InvalidError,
    "EMOE-MOD-006": InvalidError,
    "EMOE-MOD-010": InvalidError,
    "EMOE-MOD-011": InvalidError,
    "EMOE-MOD-007": InvalidError,
    "EMOE-MOD-012": InvalidError,
    "EMOE-MOD-013": InvalidError,
    "EMOE-MOD-014": InvalidError,
    "EMOE-MOD-015": InvalidError,
    "EMOE-MOD-008": InvalidError,
    "EMOE-MOD-009": InvalidError,
    # Graphs
    "EMOE-GRA-001": InvalidError,
    "EMOE-GRA-002": InvalidError,
    "EMOE-GRA-003": InvalidError,
    "EMOE-GRA-004": InvalidError,
    # Binaries
    "EMOE-BIN-001": InvalidError,
    "EMOE-BIN-002": InvalidError,
    "EMOE-BIN-003": InvalidError,
    "EMOE-BIN-004": InvalidError,
    "EMOE-BIN-005": InvalidError,
    # Layouts
    "EMOE-LAY-001": InvalidError,
    # Other sections
    "EMOE-SEC-020": InvalidError,
    # Tables
    "EMOE-TAB-001": MalformedError,
    "EMOE-TAB-002": LimitError,
    "EMOE-TAB-003": MalformedError,
    "EMOE-TAB-004": MalformedError,
    "EMOE-TAB-005": MalformedError,
    "EMOE-TAB-006": MalformedError,
    "EMOE-LAY-002": InvalidError,
    "EMOE-TAB-007": InvalidError,
    "EMOE-TAB-008": LimitError,
    "EMOE-TAB-009": InvalidError,
    "EMOE-TAB-010": InvalidError,
    "EMOE-TAB-011": InvalidError,
    "EMOE-TAB-012": IntegrityError,
    "EMOE-LAY-003": InvalidError,
    "EMOE-LAY-004": InvalidError,
    "EMOE-GRA-005": InvalidError,
    "EMOE-LAY-005": InvalidError,
    "EMOE-CFG-001": InvalidError,
    "EMOE-CFG-002": InvalidError,
    "EMOE-CFG-003": InvalidError,
    # Programs
    "EMOE-SCH-001": MalformedError,
    "EMOE-SCH-002": LimitError,
    "EMOE-SCH-003": MalformedError,
    "EMOE-SCH-004": MalformedError,
    "EMOE-SCH-005": InvalidError,
    "EMOE-SCH-006": InvalidError,
    "EMOE-SCH-007": InvalidError,
    "EMOE-SCH-008": InvalidError,
    "EMOE-SCH-009": InvalidError,
    "EMOE-SCH-010": InvalidError,
    "EMOE-SCH-011": InvalidError,
    "EMOE-SCH-012": InvalidError,
    "EMOE-SCH-013": InvalidError,
    "EMOE-SCH-014": InvalidError,
    "EMOE-SCH-015": InvalidError,
    "EMOE-SCH-016": InvalidError,
    "EMOE-SCH-017": InvalidError,
    "EMOE-SCH-018": InvalidError,
    "EMOE-SCH-019": InvalidError,
    "EMOE-SCH-020": InvalidError,
    "EMOE-SCH-021": InvalidError,
    "EMOE-SCH-022": InvalidError,
    "EMOE-SCH-023": InvalidError,
    "EMOE-SCH-024": InvalidError,
    "EMOE-SCH-025": InvalidError,
    "EMOE-SCH-026": InvalidError,
    "EMOE-SCH-027": InvalidError,
    "EMOE-SCH-028": InvalidError,
    "EMOE-SCH-029": InvalidError,
    "EMOE-SCH-030": InvalidError,
    "EMOE-SCH-031": InvalidError,
    "EMOE-SCH-032": InvalidError,
    "EMOE-SCH-033": InvalidError,
    # Programs that decode
    "EMOE-SCH-034": InvalidError,
    "EMOE-SCH-035": InvalidError,
    "EMOE-SCH-036": InvalidError,
    "EMOE-SCH-037": InvalidError,
    "EMOE-SCH-038": InvalidError,
    "EMOE-SCH-039": InvalidError,
    "EMOE-SCH-040": InvalidError,
    "EMOE-SCH-041": InvalidError,
    "EMOE-SCH-042": InvalidError,
    # Prefetch router
    "EMOE-PRE-001": MalformedError,
    "EMOE-PRE-002": IntegrityError,
    "EMOE-PRE-003": InvalidError,
    "EMOE-PRE-004": InvalidError,
    "EMOE-PRE-005": InvalidError,
    "EMOE-PRE-006": InvalidError,
    "EMOE-PRE-007": InvalidError,
    # Records
    "EMOE-REC-001": IntegrityError,
    "EMOE-REC-002": IntegrityError,
    "EMOE-REC-003": InvalidError,
    "EMOE-REC-004": InvalidError,
    "EMOE-REC-005": InvalidError,
    "EMOE-REC-006": InvalidError,
    "EMOE-REC-007": InvalidError,
    "EMOE-REC-008": InvalidError,
    "EMOE-REC-009": InvalidError,
    "EMOE-PRE-008": IntegrityError,
    # Identity
    "EMOE-IDN-001": IntegrityError,
    # Padding
    "EMOE-PAD-001": InvalidError,
}
"""Class of the refusal by rule, in the order of the checks."""


def refusal(
    rule: str, message: str, *, path: str | None = None, offset: int | None = None, hint: str | None = None
) -> EmoeError:
    """The error that says a rule is broken, of the class that the rule has.

    Args:
        rule: its id.
        message: found and expected, see `errors`.
        path: the field or section concerned.
        offset: byte offset from the package's start.
        hint: what helps.
    """
    return RULES[rule](message, rule=rule, path=path, offset=offset, hint=hint)


def require(condition: bool, rule: str, message: str, path: str) -> None:
    """Refuse by a rule unless the condition holds. Raises the error of `refusal`."""
    if not condition:
        raise refusal(rule, message, path=path)
