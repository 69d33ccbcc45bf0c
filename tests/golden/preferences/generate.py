"""What TRL's own trainers make of preferences, by a tiny random Qwen2 with a LoRA; run by hand.

    pip install trl==1.16.0 transformers==5.23.0 peft==0.21.2 datasets torch safetensors
    python generate.py

The loss code is that of DPOTrainer, KTOTrainer and ORPOTrainer, called on the model of ../llama/qwen2 and its
adapter without the rest of a trainer, whose place a bare object takes. losses.json has the tokens, each loss with the
log-probabilities that went into it, and the metrics; gradients.safetensors the gradients of the LoRA.
"""

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.utils import add_fused_lm_head

HERE = Path(__file__).parent
MODEL = HERE / "../llama/qwen2"
OUTPUTS = ("log_probs", "entropy", "mean_logits", "is_top1")
DPO = ["sigmoid", "hinge", "ipo", "robust", "nca_pair", "sppo_hard", "apo_zero", "apo_down", "sigmoid_norm"]
GRADIENTS = [("dpo", "sigmoid"), ("dpo", "ipo"), ("orpo", "orpo"), ("kto", "kto")]
BETA = 0.3
SMOOTHING = 0.1
WEIGHTS = {"desirable_weight": 1.5, "undesirable_weight": 0.5}


class Accelerator:
    device = torch.device("cpu")

    def gather_for_metrics(self, x):
        return x

    gather = gather_for_metrics

    def unwrap_model(self, model):
        return model


def trainer(model, **settings):
    return SimpleNamespace(
        accelerator=Accelerator(), model=model, ref_model=None, beta=BETA, aux_loss_enabled=False,
        precompute_ref_logps=False, args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)}, _total_train_tokens=0, _tp_size=1,
        **settings,
    )


def padded(rows, value):
    longest = max(len(row) for row in rows)
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows])


def batch_of(pairs):
    """Prompts with chosen answers, then with rejected ones."""
    rows = [(p["prompt"], p[kind]) for kind in ["chosen", "rejected"] for p in pairs]
    ids = padded([prompt + answer for prompt, answer in rows], 0)
    attention = padded([[1] * len(prompt + answer) for prompt, answer in rows], 0)
    mask = padded([[0] * len(prompt) + [1] * len(answer) for prompt, answer in rows], 0)
    return {"input_ids": ids, "attention_mask": attention, "completion_mask": mask}


def dpo(model, loss_type, pairs):
    smoothing = SMOOTHING if loss_type == "robust" else 0.0
    self = trainer(
        model, ld_alpha=None, f_divergence_type="reverse_kl", loss_types=[loss_type], loss_weights=[1.0],
        label_smoothing=smoothing, use_weighting=False,
    )
    return DPOTrainer._compute_loss(self, model, batch_of(pairs), False), self._metrics["train"], smoothing


def orpo(model, pairs):
    self = trainer(model, is_encoder_decoder=False, padding_value=0)
    for name in ["concatenated_inputs", "get_batch_logps"]:
        setattr(self, name, getattr(ORPOTrainer, name))
    for name in ["concatenated_forward", "odds_ratio_loss"]:
        setattr(self, name, getattr(ORPOTrainer, name).__get__(self))
    batch = {}
    for kind in ["chosen", "rejected"]:
        rows = [(p["prompt"], p[kind]) for p in pairs]
        batch[f"{kind}_input_ids"] = padded([prompt + answer for prompt, answer in rows], 0)
        batch[f"{kind}_attention_mask"] = padded([[1] * len(prompt + answer) for prompt, answer in rows], 0)
        batch[f"{kind}_labels"] = padded([[-100] * len(prompt) + answer for prompt, answer in rows], -100)
    loss, metrics = ORPOTrainer.get_batch_loss_metrics(self, model, batch)
    return loss, {name: [value] for name, value in metrics.items()}


def kto(model, loss_type, samples):
    """Each answer also after the prompt of the sample before it."""
    self = trainer(model, calculate_KL=loss_type == "kto", loss_type=loss_type, **WEIGHTS)
    self._compute_kl_logps = KTOTrainer._compute_kl_logps.__get__(self)
    n = len(samples)

    def part(rows, prefix):
        return {
            f"{prefix}input_ids": padded([prompt + answer for prompt, answer in rows], 0),
            f"{prefix}attention_mask": padded([[1] * len(prompt + answer) for prompt, answer in rows], 0),
            f"{prefix}completion_mask": padded([[0] * len(prompt) + [1] * len(answer) for prompt, answer in rows], 0),
        }

    batch = part([(s["prompt"], s["completion"]) for s in samples], "")
    if self.calculate_KL:
        batch |= part([(s["prompt"], samples[(i + 1) % n]["completion"]) for i, s in enumerate(samples)], "KL_")
    batch["label"] = torch.tensor([s["label"] for s in samples])
    return KTOTrainer._compute_loss(self, model, batch, False), self._metrics["train"]


