"""The rivals, one adapter each: what its own users call, in its installed package, on the inputs of `inputs.py`.

Packages that do not import without Ray, PEFT and the like give up the functions in question from their installed source
file. None of their code is kept here.
"""

import __future__

import ast
import importlib.metadata
import importlib.util
import shutil
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import rsi_kernels
import torch
import torch.nn.functional as F

from .inputs import GAMMA, LAM


class Unavailable(Exception):
    """The rival cannot run here; the message says why."""


@dataclass(frozen=True)
class Rival:
    """load() gives the function of a case's inputs; its results are compared with inputs.exact[answer]."""

    name: str
    package: str  # on the registry
    load: Callable[[], Callable]
    answer: str | None = None  # None: a floor, whose result is not compared
    compiles: bool = False  # in its first call

    def version(self) -> str:
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            raise Unavailable("not installed") from None


def source(package: str, path: str, names: str, **known):
    """Functions, classes and constants of an installed source file, compiled alone; known: what they use besides."""
    file = Path(importlib.util.find_spec(package).origin).parent / path
    wanted = set(names.split())
    body = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name
            # A registry's decorator is not needed, and not known here.
            keep = ("torch", "staticmethod")
            node.decorator_list = [d for d in node.decorator_list if ast.unparse(d).startswith(keep)]
        else:
            name = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else None
        if name in wanted:
            body.append(node)
            wanted.remove(name)
    if wanted:
        raise Unavailable(f"no {', '.join(sorted(wanted))} in {package}/{path}")
    namespace = {"torch": torch, "F": F, **vars(typing), **known}
    # Annotations are kept as text: they name types that are not known here.
    flags = __future__.annotations.compiler_flag
    exec(compile(ast.Module(body, []), str(file), "exec", flags=flags, dont_inherit=True), namespace)
    return SimpleNamespace(**namespace)


def module(package: str, path: str):
    """An installed source file as a module of its own, without its package; for kernels, which Triton wants whole."""
    file = Path(importlib.util.find_spec(package).origin).parent / path
    if not file.exists():
        raise Unavailable(f"no {package}/{path}")
    spec = importlib.util.spec_from_file_location(f"{package}_{file.stem}", file)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def on_gpu() -> bool:
    """True in `bench.gpu`; `bench.cpu` has a CPU build of torch."""
    return torch.cuda.is_available()


def compiled(function):
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise Unavailable("no C++ compiler found")
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)


# turn_gae


def ours_gae():
    return lambda x: rsi_kernels.turn_gae(
        x.values, x.mask, x.turn_ids, token_rewards=x.rewards, gamma=GAMMA, lam=LAM
    )  # fmt: skip


def verl_gae():
    whiten = source("verl", "utils/torch_functional.py", "masked_sum masked_mean masked_var masked_whiten")
    verl = source("verl", "trainer/ppo/core_algos.py", "compute_gae_advantage_return", verl_F=whiten)
    # Its advantages are whitened; its returns are not, and show the recursion.
    return lambda x: (None, verl.compute_gae_advantage_return(x.rewards, x.values, x.mask.long(), GAMMA, LAM)[1])


def openrlhf_gae():
    openrlhf = source("openrlhf", "trainer/ppo_utils/experience_maker.py", "get_advantages_and_returns")
    return lambda x: openrlhf.get_advantages_and_returns(None, x.values, x.rewards, x.mask, GAMMA, LAM)


def torchrl_gae():
    from torchrl.objectives.value.functional import vec_generalized_advantage_estimate

    def run(x):
        values = x.values[..., None]
        following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
        done = torch.zeros_like(values, dtype=torch.bool)
        done[:, -1] = True
        out = vec_generalized_advantage_estimate(GAMMA, LAM, values, following, x.rewards[..., None], done, done)
        return tuple(y[..., 0] for y in out)

    return run


def plain_gae():
    """The recursion as one writes it down: token after token, all rows at once."""

    def run(x):
        following, trace = torch.zeros_like(x.values[:, 0]), torch.zeros_like(x.values[:, 0])
        advantages = torch.zeros_like(x.values)
        for t in range(x.values.shape[1] - 1, -1, -1):
            delta = x.rewards[:, t] + GAMMA * following - x.values[:, t]
            trace = torch.where(x.mask[:, t], delta + GAMMA * LAM * trace, trace)
            following = torch.where(x.mask[:, t], x.values[:, t], following)
            advantages[:, t] = trace
        return advantages, advantages + x.values

    return run


