"""Tasks in the Harbor format, from a folder or from the demo's generator.

    NAME/task.toml                 timeouts and metadata; `[metadata.families]`: family name = name patterns of checks
    NAME/instruction.md            what the agent is asked
    NAME/environment/Dockerfile    how the task's machine is made
    NAME/tests/test.sh             writes /logs/verifier/reward.txt or reward.json, and ctrf.json if it likes
    NAME/solution/solve.sh         optional

A Dockerfile is read as a plain list of WORKDIR, COPY and `RUN mkdir -p` lines, which is all that the embedded sandbox
can follow. FROM, LABEL and CMD are passed over: the commands at hand are the sandbox's own, whatever the image. Any
other line is refused.
"""

import shlex
import shutil
import stat
import tomllib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rsi_fast import config
from rsi_fast.errors import UserError

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="ignore")  # Harbor has more keys than a rollout needs


class _Metadata(_Section):
    families: dict[str, list[str]] = {}


class _Verifier(_Section):
    timeout_sec: Seconds | None = None
    env: Annotated[dict[str, str], Field(max_length=0)] = {}  # would be dropped silently: refused


class _Agent(_Section):
    timeout_sec: Seconds | None = None


class _TaskFile(_Section):
    metadata: _Metadata = _Metadata()
    verifier: _Verifier = _Verifier()
    agent: _Agent = _Agent()
    steps: Annotated[list[Any], Field(max_length=0)] = []  # tasks of several steps are not supported


@dataclass(frozen=True)
class Environment:
    """What stands in the sandbox when the agent starts. Paths in it are absolute."""

    workdir: str
    directories: tuple[str, ...]
    copies: tuple[tuple[Path, str], ...]  # a file or a folder here, and the path that it gets

    def read_files(self) -> dict[str, tuple[bytes, int]]:
        """Path in the sandbox -> content and mode. Empty folders are not copied; RUN mkdir -p makes some."""
        files = {}
        for source, target in self.copies:
            sources = sorted(p for p in source.rglob("*") if p.is_file()) if source.is_dir() else [source]
            for path in sources:
                place = PurePosixPath(target, path.relative_to(source).as_posix()) if source.is_dir() else target
                files[str(place)] = (path.read_bytes(), stat.S_IMODE(path.stat().st_mode))
        return files


@dataclass(frozen=True)
class Task:
    name: str  # of its folder; unique in its set
    folder: Path
    instruction: str
    environment: Environment
    families: dict[str, list[str]]  # family -> patterns (fnmatch) of the names of its checks
    verifier_timeout_s: float | None
    agent_timeout_s: float | None

    def test_files(self) -> dict[str, bytes]:
        return _folder_files(self.folder / "tests", "/tests")

    def solution_files(self) -> dict[str, bytes]:
        return _folder_files(self.folder / "solution", "/solution")


def load_task(folder: Path) -> Task:
    """Reads one task. Raises UserError that names the file and the field."""
    folder = Path(folder)
    settings = _read_settings(folder / "task.toml")
    instruction = _read_text(folder / "instruction.md").strip()
    if not instruction:
        raise UserError(f"{folder / 'instruction.md'} is empty; it must say what the agent is to do")
    if not (folder / "tests" / "test.sh").is_file():
        raise UserError(f"{folder / 'tests' / 'test.sh'} is missing; a task needs its verifier there")
    return Task(
        name=folder.name,
        folder=folder,
        instruction=instruction,
        environment=_read_dockerfile(folder / "environment" / "Dockerfile"),
        families=settings.metadata.families,
        verifier_timeout_s=settings.verifier.timeout_sec,
        agent_timeout_s=settings.agent.timeout_sec,
    )


def load_task_set(settings: config.TaskSet, seed: int, run_dir: Path) -> dict[str, Task]:
    """All tasks of a set by name, in order of name. Raises UserError for the first broken task."""
    return {path.name: load_task(path) for path in task_folders(settings, seed, run_dir)}


def task_folders(settings: config.TaskSet, seed: int, run_dir: Path) -> list[Path]:
    """The folders of a set's tasks, in order of name. The demo's are made under `run_dir/tasks` on first use."""
    if settings.generator == "demo":
        folder = Path(run_dir) / "tasks" / settings.split
        if not folder.exists():
            from rsi_fast.demo.tasks import write_tasks

            part = folder.with_name(f".{folder.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            write_tasks(part, settings.split, settings.count, seed)
            part.rename(folder)
    else:
        folder = settings.path
        if not folder.is_dir():
            raise UserError(f"task folder {folder} does not exist; set tasks.*.path to a folder of Harbor tasks")
    folders = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not folders:
        raise UserError(f"task folder {folder} holds no tasks; expected one folder a task, with a task.toml in each")
    return folders[: settings.count]


def _read_settings(path: Path) -> _TaskFile:
    try:
        return _TaskFile.model_validate(tomllib.loads(_read_text(path)))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None
    except ValidationError as error:
        item = error.errors()[0]
        field = ".".join(str(part) for part in item["loc"])
        if field in ("verifier.env", "steps"):
            raise UserError(f"{path}: {field} is not supported; remove it or leave the task out") from None
        raise UserError(f"{path}: {field}: {item['msg']} (got {item['input']!r})") from None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path} is missing; a Harbor task needs it") from None
    except (UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _read_dockerfile(path: Path) -> Environment:
    workdir = "/"
    directories: list[str] = []
    copies: list[tuple[Path, str]] = []
    for line in _read_text(path).replace("\\\n", " ").splitlines():
        instruction, _, rest = line.strip().partition(" ")
        refused = UserError(
            f"{path}: the embedded sandbox cannot follow {line.strip()!r}; it knows WORKDIR, COPY and RUN mkdir -p. "
            'Simplify the line, or use sandbox.kind = "docker" once there is one'
        )
        try:
            words = shlex.split(rest)
        except ValueError:
            raise refused from None
        if not instruction or instruction.startswith("#") or instruction.upper() in ("FROM", "LABEL", "CMD"):
            continue
        if any(set("$*?;&|<>`") & set(word) for word in words):
            raise refused
        if instruction.upper() == "WORKDIR" and len(words) == 1:
            workdir = _absolute(workdir, words[0])
        elif instruction.upper() == "COPY" and len(words) >= 2 and not words[0].startswith(("--", "[")):
            copies += _copies(path, workdir, words)
        elif instruction.upper() == "RUN" and words[:2] == ["mkdir", "-p"] and len(words) > 2:
            directories += [_absolute(workdir, word) for word in words[2:]]
        else:
            raise refused
    return Environment(workdir, tuple(directories), tuple(copies))


def _copies(dockerfile: Path, workdir: str, words: list[str]) -> list[tuple[Path, str]]:
    """Docker's rules: a folder's content goes into the target; a file does when that ends with a slash."""
    *sources, target = words
    into_folder = target.endswith(("/", ".")) or len(sources) > 1
    copies = []
    for name in sources:
        source = dockerfile.parent / name.lstrip("/")
        if not source.exists():
            raise UserError(f"{dockerfile}: COPY {name}: there is no such file beside the Dockerfile")
        place = _absolute(workdir, target)
        copies.append((source, place if source.is_dir() or not into_folder else f"{place}/{source.name}"))
    return copies


def _absolute(workdir: str, path: str) -> str:
    """`path` seen from `workdir`, without `.` and trailing slash."""
    return str(PurePosixPath(workdir, path))


def _folder_files(folder: Path, target: str) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {f"{target}/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in files}
