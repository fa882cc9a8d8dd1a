"""The kinds of demo tasks: instruction, files, the right commands, typical mistakes, and what must hold afterwards.

Kinds whose function begins with `look_` cannot be solved without reading an output: the name or value that the last
commands need stands in no instruction.
"""

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

NAMES = tuple(
    (
        "amber blue brave calm clear cold dark deep dry early fair fast fine firm flat fresh glad gold grand "
        "gray green happy heavy high iron kind large late light lone long loud lucky mild neat noble odd old "
        "pale arch barn beach bell bird boat bone book bridge brook cabin cake camp cart cave cloud coast "
        "coin corn crane creek crow dawn deer desk door dove drum dune eagle farm field fish flag flute fox "
        "frog gate glass hill horse house island jar kite lake lamp leaf lion map mill moon mouse oak owl "
        "park pearl pine plum pond queen rain ring road rope rose sand seed ship "
    ).split()
)


def split_of(kind: str, place: int, name: str) -> str:
    """Every (kind, place in the instruction, name) belongs to one split: held-out tasks use names where training never
    shows them, though each name is known from elsewhere."""
    part = zlib.crc32(f"{kind}/{place}/{name}".encode()) % 8
    return "heldout" if part < 2 else "dev" if part == 2 else "train"


class Names:
    """Draws names without repetition for one task, each fit for its place and the split."""

    def __init__(self, rng: random.Random, kind: str, split: str):
        self._left = rng.sample(NAMES, len(NAMES))
        self._kind, self._split, self._place = kind, split, 0

    def word(self) -> str:
        self._place += 1
        for i, name in enumerate(self._left):
            if split_of(self._kind, self._place, name) == self._split:
                return self._left.pop(i)
        raise AssertionError(f"no name is left for place {self._place} of {self._kind}")

    def words(self, count: int) -> list[str]:
        return [self.word() for _ in range(count)]

    def file(self, suffix: str = ".txt") -> str:
        return self.word() + suffix


@dataclass
class Instance:
    """One task: what is there before, and what must be there after."""

    instruction: str
    commands: list[str]
    mistakes: list[list[str]]  # wrong ways, as careless people write them
    files: dict[str, str] = field(default_factory=dict)  # path to content
    directories: list[str] = field(default_factory=list)  # empty ones
    want: dict[str, str] = field(default_factory=dict)  # path to content afterwards
    gone: list[str] = field(default_factory=list)
    made: list[str] = field(default_factory=list)  # directories that must be there
    executable: list[str] = field(default_factory=list)
    kind: str = ""


def lines(*texts: str) -> str:
    return "".join(text + "\n" for text in texts)


# ---- the instruction says everything


def replace(n: Names, rng: random.Random) -> Instance:
    f, old, new = n.file(), n.word(), n.word()
    texts = [old, *n.words(2)]
    rng.shuffle(texts)
    return Instance(
        f"replace {old} by {new} in {f}",
        [f"sed -i s/{old}/{new}/ {f}"],
        [[f"sed s/{old}/{new}/ {f}"]],
        files={f: lines(*texts)},
        want={f: lines(*(new if text == old else text for text in texts))},
    )


def copy_append(n: Names, rng: random.Random) -> Instance:
    f, g, w, text = n.file(), n.file(), n.word(), n.word()
    return Instance(
        f"copy {f} to {g} and append {w}",
        [f"cp {f} {g}", f"echo {w} >> {g}"],
        [[f"mv {f} {g}", f"echo {w} >> {g}"], [f"cp {f} {g}", f"echo {w} > {g}"]],
        files={f: lines(text)},
        want={f: lines(text), g: lines(text, w)},
    )


def write_move(n: Names, rng: random.Random) -> Instance:
    f, w, d = n.file(), n.word(), n.word()
    return Instance(
        f"write {w} to {f} and move it into {d}",
        [f"echo {w} > {f}", f"mv {f} {d}"],
        [[f"echo {w} > {f}", f"cp {f} {d}"], [f"touch {f}", f"mv {f} {d}"]],
        directories=[d],
        want={f"{d}/{f}": lines(w)},
        gone=[f],
    )


