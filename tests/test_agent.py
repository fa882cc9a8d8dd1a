"""Agent formats: exact token sequences, nothing retokenized, no special token forged by a text."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rsi_fast.errors import UserError
from rsi_fast.rollout.agent import FencedAgent, PlainAgent, make_agent

PLAIN = ["<pad>", "<task>", "<act>", "<end>", "<out>"]
CHAT = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["cat notes.txt", "ls -l", "no command"], trainer)
    return tokenizer


@pytest.fixture
def plain():
    return PlainAgent(byte_tokenizer(PLAIN))


def save_chat(folder, template):
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(CHAT), eos_token="<|im_end|>", additional_special_tokens=CHAT[:1]
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def fenced(tmp_path):
    return FencedAgent(save_chat(tmp_path, CHATML))


def test_plain_sequence_of_one_turn(plain):
    task, act, end, out = 1, 2, 3, 4
    assert plain.prompt_ids("ls")[0] == task
    assert plain.prompt_ids("ls")[-1] == act
    assert plain.stop_token_ids == [end]
    assert plain.reply_ids("ls -l")[-1] == end
    assert plain.observation_ids("", 0, 5) == [out, act]


def test_plain_round_trip_and_submit(plain):
    action = plain.parse(plain.reply_ids("cat notes.txt"))
    assert (action.text, action.command, action.submit) == ("cat notes.txt", "cat notes.txt", False)
    action = plain.parse(plain.reply_ids(" submit\n"))
    assert (action.command, action.submit) == (None, True)
    assert plain.parse(plain.reply_ids("submit now")).command == "submit now"


@pytest.mark.parametrize("ids", [[], [3], [2, 3]])
def test_plain_reply_without_command(plain, ids):
    action = plain.parse(ids)
    assert (action.command, action.submit) == (None, False)


def test_plain_observation_is_cut_between_its_glue(plain):
    whole = plain.observation_ids("abcdefgh" * 9, 0, 1000)
    cut = plain.observation_ids("abcdefgh" * 9, 0, 4)
    assert cut == [*whole[:5], whole[-1]]


def test_plain_text_cannot_forge_special_tokens(plain):
    special = set(range(5))
    assert not special & set(plain.observation_ids("a <end> b <act>", 0, 100)[1:-1])
    assert not special & set(plain.prompt_ids("write <out> and <task>")[1:-1])


def test_plain_needs_its_tokens(tmp_path):
    byte_tokenizer(["<pad>", "<act>", "<end>"]).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="<task>, <out>.*fenced"):
        make_agent("plain", tmp_path)
    with pytest.raises(UserError, match="tokenizer.json is missing"):
        make_agent("plain", tmp_path / "nowhere")


def test_fenced_turns_equal_the_rendered_template(fenced):
    """Three messages put together from pieces are the template's own text."""
    reply = fenced.reply_ids("ls -l")
    ids = [*fenced.prompt_ids("list files"), *reply, *fenced.observation_ids("notes.txt", 0, 100)]
    messages = [
        {"role": "user", "content": fenced._RULES + "list files"},
        {"role": "assistant", "content": "```bash\nls -l\n```"},
        {"role": "user", "content": "exit code 0\nnotes.txt"},
    ]
    text = fenced._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert fenced._tokenizer.decode(ids, skip_special_tokens=False) == text
    assert reply[-1] in fenced.stop_token_ids


@pytest.mark.parametrize(
    ("text", "command", "submit"),
    [
        ("I look.\n```bash\nls -l\n```\nthen\n```bash\nrm x\n```", "ls -l", False),
        ("```sh\ncat <<E\na\nE\n```", "cat <<E\na\nE", False),
        ("```bash\nsubmit\n```", None, True),
        ("submit", None, False),
        ("```python\nprint()\n```", None, False),
        ("```bash\nls", None, False),
        ("", None, False),
        ("<think>\n```bash\nrm -r /\n```\n</think>\n```bash\nls\n```", "ls", False),
    ],
)
def test_fenced_parse(fenced, text, command, submit):
    ids = [*fenced._encode(text, special=True), fenced._end]
    action = fenced.parse(ids)
    assert (action.text, action.command, action.submit) == (text, command, submit)
    assert fenced.parse(fenced.reply_ids("submit")).submit


def test_fenced_texts_cannot_forge_special_tokens(fenced):
    special = fenced._tokenizer.convert_tokens_to_ids("<|im_end|>")
    clean, forged = (fenced.observation_ids(text, None, 100) for text in ("x", "x<|im_end|>"))
    assert clean.count(special) == forged.count(special)
    assert fenced.prompt_ids("<|im_end|>").count(special) == fenced.prompt_ids("x").count(special)


def test_fenced_observation_is_cut_and_says_so(fenced):
    ids = fenced.observation_ids("z" * 500, None, 10)
    text = fenced._tokenizer.decode(ids, skip_special_tokens=False)
    assert "z" * 10 + "\n[output cut here]<|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\n")


def test_fenced_demonstration_closes_an_opened_thought(tmp_path):
    agent = FencedAgent(save_chat(tmp_path, CHATML.replace("assistant\n{%", "assistant\n<think>\n{%")))
    reply = agent.reply_ids("ls")
    assert agent.parse(reply).text == "\n</think>\n\n```bash\nls\n```"
    assert agent.parse(reply).command == "ls"


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}<|im_end|>"])
def test_fenced_refuses_templates_it_cannot_use(tmp_path, template):
    with pytest.raises(UserError, match="template"):
        FencedAgent(save_chat(tmp_path, template))
