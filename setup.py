"""Packaging: what t1jax needs, and why. Tool settings are in pyproject.toml."""

from setuptools import find_packages, setup

# Lower bounds are releases the tests run with.
REQUIRED = [
    "jax>=0.10.2",  # arrays, compilation, sharding; 0.10.2 is the last for Python 3.11
    "flax>=0.12.8",  # the module system of t1jax/model
    "optax>=0.2.8",  # Adam, schedules, clipping in t1jax/rl
    "orbax-checkpoint>=0.12.8",  # sharded checkpoints that several hosts write together
    "grain>=0.2.18",  # the order of training data, read ahead by threads or processes
    "tensorboardX>=2.6.5",  # TensorBoard's event files, without TensorFlow
    "numpy>=2.2",  # every host array
    "ml_dtypes>=0.5.1",  # bfloat16 on the host
    "safetensors>=0.5",  # Hugging Face weights; the inputs and outputs of `t1jax score`
    "etils[epath]>=1.12",  # one path type for local disk and gs://
    "tokenizers>=0.21",  # tokenizer.json without transformers
    "typer>=0.15",  # the command line
    "rich>=13.9",  # progress bars on a terminal
    # The Engine contract of t1jax/sampling, imported only there. It brings TensorFlow, whose
    # text package has no wheels for Python 3.14.
    "google-jetstream==0.2.2; python_version < '3.14'",
    "pyyaml>=6.0.2",  # configs/*.yaml
    "pydantic>=2.10",  # task.toml: strict types, and errors that name the field
    "httpx>=0.28",  # evaluating models behind OpenAI-compatible servers, many requests at once
    "matplotlib>=3.11",  # the figures of `t1jax report`, imported only there
    "jinja2>=3.1",  # its pages, with everything escaped
    "docker>=7.1",  # sandboxes on a Docker Engine
    "pytest>=8.3",  # runs the verifiers of tasks, in every sandbox; and our tests
    "pytest-json-ctrf>=0.3.5",  # the reports that verifiers write
]

EXTRAS = {
    "tpu": [
        "libtpu",  # the TPU run-time, and ahead-of-time TPU compilation on any machine; jax fits it
        "tokamax>=0.0.12",  # Pallas kernels for ragged products, chosen by name in the model
    ],
    "hf": [
        "torch>=2.13.0",  # runs the reference; see constraints.txt
        "transformers>=5.24",  # the reference: the first release whose cached forward is right
    ],
    "harbor": [
        "harbor>=0.25; python_version >= '3.12'",  # hosted sandboxes: Daytona, Modal, E2B …
    ],
    "test": [
        "pytest-xdist>=3.6",  # on every core
        "hypothesis>=6.120",  # properties over generated inputs
        "psutil>=6.1",  # memory that a test or benchmark used
        "ruff>=0.17",  # lint
        "mypy>=1.15",  # types
        "types-PyYAML>=6.0.12",  # types of yaml, which carries none
    ],
}

setup(
    name="t1jax",
    version="0.1.0",
    description="Agentic reinforcement learning of Qwen3.5-MoE in JAX, on TPUs",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["t1jax", "t1jax.*", "sandbox", "sandbox.*"]),
    package_data={"t1jax": ["evaluation/templates/*"], "sandbox": ["*.bash", "images/*"]},
    install_requires=REQUIRED,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["t1jax = t1jax.cli:main"]},
)