def make_move(n: Names, rng: random.Random) -> Instance:
    f, d, text = n.file(), n.word(), n.word()
    return Instance(
        f"make the directory {d} and move {f} into it",
        [f"mkdir {d}", f"mv {f} {d}"],
        [[f"mkdir {d}", f"cp {f} {d}"], [f"mkdir {d}"]],
        files={f: lines(text)},
        want={f"{d}/{f}": lines(text)},
        gone=[f],
        made=[d],
    )


def sort_delete(n: Names, rng: random.Random) -> Instance:
    f, g, texts = n.file(), n.file(), n.words(3)
    if texts == sorted(texts):
        texts.reverse()
    return Instance(
        f"sort {f} into {g} and delete {f}",
        [f"sort {f} > {g}", f"rm {f}"],
        [[f"sort {f} > {g}", f"cat {g}"], [f"cat {f} > {g}", f"rm {f}"]],
        files={f: lines(*texts)},
        want={g: lines(*sorted(texts))},
        gone=[f],
    )


def filter_delete(n: Names, rng: random.Random) -> Instance:
    f, w, g = n.file(), n.word(), n.file()
    hits = [w] * rng.randint(1, 2)
    texts = hits + n.words(2)
    rng.shuffle(texts)
    return Instance(
        f"keep the lines with {w} of {f} in {g} and delete {f}",
        [f"grep {w} {f} > {g}", f"rm {f}"],
        [[f"grep {w} {f} > {g}", f"cat {g}"], [f"grep -c {w} {f} > {g}", f"rm {f}"]],
        files={f: lines(*texts)},
        want={g: lines(*hits)},
        gone=[f],
    )


def rename_append(n: Names, rng: random.Random) -> Instance:
    f, g, w, text = n.file(), n.file(), n.word(), n.word()
    return Instance(
        f"rename {f} to {g} and append {w}",
        [f"mv {f} {g}", f"echo {w} >> {g}"],
        [[f"cp {f} {g}", f"echo {w} >> {g}"], [f"mv {f} {g}", f"echo {w} > {g}"]],
        files={f: lines(text)},
        want={g: lines(text, w)},
        gone=[f],
    )


def script(n: Names, rng: random.Random) -> Instance:
    f, w = n.file(".sh"), n.word()
    return Instance(
        f"make the script {f} that prints {w}",
        [f"echo echo {w} > {f}", f"chmod +x {f}"],
        [[f"echo {w} > {f}", f"chmod +x {f}"], [f"echo echo {w} > {f}", f"cat {f}"]],
        want={f: lines(f"echo {w}")},
        executable=[f],
    )


def two_files(n: Names, rng: random.Random) -> Instance:
    f, g, w, x = n.file(), n.file(), n.word(), n.word()
    return Instance(
        f"write {w} to {f} and {x} to {g}",
        [f"echo {w} > {f}", f"echo {x} > {g}"],
        [[f"echo {w} > {f}", f"echo {w} > {g}"], [f"echo {w} > {f}", f"touch {g}"]],
        want={f: lines(w), g: lines(x)},
    )


def append_two(n: Names, rng: random.Random) -> Instance:
    f, w, x, text = n.file(), n.word(), n.word(), n.word()
    return Instance(
        f"append {w} and {x} to {f}",
        [f"echo {w} >> {f}", f"echo {x} >> {f}"],
        [[f"echo {w} > {f}", f"echo {x} >> {f}"], [f"echo {w} >> {f}", f"echo {x} > {f}"]],
        files={f: lines(text)},
        want={f: lines(text, w, x)},
    )


def copy_append_delete(n: Names, rng: random.Random) -> Instance:
    f, g, w, text = n.file(), n.file(), n.word(), n.word()
    return Instance(
        f"copy {f} to {g} and append {w} and delete {f}",
        [f"cp {f} {g}", f"echo {w} >> {g}", f"rm {f}"],
        [[f"cp {f} {g}", f"echo {w} >> {g}"], [f"cp {f} {g}", f"echo {w} > {g}", f"rm {f}"]],
        files={f: lines(text)},
        want={g: lines(text, w)},
        gone=[f],
    )