# token_logprobs


def ours_logprobs():
    return lambda x: rsi_kernels.token_logprobs(x.logits, x.targets)


def ours_logprobs_masked():
    return lambda x: rsi_kernels.token_logprobs(x.logits, x.targets, x.mask)


def ours_logprobs_entropy():
    return lambda x: rsi_kernels.token_logprobs(x.logits, x.targets, return_entropy=True)


def verl_logprobs():
    verl = source("verl", "utils/torch_functional.py", "logprobs_from_logits_v2")
    return lambda x: verl.logprobs_from_logits_v2(x.logits, x.targets) * x.mask


def verl_logprobs_entropy():
    verl = source("verl", "utils/torch_functional.py", "logprobs_from_logits_v2 entropy_from_logits")
    return lambda x: (verl.logprobs_from_logits_v2(x.logits, x.targets), verl.entropy_from_logits(x.logits))


def _trl():
    # On a CPU it never takes its Triton path.
    names = "selective_log_softmax entropy_from_logits selective_log_softmax_and_entropy"
    return source("trl", "trainer/utils.py", names, is_triton_available=lambda: False)


def _trl_kernel():
    return module("trl", "kernels/logprob_entropy.py").selective_log_softmax_and_entropy


def trl_logprobs():
    if on_gpu():
        kernel = _trl_kernel()
        return lambda x: kernel(x.logits, x.targets, 1.0, x.row_mask)[0]
    trl = _trl()
    return lambda x: trl.selective_log_softmax(x.logits, x.targets, row_mask=x.row_mask)


def trl_logprobs_entropy():
    if on_gpu():
        kernel = _trl_kernel()
        return lambda x: kernel(x.logits, x.targets)
    trl = _trl()
    return lambda x: trl.selective_log_softmax_and_entropy(x.logits, x.targets)


def openrlhf_logprobs():
    openrlhf = source("openrlhf", "models/utils.py", "_logsumexp_by_chunk log_probs_from_logits")
    return lambda x: openrlhf.log_probs_from_logits(x.logits, x.targets) * x.mask


def plain_logprobs():
    def run(x):
        logprobs = torch.log_softmax(x.logits.float(), -1).gather(-1, x.targets[..., None])[..., 0]
        return torch.where(x.mask, logprobs, 0.0)

    return run


def plain_cross_entropy():
    def run(x):
        targets = torch.where(x.mask, x.targets, -100)
        return -F.cross_entropy(x.logits.flatten(0, 1), targets.view(-1), reduction="none").view(targets.shape)

    return run


