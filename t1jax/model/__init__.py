"""The Qwen3.5-MoE text model: pure JAX functions of (parameters, arrays), in Flax NNX modules.

Read `qwen3_5.py` first: it is the model from tokens to hidden states, top to bottom.
"""
