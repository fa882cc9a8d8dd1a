"""Text of the base checkpoint: terminal sessions with random commands and their real outputs.

No task is solved on purpose, no verifier looks, nothing is rewarded. In four of ten sessions the first line quotes the
commands that follow; in the others it is a random phrase with names, and random commands on those names come after it.
So the base knows names, words, syntax and copying, and not which command answers which instruction.
"""

import random
import re
from dataclasses import dataclass

import bashkit

from rsi_fast.demo.kinds import NAMES, lines

VERBS = (
    "append,replace,make the directory,copy,write,move,sort,keep the lines with,rename,make the script,swap,delete,"
    "delete the file with,put,follow,set,make a directory,write the value of,show,look at,use,take,check,count,find,"
    "put the file with,list,the,change"
).split(",")
LINKS = (
    "to,in,into,and,with,of,by,the file with,the directory,the lines with,the value of,and write,and delete,and append,"
    "and move it into,named like,in a new directory,that prints,named in,into it and delete,to the file,and,to,with,in"
).split(",")
TAILS = ("", "", "", "", " there", " twice", " into it", " wherever it is", " lines", " again", " now")

# F: a file of the session, G: any file, D: a directory, W: a word, N: a small number
COMMANDS = (
    "cat F|cat F|cat F|ls D|ls|ls|echo W > G|echo W > G|echo W > F|echo W >> F|echo W >> F|echo W|cp F G|mv F G|mv F D|"
    "cp F D|rm F|rm F|mkdir W|mkdir W|touch G|grep W F|grep W F > G|grep -l W *.txt|grep -l W *.txt|grep -c W F|"
    "grep -v W F|wc -l *.txt|wc -l F|sort F|sort F > G|sed -i s/W/W/ F|sed s/W/W/ F|sed -i s/W=.*/W=W/ F|chmod +x F|"
    "find -name F|find -name F|head -n N F|tail -n N F|echo W=W >> F|echo W=W > G|echo echo W > G|echo W > D/F|cat D/F|"
    "rm D/F|echo W >> ./D/F|mv F tmp|mv tmp F|cat F > G"
).split("|")
SLOT = re.compile(r"(?<![A-Za-z])([FGDWN])(?![A-Za-z])")
NAME_SET = frozenset(NAMES)


@dataclass
class Session:
    line: str
    turns: list[tuple[str, str]]  # command, output
    submits: bool
    quotes: bool  # the line quotes the commands


def is_file(name: str) -> bool:
    return "." in name


