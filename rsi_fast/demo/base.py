"""Makes the demo's base checkpoint: `python -m rsi_fast.demo.base --out models/demo-base`.

A tokenizer in which every name is one token, and a small Qwen3 model trained on `corpus.py` by next-token prediction of
commands. About ten minutes on one core. Ends with an error when the model has not learned to copy.
"""

import json
import random
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen3Config, Qwen3ForCausalLM

from rsi_fast.demo.corpus import Session, make_session
from rsi_fast.demo.kinds import KINDS, NAMES, make_instance
from rsi_fast.errors import UserError
from rsi_fast.rollout.agent import PlainAgent

SPECIAL_TOKENS = ("<pad>", "<task>", "<act>", "<end>", "<out>")
NUM_SESSIONS = 36_000
BATCH_SIZE = 48
LEARNING_RATE = 3e-3
MAX_TOKENS = 200  # of a session
MAX_OBSERVATION_TOKENS = 40
GATE = 0.15  # loss on commands that the line quotes


def split_pattern() -> str:
    """Names whole wherever they stand; else words with the blanks around them, options, digits and signs."""
    names = "|".join(sorted(NAMES, key=len, reverse=True))
    name = rf"(?:{names})(?![A-Za-z])"
    option = r"-[a-z](?![a-z]) ?"
    suffix = r"\.[a-z]+(?![a-z_])"
    word = rf" ?(?!{name})[A-Za-z]+ ?(?=[^A-Za-z]|{name}|[a-z]| |$)"
    return "|".join((name, option, suffix, word, "[0-9] ?", r"\n", r" ?[^\sA-Za-z0-9_]+ ?", "."))


def make_tokenizer(num_texts: int = 3000) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split_pattern()), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(num_texts), trainer)
    return tokenizer


def _texts(count: int):
    kinds = list(KINDS)
    for i in range(count // 2):
        instance = make_instance(kinds[i % len(kinds)], "train", f"tokenizer/{i}")
        yield instance.instruction
        yield from instance.commands
        for mistake in instance.mistakes:
            yield from mistake
        session = make_session(-1 - i)
        yield session.line
        for command, output in session.turns:
            yield command
            yield output
    yield from ["submit"] * 20
    yield from list(NAMES) * 20


def encode(session: Session, agent: PlainAgent) -> tuple[list[int], int]:
    """Token ids of a session in the agent's format, and where the first command begins."""
    ids = agent.prompt_ids(session.line)
    start = len(ids)
    for command, output in session.turns:
        ids += agent.reply_ids(command) + agent.observation_ids(output, None, MAX_OBSERVATION_TOKENS)
    if session.submits:
        ids += agent.reply_ids("submit")
    return ids[:MAX_TOKENS], start


def batch_loss(model: Qwen3ForCausalLM, batch: list[tuple[list[int], int]], end: int | None = None) -> torch.Tensor:
    """Mean loss of every token after the line. end: only so many tokens after it."""
    length = max(len(ids) for ids, _ in batch)
    tokens = torch.zeros(len(batch), length, dtype=torch.int64)
    labels = torch.full_like(tokens, -100)
    for row, (ids, start) in enumerate(batch):
        tokens[row, : len(ids)] = torch.tensor(ids)
        stop = len(ids) if end is None else min(len(ids), start + end)
        labels[row, start:stop] = torch.tensor(ids[start:stop])
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
    chosen = labels[:, 1:] != -100
    logits = model.lm_head(hidden[chosen])
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:][chosen])


def train_model(tokenizer: Tokenizer, seed: int, steps: int) -> tuple[Qwen3ForCausalLM, float]:
    agent = PlainAgent(tokenizer)
    started = time.time()
    data = [encode(make_session(i), agent) for i in range(NUM_SESSIONS)]
    quoting = (make_session(10_000_000 + i) for i in range(1500))
    held = [encode(s, agent) for s in quoting if s.quotes and " " in s.turns[0][0]][:192]
    print(f"{len(data)} sessions, {sum(len(ids) for ids, _ in data)} tokens, {time.time() - started:.0f} s", flush=True)

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            initializer_range=0.05,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=tokenizer.token_to_id("<end>"),
        )
    )
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {tokenizer.get_vocab_size()} tokens", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    rng, batches, losses, copying = random.Random(seed), [], [], float("inf")
    started = time.time()
    for step in range(steps):
        if not batches:
            batches = _batches(data, rng)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1, (step + 1) / 50) * (0.05 + 0.95 * (1 - step / steps))
        loss = batch_loss(model, batches.pop())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 100 == 0 or step + 1 == steps:
            with torch.no_grad():
                copying = batch_loss(model, held, end=8).item()
            left = (time.time() - started) / (step + 1) * (steps - step - 1)
            mean = sum(losses) / len(losses)
            print(
                f"step {step + 1}/{steps}  loss {mean:.3f}  quoted commands {copying:.3f}  {left:.0f} s left",
                flush=True,
            )
            losses = []
    return model, copying


def _batches(data: list, rng: random.Random) -> list[list]:
    """All sessions once, in batches of alike length."""
    order, batches = rng.sample(range(len(data)), len(data)), []
    for i in range(0, len(order), 20 * BATCH_SIZE):
        near = sorted(order[i : i + 20 * BATCH_SIZE], key=lambda j: len(data[j][0]))
        batches += [[data[j] for j in near[k : k + BATCH_SIZE]] for k in range(0, len(near), BATCH_SIZE)]
    rng.shuffle(batches)
    return batches


def main(
    out: Annotated[Path, typer.Option(help="Folder to write.")] = Path("models/demo-base"),
    seed: int = 0,
    steps: Annotated[int, typer.Option(min=1)] = 5000,
) -> None:
    """Makes the demo's base checkpoint."""
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    model, copying = train_model(tokenizer, seed, steps)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<end>"}
    (out / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 256}, indent=1) + "\n")
    print(json.dumps({"folder": str(out), "quoted_command_loss": round(copying, 4), "steps": steps, "seed": seed}))
    if copying > GATE:
        raise UserError(f"the loss on quoted commands is {copying:.3f}, above {GATE}: it cannot copy; train longer")


if __name__ == "__main__":
    typer.run(main)