def swap(n: Names, rng: random.Random) -> Instance:
    f, g, a, b = n.file(), n.file(), n.word(), n.word()
    return Instance(
        f"swap {f} and {g}",
        [f"mv {f} tmp", f"mv {g} {f}", f"mv tmp {g}"],
        [[f"mv {f} tmp", f"mv {g} {f}"], [f"mv {f} {g}", f"mv {g} {f}"]],
        files={f: lines(a), g: lines(b)},
        want={f: lines(b), g: lines(a)},
    )


# ---- an output must be read


def _two_with(n: Names, word: str) -> tuple[str, dict[str, str]]:
    """The file that holds the word, and it beside another one."""
    f, g = n.file(), n.file()
    return f, {f: lines(word), g: lines(n.word())}


def look_has_write(n: Names, rng: random.Random) -> Instance:
    w, x = n.words(2)
    f, files = _two_with(n, w)
    find = f"grep -l {w} *.txt"
    return Instance(
        f"write {x} to the file with {w}",
        [find, f"echo {x} > {f}"],
        [[find, f"echo {x} >> {f}"], [find, f"echo {w} > {f}"]],
        files=files,
        want={f: lines(x)},
    )


def look_has_delete(n: Names, rng: random.Random) -> Instance:
    w = n.word()
    f, files = _two_with(n, w)
    find = f"grep -l {w} *.txt"
    return Instance(f"delete the file with {w}", [find, f"rm {f}"], [[find, f"cat {f}"]], files=files, gone=[f])


def look_has_move(n: Names, rng: random.Random) -> Instance:
    w, d = n.words(2)
    f, files = _two_with(n, w)
    find = f"grep -l {w} *.txt"
    return Instance(
        f"move the file with {w} into {d}",
        [find, f"mv {f} {d}"],
        [[find, f"cp {f} {d}"], [find, f"cat {f}"]],
        files=files,
        directories=[d],
        want={f"{d}/{f}": lines(w)},
        gone=[f],
    )


def look_has_rename(n: Names, rng: random.Random) -> Instance:
    w, g = n.word(), n.file()
    f, files = _two_with(n, w)
    find = f"grep -l {w} *.txt"
    return Instance(
        f"rename the file with {w} to {g}",
        [find, f"mv {f} {g}"],
        [[find, f"cp {f} {g}"], [find, f"touch {g}"]],
        files=files,
        want={g: lines(w)},
        gone=[f],
    )


def look_has_make(n: Names, rng: random.Random) -> Instance:
    w, d = n.words(2)
    f, files = _two_with(n, w)
    find = f"grep -l {w} *.txt"
    return Instance(
        f"put the file with {w} in a new directory {d}",
        [find, f"mkdir {d}", f"mv {f} {d}"],
        [[find, f"mkdir {d}", f"cp {f} {d}"], [find, f"mkdir {d}"]],
        files=files,
        want={f"{d}/{f}": lines(w)},
        gone=[f],
        made=[d],
    )


def look_follow(n: Names, rng: random.Random) -> Instance:
    f, g, w = n.file(), n.file(), n.word()
    return Instance(
        f"write {w} to the file named in {f}",
        [f"cat {f}", f"echo {w} > {g}"],
        [[f"cat {f}", f"echo {w} > {f}"], [f"cat {f}", f"touch {g}"]],
        files={f: lines(g)},
        want={g: lines(w)},
    )


def look_follow_twice(n: Names, rng: random.Random) -> Instance:
    f, g, h, w = n.file(), n.file(), n.file(), n.word()
    return Instance(
        f"follow {f} twice and write {w} there",
        [f"cat {f}", f"cat {g}", f"echo {w} > {h}"],
        [[f"cat {f}", f"cat {g}", f"echo {w} > {g}"], [f"cat {f}", f"echo {w} > {g}"]],
        files={f: lines(g), g: lines(h)},
        want={h: lines(w)},
    )


def _settings(n: Names, rng: random.Random, key: str, value: str) -> list[str]:
    texts = [f"{key}={value}", "=".join(n.words(2))]
    rng.shuffle(texts)
    return texts


