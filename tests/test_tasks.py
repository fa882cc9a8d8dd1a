"""The loader of Harbor tasks: what it reads, and what it says of a broken task."""

import shutil
import time

import pytest

from rsi_fast import config
from rsi_fast.errors import UserError
from rsi_fast.tasks import load_task, load_task_set

TOML = """
version = "1.0"
[metadata]
difficulty = "easy"
[metadata.families]
files = ["file *"]
[verifier]
timeout_sec = 12.5
[agent]
timeout_sec = 90
[environment]
memory_mb = 2048
"""


def write_task(folder, **changes):
    """A good task, with texts replaced by file (None: the file is left out)."""
    texts = {
        "task.toml": TOML,
        "instruction.md": "\nDo it.\n\n",
        "environment/Dockerfile": "FROM debian\nWORKDIR /app\nCOPY files/ ./\n",
        "environment/files/a.txt": "a\n",
        "environment/files/sub/b.txt": "b\n",
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
        "solution/solve.sh": "true\n",
    }
    texts.update(changes)
    for path, text in texts.items():
        if text is not None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def test_good_task(tmp_path):
    task = load_task(write_task(tmp_path / "one"))
    assert (task.name, task.instruction) == ("one", "Do it.")
    assert task.families == {"files": ["file *"]}
    assert (task.verifier_timeout_s, task.agent_timeout_s) == (12.5, 90)
    files = {path: content for path, (content, _) in task.environment.read_files().items()}
    assert files == {"/app/a.txt": b"a\n", "/app/sub/b.txt": b"b\n"}
    assert list(task.test_files()) == ["/tests/test.sh"]
    assert list(task.solution_files()) == ["/solution/solve.sh"]


def test_optional_parts(tmp_path):
    task = load_task(write_task(tmp_path / "one", **{"task.toml": "", "solution/solve.sh": None}))
    assert task.families == {}
    assert task.verifier_timeout_s is None
    assert task.solution_files() == {}


@pytest.mark.parametrize(
    ("dockerfile", "workdir", "directories", "files"),
    [
        ("FROM x", "/", (), {}),
        ("FROM x\nWORKDIR /a\nWORKDIR b\n", "/a/b", (), {}),
        ("# c\nFROM x\nWORKDIR /a\nRUN mkdir -p d e/f /g\nCMD bash", "/a", ("/a/d", "/a/e/f", "/g"), {}),
        ("FROM x\nWORKDIR /a\nCOPY files /srv", "/a", (), {"/srv/a.txt", "/srv/sub/b.txt"}),
        ("FROM x\nWORKDIR /a\nCOPY files/a.txt .", "/a", (), {"/a/a.txt"}),
        ("FROM x\nWORKDIR /a\nCOPY files/a.txt c.txt", "/a", (), {"/a/c.txt"}),
        ("FROM x\nCOPY files/a.txt files/sub/b.txt \\\n  /d/\n", "/", (), {"/d/a.txt", "/d/b.txt"}),
    ],
)
def test_dockerfile(tmp_path, dockerfile, workdir, directories, files):
    environment = load_task(write_task(tmp_path / "one", **{"environment/Dockerfile": dockerfile})).environment
    assert environment.workdir == workdir
    assert environment.directories == directories
    assert set(environment.read_files()) == set(files)


@pytest.mark.parametrize(
    "line",
    [
        "RUN apt-get update",
        "RUN mkdir -p a && rm -rf b",
        "RUN mkdir -p $HOME",
        "RUN mkdir a",
        "COPY --from=build /a /b",
        "COPY *.txt /a/",
        'COPY ["a", "b"]',
        "ENV A=1",
        "ADD a b",
        "ENTRYPOINT x",
        "USER nobody",
        'WORKDIR "',
        "NONSENSE",
    ],
)
def test_dockerfile_that_needs_docker_is_refused(tmp_path, line):
    with pytest.raises(UserError, match=r"Dockerfile: .*cannot follow.*docker") as caught:
        load_task(write_task(tmp_path / "one", **{"environment/Dockerfile": f"FROM x\n{line}\n"}))
    assert line.split()[0] in str(caught.value)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("task.toml", None, "task.toml is missing"),
        ("task.toml", "a = ", "task.toml is not valid TOML"),
        ("task.toml", b"\xff", "task.toml cannot be read"),
        ("task.toml", "[verifier]\ntimeout_sec = -1", "task.toml: verifier.timeout_sec: .*-1"),
        ("task.toml", "[verifier]\ntimeout_sec = inf", "task.toml: verifier.timeout_sec"),
        ("task.toml", "[agent]\ntimeout_sec = 'soon'", "task.toml: agent.timeout_sec: .*soon"),
        ("task.toml", "verifier = 3", "task.toml: verifier"),
        ("task.toml", "[verifier.env]\nKEY = 'x'", "verifier.env is not supported"),
        ("task.toml", "[[steps]]\nname = 'x'", "steps is not supported"),
        ("task.toml", "[metadata]\nfamilies = 3", "task.toml: metadata.families"),
        ("task.toml", "[metadata.families]\nfiles = 'file *'", "task.toml: metadata.families.files"),
        ("instruction.md", None, "instruction.md is missing"),
        ("instruction.md", " \n", "instruction.md is empty"),
        ("environment/Dockerfile", None, "Dockerfile is missing"),
        ("environment/Dockerfile", "FROM x\nCOPY nothing /a", "COPY nothing: there is no such file"),
        ("tests/test.sh", None, "test.sh is missing"),
    ],
)
def test_broken_task_names_file_and_field(tmp_path, file, text, message):
    with pytest.raises(UserError, match=message) as caught:
        load_task(write_task(tmp_path / "one", **{file: text}))
    assert str(tmp_path / "one") in str(caught.value)


def test_folder_of_tasks(tmp_path):
    for name in ("b", "a", "c"):
        write_task(tmp_path / "set" / name)
    (tmp_path / "set" / "README.md").write_text("not a task")
    (tmp_path / "set" / ".git").mkdir()
    assert list(load_task_set(config.TaskSet(path=tmp_path / "set"), 0, tmp_path)) == ["a", "b", "c"]
    assert list(load_task_set(config.TaskSet(path=tmp_path / "set", count=2), 0, tmp_path)) == ["a", "b"]
    shutil.rmtree(tmp_path / "set" / "b" / "tests")
    with pytest.raises(UserError, match=r"b/tests/test.sh is missing"):
        load_task_set(config.TaskSet(path=tmp_path / "set"), 0, tmp_path)


def test_no_tasks(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        load_task_set(config.TaskSet(path=tmp_path / "none"), 0, tmp_path)
    with pytest.raises(UserError, match="holds no tasks"):
        load_task_set(config.TaskSet(path=tmp_path), 0, tmp_path)


def test_loading_is_fast(tmp_path):
    settings = config.TaskSet(generator="demo", count=300)
    load_task_set(settings, 0, tmp_path)
    before = time.process_time()
    load_task_set(settings, 0, tmp_path)
    assert time.process_time() - before < 300 * 0.0012  # 5,000 tasks within seconds
