"""`bench index|route|ingress`: run a measurement and print its JSON."""

from __future__ import annotations

import argparse
import importlib
import json


def run(arguments: argparse.Namespace) -> int:
    """Always 0: figures are for people to judge."""
    module = importlib.import_module(f"deployment.bench.{arguments.what}")
    print(json.dumps(module.run(quick=arguments.quick), indent=None if arguments.json else 2))
    return 0
