"""What the backend for the HTP does with numbers beyond those of fp16."""

from __future__ import annotations

import numpy as np
import pytest

from estream_runtime.backends.htp import _check_range
from estream_spec.errors import TrapError


@pytest.mark.parametrize("value", [65504.0, -65504.0, 0.0])
def test_numbers_that_fp16_has_pass(value: float) -> None:
    _check_range(np.array([[1, value]], np.float32), "graph out.0", "x")


@pytest.mark.parametrize("value", [65505.0, -7e4, np.inf, np.nan])
def test_numbers_that_fp16_does_not_have_are_refused(value: float) -> None:
    """They trap before anything is given to the vendor's library, and the message says which and where."""
    with pytest.raises(TrapError, match=r"'x' has .*largest number of fp16 is 65504 \(at graph out\.0\)"):
        _check_range(np.array([[1, value]], np.float32), "graph out.0", "x")
