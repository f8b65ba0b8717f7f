"""Which binary of a package backend `htp` runs, if any: no other is given to the vendor's library. MATCHING.md."""

from __future__ import annotations

from estream_loader.package import Package
from estream_runtime.backends.htp import HtpBackend
from estream_runtime.device import chip_here, facts_here
from estream_runtime.npu.contents import check_contents
from estream_runtime.npu.qnn import HINT, simulated
from estream_spec.chips import Chip, chip_named, chip_numbered
from estream_spec.errors import LinkError
from estream_spec.matching import match
from estream_spec.matching_text import advice, explain


def open_htp(package: Package, name: str | None) -> HtpBackend:
    """Opens the backend over the binary for the chip that is here, or that is simulated.

    Args:
        package: the open package.
        name: names the chip; None takes the one that is here, and in the simulator that of the first binary.

    Raises:
        LinkError: no binary of the package is for the chip and an SDK as old as the one installed, the chip is not the
            one that is here, the binary is not what the manifest says, or the vendor's library is missing or refuses
            it.
        FormatError: the package turns out to be faulty.
    """
    manifest = package.manifest
    chip = _chip(package, name)
    found = match(facts_here(chip=chip), package.container, manifest)
    if found.reason == "no-sdk":
        raise LinkError("backend htp needs onnxruntime-qnn, which is not installed", hint=HINT)
    if found.binary is None:
        raise LinkError(explain(found), path=package.source.name, hint=advice(found, package.source.name))
    [binary] = [each for each in manifest.binaries if each.section == found.binary]
    data = package.binary(binary)
    check_contents(binary, data, manifest.model)
    return HtpBackend(manifest.model, data, binary.graphs, chip)


def _chip(package: Package, name: str | None) -> Chip:
    """The chip to run on."""
    asked = None if name is None else chip_named(name)
    if not simulated():
        here = chip_here()
        if here is None and asked is None:
            raise LinkError("this device's chip is not known", hint="name it, for example htp:sm8650")
        if here is not None and asked not in (None, here):
            raise LinkError(f"this device is {here}, not {asked}")
        chip = here or asked
        assert chip is not None
        return chip
    if asked is not None:
        return asked
    if not package.manifest.binaries:
        hint = f"compile it: estream-pack compile {package.source.name} --target htp:sm8650"
        raise LinkError("the package has no binary for any NPU", path=package.source.name, hint=hint)
    first = package.manifest.binaries[0]
    return chip_numbered(first.soc_model, first.architecture)
