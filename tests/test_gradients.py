"""Traps 8 to 10: the gradients of actor and critic do not depend on how trajectories are cut into micro-batches,
packed, ordered and dealt to ranks. All are compared with plain PyTorch in float64, one trajectory at a time."""

import os
import subprocess
import sys
from pathlib import Path

import gradient_ranks
import pytest
import torch
import trainer_runs
from gradient_ranks import FEW, LONGEST, VOCABULARY
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from rsi_fast.trainer.batching import Cut, Sample
from rsi_fast.trainer.models import load_actor, load_critic

pytestmark = pytest.mark.e2e


def llama(folder: Path) -> Path:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def qwen3_5(folder: Path) -> Path:
    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    Qwen3_5ForCausalLM(config).save_pretrained(folder)
    return folder


MODELS = {"qwen3": trainer_runs.tiny_model, "llama": llama, "qwen3_5": qwen3_5}
ENGINES = ("actor", "critic", "sft")


def plain_gradients(model: Path, samples: list[Sample]) -> dict[str, dict[str, torch.Tensor]]:
    """The losses as they are written in papers, over one trajectory after the other, in float64."""
    config = gradient_ranks.settings(model)
    trainer, temperature = config.trainer, config.rollout.temperature
    total = sum(s.num_actions for s in samples)
    actor = load_actor(model, torch.float64)
    critic = load_critic(model, torch.float64, seed=1).double()
    found = {}
    for kind in ENGINES:
        module = critic if kind == "critic" else actor
        module.zero_grad()
        for sample in samples:
            mask = sample.action_mask
            values = {name: x.double()[mask] for name, x in sample.values.items()}
            ids = sample.token_ids[None]
            if kind == "critic":
                hidden = critic.backbone(input_ids=ids, use_cache=False).last_hidden_state[0]
                value = critic.value_head(hidden)[:-1, 0][mask[1:]]  # state t-1 speaks of token t
                old = values["old_values"]
                near = old + (value - old).clamp(-trainer.value_clip, trainer.value_clip)
                errors = torch.maximum((value - values["returns"]) ** 2, (near - values["returns"]) ** 2)
                loss = 0.5 * errors.sum()
            else:
                logits = actor.language_model(input_ids=ids, use_cache=False).logits[0, :-1]
                logits = logits / (temperature if kind == "actor" else 1.0)
                logprobs = torch.log_softmax(logits, -1).gather(-1, sample.token_ids[1:, None])[:, 0][mask[1:]]
                if kind == "sft":
                    loss = -logprobs.sum()
                else:
                    loss = plain_policy_loss(logprobs, values, sample.behaviour_logprobs.double()[mask], trainer).sum()
            (loss / total).backward()
        found[kind] = {module.folder_name(n): p.grad.clone() for n, p in module.named_parameters()}
    return found


def plain_policy_loss(logprobs, values, behaviour_logprobs, trainer) -> torch.Tensor:
    advantages = values["advantages"]
    ratio = (logprobs - values["old_logprobs"]).exp()
    clipped = ratio.clamp(1 - trainer.clip_low, 1 + trainer.clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * trainer.dual_clip), loss)
    weight = (values["old_logprobs"] - behaviour_logprobs).exp().clamp(max=trainer.importance_cap)
    return loss * weight


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Name -> (folder of a tiny model, the gradients that it should have by the name of the case)."""
    samples = gradient_ranks.make_samples()
    assert len({len(s) for s in samples}) > 5
    assert max(map(len, samples)) <= LONGEST
    assert [i for i, s in enumerate(samples) if not s.num_actions] == [4], "alone it is a micro-batch without actions"
    found = {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        folder = make(tmp_path_factory.mktemp("models") / name)
        last = gradient_ranks.windows(samples, gradient_ranks.settings(folder), Cut(LONGEST, False, 100.0), 1)[-1][0]
        assert len(last) == 3, "the last optimizer step has fewer samples"
        truths = dict.fromkeys(("one", "many", "shuffled"), plain_gradients(folder, samples))
        truths |= {"few": plain_gradients(folder, samples[:FEW]), "window": plain_gradients(folder, last)}
        found[name] = folder, truths
    return found


@pytest.mark.parametrize(("num_ranks", "names"), [(1, ["qwen3"]), (2, list(MODELS)), (3, ["qwen3"]), (4, ["qwen3"])])
def test_gradients_do_not_depend_on_the_cut(models, num_ranks, names, tmp_path):
    run_ranks(tmp_path, num_ranks, [models[name][0] for name in names])
    for model in names:
        truths = models[model][1]
        reason = (tmp_path / model / "packing.txt").read_text()
        # Its linear attention has no kernels on a CPU, and its plain form carries the state on along the row.
        assert ("depend on its neighbour" in reason) if model == "qwen3_5" else reason == "packed"
        kinds = ("padded", "packed") if reason == "packed" else ("padded",)
        files = {
            f"{engine}-{kind}-{case}": truths[case][engine] for engine in ENGINES for kind in kinds for case in truths
        }
        assert {path.stem for path in (tmp_path / model).glob("*.safetensors")} == files.keys()
        for name, truth in files.items():
            found = load_file(tmp_path / model / f"{name}.safetensors")
            assert found.keys() == truth.keys()
            error = torch.stack([(found[n] - truth[n]).norm() for n in truth]).norm()
            size = torch.stack([truth[n].norm() for n in truth]).norm()
            assert error < 1e-5 * size, (model, name)


def run_ranks(out: Path, num_ranks: int, folders: list[Path]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command += [gradient_ranks.__file__, str(out), *map(str, folders)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
    env["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
