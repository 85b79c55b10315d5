"""Worker: the tasks of the reference, transformers' Qwen3_5MoeForCausalLM on torch."""

import functools
import warnings

import torch
from model_sizes import CACHED, DECODE_STEPS, POSITIONS, ROWS, document
from torch.nn import functional as F
from transformers import DynamicCache
from transformers.models.qwen3_5_moe import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from workers import PeakMemory, Task, serve


@functools.cache
def subject():
    """The model with random weights and a batch of tokens."""
    torch.manual_seed(0)
    model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**document()))
    assert all(p.dtype == torch.float32 for p in model.parameters())
    return model, torch.randint(0, document()["vocab_size"], (ROWS, POSITIONS))


def parameters() -> int:
    return sum(p.numel() for p in subject()[0].parameters())


def busiest_expert() -> float:
    """Rows of the fullest expert over the mean, first layer: the random router is no outlier."""
    model, tokens_BT = subject()
    layer, seen = model.model.layers[0].mlp.gate, []
    hook = layer.register_forward_hook(lambda module, inputs, out: seen.append(out[2]))
    with torch.inference_mode():
        model(tokens_BT, use_cache=False)
    hook.remove()
    counts = torch.bincount(seen[0].flatten(), minlength=layer.num_experts)
    return float(counts.max() / counts.float().mean())


def use(experts: str, attention: str):
    """The subject, with these kernels from now on."""
    model, tokens_BT = subject()
    model.set_experts_implementation(experts)
    model.set_attn_implementation(attention)
    return model, tokens_BT


def forward_task(experts: str, attention: str) -> Task:
    def run():
        model, tokens_BT = use(experts, attention)
        with torch.inference_mode():
            return model(tokens_BT, use_cache=False).logits

    return Task.in_a_row(run)


def train_step(experts: str, attention: str) -> None:
    """Mean log-prob of the next token, and its gradient by every parameter."""
    model, tokens_BT = use(experts, attention)
    model.zero_grad(set_to_none=True)
    logits_BTV = model(tokens_BT, use_cache=False).logits
    targets_BT = tokens_BT.roll(-1, dims=1)
    F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten()).backward()


def train_task(experts: str, attention: str) -> Task:
    return Task.in_a_row(lambda: train_step(experts, attention))


def train_memory(experts: str, attention: str) -> dict[str, int]:
    """Peak growth over three steps after weights; see model.py."""
    use(experts, attention)
    peak = PeakMemory()
    for _ in range(3):
        train_step(experts, attention)
    return {"growth": peak.growth()}


class Decode:
    """Greedy decoding of `rows` rows, whose cache starts with CACHED tokens."""

    def __init__(self, rows: int, experts: str, attention: str):
        self.kernels = experts, attention
        self.prompts = subject()[1][:, :CACHED].repeat(-(-rows // ROWS), 1)[:rows]
        self.length = 2 * CACHED

    @torch.inference_mode()
    def make_room(self) -> None:
        if self.length + DECODE_STEPS <= 2 * CACHED:
            return
        model, _ = use(*self.kernels)
        self.cache, self.length = DynamicCache(config=model.config), CACHED
        # Prefilled with the kernel that is fit for it, whichever decodes.
        model.set_experts_implementation("grouped_mm")
        self.read(model, self.prompts)

    def read(self, model, tokens_BT) -> None:
        output = model(
            tokens_BT, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )
        self.token = output.logits.argmax(dim=-1)

    @torch.inference_mode()
    def run(self) -> None:
        model, _ = use(*self.kernels)
        for _ in range(DECODE_STEPS):
            self.read(model, self.token)
        self.length += DECODE_STEPS


def decode_task(rows: int, experts: str, attention: str) -> Task:
    decode = Decode(rows, experts, attention)
    return Task(run=decode.run, before=decode.make_room)


def plain_task(rows: int, inner: int, outer: int) -> Task:
    """One dense float32 product: the machine's plain rate."""
    x, w = torch.randn(rows, inner), torch.randn(inner, outer)
    return Task(run=lambda: x @ w, repeats=5)


if __name__ == "__main__":
    warnings.simplefilter("ignore", FutureWarning)  # `past_key_values` gets a new name
    serve(
        {"forward": forward_task, "train": train_task, "decode": decode_task, "plain": plain_task},
        {
            "parameters": parameters,
            "busiest_expert": busiest_expert,
            "train_memory": train_memory,
        },
    )
