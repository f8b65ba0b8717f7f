"""Which class each rule has, FORMAT.md section 9.4, and how a package is refused by one."""

from __future__ import annotations

from typing import Final

RULES_OF_CLASS: Final = {
    "malformed": (
        "SUP-001 SUP-003 DIR-002 DIR-004 DIR-005 SIG-001 MAN-001 TAB-001 TAB-003 TAB-004 TAB-005 TAB-006 "
        "SCH-001 SCH-003 SCH-004 PRE-001"
    ),
    "invalid": (
        "SUP-004 SUP-010 SEC-001 SEC-002 SEC-005 SEC-006 SEC-007 SEC-008 SEC-009 SEC-012 SEC-013 SEC-014 SEC-015 "
        "SEC-016 SEC-020 MAN-002 MAN-003 MOD-001 MOD-002 MOD-003 MOD-004 MOD-005 MOD-006 MOD-007 MOD-008 MOD-009 "
        "MOD-010 MOD-011 MOD-012 MOD-013 MOD-014 MOD-015 GRA-001 GRA-002 GRA-003 GRA-004 GRA-005 BIN-001 BIN-002 "
        "BIN-003 BIN-004 BIN-005 LAY-001 LAY-002 LAY-003 LAY-004 LAY-005 TAB-007 TAB-009 TAB-010 TAB-011 CFG-001 "
        "CFG-002 CFG-003 SCH-005 SCH-006 SCH-007 SCH-008 SCH-009 SCH-010 SCH-011 SCH-012 SCH-013 SCH-014 SCH-015 "
        "SCH-016 SCH-017 SCH-018 SCH-019 SCH-020 SCH-021 SCH-022 SCH-023 SCH-024 SCH-025 SCH-026 SCH-027 SCH-028 "
        "SCH-029 SCH-030 SCH-031 SCH-032 SCH-033 SCH-034 SCH-035 SCH-036 SCH-037 SCH-038 SCH-039 SCH-040 SCH-041 "
        "SCH-042 PRE-003 PRE-004 PRE-005 PRE-006 PRE-007 REC-003 REC-004 REC-005 REC-006 REC-007 REC-008 REC-009 "
        "PAD-001"
    ),
    "integrity": "SUP-002 SUP-011 DIR-001 SEC-018 SEC-019 TAB-012 PRE-002 REC-001 REC-002 PRE-008 IDN-001",
    "unsupported": "SUP-005 SUP-006 SEC-003 SEC-004",
    "limit": "SUP-007 SUP-008 SUP-009 DIR-003 SEC-010 SEC-011 SEC-017 TAB-002 TAB-008 SCH-002",
    "untrusted": "SIG-002 SIG-003",
}
CLASSES: Final = {rule: name for name, rules in RULES_OF_CLASS.items() for rule in rules.split()}


class RefusedError(Exception):
    """The package breaks the rule."""

    def __init__(self, rule: str) -> None:
        super().__init__(f"EMOE-{rule}")
        self.rule = f"EMOE-{rule}"
        self.error_class = CLASSES[rule]


def require(condition: bool, rule: str) -> None:
    """Refuse the package by the rule unless the condition holds."""
    if not condition:
        raise RefusedError(rule)
