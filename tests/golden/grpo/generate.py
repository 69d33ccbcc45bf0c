"""What TRL's GRPOTrainer makes of completions and their rewards, by a tiny random Qwen2 with a LoRA; run by hand.

    pip install trl==1.16.0 transformers==5.23.0 peft==0.21.2 datasets torch safetensors
    python generate.py

The loss is that of GRPOTrainer._compute_loss, called on the model of ../llama/qwen2 and its adapter without the rest of
a trainer, whose place a bare object takes. Advantages are computed by the lines of the trainer that do it, cut out of
its source. grpo.json has the tokens, the losses and the advantages; gradients.safetensors the gradients of the LoRA.
"""

import inspect
import json
import textwrap
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head, nanstd

HERE = Path(__file__).parent
MODEL = HERE / "../llama/qwen2"
MAX_COMPLETION = 9
CASES = [(loss, beta, 1.0) for loss in ["grpo", "dr_grpo", "dapo"] for beta in [0.0, 0.04]] + [("dapo", 0.04, 0.7)]


class Accelerator:
    device = torch.device("cpu")
    num_processes = 1

    def autocast(self):
        return nullcontext()

    def gather(self, x):
        return x

    def reduce(self, x, reduction):
        return x


def trainer(model, loss_type, beta):
    self = SimpleNamespace(
        accelerator=Accelerator(), model=model, beta=beta, loss_type=loss_type, aux_loss_enabled=False,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level="token", epsilon_low=0.2,
        epsilon_high=0.2, use_vllm=False, current_gradient_accumulation_steps=1, max_completion_length=MAX_COMPLETION,
        _entropy_bonus_enabled=False, _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
    )
    name = "_get_per_token_logps_and_entropies"
    # Without the timer around it.
    setattr(self, name, inspect.unwrap(getattr(GRPOTrainer, name)).__get__(self))
    return self


def padded(rows, side):
    longest = max(len(row) for row in rows)
    fill = lambda row: [0] * (longest - len(row))
    return torch.tensor([fill(row) + row if side == "left" else row + fill(row) for row in rows])


def loss_of(model, samples, loss_type, beta):
    self = trainer(model, loss_type, beta)
    prompts, completions = [s["prompt"] for s in samples], [s["completion"] for s in samples]
    ones = lambda rows: [[1] * len(row) for row in rows]
    inputs = {
        "prompt_ids": padded(prompts, "left"), "prompt_mask": padded(ones(prompts), "left"),
        "completion_ids": padded(completions, "right"), "completion_mask": padded(ones(completions), "right"),
        "advantages": torch.tensor([s["advantage"] for s in samples]),
        "num_items_in_batch": torch.tensor(float(sum(map(len, completions)))),
    }
    if beta:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        with torch.no_grad(), model.disable_adapter():
            logps, _, _ = self._get_per_token_logps_and_entropies(
                model, ids, mask, inputs["completion_ids"].shape[1]
            )
        inputs["ref_per_token_logps"] = logps
    return inspect.unwrap(GRPOTrainer._compute_loss)(self, model, inputs), self._metrics["train"]


def advantages_of(rewards, scale_rewards, num_generations):
    """The lines from the mean of each group to what is logged of deviations."""
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    begin = source.index("            mean_grouped_rewards = torch.nanmean(rewards.view")
    end = source.index('        elif self.multi_objective_aggregation == "normalize_then_sum"')
    names = {
        "torch": torch, "nanstd": nanstd, "rewards": torch.tensor(rewards), "num_generations": num_generations,
        "self": SimpleNamespace(scale_rewards=scale_rewards),
    }
    exec(textwrap.dedent(source[begin:end]), names)
    return {
        "rewards": rewards, "scale_rewards": scale_rewards, "num_generations": num_generations,
        "advantages": names["advantages"].tolist(),
        "frac_reward_zero_std": names["is_std_zero"].float().mean().item(),
    }


def adapted(temperature):
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    add_fused_lm_head(base, temperature=temperature, outputs=("log_probs", "entropy"))
    return PeftModel.from_pretrained(base, MODEL / "peft", is_trainable=True).train()


def main():
    torch.manual_seed(5)
    vocabulary = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    draw = lambda n: torch.randint(3, vocabulary, (n,)).tolist()
    prompts = [draw(5), draw(3)]
    lengths, advantages = [7, 4, 9, 1], [1.3, -0.7, 0.0, -0.4]
    samples = [
        {"prompt": prompts[i // 2], "completion": draw(n), "advantage": a}
        for i, (n, a) in enumerate(zip(lengths, advantages))
    ]
    cases, gradients = [], {}
    for loss_type, beta, temperature in CASES:
        model = adapted(temperature)
        loss, metrics = loss_of(model, samples, loss_type, beta)
        loss.backward()
        name = f"{loss_type}.{beta}.{temperature}"
        case = {"name": name, "loss_type": loss_type, "beta": beta, "temperature": temperature, "loss": loss.item()}
        if beta:
            case["kl"] = metrics["kl"][0]
        cases.append(case)
        for key, value in model.named_parameters():
            if value.requires_grad:
                key = key.removeprefix("base_model.model.").replace(".default", "")
                gradients[f"{name}.{key}"] = value.grad.clone()
        print(case)
    rewards = [[1.0, 0.0, 0.0, 1.0, 0.5, 0.25, -2.0, 3.0], [1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0], [0.1] * 8]
    found = [advantages_of(r, s, n) for r in rewards for s in ["group", "batch", "none"] for n in [2, 4]]
    golden = {"max_completion_length": MAX_COMPLETION, "samples": samples, "cases": cases, "advantages": found}
    (HERE / "grpo.json").write_text(json.dumps(golden, indent=1) + "\n")
    save_file(gradients, HERE / "gradients.safetensors")


if __name__ == "__main__":
    main()
