"""Profiles that come with this project, one JSON file each, read as an import would read them: they are part of it."""

from __future__ import annotations

from importlib.resources import files

from estream_spec.profile import DeviceProfile, decode_profile

_SUFFIX = ".json"


def shipped_profiles() -> tuple[str, ...]:
    """Names of the profiles, sorted."""
    names = (entry.name for entry in files(__name__).iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


def shipped_profile(name: str) -> DeviceProfile:
    """A profile by its name, one of `shipped_profiles`."""
    return decode_profile(files(__name__).joinpath(f"{name}{_SUFFIX}").read_bytes(), name)
