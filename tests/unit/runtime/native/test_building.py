"""The native kernel is compiled while a wheel is built, and a wheel comes of it whatever the compiler does."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from estream_runtime.native.compiling import compile_path, compile_paths, find_compiler
from estream_runtime.native.paths import PATHS, PLAIN, KernelPath, paths_of

ROOT = Path(__file__).parents[4]
NATIVE = Path("runtime/estream_runtime/native")
HERE = paths_of(platform.machine())
WITHOUT = "the native kernel is not compiled"
EXPORTED = '__attribute__((visibility("default")))'


def script(path: Path, text: str) -> str:
    """A program for the shell."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def older_compiler(folder: Path, unknown: KernelPath) -> str:
    """A compiler that refuses one path as one does that is older than its instructions."""
    refusal = f'case "$*" in *{unknown.define}*) echo "unrecognized option" >&2; exit 1;; esac'
    return script(folder / "older", f'{refusal}\nexec {" ".join(find_compiler())} "$@"')


def number(library: Path) -> int:
    """What the kernel of `project` says."""
    return int(ctypes.CDLL(str(library)).kernel_number())


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """What a kernel is built from, apart from the project at work, and a small one: it says 41."""
    folder = tmp_path / "project"
    for name in (
        "pyproject.toml",
        "hatch_build.py",
        "README.md",
        "LICENSE",
        ".gitignore",
        "spec/estream_spec/__init__.py",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / NATIVE, folder / NATIVE, ignore=shutil.ignore_patterns("*.so", "*.h"))
    (folder / NATIVE / "kernel.c").write_text(f"{EXPORTED} int kernel_number(void) {{ return 41; }}\n")
    return folder


def build(project: Path, kind: str, **environment: str) -> tuple[Path, str]:
    """Build a wheel as an installer does.

    Args:
        project: from what.
        kind: `wheel` or `editable`.
        environment: variables that differ from this process's.

    Returns:
        The wheel, and what was said on the way.
    """
    output = project.parent / "wheels"
    program = f"import sys, hatchling.build; print(hatchling.build.build_{kind}(sys.argv[1]))"
    finished = subprocess.run(
        [sys.executable, "-c", program, str(output)],
        cwd=project,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return output / finished.stdout.splitlines()[-1], finished.stderr


def libraries(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("kernel-*.so")}


def libraries_in(wheel: Path) -> set[str]:
    with ZipFile(wheel) as archive:
        names = [Path(name) for name in archive.namelist()]
    return {name.name for name in names if name.parent == Path("estream_runtime/native") and name.suffix == ".so"}


@pytest.mark.parametrize("path", HERE, ids=[path.name for path in HERE])
def test_every_path_of_this_machine_compiles_without_a_warning(tmp_path: Path, path: KernelPath) -> None:
    compile_path(path, tmp_path / path.library, find_compiler(), ["-Werror"])
    assert libraries(tmp_path) == {path.library}
    ctypes.CDLL(str(tmp_path / path.library))  # refuses a library that lacks something


@pytest.mark.parametrize(("machine", "other"), [("x86_64", "AMD64"), ("aarch64", "arm64")])
def test_a_machine_has_the_same_paths_whatever_its_system_calls_it(machine: str, other: str) -> None:
    assert paths_of(machine) == paths_of(other)
    assert len(paths_of(machine)) > 1


def test_each_path_is_for_some_machine_and_the_plain_one_is_the_last_for_all() -> None:
    assert {path for machine in ("x86_64", "aarch64") for path in paths_of(machine)} == set(PATHS)
    for machine in ("x86_64", "aarch64", "riscv64"):
        assert paths_of(machine)[-1] == PLAIN
    assert paths_of("riscv64") == (PLAIN,)


def test_a_compiler_that_refuses_one_path_still_compiles_the_others(tmp_path: Path) -> None:
    newest = KernelPath("newest", (), ("-mno-such-instructions",))
    refused = compile_paths([newest, PLAIN], tmp_path, find_compiler())
    assert list(refused) == ["newest"]
    assert "-mno-such-instructions" in refused["newest"]
    assert libraries(tmp_path) == {PLAIN.library}


def test_a_compiler_that_refuses_the_plain_path_is_of_no_use(tmp_path: Path) -> None:
    with pytest.raises(ChildProcessError, match="unrecognized option"):
        compile_paths(HERE, tmp_path, [older_compiler(tmp_path, PLAIN)])
    assert libraries(tmp_path) == set()


def test_a_compiler_that_fails_without_a_word_is_named(tmp_path: Path) -> None:
    with pytest.raises(ChildProcessError, match="silent ended with status 3"):
        compile_path(PLAIN, tmp_path / PLAIN.library, [script(tmp_path / "silent", "exit 3")])


def test_a_compiler_that_writes_nothing_leaves_what_was_there(tmp_path: Path) -> None:
    library = tmp_path / PLAIN.library
    library.write_bytes(b"older")
    with pytest.raises(ChildProcessError, match="idle wrote nothing"):
        compile_path(PLAIN, library, [script(tmp_path / "idle", "exit 0")])
    assert library.read_bytes() == b"older"
    assert {path.name for path in tmp_path.iterdir()} == {"idle", PLAIN.library}


def test_cc_that_is_no_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "'gcc -m64")
    with pytest.raises(FileNotFoundError, match="which CC names: No closing quotation"):
        find_compiler()


