from __future__ import annotations

import pytest

from estream_conformance.errors import UsageError
from estream_conformance.expectations import parse_expected_failures

KNOWN = ["smallest", "full", "format_major_1"]


def test_names_and_comments() -> None:
    text = "# what we cannot do yet\n\n  smallest\t# no f32\r\nformat_major_1#\n   \n"
    assert parse_expected_failures(text, KNOWN, "x") == {"smallest", "format_major_1"}
    assert parse_expected_failures("", KNOWN, "x") == frozenset()


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("full\nsmalest\n", "there is no test 'smalest' (at my.xfail, line 2)", "did you mean 'smallest'?"),
        ("zzz", "there is no test 'zzz' (at my.xfail, line 1)", "'estream-conformance list' shows all names"),
        ("Full", "there is no test 'Full' (at my.xfail, line 1)", "did you mean 'full'?"),
        ("full smallest", "there is no test 'full smallest' (at my.xfail, line 1)", "did you mean 'smallest'?"),
        (
            "full\n#\nfull # again\n",
            "'full' is expected to fail twice, first in line 1 (at my.xfail, line 3)",
            "name it once",
        ),
    ],
)
def test_what_is_refused(text: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_expected_failures(text, KNOWN, "my.xfail")
    assert (str(error.value), error.value.hint) == (message, hint)
