"""AI Hub through Qualcomm's client `qai_hub`, without its chatter and with this project's refusals.

The client is imported when a `Service` is made and nowhere else: everything else works without it.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from estream_packer.htp.aihub_refusals import http_status, refusal
from estream_spec.chips import Chip
from estream_spec.errors import EmoeError, LinkError, PackError

Job = Any  # The client publishes its types, but it may not be installed where they are checked.

_GONE: Final = 404


@dataclass(frozen=True, slots=True)
class Status:
    """How far a job is.

    Attributes:
        finished: whether it has ended, well or badly.
        failure: why it failed; None where it did not.
    """

    finished: bool
    failure: str | None


@dataclass(frozen=True, slots=True)
class Linked:
    """What a link job made.

    Attributes:
        data: the context binary.
        tensors: names of the inputs and outputs of each graph in it; a binary of one graph may have it under None.
        facts: what else the service says of it, by the client's names, such as `QNN_CONTEXT_BIN_SOC_MODEL`.
    """

    data: bytes
    tensors: dict[str | None, frozenset[str]]
    facts: dict[str, str]


class Service:
    """One session with AI Hub, as the user whose token the client finds."""

    def __init__(self) -> None:
        """Opens it, asking nothing of the service yet.

        Raises:
            LinkError: the client is not installed, or has no token.
        """
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                import qai_hub
        except ImportError as error:
            message = f"AI Hub's client cannot be loaded: {str(error) or 'it is not installed'}"
            raise LinkError(message, hint="install it with: pip install 'estream-pack[aihub]'") from error
        self._hub = qai_hub
        self.version: str = qai_hub.__version__
        with asking("to log in"):
            self._client = qai_hub.Client()
            self._client.set_verbose(False)

    def device(self, chip: Chip) -> Any:
        """The devices with a chip, as the client wants them named.

        Raises:
            LinkError: there is none, or the service does not answer.
        """
        # Named as the manifest names a chip; what a chipset is called differs between devices that have the same chip.
        attributes = [f"soc-model:{chip.soc_model}", f"hexagon:v{chip.architecture}", "framework:qnn"]
        with asking(f"for devices with {chip}"):
            found = self._client.get_devices(attributes=attributes)
        if not found:
            message = f"AI Hub has no device with {chip}"
            raise LinkError(message, hint="'qai-hub list-devices' shows what it has; others compile locally")
        return self._hub.Device(attributes=attributes)

    def job(self, job_id: str | None) -> Job | None:
        """A job of an earlier run; None where there is none, or none any more.

        Raises:
            LinkError: the service does not answer.
        """
        if job_id is None:
            return None
        with asking(f"for job {job_id}"):
            try:
                return self._client.get_job(job_id)
            except self._hub.UserError as error:
                if http_status(error) == _GONE:
                    return None
                raise

    def compile(self, name: str, onnx: bytes, device: Any, options: str) -> Job:
        """Uploads a model and has it compiled.

        Raises:
            LinkError: the service does not answer.
            PackError: it refuses the model.
        """
        with asking(f"to compile {name}"), tempfile.TemporaryDirectory(prefix="estream-aihub-") as folder:
            path = Path(folder, f"{name}.onnx")
            path.write_bytes(onnx)
            model = self._client.upload_model(str(path), name=name)
            return self._client.submit_compile_job(model, device=device, name=name, options=options)

    def link(self, compiled: Sequence[Job], device: Any, name: str, options: str) -> Job:
        """Has what finished jobs made linked into one context binary.

        Raises:
            LinkError: the service does not answer.
            PackError: it refuses to.
        """
        with asking("to link"):
            models = [job.get_target_model() for job in compiled]
            return self._client.submit_link_job(models, device=device, name=name, options=options)

    def status(self, job: Job) -> Status:
        """How far a job is.

        Raises:
            LinkError: the service does not answer.
        """
        with asking(f"for job {job.job_id}"):
            status = job.get_status()
        failure = " ".join((status.message or "no reason given").split()) if status.failure else None
        return Status(status.finished, failure)

    def fetch(self, job: Job) -> Linked:
        """What a finished link job made.

        Raises:
            LinkError: the service does not answer, or breaks off.
            PackError: the job made nothing.
        """
        with (
            asking(f"for the binary of job {job.job_id}"),
            tempfile.TemporaryDirectory(prefix="estream-aihub-") as folder,
        ):
            model = job.get_target_model()
            if model is None:
                raise PackError(f"AI Hub has no binary of job {job.job_id}", hint=f"see {job.url}")
            data = Path(model.download(str(Path(folder, "linked.bin")))).read_bytes()
            tensors = {
                graph: frozenset(tensor.name for spec in (inputs, model.output_spec.get(graph, [])) for tensor in spec)
                for graph, inputs in model.input_spec.items()
            }
            return Linked(data, tensors, {key.name: value for key, value in model.metadata.items()})


@contextlib.contextmanager
def asking(what: str) -> Iterator[None]:
    """Ask AI Hub for something: what the client prints is dropped, and whatever it raises becomes one clear message.

    Args:
        what: what is asked, as it goes on after `when asked`.
    """
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    except EmoeError:
        raise
    except Exception as error:  # the client lets through whatever the libraries below it raise
        raise refusal(error, what) from error