def look_value(n: Names, rng: random.Random) -> Instance:
    key, value, f, g = n.word(), n.word(), n.file(".cfg"), n.file()
    return Instance(
        f"write the value of {key} in {f} to {g}",
        [f"grep {key} {f}", f"echo {value} > {g}"],
        [[f"grep {key} {f}", f"echo {key} > {g}"], [f"grep {key} {f} > {g}", f"cat {g}"]],
        files={f: lines(*_settings(n, rng, key, value))},
        want={g: lines(value)},
    )


def look_value_delete(n: Names, rng: random.Random) -> Instance:
    key, value, f, g = n.word(), n.word(), n.file(".cfg"), n.file()
    return Instance(
        f"write the value of {key} in {f} to {g} and delete {f}",
        [f"grep {key} {f}", f"echo {value} > {g}", f"rm {f}"],
        [[f"grep {key} {f}", f"echo {value} > {g}"], [f"grep {key} {f}", f"echo {key} > {g}", f"rm {f}"]],
        files={f: lines(*_settings(n, rng, key, value))},
        want={g: lines(value)},
        gone=[f],
    )


def look_set_from(n: Names, rng: random.Random) -> Instance:
    key, other, value, old, f, g = n.word(), n.word(), n.word(), n.word(), n.file(".cfg"), n.file(".cfg")
    texts = _settings(n, rng, key, old)
    after = [f"{key}={value}" if text.startswith(f"{key}=") else text for text in texts]
    return Instance(
        f"set {key} in {f} to the value of {other} in {g}",
        [f"grep {other} {g}", f"sed -i s/{key}=.*/{key}={value}/ {f}"],
        [
            [f"grep {other} {g}", f"sed s/{key}=.*/{key}={value}/ {f}"],
            [f"grep {other} {g}", f"sed -i s/{key}/{value}/ {f}"],
        ],
        files={f: lines(*texts), g: lines(f"{other}={value}")},
        want={f: lines(*after)},
    )


def look_like_file(n: Names, rng: random.Random) -> Instance:
    d, name = n.words(2)
    return Instance(
        f"make a directory named like the file in {d}",
        [f"ls {d}", f"mkdir {name}"],
        [[f"ls {d}", f"touch {name}"], [f"ls {d}", f"mkdir {d}"]],
        files={f"{d}/{name}.txt": lines(n.word())},
        made=[name],
    )


def look_where(n: Names, rng: random.Random) -> Instance:
    f, d, other, w, text = n.file(), n.word(), n.word(), n.word(), n.word()
    find = f"find -name {f}"
    return Instance(
        f"append {w} to {f} wherever it is",
        [find, f"echo {w} >> ./{d}/{f}"],
        [[find, f"echo {w} > ./{d}/{f}"], [find, f"echo {w} >> {f}"]],
        files={f"{d}/{f}": lines(text)},
        directories=[other],
        want={f"{d}/{f}": lines(text, w)},
    )


KINDS: dict[str, Callable[[Names, random.Random], Instance]] = {
    function.__name__: function
    for function in (
        *(replace, copy_append, write_move, make_move, sort_delete, filter_delete, rename_append, script, two_files),
        *(append_two, copy_append_delete, swap, look_has_write, look_has_delete, look_has_move, look_has_rename),
        *(look_has_make, look_follow, look_follow_twice, look_value, look_value_delete, look_set_from),
        *(look_like_file, look_where),
    )
}
WELL_TAUGHT = ("replace", "make_move", "two_files", "look_has_delete", "look_follow", "look_value")


def needs_output(kind: str) -> bool:
    return kind.startswith("look_")


def make_instance(kind: str, split: str, seed: str) -> Instance:
    """The task that a seed stands for: the same on every machine. A bystander file lies beside what it is about."""
    rng = random.Random(f"{split}/{kind}/{seed}")
    names = Names(rng, kind, split)
    instance = KINDS[kind](names, rng)
    instance.files[names.file()] = lines(names.word())
    instance.kind = kind
    return instance
