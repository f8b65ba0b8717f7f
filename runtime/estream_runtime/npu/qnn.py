"""ONNX Runtime's provider for Qualcomm's QNN SDK: found, loaded when it is first needed, and told what to do.

On x86-64 the SDK has a simulator in place of the processor. It runs the same binaries, slowly.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Final

from estream_spec.chips import Chip
from estream_spec.errors import LinkError

PROVIDER: Final = "QNNExecutionProvider"
HINT: Final = "pip install 'estream-pack[npu]'"
_SIMULATING: Final = ("x86_64", "AMD64")
_SILENT: Final = 4
"""Logs only what ends the process: what goes wrong is raised, and told once."""


def simulated() -> bool:
    """Whether the SDK has nothing but a simulator on machines of this kind."""
    return platform.machine() in _SIMULATING


def session_options(chip: Chip, entries: Mapping[str, str], options: Mapping[str, str]) -> Any:
    """Options of an ONNX Runtime session that computes on the processor of a chip.

    Args:
        chip: which one.
        entries: entries of the session's configuration.
        options: of the provider, besides the chip.

    Raises:
        LinkError: the provider is not installed, or does not load.
    """
    devices = _devices()

    from estream_runtime.onnx_runtime import onnxruntime

    made = onnxruntime.SessionOptions()
    made.log_severity_level = _SILENT
    for key, value in entries.items():
        made.add_session_config_entry(key, value)
    told = {"backend_type": "htp", "soc_model": str(chip.soc_model), "htp_arch": str(chip.architecture), **options}
    made.add_provider_for_devices(list(devices), told)
    return made


@contextmanager
def quiet() -> Iterator[None]:
    """Drops what the simulator writes to standard output, which is for results; what goes wrong is raised.

    It takes the output from the whole process as long as it lasts, so nothing is done where nothing is simulated.
    """
    if not simulated():
        yield
        return
    with suppress(AttributeError, OSError, ValueError):  # there is none, or it is closed
        sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # it is closed, and will be again
        kept = None
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what C has not written yet would come later, and go where it should not
        if kept is not None:
            os.dup2(kept, 1)
        for number in {nowhere, 1 if kept is None else kept}:
            os.close(number)


@cache
def _devices() -> tuple[Any, ...]:
    """What ONNX Runtime knows the provider's devices as; the provider is loaded once for the whole process."""
    try:
        import onnxruntime_qnn

        from estream_runtime.onnx_runtime import onnxruntime
    except ImportError:
        raise LinkError("backend htp needs onnxruntime-qnn, which is not installed", hint=HINT) from None
    if not hasattr(onnxruntime, "get_ep_devices"):
        raise LinkError(f"backend htp needs ONNX Runtime 1.24 or later, found {onnxruntime.__version__}", hint=HINT)

    def known() -> tuple[Any, ...]:
        return tuple(each for each in onnxruntime.get_ep_devices() if each.ep_name == PROVIDER)

    try:
        if not known():  # someone else in this process may have registered it
            onnxruntime.register_execution_provider_library(PROVIDER, onnxruntime_qnn.get_library_path())
    except Exception as error:  # what ONNX Runtime raises has no common base of its own
        raise LinkError(f"onnxruntime-qnn does not load: {str(error)!r}", hint=HINT) from error
    if not (devices := known()):
        raise LinkError("onnxruntime-qnn knows no device here")
    return devices
