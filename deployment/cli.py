"""`python -m deployment`: the command line. Commands are imported when they are called, so that help is instant."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status. Errors that a user can mend are one line on stderr."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.DEBUG if arguments.verbose else logging.WARNING)
    module, _, function = arguments.command.partition(":")
    command = getattr(importlib.import_module(f"deployment.commands.{module}"), function or "run")
    try:
        return int(command(arguments))
    except (ValueError, RuntimeError, OSError) as exc:
        if arguments.verbose:
            raise
        print(f"error: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


_ADAPTER_ACTIONS = {
    "unload": "offer it no more; running requests finish",
    "reload": "read its source again",
    "pin": "never unload it to make room",
    "unpin": "let it be unloaded again",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deployment", description="LoRA serving on Ray with SGLang")
    parser.add_argument("-v", "--verbose", action="store_true", help="log more, and show tracebacks")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    up = commands.add_parser("up", help="run a deployment; it ends with this process")
    up.add_argument("config", help="YAML file, see configs/")
    up.set_defaults(command="up")

    apply = commands.add_parser("apply", help="change a running deployment to an edited configuration")
    apply.add_argument("config")
    apply.add_argument("--wait", type=float, metavar="SECONDS", help="until it is reached")
    apply.set_defaults(command="up:apply")

    down = commands.add_parser("down", help="end a running deployment")
    down.set_defaults(command="up:down")

    status = commands.add_parser("status", help="workers, router and LoRA table of a running deployment")
    status.add_argument("--json", action="store_true")
    status.set_defaults(command="status")

    doctor = commands.add_parser("doctor", help="check this machine and a configuration before anything starts")
    doctor.add_argument("config")
    doctor.add_argument("--json", action="store_true")
    doctor.set_defaults(command="doctor")

    route = commands.add_parser("route", help="explain where a request would go, without running it")
    route.add_argument("--model", required=True)
    what = route.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt")
    what.add_argument("--messages", metavar="FILE", help="JSON list of chat messages")
    route.add_argument("--json", action="store_true")
    route.set_defaults(command="status:route")

    adapters = commands.add_parser("adapters", help="the catalogue of adapters of a running deployment")
    actions = adapters.add_subparsers(required=True, dest="action", metavar="ACTION")
    listing = actions.add_parser("list", help="all of them, and where they are")
    where = actions.add_parser("where", help="one of them")
    load = actions.add_parser("load", help="offer an adapter and load it")
    others = [actions.add_parser(action, help=text) for action, text in _ADAPTER_ACTIONS.items()]
    for action in (where, load, *others):
        action.add_argument("adapter", metavar="NAME")
    load.add_argument("source", help="folder, file://, hf://org/repo[@revision][/folder], or a URI that fsspec reads")
    load.add_argument("--placement", choices=["everywhere", "replicas", "on_demand"])
    load.add_argument(
        "--replicas", type=int, default=1, metavar="N", help="workers that hold it (default: %(default)s)"
    )
    load.add_argument("--pinned", action="store_true", help="never unload it to make room")
    for action in (listing, where, load, *others):
        action.add_argument("--json", action="store_true")
        action.add_argument("--url", help="the router; default: that of the running deployment")
        action.add_argument("--api-key", help="the router's API key, if it has one")
        action.add_argument("--name", help="deployment; default: the only one")
        action.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS")
        action.set_defaults(command="adapters")

    audit = commands.add_parser("audit", help="compare the router's index with the workers' mirrors and the engines")
    audit.add_argument("--json", action="store_true")
    audit.set_defaults(command="audit")

    indexer = commands.add_parser("indexer", help="the block index as a service, for any SGLang servers; no Ray")
    indexer.add_argument("--port", type=_port, required=True)
    indexer.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    indexer.add_argument("--max-index-mb", type=_index_mb, default=4096, metavar="MB", help="memory of the index")
    indexer.set_defaults(command="indexer")

    decisions = commands.add_parser("decisions", help="what the router chose lately, and why, term by term")
    decisions.add_argument("--last", type=int, default=20, metavar="N", help="so many (default: %(default)s)")
    decisions.add_argument("--replay", metavar="FILE", help="decide a log (router.decision_log) again and compare")
    decisions.add_argument("--json", action="store_true")
    decisions.set_defaults(command="decisions")

    tour = commands.add_parser("tour", help="send requests to a running deployment and compare predictions")
    tour.add_argument("--json", action="store_true")
    tour.set_defaults(command="tour")
    for command in (route, tour, audit, decisions):
        command.add_argument("--url", help="the router; default: that of the running deployment")
        command.add_argument("--api-key", help="the router's API key, if it has one")
    for command in (down, status, route, tour, audit, decisions):
        command.add_argument("--name", help="deployment; default: the only one")

    bench = commands.add_parser("bench", help="measure a part, side by side with a plain version")
    bench.add_argument("what", choices=["index", "route", "ingress", "mirror"])
    bench.add_argument("--json", action="store_true")
    bench.add_argument("--quick", action="store_true", help="less of everything, for a smoke test")
    bench.set_defaults(command="bench")

    _add_simulate(commands.add_parser("simulate", help="a trace through a fleet of model engines, in virtual time"))

    demo = commands.add_parser("demo", help="the laptop deployment: Ray, two engines on the CPU, a tour")
    demo.add_argument("--stop", action="store_true", help="end it and its Ray")
    demo.set_defaults(command="demo")
    return parser


def _add_simulate(simulate: argparse.ArgumentParser) -> None:
    simulate.add_argument("trace", help="Mooncake, agentic or simple JSON lines, see deployment/simulate/trace.py")
    simulate.add_argument("--workers", default="16", metavar="N[,N]", help="sizes of the fleet (default: %(default)s)")
    simulate.add_argument("--policy", default="ours", metavar="P[,P]", help="`all`, or some of: ours, round_robin, ...")
    simulate.add_argument("--profile", default="a100-llama-8b", help="of the engines (default: %(default)s)")
    simulate.add_argument("--adapters", type=int, default=0, metavar="K", help="0: the base model only")
    simulate.add_argument(
        "--popularity", default="zipf:0.9", metavar="LAW", help="uniform, zipf:A, power:A, drift:FILE"
    )
    simulate.add_argument("--slots", type=int, default=8, help="adapters in one batch (default: %(default)s)")
    simulate.add_argument("--kv-tokens", type=int, default=0, help="cache of one worker; default: the profile's")
    simulate.add_argument("--rate", type=float, default=1.0, help="times faster than the trace (default: %(default)s)")
    simulate.add_argument("--burstiness", type=float, default=1.0, metavar="CV", help="of gaps between calls")
    simulate.add_argument("--calls", type=int, metavar="N", help="only the first N")
    simulate.add_argument("--scale", type=float, default=1.0, help="of lengths, for agentic traces")
    simulate.add_argument(
        "--reload-every", type=float, metavar="SECONDS", help="each adapter gets new weights so often"
    )
    simulate.add_argument("--event-delay-ms", type=float, default=1.0)
    simulate.add_argument("--event-loss", type=float, default=0.0, metavar="SHARE")
    simulate.add_argument("--fail-every", type=float, metavar="SECONDS", help="a worker dies so often")
    simulate.add_argument("--fail-for", type=float, default=20.0, metavar="SECONDS")
    simulate.add_argument("--target-ms", type=float, metavar="MS", help="say how few workers keep p90 within this")
    simulate.add_argument("--seed", type=int, default=0)
    simulate.add_argument("--json", action="store_true")
    simulate.add_argument("--plot", metavar="FILE", help="distribution of times to first token, PNG or SVG")
    simulate.set_defaults(command="simulate")


def _port(text: str) -> int:
    return _within(text, "port", 1, 65535)


def _index_mb(text: str) -> int:
    return _within(text, "index size in MB", 16, 1 << 20)


def _within(text: str, what: str, low: int, high: int) -> int:
    if not text.isdecimal() or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"{what} must be {low} to {high}, got {text!r}")
    return int(text)
