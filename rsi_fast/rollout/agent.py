"""The agent's format: how a task becomes a prompt, a reply a command, and a command's output the next prompt.

Text is tokenized piece by piece and never again: the prompt of the next turn is always

    last prompt + token ids that the model sampled (end token included) + `observation_ids(...)`

so behaviour log-probs stay aligned with what the trainer scores. Text that comes from a task or a command cannot forge
a special token: `<end>` in a file's content is five ordinary characters.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from rsi_fast.errors import UserError

SUBMIT = "submit"  # the command with which the agent says that it is done


@dataclass(frozen=True)
class Action:
    """What a reply asks for. `command` is None when it submits and when it holds nothing that can be run."""

    text: str
    command: str | None
    submit: bool


def _action(text: str, command: str | None) -> Action:
    command = (command or "").strip()
    submit = command == SUBMIT
    return Action(text=text, command=None if submit or not command else command, submit=submit)


class PlainAgent:
    """For small models with a tokenizer of their own: every reply is one command and nothing else.

    prompt `<task>` instruction `<act>`, reply command `<end>`, observation `<out>` output `<act>`.
    """

    no_command = "no command"  # the observation after a reply that holds none

    def __init__(self, tokenizer: Tokenizer):
        """Raises UserError when the tokenizer lacks one of the format's special tokens."""
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = True  # special tokens in a text are taken as text
        ids = {name: tokenizer.token_to_id(name) for name in ("<task>", "<act>", "<end>", "<out>")}
        missing = [name for name, token_id in ids.items() if token_id is None]
        if missing:
            raise UserError(
                f"the model's tokenizer has no token {', '.join(missing)}, which the agent format `plain` needs; "
                'for a chat model set rollout.agent = "fenced"'
            )
        self._task, self._act, self._end, self._out = ids.values()
        self.stop_token_ids = [self._end]

    def prompt_ids(self, instruction: str) -> list[int]:
        return [self._task, *self._encode(instruction), self._act]

    def observation_ids(self, output: str, exit_code: int | None, max_tokens: int) -> list[int]:
        """The output, cut to `max_tokens` at its tail, between the two glue tokens. The exit code is not shown."""
        return [self._out, *self._encode(output)[:max_tokens], self._act]

    def parse(self, token_ids: list[int]) -> Action:
        """token_ids: one reply as sampled, with or without its end token."""
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return _action(text, text)

    def reply_ids(self, command: str) -> list[int]:
        """The tokens that a model would sample to run `command`, for demonstrations."""
        return [*self._encode(command), self._end]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


class FencedAgent:
    """For chat models: free text, and the first fenced ```bash block of a reply is the command.

    The glue around messages is read off the chat template once, by rendering it with markers in place of the texts.
    """

    no_command = (
        "Your reply held no ```bash block, so nothing was run. Give exactly one; with `submit` in it to finish."
    )
    _RULES = (
        "You work in a Linux shell until the task below is done. In each reply give exactly one fenced block\n"
        "```bash\nCOMMAND\n```\nwith the next command. It is run, and you are shown its output. "
        "When the task is done, give a block with the single word `submit`.\n\nTask:\n"
    )
    _CUT = "\n[output cut here]"
    _BLOCK = re.compile(r"```(?:bash|sh)[ \t]*\n(.*?)```", re.DOTALL)

    def __init__(self, model_path: Path):
        """Reads tokenizer and chat template of a Hugging Face folder.

        Raises UserError when there is no chat template, or it does not keep messages whole and in order.
        """
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        if not self._tokenizer.chat_template:
            raise UserError(
                f"the tokenizer in {model_path} has no chat template, which the agent format `fenced` needs; "
                "add chat_template.jinja there, or use a chat model"
            )
        task, reply, output = "TASKqzwx", "REPLYqzwx", "OUTPUTqzwx"
        messages = [{"role": "user", "content": task}]
        prompt = self._render(messages)
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": output}]
        turns = self._render(messages)
        if prompt.count(task) != 1 or turns.count(reply) != 1 or turns.count(output) != 1 or reply in prompt:
            raise UserError(f"the chat template in {model_path} does not show every message once; use another template")
        before_task, after_task = prompt.split(task)
        before_output, after_output = turns.split(reply)[1].split(output)

        glue = self._encode(before_output, special=True)
        if not glue or glue[0] not in self._tokenizer.all_special_ids:
            raise UserError(
                f"the chat template in {model_path} ends a reply with {before_output[:20]!r}, expected a special token"
            )
        self._end = glue[0]  # sampled by the model, so not part of the glue
        self._before_task, self._after_task = self._encode(before_task, special=True), self._encode(after_task, True)
        self._before_output, self._after_output = glue[1:], self._encode(after_output, special=True)
        self._opens_thinking = after_task.rstrip().endswith("<think>")
        self.stop_token_ids = sorted({self._end, self._tokenizer.eos_token_id} - {None})

    def prompt_ids(self, instruction: str) -> list[int]:
        return [*self._before_task, *self._encode(self._RULES + instruction.strip()), *self._after_task]

    def observation_ids(self, output: str, exit_code: int | None, max_tokens: int) -> list[int]:
        """The exit code (when there is one) and the output, cut to `max_tokens` at its tail, inside the glue."""
        text = output if exit_code is None else f"exit code {exit_code}\n{output}"
        ids = self._encode(text)
        if len(ids) > max_tokens:
            ids = [*ids[:max_tokens], *self._encode(self._CUT)]
        return [*self._before_output, *ids, *self._after_output]

    def parse(self, token_ids: list[int]) -> Action:
        """token_ids: one reply as sampled, with or without its end token."""
        if token_ids and token_ids[-1] in self.stop_token_ids:
            token_ids = token_ids[:-1]
        text = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        block = self._BLOCK.search(text.rpartition("</think>")[2])  # blocks in a thought are not run
        return _action(text, block and block.group(1))

    def reply_ids(self, command: str) -> list[int]:
        """The tokens that a model would sample to run `command`, for demonstrations."""
        thought = "\n</think>\n\n" if self._opens_thinking else ""
        return [*self._encode(thought, special=True), *self._encode(f"```bash\n{command}\n```"), self._end]

    def _render(self, messages: list[dict[str, str]]) -> str:
        return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def _encode(self, text: str, special: bool = False) -> list[int]:
        """special: special tokens written in the text are meant as such."""
        return self._tokenizer(text, add_special_tokens=False, split_special_tokens=not special)["input_ids"]


Agent = PlainAgent | FencedAgent


def make_agent(name: str, model_path: Path) -> Agent:
    """The agent format `plain` or `fenced`, with the tokenizer of the model folder."""
    if name == "fenced":
        return FencedAgent(Path(model_path))
    path = Path(model_path) / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"{path} is missing; the agent format `plain` reads its tokenizer from there")
    return PlainAgent(Tokenizer.from_file(str(path)))
