from __future__ import annotations

import errno
import os
import shlex
import tempfile
import threading
import time
from pathlib import Path

import pytest

from conformance.conftest import Program, bad, good
from estream_conformance.errors import UsageError
from estream_conformance.image import Image
from estream_conformance.judgement import Reason
from estream_conformance.process import STDERR_KEPT, ask
from estream_conformance.runner import Outcome, ask_about, check_entry_point, parse_entry_point, run_suite
from estream_conformance.vector import Vector

VECTORS = [good(), bad()]
RIGHT = """
    import sys
    good = open(sys.argv[1], "rb").read() == b"good"
    line = '{"a":[1,{"b":"\\u00e9"}]}' if good else '{"class":"invalid","rule":"EMOE-SEC-012"}'
    sys.stdout.buffer.write(line.encode())
    sys.exit(0 if good else 1)
"""


def reasons(entry_point: str, vectors: list[Vector] = VECTORS, timeout: float = 10) -> list[Reason | None]:
    results = run_suite(shlex.split(entry_point), vectors, timeout=timeout)
    assert [result.vector for result in results] == vectors
    return [result.judgement.reason for result in results if result.judgement is not None]


def test_a_loader_that_is_right(program: Program) -> None:
    assert reasons(program(RIGHT)) == [None, None]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("print('{}')", [Reason.CONTENT, Reason.ACCEPTED]),
        ("""print('{"class":"invalid"}'); raise SystemExit(1)""", [Reason.REFUSED, None]),
        ("import os; os.abort()", [Reason.CRASH, Reason.CRASH]),
        ("raise SystemExit(3)", [Reason.CRASH, Reason.CRASH]),
        ("raise KeyError('x')", [Reason.NO_VERDICT, Reason.NO_VERDICT]),
        ("import os; print(os.urandom(100))", [Reason.NO_JSON, Reason.ACCEPTED]),
        ("import sys\nwhile True: sys.stdout.write('x' * 65536)", [Reason.FLOOD, Reason.FLOOD]),
        ("import sys; print(len(sys.stdin.read())); raise SystemExit(7)", [Reason.CRASH, Reason.CRASH]),
    ],
    ids=["accepts all", "refuses all", "aborts", "exits 3", "throws", "garbage", "endless", "reads stdin"],
)
def test_a_loader_that_is_wrong(source: str, expected: list[Reason | None], program: Program) -> None:
    assert reasons(program(source)) == expected


