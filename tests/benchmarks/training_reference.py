"""Worker: a training step of transformers' model with torch's AdamW."""

import functools
import warnings

import torch
from model_reference import subject, train_step
from workers import Task, serve


@functools.cache
def optimizer():
    """AdamW with the recipe's numbers, in its fused form: torch's quickest on CPU."""
    model, _ = subject()
    return torch.optim.AdamW(
        model.parameters(), lr=1e-6, betas=(0.9, 0.98), weight_decay=0.1, fused=True
    )


def step_task(experts: str, attention: str) -> Task:
    """Log-softmax, gradient, clip by the global norm, AdamW."""

    def run():
        train_step(experts, attention)
        torch.nn.utils.clip_grad_norm_(subject()[0].parameters(), 1.0)
        optimizer().step()

    return Task.in_a_row(run)


if __name__ == "__main__":
    warnings.simplefilter("ignore", FutureWarning)
    serve({"step": step_task}, {})
