from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as Xml

import pytest

from conformance.conftest import Program
from estream_conformance import cli
from estream_conformance.suite import FEATURES, chosen
from estream_conformance.vector import Vector

Run = Callable[..., tuple[int, str, str]]
DOCUMENT = Path(__file__).parents[2] / "spec" / "LOADER-CLI.md"
REFUSES_ALL = """
    print('{"class":"malformed"}')
    raise SystemExit(1)
"""
QUOTE = "quote the whole command of the loader, such as \"python3 my_loader.py\"; see 'estream-conformance run --help'"
SOME = ("--only", "smallest", "--only", "EMOE-SUP-005")
"""One file to accept, and some to refuse as unsupported."""


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """`run(*arguments)`: exit status, standard output and standard error of `estream-conformance`."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        status = cli.run_command([str(argument) for argument in arguments])
        return status, *capfd.readouterr()

    return call


@pytest.fixture(scope="module")
def other_major(suite: list[Vector]) -> Vector:
    """A file to refuse as unsupported."""
    return chosen(suite, ["EMOE-SUP-005"])[0]


@pytest.fixture(scope="module")
def no_magic(suite: list[Vector]) -> Vector:
    """A file to refuse as malformed."""
    return chosen(suite, ["EMOE-SUP-001"])[0]


@pytest.fixture
def some(suite: list[Vector]) -> list[Vector]:
    """The vectors that `SOME` chooses."""
    return chosen(suite, SOME[1::2])


def test_the_smallest_program_gets_a_useful_report(
    run: Run, program: Program, suite: list[Vector], other_major: Vector
) -> None:
    source = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)[-1]
    status, out, err = run("run", program(source), "--features", "", "--only", "EMOE-SUP-00?", "--only", "smallest")
    assert (status, err) == (1, "")
    assert "smallest:" not in out
    assert (
        f"{other_major.name}: accepted what must be refused\n"
        f"  {other_major.about}\n"
        "  expected  refused as unsupported by EMOE-SUP-005\n"
        "  found     accepted\n"
        f"  file      estream-conformance export FOLDER --only {other_major.name}\n"
    ) in out
    rows = {
        row[0]: [int(each) for each in row[1:]]
        for line in out.splitlines()
        if (row := line.split())[1:] and row[0] in ("accepted", "SUP", "all")
    }
    asked = chosen(suite, ["EMOE-SUP-00?"])
    assert rows["accepted"][:2] == [1, 0]
    assert sum(rows["SUP"]) == len(asked)
    assert rows["SUP"][0] >= 1
    assert sum(rows["all"]) == len(asked) + 1


def test_each_rule_is_told_by_a_few_failures(run: Run, program: Program, suite: list[Vector]) -> None:
    names = [each.name for each in chosen(suite, ["EMOE-SUP-005"])]
    assert len(names) > 2
    asked = (program(REFUSES_ALL), "--only", "emoe-sup-005", "--only", "smallest")
    for options, shown in (((), 2), (("--show", "1"), 1), (("--show", "0"), 0), (("--show", "1000"), len(names))):
        status, out, _ = run("run", *asked, *options)
        assert status == 1
        assert [name for name in names if f"\n{name}: " in f"\n{out}"] == names[:shown]
        more = re.findall(r"^\.\.\. and (\d+) more of EMOE-SUP-005$", out, re.MULTILINE)
        assert more == [str(len(names) - shown)] * (0 < shown < len(names))
        rows = [line.split() for line in out.splitlines()[-4:]]
        assert rows == [
            ["accepted", "0", "1"],
            ["SUP", "0", str(len(names))],
            ["EMOE-SUP-005", "0", str(len(names))],
            ["all", "0", str(len(names) + 1)],
        ]


def test_a_file_system_without_files_so_large(program: Program, suite: list[Vector], tmp_path: Path) -> None:
    large = [each.name for each in suite if each.image.length > 1 << 40 and "zstd" not in each.features]
    asked = [option for name in (*large, "smallest") for option in ("--only", name)]

    def limited(*arguments: str) -> tuple[int, str, str]:
        command = shlex.join([sys.executable, "-m", "estream_conformance", *arguments])
        done = subprocess.run(["sh", "-c", f"ulimit -f 1000000; exec {command}"], capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    fault = f"the file of {large[0]!r} cannot be written: file too large"
    results = tmp_path / "results.xml"
    status, out, err = limited("run", program("print()"), *asked, "--features", "large", "--junit", str(results))
    assert (status, err) == (3, "")
    assert f"{large[0]}: not asked\n" in out
    assert f"\n  {fault}\n  leave `large` out of --features\n" in out
    assert out.splitlines()[-1].split() == ["all", "1", "0", str(len(large))]
    junit = Xml.parse(results).getroot().find("testsuite")
    assert junit is not None
    assert (junit.get("failures"), junit.get("errors")) == ("0", str(len(large)))
    assert [each.get("message") for each in junit.iter("error")][:1] == [fault]
    folder = str(tmp_path / "suite")
    assert limited("export", folder, *asked) == (
        3,
        "",
        f"estream-conformance: error: {fault}\nestream-conformance: hint: leave `large` out of --features\n",
    )
    assert limited("export", folder, *asked, "--features", "accept")[0] == 0
    assert {each.stem for each in Path(folder).iterdir()} == {"smallest"}


def test_all_results_as_json(run: Run, program: Program, some: list[Vector]) -> None:
    entry_point = program(REFUSES_ALL)
    status, out, err = run("run", entry_point, *SOME, "--json", "--features", "zstd, accept")
    found = json.loads(out)
    assert (status, err) == (1, "")
    assert (found["entry_point"], found["features"]) == (entry_point, ["accept", "zstd"])
    assert found["counts"] == {
        "passed": 0,
        "failed": len(some),
        "expected-failure": 0,
        "unexpected-pass": 0,
        "left-out": 0,
        "not-asked": 0,
    }
    assert [each["name"] for each in found["results"]] == [each.name for each in some]
    first, second = found["results"][:2]
    assert first.pop("seconds") > 0
    assert first == {
        "name": "smallest",
        "about": "The smallest package: one layer, one expert, all weights f32.",
        "rule": None,
        "outcome": "failed",
        "reason": "refused",
        "expected": "accepted",
        "found": "refused as malformed",
        "fault": None,
        "stderr": "",
    }
    assert (second["rule"], second["reason"]) == ("EMOE-SUP-005", "class")


def test_junit(run: Run, program: Program, some: list[Vector], other_major: Vector, tmp_path: Path) -> None:
    path, listed = tmp_path / "results.xml", tmp_path / "xfail"
    path.write_text("older")
    listed.write_text(f"{other_major.name}\n")
    entry_point = program(f"import sys; print('oh\\x1b\\x00', file=sys.stderr)\n{REFUSES_ALL.replace('    ', '')}")
    assert run("run", entry_point, *SOME, "--junit", path, "--xfail", listed)[0] == 1
    suite = Xml.parse(path).getroot().find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures")) == (str(len(some)), str(len(some) - 1))
    assert (suite.get("skipped"), suite.get("errors")) == ("1", "0")
    cases = {case.get("name"): case for case in suite.findall("testcase")}
    assert list(cases) == [each.name for each in some]
    failure = cases["smallest"].find("failure")
    assert failure is not None
    assert (cases["smallest"].get("classname"), failure.get("type")) == ("conformance.accepted", "refused")
    assert (failure.text or "").endswith("expected accepted\nfound refused as malformed")
    assert cases["smallest"].findtext("system-err") == r"oh\x1b\x00"
    assert cases[other_major.name].find("failure") is None
    assert cases[other_major.name].find("skipped") is not None
    assert sorted(each.name for each in tmp_path.iterdir() if each.name.startswith(".")) == []


def test_expected_failures(run: Run, program: Program, some: list[Vector], no_magic: Vector, tmp_path: Path) -> None:
    entry_point, listed = program(REFUSES_ALL), tmp_path / "xfail"
    listed.write_text("".join(f"{each.name}\n" for each in some), encoding="utf-8-sig")
    status, out, err = run("run", entry_point, *SOME, "--xfail", listed)
    assert (status, err) == (0, "")
    assert "failed as expected" in out
    listed.write_text(f"{listed.read_text()}{no_magic.name} # though it can do this\n")
    assert run("run", entry_point, *SOME, "--xfail", listed)[0] == 0
    status, out, _ = run("run", entry_point, "--only", no_magic.name, "--xfail", listed)
    assert status == 1
    assert f"{no_magic.name}: passed, though it is expected to fail\n" in out
    assert "passed unexpectedly" in out


def test_a_command_that_is_no_loader_is_told_once(run: Run, program: Program, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    loader = program(f"open({str(asked)!r}, 'a').write('x'); import none_such")
    status, out, err = run("run", loader, *SOME)
    assert (status, out, asked.read_text()) == (2, "", "x")
    error, hint = err.splitlines()
    assert error.startswith(f"estream-conformance: error: {loader!r} gives no verdict about the file 'smallest': ")
    assert error.endswith("ModuleNotFoundError: No module named 'none_such'")
    assert hint.startswith("estream-conformance: hint: ")


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        ("smallest", lambda each: each.name == "smallest"),
        ("SMALL*", lambda each: each.name.startswith("small")),
        ("emoe-sup-005", lambda each: each.rule == "EMOE-SUP-005"),
        ("sup", lambda each: (each.rule or "").startswith("EMOE-SUP-")),
        ("Accepted", lambda each: each.rule is None),
    ],
)
def test_patterns(pattern: str, fits: Callable[[Vector], bool], suite: list[Vector]) -> None:
    found = chosen(suite, [pattern])
    assert found == [each for each in suite if fits(each)]
    assert found


def test_tests_that_are_left_out_are_counted(
    run: Run, program: Program, suite: list[Vector], other_major: Vector
) -> None:
    left = [each for each in suite if "zstd" in each.features][:1]
    asked = [option for each in [*left, other_major] for option in ("--only", each.name)]
    status, out, _ = run("run", program(REFUSES_ALL), *asked, "--features", "records", "--json")
    assert status == 1
    assert json.loads(out)["counts"]["left-out"] == len(left) == 1


def test_the_list(run: Run, suite: list[Vector], other_major: Vector) -> None:
    status, out, err = run("list")
    assert (status, err) == (0, "")
    *blocks, counts = out.split("\n\n")
    assert len(blocks) == len(suite)
    assert blocks[0].splitlines()[2].startswith("  accepted (features: accept")
    assert f"{other_major.name}\n  {other_major.about}\n  refused as unsupported by EMOE-SUP-005" in blocks
    same_rule = sum(each.rule == other_major.rule for each in suite)
    rows = [line.split() for line in counts.splitlines()]
    assert [str(same_rule), "EMOE-SUP-005"] in rows
    assert rows[-1] == [str(len(suite)), "all"]
    status, out, _ = run("list", "--only", other_major.name)
    assert (status, out.splitlines()[0]) == (0, other_major.name)
    assert out.endswith("\n\n    1 EMOE-SUP-005\n    1 all\n")
    status, out, _ = run("list", "--json")
    found = json.loads(out)
    assert [each["name"] for each in found] == [each.name for each in suite]
    assert {
        "name": other_major.name,
        "about": other_major.about,
        "answer": "refused",
        "class": "unsupported",
        "rule": "EMOE-SUP-005",
        "features": [],
    } in found


def test_export(run: Run, suite: list[Vector], tmp_path: Path) -> None:
    folder = tmp_path / "suite"
    status, out, err = run("export", folder)
    assert (status, out, err) == (0, f"{len(suite)} files and their answers in {folder}\n", "")
    for vector in suite:
        answer = json.loads((folder / f"{vector.name}.json").read_text(encoding="utf-8"))
        path = folder / f"{vector.name}.emoe"
        assert path.stat().st_size == vector.image.length
        assert (answer["status"], answer["class"], answer["rule"]) == (
            0 if vector.rule is None else 1,
            vector.refused_as,
            vector.rule,
        )
        assert (answer["output"], answer["about"]) == (vector.json, vector.about)
        assert (answer["features"], len(answer["arguments"])) == (sorted(vector.features), len(vector.arguments))
        named = [each for each in answer["arguments"] if each.endswith(".signature")]
        assert [(folder / each).read_bytes() for each in named] == (
            [] if vector.detached is None else [vector.detached]
        )
    smallest = chosen(suite, ["smallest"])[0]
    assert (folder / "smallest.emoe").read_bytes() == smallest.image.data()
    used = sum(each.stat().st_blocks for each in folder.iterdir()) * 512
    assert used < sum(vector.image.length for vector in suite if vector.image.length < 1 << 31) + (64 << 20)
    assert run("export", folder)[0] == 2


@pytest.mark.parametrize("exists", [True, False])
def test_an_export_that_fails_leaves_nothing(
    exists: bool, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "suite"
    if exists:
        folder.mkdir()
    write_text, left = Path.write_text, [3]

    def write(path: Path, text: str, encoding: str | None = None) -> int:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(28, "No space left on device", str(path))
        return write_text(path, text, encoding)

    monkeypatch.setattr(Path, "write_text", write)
    status, out, err = run("export", folder)
    assert (status, out) == (3, "")
    assert re.fullmatch(r"estream-conformance: error: no space left on device \(at .*\.json\)\n", err)
    assert folder.exists() == exists
    assert list(tmp_path.rglob("*")) == [folder] * exists


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["run", "./none"], "there is no program './none'", None),
        (
            ["run", "LOADER", "--features", "zstd,nap"],
            "there is no feature 'nap'",
            f"features are {', '.join(FEATURES)}; all are 'all'",
        ),
        (
            ["run", "LOADER", "--only", "zzz*"],
            "no test has a name, rule or rule area like 'zzz*'",
            "'estream-conformance list' shows what there is; * stands for anything",
        ),
        (
            ["run", "LOADER", "--xfail", "bad.xfail"],
            "there is no test 'smalest' (at bad.xfail, line 1)",
            "did you mean 'smallest'?",
        ),
        (["run", "LOADER", "--xfail", "latin.xfail"], "the file is not UTF-8 at byte 0 (at latin.xfail)", None),
        (
            ["run", "LOADER", "--junit", "none/x.xml"],
            "there is no folder for the results (at none/x.xml)",
            "make the folder first",
        ),
        (
            ["run", "LOADER", "--features", "", "--only", "EMOE-PAD-*"],
            "every test that was asked for needs a feature that --features leaves out",
            None,
        ),
        (["list", "--only", ""], "the pattern of --only is empty", "leave --only out to take all tests"),
        (
            ["export", "new", "--features", "", "--only", "EMOE-PAD-*"],
            "every test that was asked for needs a feature that --features leaves out",
            None,
        ),
        (
            ["run", "LOADER", "--xfail", "good.xfail", "--junit", "good.xfail"],
            "the results would replace a file of this run (at good.xfail)",
            "name another file",
        ),
        (
            ["run", "./program", "--junit", "program"],
            "the results would replace a file of this run (at program)",
            "name another file",
        ),
        (["run", "python3", "my_loader.py"], "Got unexpected extra argument (my_loader.py)", QUOTE),
        (["run", "python3", "-m", "my_loader"], "No such option '-m'.", QUOTE),
        (["export", "."], "the folder is not empty (at .)", "name an empty folder, or a new one"),
        (["export", "bad.xfail"], "there is a file of that name (at bad.xfail)", "name a folder"),
        (["run"], "Missing argument 'ENTRYPOINT'.", "see 'estream-conformance run --help'"),
        (["walk"], "No such command 'walk'.", "see 'estream-conformance --help'"),
        (
            ["run", "LOADER", "--jobs", "0"],
            "Invalid value for '--jobs': 0 is not in the range x>=1.",
            "see 'estream-conformance run --help'",
        ),
    ],
)
def test_usage_errors(
    arguments: list[str],
    message: str,
    hint: str | None,
    run: Run,
    program: Program,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = tmp_path / "asked"
    loader = program(f"open({str(asked)!r}, 'w')")
    (tmp_path / "bad.xfail").write_text("smalest\n")
    (tmp_path / "latin.xfail").write_bytes(b"\xe9\n")
    (tmp_path / "good.xfail").write_text("smallest\n")
    (tmp_path / "program").touch(mode=0o755)
    before = sorted(tmp_path.rglob("*"))
    status, out, err = run(*(loader if each == "LOADER" else each for each in arguments))
    lines = [f"estream-conformance: error: {message}"]
    lines += [f"estream-conformance: hint: {hint}"] if hint is not None else []
    assert (status, out, err.splitlines()) == (2, "", lines)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_program_ends_its_loaders_when_it_is_ended(program: Program, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    loader = program(f"""
        import os, time
        open({str(pid)!r}, "w").write(str(os.getpid()) + ".")
        time.sleep(60)
    """)
    command = [sys.executable, "-m", "estream_conformance", "run", loader, "--only", "smallest", "--timeout", "60"]
    for number in (signal.SIGTERM, signal.SIGINT):
        pid.unlink(missing_ok=True)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while not (pid.exists() and pid.read_text().endswith(".")):
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
        assert process.returncode == (130 if number == signal.SIGINT else 128 + number)
        assert out == b""
        assert err.strip() == (b"estream-conformance: error: interrupted" if number == signal.SIGINT else b"")
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()[:-1]), 0)


def test_help_and_version() -> None:
    for argument, wanted in (("--help", "Usage: estream-conformance "), ("--version", "estream-conformance, version ")):
        done = subprocess.run(
            [sys.executable, "-m", "estream_conformance", argument], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(wanted)


def test_a_reader_that_goes_away_ends_it_quietly() -> None:
    command = f"{shlex.quote(sys.executable)} -m estream_conformance list --json | true"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_results_never_replace_what_is_no_file(run: Run, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, ""):
        status, out, err = run("run", "true", "--only", "smallest", "--junit", path)
        assert (status, out) == (2, "")
        assert "error:" in err
    assert pipe.is_fifo()