def plain_logprobs_entropy():
    def run(x):
        log_p = torch.log_softmax(x.logits.float(), -1)
        return log_p.gather(-1, x.targets[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)

    return run


def compiled_logprobs():
    def logprobs(logits, targets):
        logits = logits.float()
        return logits.gather(-1, targets[..., None])[..., 0] - logits.logsumexp(-1)

    logprobs = compiled(logprobs)
    return lambda x: torch.where(x.mask, logprobs(x.logits, x.targets), 0.0)


def compiled_logprobs_entropy():
    def scores(logits, targets):
        log_p = torch.log_softmax(logits.float(), -1)
        return log_p.gather(-1, targets[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)

    scores = compiled(scores)
    return lambda x: scores(x.logits, x.targets)


# linear_token_logprobs and linear_ppo_loss


def ours_linear():
    return lambda x: rsi_kernels.linear_token_logprobs(x.hidden, x.weight, x.targets, x.mask)


def ours_linear_ppo():
    def run(x):
        return rsi_kernels.linear_ppo_loss(x.hidden, x.weight, x.targets, x.old_logprobs, x.advantages, x.mask).loss

    return run


def matmul_floor():
    return lambda x: x.hidden[x.mask] @ x.weight.T


def verl_linear():
    verl = _verl_fused_linear()
    return lambda x: verl.FusedLinearForPPOFunction.apply(x.hidden, x.weight, x.targets)[0] * x.mask


def _verl_fused_linear():
    names = "_fused_linear_for_ppo_fwd _fused_linear_for_ppo_bwd FusedLinearForPPOFunction"
    path = "utils/experimental/torch_functional.py"
    return source("verl", path, names, _FLASH_ATTN_CROSS_ENTROPY_AVAILABLE=False)


def liger_linear():
    from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

    return lambda x: LigerFusedLinearPPOBase.chunk_forward(x.hidden, x.weight, x.targets) * x.mask


def trl_linear():
    names = "TOKEN_CHUNK_SIZE OPTIONAL_OUTPUTS _BLOCK_SIZE _torch_transform _forward_tile ChunkedLogProbFunction"
    path = "kernels/chunked_logprob.py"
    trl = module("trl", path) if on_gpu() else source("trl", path, names, _use_triton=lambda device: False)

    def run(x):
        hidden, targets = x.hidden.flatten(0, 1), x.targets.view(-1)
        logprobs = trl.ChunkedLogProbFunction.apply(hidden, x.weight, None, targets, 1.0, 32768, None, 1.0, ())[0]
        return logprobs.view(x.mask.shape) * x.mask

    return run


def cce_linear():
    from cut_cross_entropy import linear_cross_entropy

    if not on_gpu():
        compiled(lambda: None)  # its CPU form is torch.compile

    def run(x):
        targets, impl = torch.where(x.mask, x.targets, -100), "cce" if x.hidden.is_cuda else "torch_compile"
        return -linear_cross_entropy(x.hidden, x.weight, targets, reduction="none", impl=impl)

    return run


def plain_linear():
    def run(x):
        """Gathers the action tokens first, as hardly anyone does."""
        logits = (x.hidden[x.mask] @ x.weight.T).float()
        logprobs = torch.log_softmax(logits, -1).gather(-1, x.targets[x.mask][:, None])[:, 0]
        return torch.zeros_like(x.mask, dtype=torch.float32).masked_scatter(x.mask, logprobs)

    return run


def with_policy_loss(load):
    """A rival that stops at log-probs, followed by the loss in plain PyTorch, as its trainer has it."""

    def loaded():
        score = load()

        def run(x):
            ratio = (score(x) - x.old_logprobs).exp()
            loss = torch.maximum(-x.advantages * ratio, -x.advantages * ratio.clamp(0.8, 1.2))
            return torch.where(x.mask, loss, 0.0).sum() / x.mask.sum()

        return run

    return loaded


def liger_ppo():
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    compiled(lambda: None)
    loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="bnpo")
    return lambda x: loss(
        x.hidden, x.weight, x.targets, x.mask.float(), x.row_advantages, old_per_token_logps=x.old_logprobs
    )[0]  # fmt: skip


# policy_loss and value_loss


def ours_policy():
    return lambda x: rsi_kernels.policy_loss(x.logprobs, x.old_logprobs, x.advantages, x.mask).loss


def ours_value():
    return lambda x: rsi_kernels.value_loss(x.values, x.old_values, x.returns, x.mask).loss


def plain_policy():
    return with_policy_loss(lambda: lambda x: x.logprobs)()


def compiled_policy():
    return compiled(plain_policy())


def plain_value():
    def run(x):
        clipped = torch.clamp(x.values, x.old_values - 0.2, x.old_values + 0.2)
        loss = 0.5 * torch.maximum((x.values - x.returns) ** 2, (clipped - x.returns) ** 2)
        return torch.where(x.mask, loss, 0.0).sum() / x.mask.sum()

    return run


def compiled_value():
    return compiled(plain_value())


# family_rewards


def ours_families():
    return lambda x: (rsi_kernels.family_rewards(x.passed, x.family, x.success, family_weights=x.weights).reward,)


def loop_families():
    def reward(report, success):
        if success:
            return 1.0
        passed, total = {}, {}
        for family, is_passed in report:
            total[family] = total.get(family, 0) + 1
            passed[family] = passed.get(family, 0) + is_passed
        return 0.4 * sum(passed[f] / total[f] for f in total) / len(total) if total else 0.0

    def run(x):
        rewards = [reward(r, s) for r, s in zip(x.reports, x.success.tolist(), strict=True)]
        return (torch.tensor(rewards, device=x.success.device),)

    return run


def _scatter(passed, family, success, num_families: int = 8):
    slot = torch.where(family < 0, num_families, family).long()
    zeros = torch.zeros(len(family), num_families + 1, device=family.device)
    total = zeros.scatter_add(1, slot, torch.ones_like(slot, dtype=torch.float32))[:, :num_families]
    num_passed = zeros.scatter_add(1, slot, passed.float())[:, :num_families]
    progress = (num_passed / total.clamp(min=1)).sum(1) / (total > 0).sum(1).clamp(min=1)
    return torch.where(success, 1.0, 0.4 * progress)


def scatter_families():
    return lambda x: (_scatter(x.passed, x.family, x.success),)


def compiled_families():
    scatter = compiled(_scatter)
    return lambda x: (scatter(x.passed, x.family, x.success),)


OURS = {
    "turn_gae": Rival("rsi-fast", "rsi-fast", ours_gae, "turns"),
    "token_logprobs": Rival("rsi-fast", "rsi-fast", ours_logprobs, "logprobs"),
    "token_logprobs_masked": Rival("rsi-fast", "rsi-fast", ours_logprobs_masked, "logprobs"),
    "token_logprobs_entropy": Rival("rsi-fast", "rsi-fast", ours_logprobs_entropy, "logprobs and entropy"),
    "linear_token_logprobs": Rival("rsi-fast", "rsi-fast", ours_linear, "logprobs"),
    "linear_ppo_loss": Rival("rsi-fast", "rsi-fast", ours_linear_ppo, "loss"),
    "family_rewards": Rival("rsi-fast", "rsi-fast", ours_families, "reward"),
    "policy_loss": Rival("rsi-fast", "rsi-fast", ours_policy, "loss"),
    "value_loss": Rival("rsi-fast", "rsi-fast", ours_value, "loss"),
}

_LOGPROBS = [
    Rival("verl", "verl", verl_logprobs, "logprobs"),
    Rival("TRL", "trl", trl_logprobs, "logprobs"),
    Rival("OpenRLHF", "openrlhf", openrlhf_logprobs, "logprobs"),
    Rival("PyTorch log_softmax", "torch", plain_logprobs, "logprobs"),
    Rival("PyTorch cross_entropy", "torch", plain_cross_entropy, "logprobs"),
    Rival("torch.compile", "torch", compiled_logprobs, "logprobs", compiles=True),
]

RIVALS = {
    "turn_gae": [
        Rival("verl", "verl", verl_gae, "tokens"),
        Rival("OpenRLHF", "openrlhf", openrlhf_gae, "masked steps"),
        Rival("TorchRL vectorised", "torchrl", torchrl_gae, "steps"),
        Rival("PyTorch loop", "torch", plain_gae, "tokens"),
    ],
    "token_logprobs": _LOGPROBS,
    "token_logprobs_masked": _LOGPROBS,
    "token_logprobs_entropy": [
        Rival("verl", "verl", verl_logprobs_entropy, "logprobs and entropy"),
        Rival("TRL", "trl", trl_logprobs_entropy, "logprobs and entropy"),
        Rival("PyTorch log_softmax", "torch", plain_logprobs_entropy, "logprobs and entropy"),
        Rival("torch.compile", "torch", compiled_logprobs_entropy, "logprobs and entropy", compiles=True),
    ],
    "linear_token_logprobs": [
        Rival("matrix product alone", "torch", matmul_floor),
        Rival("Liger", "liger-kernel", liger_linear, "logprobs"),
        Rival("verl", "verl", verl_linear, "logprobs"),
        Rival("TRL", "trl", trl_linear, "logprobs"),
        Rival("CCE", "cut-cross-entropy", cce_linear, "logprobs", compiles=True),
        Rival("PyTorch, gathered", "torch", plain_linear, "logprobs"),
    ],
    "linear_ppo_loss": [
        Rival("Liger", "liger-kernel", liger_ppo, "loss", compiles=True),
        Rival("verl", "verl", with_policy_loss(verl_linear), "loss"),
        Rival("CCE", "cut-cross-entropy", with_policy_loss(cce_linear), "loss", compiles=True),
        Rival("PyTorch, gathered", "torch", with_policy_loss(plain_linear), "loss"),
    ],
    "family_rewards": [
        Rival("Python loop", "torch", loop_families, "reward"),
        Rival("PyTorch scatter", "torch", scatter_families, "reward"),
        Rival("torch.compile", "torch", compiled_families, "reward", compiles=True),
    ],
    "policy_loss": [
        Rival("PyTorch", "torch", plain_policy, "loss"),
        Rival("torch.compile", "torch", compiled_policy, "loss", compiles=True),
    ],
    "value_loss": [
        Rival("PyTorch", "torch", plain_value, "loss"),
        Rival("torch.compile", "torch", compiled_value, "loss", compiles=True),
    ],
}