@torch.no_grad()
def scored(model, prompt, answer):
    ids = torch.tensor([prompt + answer])

    def logps():
        logits = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        return logits.gather(-1, ids[0, 1:, None])[:, 0].double()

    own = logps()
    with model.disable_adapter():
        reference = logps()
    start = len(prompt) - 1
    return {
        "answer": own[start:].sum().item(), "answer_tokens": len(answer), "text": own.sum().item(),
        "text_tokens": len(prompt + answer) - 1, "reference": reference[start:].sum().item(),
    }


def main():
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    add_fused_lm_head(base, outputs=OUTPUTS)
    model = PeftModel.from_pretrained(base, MODEL / "peft", is_trainable=True).train()
    vocabulary = base.config.vocab_size
    torch.manual_seed(3)
    draw = lambda n: torch.randint(3, vocabulary, (n,)).tolist()
    pairs = [
        {"prompt": draw(5), "chosen": draw(7), "rejected": draw(4)},
        {"prompt": draw(3), "chosen": draw(2), "rejected": draw(9)},
    ]
    samples = [
        {"prompt": pair["prompt"], "completion": pair[kind], "label": kind == "chosen"}
        for pair, kind in zip(pairs + pairs, ["chosen", "rejected", "rejected", "chosen"])
    ]
    first = {kind: scored(model, pairs[0]["prompt"], pairs[0][kind]) for kind in ["chosen", "rejected"]}
    rewards = lambda metrics: [metrics["rewards/chosen"][0], metrics["rewards/rejected"][0]]
    cases = []
    for loss_type in DPO:
        loss, metrics, smoothing = dpo(model, loss_type, pairs[:1])
        cases.append({
            "method": "dpo", "loss_type": loss_type, "beta": BETA, "label_smoothing": smoothing, **first,
            "loss": loss.item(), "rewards": rewards(metrics),
        })
    loss, metrics = orpo(model, pairs[:1])
    cases.append({
        "method": "orpo", "loss_type": "orpo", "beta": BETA, **first, "loss": loss.item(), "rewards": rewards(metrics),
    })
    for loss_type in ["kto", "apo_zero_unpaired"]:
        for sample in samples[:2]:
            loss, metrics = kto(model, loss_type, [sample])
            kind = "chosen" if sample["label"] else "rejected"
            cases.append({
                "method": "kto", "loss_type": loss_type, "beta": BETA, **WEIGHTS, "label": sample["label"],
                "chosen": scored(model, sample["prompt"], sample["completion"]), "loss": loss.item(),
                "kl": metrics["kl"][0], "rewards": [metrics[f"rewards/{kind}"][0]],
            })
    gradients, batches = {}, []
    for method, loss_type in GRADIENTS:
        model.zero_grad()
        if method == "dpo":
            loss, metrics, _ = dpo(model, loss_type, pairs)
        elif method == "orpo":
            loss, metrics = orpo(model, pairs[:1])
        else:
            loss, metrics = kto(model, loss_type, samples)
        loss.backward()
        names = ["rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "kl",
                 "logps/chosen", "logps/rejected"]
        batches.append({
            "method": method, "loss_type": loss_type, "beta": BETA, "loss": loss.item(), **WEIGHTS,
            "metrics": {name: metrics[name][0] for name in names if metrics.get(name)},
        })
        for name, value in model.named_parameters():
            if value.requires_grad:
                name = name.removeprefix("base_model.model.").replace(".default", "")
                gradients[f"{method}.{loss_type}.{name}"] = value.grad.clone()
    found = {"pairs": pairs, "samples": samples, "cases": cases, "batches": batches}
    (HERE / "losses.json").write_text(json.dumps(found, indent=1) + "\n")
    save_file(gradients, HERE / "gradients.safetensors")
    for case in cases + batches:
        print(case["method"], case["loss_type"], case["loss"])


if __name__ == "__main__":
    main()