class _Maker:
    def __init__(self, seed: int):
        r = self.r = random.Random(f"corpus/{seed}")
        names = r.sample(NAMES, 9)
        strangers = r.sample(NAMES, 8)
        self.directories = [names.pop() for _ in range(r.choice((0, 1, 1, 2)))]
        self.files = [names.pop() + r.choices((".txt", ".cfg", ".sh"), (8, 2, 1))[0] for _ in range(r.randint(2, 4))]
        self.words = names
        self.content = self._content(strangers)
        # How this session's commands pick names: what an output just showed, what the line mentions, or anything.
        self.in_order = r.random() < 0.65
        self.follow_output, self.follow_line = r.choice(((0.9, 0.97), (0.1, 0.98), (0.6, 0.93)))
        self.shown: list[str] = []
        self.recent: list[str] = []
        self.mentioned = self._mentioned()

    def _content(self, strangers: list[str]) -> dict[str, str]:
        r, content = self.r, {}
        present = self.files[:-1] if r.random() < 0.7 else self.files
        for name in present:
            pool = self.words + strangers
            if name.endswith(".cfg"):
                texts = [f"{a}={b}" for a, b in zip(r.sample(pool, 2), r.sample(pool, 2), strict=True)]
            elif r.random() < 0.3:
                texts = [r.choice([f for f in self.files if f != name] + [r.choice(strangers) + ".txt"])]
            else:
                texts = r.sample(pool, r.choice((1, 1, 2, 3, 4)))
            inside = self.directories and r.random() > 0.75
            content[f"{r.choice(self.directories)}/{name}" if inside else name] = lines(*texts)
        return content

    def _mentioned(self) -> list[str]:
        r = self.r
        keys = [t.split("=")[0] for path, text in self.content.items() if path.endswith(".cfg") for t in text.split()]
        inner = [t for text in self.content.values() for t in text.split() if t.isalpha()]
        self.items = self.files + self.directories + self.words
        self.items += [r.choice(keys)] * 2 if keys else []
        self.items += [r.choice(inner)] * 2 if inner else []
        unique = list(dict.fromkeys(r.sample(self.items, len(self.items))))
        return unique[: r.choices((0, 1, 2, 3, 4), (1, 3, 6, 5, 3))[0]]

    def _fill(self, slot: str, used: set[str]) -> str:
        r = self.r
        fits = [x for x in self.shown if is_file(x) == (slot in "FG")]
        q = r.random()
        if fits and q < self.follow_output:
            return r.choice(fits)
        fits = [x for x in self.mentioned if is_file(x) == (slot in "FG") and x not in used]
        if fits and q < self.follow_line:
            return fits[0] if self.in_order else r.choice(fits)
        if slot == "D" and self.directories:
            return r.choice(self.directories)
        fits = [x for x in self.recent + self.items if is_file(x) == (slot in "FG")]
        return r.choice(fits) if fits else r.choice(self.words) + (".txt" if slot in "FG" else "")

    def command(self) -> str:
        used: set[str] = set()

        def fill(match: re.Match) -> str:
            if match[1] == "N":
                return str(self.r.randint(1, 4))
            name = self._fill(match[1], used)
            used.add(name)
            return name

        return SLOT.sub(fill, self.r.choice(COMMANDS))

    def note(self, command: str, output: str) -> None:
        """What later commands may pick up from this one."""
        words = output.replace("=", " ").replace("/", " ").replace(":", " ").split()
        shown = [w for w in words if w.split(".")[0] in NAME_SET]
        if "=" in output:
            values = [w.split("=")[-1] for w in output.split() if "=" in w]
            shown = [v for v in values if v.isalpha()] or shown
        if command.startswith("grep -l"):
            shown = shown[:1]
        if command.startswith("ls"):
            shown += [w.rpartition(".")[0] for w in shown if is_file(w)]
        self.shown = shown
        words = command.replace("/", " ").replace("=", " ").split()
        self.recent = (self.recent + [w for w in words if w.split(".")[0] in NAME_SET])[-6:]

    def phrase(self) -> str:
        text = self.r.choice(VERBS)
        for i, name in enumerate(self.mentioned):
            text += (f" {self.r.choice(LINKS)}" if i else "") + f" {name}"
        return text + (self.r.choice(TAILS) if self.mentioned else "")


def make_session(seed: int) -> Session:
    maker = _Maker(seed)
    r = maker.r
    quotes = r.random() < 0.4
    commands: list[str] = []
    if quotes:
        commands = [maker.command() for _ in range(r.randint(1, 3))]
        verb = r.choice(VERBS)
        opening = r.choice(("", "", "use ", "then ", f"{verb} ", f"{verb} {r.choice(maker.words)} , then "))
        line = opening + " , then ".join(commands)
    else:
        line = maker.phrase()
    shell = bashkit.Bash(cwd="/app", timeout_seconds=1, max_commands=2000)
    files = shell.fs()
    for directory in ["/app", *(f"/app/{d}" for d in maker.directories)]:
        files.mkdir(directory, True)
    for path, text in maker.content.items():
        files.write_file(f"/app/{path}", text.encode())
    turns = []
    for i in range(len(commands) or r.randint(1, 6)):
        command = commands[i] if commands else maker.command()
        result = shell.execute_sync(command)
        output = (result.stdout + result.stderr)[:200]
        turns.append((command, output))
        maker.note(command, output)
    return Session(line, turns, submits=r.random() < 0.5, quotes=quotes)