def test_cc_names_the_compiler_and_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"{sys.executable} -m 'a compiler'")
    assert find_compiler() == (sys.executable, "-m", "a compiler")


def test_without_cc_the_first_compiler_found_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no C compiler, looked for: cc, gcc, clang"):
        find_compiler()
    script(tmp_path / "clang", "exit 0")
    assert find_compiler() == ("clang",)
    script(tmp_path / "gcc", "exit 0")
    assert find_compiler() == ("gcc",)


def test_a_wheel_has_the_kernel_and_is_for_this_machine_and_every_python(project: Path, tmp_path: Path) -> None:
    wheel, told = build(project, "wheel")
    assert told == ""
    assert libraries_in(wheel) == {path.library for path in HERE}
    assert "-py3-none-" in wheel.name
    assert platform.machine().lower() in wheel.name
    with ZipFile(wheel) as archive:
        assert number(Path(archive.extract(f"estream_runtime/native/{PLAIN.library}", tmp_path))) == 41
    assert libraries(project / NATIVE) == set()


def test_without_a_compiler_the_wheel_is_for_every_machine_and_a_notice_says_so(project: Path) -> None:
    (project / NATIVE / PLAIN.library).write_bytes(b"what an editable installation left")
    wheel, told = build(project, "wheel", CC="/nonexistent")
    assert told.count(WITHOUT) == 1
    assert "no C compiler '/nonexistent', which CC names" in told
    assert wheel.name.endswith("-py3-none-any.whl")
    assert libraries_in(wheel) == set()


def test_a_compiler_that_fails_is_told_of_and_the_wheel_is_built(project: Path) -> None:
    (project / NATIVE / "kernel.c").write_text('#error "not today"\n')
    wheel, told = build(project, "wheel")
    assert WITHOUT in told
    assert "not today" in told
    assert wheel.name.endswith("-py3-none-any.whl")


def test_a_wheel_lacks_what_an_older_compiler_refuses_and_a_notice_names_it(project: Path, tmp_path: Path) -> None:
    refused = HERE[0]
    wheel, told = build(project, "wheel", CC=older_compiler(tmp_path, refused))
    assert f"the native kernel is compiled without {refused.name}" in told
    assert "unrecognized option" in told
    assert libraries_in(wheel) == {path.library for path in HERE[1:]}


def test_an_editable_installation_has_the_kernel_beside_its_source_and_installing_again_renews_it(
    project: Path,
) -> None:
    wheel, told = build(project, "editable")
    assert told == ""
    assert libraries_in(wheel) == set()
    assert libraries(project / NATIVE) == {path.library for path in HERE}
    (project / NATIVE / "kernel.c").write_text(f"{EXPORTED} int kernel_number(void) {{ return 42; }}\n")
    build(project, "editable")
    assert number(project / NATIVE / PLAIN.library) == 42


def test_an_editable_installation_without_a_compiler_keeps_no_older_kernel(project: Path) -> None:
    build(project, "editable")
    _, told = build(project, "editable", CC="/nonexistent")
    assert WITHOUT in told
    assert libraries(project / NATIVE) == set()
