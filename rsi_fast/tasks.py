"""Tasks in the Harbor format, read by one loader whatever the sandbox.

    task.toml   instruction.md   environment/Dockerfile, ...   tests/test.sh   solution/solve.sh

The embedded sandbox has no images: it lays out what the Dockerfile's WORKDIR and COPY lines say and ignores FROM.
"""

import tomllib
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path, PurePosixPath

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rsi_fast import config as run_config
from rsi_fast.errors import UserError

REQUIRED = ("task.toml", "instruction.md", "environment", "tests/test.sh")


class _Metadata(BaseModel):
    model_config = ConfigDict(extra="allow")
    families: dict[str, list[str]] = {}  # family to patterns of check names


class _Timeout(BaseModel):
    model_config = ConfigDict(extra="allow")
    timeout_sec: float | None = Field(default=None, gt=0)


class _TaskFile(BaseModel):
    model_config = ConfigDict(extra="allow")
    metadata: _Metadata = _Metadata()
    verifier: _Timeout = _Timeout()
    agent: _Timeout = _Timeout()


class Task:
    """One task folder. What is wrong with it shows at first use, as a UserError that names file and field."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.name = self.folder.name

    @cached_property
    def _file(self) -> _TaskFile:
        for required in REQUIRED:
            if not (self.folder / required).exists():
                raise UserError(f"task {self.folder}: {required} is missing")
        path = self.folder / "task.toml"
        try:
            return _TaskFile.model_validate(tomllib.loads(self._text("task.toml")))
        except tomllib.TOMLDecodeError as error:
            raise UserError(f"task file {path} is not TOML: {error}") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise UserError(f"task file {path}: {where}: {first['msg']} (got {first['input']!r})") from None

    def _text(self, name: str) -> str:
        try:
            return (self.folder / name).read_text()
        except UnicodeDecodeError as error:
            raise UserError(f"task file {self.folder / name} is not UTF-8 text: {error}") from None

    @cached_property
    def instruction(self) -> str:
        _ = self._file
        text = self._text("instruction.md").strip()
        if not text:
            raise UserError(f"task file {self.folder / 'instruction.md'} is empty")
        return text

    @property
    def families(self) -> dict[str, list[str]]:
        return self._file.metadata.families

    @property
    def verifier_timeout_s(self) -> float | None:
        return self._file.verifier.timeout_sec

    @property
    def agent_timeout_s(self) -> float | None:
        return self._file.agent.timeout_sec

    def verifier_files(self) -> dict[str, bytes]:
        """tests/ as absolute paths of the sandbox. They enter only when the agent has finished."""
        return _files(self.folder / "tests", "/tests")

    @cached_property
    def layout(self) -> "Layout":
        """What the Dockerfile lays out, for a sandbox without images."""
        _ = self._file
        return Layout(self.folder / "environment")


class Layout:
    """Working directory, directories and files that a simple Dockerfile (FROM, WORKDIR, COPY, RUN mkdir -p) gives."""

    def __init__(self, environment: Path):
        self.workdir = "/"
        self.directories: list[str] = []
        self.files: dict[str, bytes] = {}
        dockerfile = environment / "Dockerfile"
        if not dockerfile.exists():
            raise UserError(f"{dockerfile} is missing: the embedded sandbox reads WORKDIR and COPY from it")
        for number, line in enumerate(dockerfile.read_text().splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#") or words[0].upper() == "FROM":
                continue
            if words[0].upper() == "WORKDIR" and len(words) == 2:
                self.workdir = str(PurePosixPath(self.workdir) / words[1])
                self.directories.append(self.workdir)
            elif words[0].upper() == "COPY" and len(words) == 3 and not words[1].startswith("--"):
                self._copy(environment, words[1], words[2], f"{dockerfile}:{number}")
            elif words[:3] == ["RUN", "mkdir", "-p"]:
                self.directories += [str(PurePosixPath(self.workdir) / word) for word in words[3:]]
            else:
                raise UserError(
                    f"{dockerfile}:{number}: `{line.strip()}` needs a real image; the embedded sandbox (sandbox.kind = "
                    '"bashkit") understands FROM, WORKDIR, COPY source target and RUN mkdir -p only'
                )

    def _copy(self, environment: Path, source: str, target: str, where: str) -> None:
        path = (environment / source).resolve()
        if not path.is_relative_to(environment.resolve()) or not path.exists():
            raise UserError(f"{where}: COPY source {source} does not exist inside {environment}")
        base = PurePosixPath(self.workdir) / target
        if path.is_file():
            self.files[str(base / path.name if target.endswith("/") else base)] = path.read_bytes()
            return
        self.directories.append(str(base))
        self.directories += [str(base / p.relative_to(path)) for p in sorted(path.rglob("*")) if p.is_dir()]
        self.files |= _files(path, str(base))


def _files(folder: Path, target: str) -> dict[str, bytes]:
    return {
        str(PurePosixPath(target) / path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


class TaskSet(Mapping[str, Task]):
    """Tasks by name, in order of name. A task is read when it is first asked for."""

    def __init__(self, folder: Path, count: int | None = None):
        if not folder.is_dir():
            raise UserError(f"task folder {folder} does not exist")
        names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        if not names:
            raise UserError(f"task folder {folder} holds no tasks: expected folders with a task.toml each")
        self._tasks = {name: Task(folder / name) for name in names[:count]}

    def __getitem__(self, name: str) -> Task:
        return self._tasks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)


def load_task_set(settings: run_config.TaskSet, seed: int, run_dir: Path) -> TaskSet:
    """The tasks of a run file's task set. The demo's are generated under RUN/tasks once, then read like any others."""
    if settings.path is not None:
        return TaskSet(settings.path, settings.count)
    folder = Path(run_dir) / "tasks" / settings.split
    if not folder.exists():
        from rsi_fast.demo.tasks import write_tasks

        part = folder.with_name(f".{folder.name}.part")
        write_tasks(part, settings.split, settings.count, seed)
        part.rename(folder)
    return TaskSet(folder)
