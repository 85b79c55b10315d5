"""Worker: transformers' `generate`, which also writes the weights that both sides read."""

import functools
import time
import warnings
from pathlib import Path

import torch
from model_sizes import CACHED, DECODE_STEPS, document
from transformers.models.qwen3_5_moe import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from workers import Task, serve

PROMPT = 1000


def write(folder: str) -> None:
    """Random weights as a published checkpoint."""
    torch.manual_seed(0)
    model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**document()))
    model.save_pretrained(folder)
    assert (Path(folder) / "config.json").exists()


@functools.cache
def subject(folder: str):
    return Qwen3_5MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class Steps:
    """DECODE_STEPS steps of `generate`'s own loop after its prefill.

    A criterion that looks at the clock is called after every token: what is timed lies between the
    first token and the last.
    """

    def __init__(self, folder: str, rows: int, experts: str, attention: str):
        self.model, self.kernels = subject(folder), (experts, attention)
        torch.manual_seed(1)
        self.prompt = torch.randint(0, 8192, (rows, CACHED))

    @torch.inference_mode()
    def seconds(self) -> float:
        stamps: list[float] = []

        def stamp(ids, scores, **_):
            stamps.append(time.perf_counter())
            if len(stamps) == 1:  # the prompt was read with what is fit for it
                self.model.set_experts_implementation(self.kernels[0])
            return torch.zeros(len(ids), dtype=torch.bool)

        self.model.set_attn_implementation(self.kernels[1])
        self.model.set_experts_implementation("grouped_mm")
        self.model.generate(
            self.prompt, attention_mask=torch.ones_like(self.prompt), do_sample=True,
            max_new_tokens=DECODE_STEPS + 1, min_new_tokens=DECODE_STEPS + 1, temperature=1.0,
            top_k=0, stopping_criteria=[stamp],
        )  # fmt: skip
        return stamps[-1] - stamps[0]


def decode_task(**arguments) -> Task:
    steps = Steps(**arguments)
    return Task(run=steps.seconds, own_seconds=True, warm_up=1)


def first_token_task(folder: str, experts: str, attention: str) -> Task:
    """`generate` of one token."""
    model = subject(folder)
    prompt = torch.randint(0, 8192, (1, PROMPT))

    @torch.inference_mode()
    def run() -> None:
        model.set_experts_implementation(experts)
        model.set_attn_implementation(attention)
        model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=1, do_sample=True,
            temperature=1.0, top_k=0,
        )  # fmt: skip

    return Task.in_a_row(run)


if __name__ == "__main__":
    warnings.simplefilter("ignore", FutureWarning)
    serve({"decode": decode_task, "first_token": first_token_task}, {"write": write})
