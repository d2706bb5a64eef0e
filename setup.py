"""Package metadata. Tool settings are in pyproject.toml, the tested versions in constraints.txt."""

from pathlib import Path

from setuptools import setup

FOLDERS = ("formats", "kernels", "modifiers")

setup(
    name="sparseautomodel",
    version="0.1.0.dev0",
    description="A recipe turns a transformers checkpoint into a sparse or quantized model in one read",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["transformers", "quantization", "pruning", "sparsity", "compression", "compressed-tensors"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=[
        "sparseautomodel",
        *(f"sparseautomodel.{folder}" for folder in FOLDERS),
        "sparseautomodel.recipes",
    ],
    # The recipes are read and edited at the top of the repository and travel inside the package.
    package_dir={"sparseautomodel": "sparseautomodel", "sparseautomodel.recipes": "recipes"},
    package_data={"sparseautomodel": ["py.typed", "*.c"], "sparseautomodel.recipes": ["*.yaml"]},
    python_requires=">=3.11",
    install_requires=[
        # compressed-tensors 0.20 asks for 2.10; no release but the one in constraints.txt is tested.
        "torch>=2.11",
        # One minor each: the loader takes our tensors, and parses our quantization_config, through seams that
        # these two packages moved between earlier minors.
        "transformers>=5.24,<5.25",
        "compressed-tensors>=0.20,<0.21",
        "accelerate>=1.10",
        "safetensors>=0.8",
        "httpx2",  # comes with huggingface_hub; blocks on a server are fetched with it
        "greenlet>=3",
        "pyyaml>=6",
        "typer",
        "rich",
    ],
    extras_require={
        "gguf": ["gguf"],
        "eval": ["lm_eval"],
        "dev": [
            "bitsandbytes",
            "gguf",
            "hypothesis",
            "mypy",
            # The first release that knows transformers 5.24's names is the one tested.
            "peft>=0.21,<0.22",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "setuptools>=77",
            "types-PyYAML",
        ],
    },
    entry_points={"console_scripts": ["sparseautomodel = sparseautomodel.__main__:main"]},
    zip_safe=False,
)