@pytest.mark.parametrize(
    "source",
    [
        "import time; time.sleep(60)",
        "import os, time; os.close(1); os.close(2); time.sleep(60)",
        "import sys\nwhile True: sys.stderr.write('x' * 65536)",
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)",
    ],
    ids=["sleeps", "closes its pipes and sleeps", "endless errors", "will not be asked"],
)
def test_a_loader_that_hangs_is_ended(source: str, program: Program) -> None:
    begin = time.monotonic()
    assert reasons(program(source), timeout=0.5) == [Reason.TIMEOUT, Reason.TIMEOUT]
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize("session", ["", "os.setsid()"], ids=["in its group", "in a session of its own"])
def test_a_child_that_keeps_the_pipes_open(session: str, program: Program, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    entry_point = program(f"""
        import os, sys, time
        print('{{"class":"invalid"}}', flush=True)
        if child := os.fork():
            open({str(pid)!r}, "w").write(str(child))
            os._exit(1)
        {session or "pass"}
        time.sleep(20)
    """)
    begin = time.monotonic()
    assert reasons(entry_point, [bad()]) == [None]
    assert time.monotonic() - begin < 15
    if session:
        os.kill(int(pid.read_text()), 9)  # nobody else would
    else:
        wait_for_end(int(pid.read_text()))


def wait_for_end(pid: int) -> None:
    """Return when a process has ended, as it must have been killed."""
    for _ in range(1000):
        state = Path(f"/proc/{pid}/stat")
        try:
            if state.read_text().rpartition(")")[2].split()[0] == "Z":  # whoever took it over has not looked yet
                return
        except FileNotFoundError:
            return
        time.sleep(0.01)
    pytest.fail("the child lives on")


def test_what_a_loader_prints_is_bounded(program: Program) -> None:
    command = shlex.split(program("import sys\nfor n in range(20_000): print(n, file=sys.stderr)\nprint('x' * 1000)"))
    answer = ask(command, timeout=60, limit=1001)
    assert (answer.status, len(answer.output), answer.flooded) == (0, 1001, False)
    assert len(answer.errors) == STDERR_KEPT
    assert answer.errors.endswith(b"\n19999\n")
    answer = ask(command, timeout=60, limit=1000)
    assert (answer.status, len(answer.output), answer.flooded) == (None, 1000, True)


def test_a_run_that_is_stopped_leaves_no_program_running(program: Program) -> None:
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    answer = ask(shlex.split(program("import time; time.sleep(60)")), timeout=60, limit=1, stop=stop)
    assert answer.status is None
    assert answer.seconds < 30


def test_what_a_loader_is_given(program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    command = shlex.split(
        program("""
        import os, sys
        path, *options = sys.argv[1:]
        print(os.path.basename(path), os.path.getsize(path), options[:3], open(options[4], "rb").read(), os.getcwd())
    """)
    )
    arguments = ("--offset", "7", "--key", "--detached", "{detached}")
    vector = bad(Image.of((0, b"x"), (1 << 32, b"end")), arguments=arguments, detached=b"\0signature")
    answer = ask_about(vector, command, timeout=60)
    wanted = f"package.emoe {(1 << 32) + 3} ['--offset', '7', '--key'] b'\\x00signature' {Path.cwd()}\n"
    assert answer.output.decode() == wanted, answer.errors
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_written_ends_the_run(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere/at all")
    with pytest.raises(FileNotFoundError):
        run_suite(shlex.split(program(RIGHT)), VECTORS)


def test_a_file_that_cannot_be_written_is_told_and_the_others_are_asked(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Image.write

    def within_16_gib(image: Image, path: Path) -> None:
        if image.length > 1 << 34:
            raise OSError(errno.EFBIG, "File too large", str(path))
        write(image, path)

    monkeypatch.setattr(Image, "write", within_16_gib)
    huge = bad(Image.of((1 << 40, b"end")), name="huge", features=frozenset({"large"}))
    found = run_suite(shlex.split(program(RIGHT)), [good(), huge, bad()], expected_failures={"huge"})
    assert [each.outcome for each in found] == [Outcome.PASSED, Outcome.NOT_ASKED, Outcome.PASSED]
    assert str(found[1].fault) == "the file of 'huge' cannot be written: file too large"
    assert found[1].fault is not None
    assert found[1].fault.hint == "leave `large` out of --features"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("raise SystemExit(1)", "exit status 1, and standard output that is empty; its standard error is empty"),
        (
            "import none_such",
            "standard output that is empty; its standard error ends: .* | ModuleNotFoundError: No mod",
        ),
        ("raise SystemExit(2)", "exit status 2, which is no answer; its"),
        ("import os; os.abort()", "ended by SIGABRT; its"),
        ("import time; time.sleep(60)", r"no answer in 1\.\d s; its"),
    ],
)
def test_a_command_that_is_no_loader(source: str, found: str, program: Program) -> None:
    entry_point = program(source)
    with pytest.raises(UsageError, match=found) as error:
        check_entry_point(shlex.split(entry_point), good(), timeout=1 if "sleep" in source else 60)
    assert str(error.value).startswith(f"{entry_point!r} gives no verdict about the file 'good': ")
    assert error.value.hint is not None


@pytest.mark.parametrize("source", ["print('no')", "print('no'); raise SystemExit(1)", "pass"])
def test_a_loader_that_is_wrong_is_a_loader(source: str, program: Program) -> None:
    check_entry_point(shlex.split(program(source)), good(), timeout=60)


def test_features_leave_out_tests_but_accept_does_not(program: Program) -> None:
    vectors = [good(features=frozenset({"accept"})), good(name="packed", features=frozenset({"accept", "zstd"})), bad()]
    command = shlex.split(program("print('{}')"))
    found = run_suite(command, vectors, features=())
    assert [each.outcome for each in found] == [Outcome.PASSED, Outcome.LEFT_OUT, Outcome.FAILED]
    assert found[1].judgement is None
    found = run_suite(command, vectors, features={"accept", "zstd"})
    assert [each.outcome for each in found] == [Outcome.FAILED] * 3


def test_expected_failures_are_strict(program: Program) -> None:
    vectors = [good(name="a"), bad(name="b"), good(name="c"), bad(name="d", features=frozenset({"large"}))]
    command = shlex.split(program("""print('{"a":[1,{"b":"\\u00e9"}]}')"""))
    found = run_suite(command, vectors, features={"accept"}, expected_failures={"a", "b", "d"})
    assert [each.outcome for each in found] == [
        Outcome.UNEXPECTED_PASS,
        Outcome.EXPECTED_FAILURE,
        Outcome.PASSED,
        Outcome.LEFT_OUT,
    ]


def test_results_come_in_order_and_carry_what_was_printed(program: Program) -> None:
    vectors = [bad(bytes([49 + n]), name=f"v{n}") for n in range(6)]
    entry_point = program("""
        import sys, time
        number = int(open(sys.argv[1]).read())
        time.sleep(0.3 / number)
        print(number, "\\x1b[2J", file=sys.stderr)
        sys.exit(2)
    """)
    steps: list[None] = []
    found = run_suite(shlex.split(entry_point), vectors, jobs=3, advance=lambda: steps.append(None))
    assert [each.vector.name for each in found] == [f"v{n}" for n in range(6)]
    assert [each.errors for each in found] == [rf"{n + 1} \x1b[2J" for n in range(6)]
    assert len(steps) == 6


def test_a_loader_that_cannot_be_started_ends_the_run(tmp_path: Path) -> None:
    path = tmp_path / "loader"
    path.write_text("#!/no/such/interpreter\n")
    path.chmod(0o755)
    with pytest.raises(UsageError, match="cannot be started: no such file or directory"):
        run_suite(parse_entry_point(str(path)), VECTORS)


@pytest.mark.parametrize(
    ("entry_point", "message", "hint"),
    [
        ("", "the entry point is empty", "give a command line such as"),
        ("python3 'my loader.py", "the entry point cannot be split into words: no closing quotation", None),
        ("./no-such-loader", "there is no program './no-such-loader'", None),
        ("no-such-loader --fast", "there is no program 'no-such-loader'", None),
        ("here", "there is no program 'here'", "did you mean './here'?"),
        ("./plain", "the entry point './plain' is not executable", "run 'chmod +x ./plain'"),
        ("./folder", "the entry point './folder' is a folder", None),
    ],
)
def test_an_entry_point_that_is_none(
    entry_point: str, message: str, hint: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plain").touch()
    Path("here").touch(mode=0o755)
    Path("folder").mkdir()
    with pytest.raises(UsageError) as error:
        parse_entry_point(entry_point)
    assert str(error.value) == message
    assert (error.value.hint or "").startswith(hint or "")
    assert (error.value.hint is None) == (hint is None)


def test_an_entry_point_with_arguments(tmp_path: Path) -> None:
    path = tmp_path / "my loader"
    path.touch(mode=0o755)
    assert parse_entry_point(f"'{path}' --strict 'a b'") == [str(path), "--strict", "a b"]
