"""`make interop`: NVIDIA Dynamo's standalone indexer on a live worker's event stream, base and adapters apart.

Dynamo gets a virtual environment of its own: its dependencies are nobody else's business. Exits 0 if it sees what
the engine holds. The worker carries dp_rank 1, so that the fleet-wide tag is seen to arrive.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import venv
from pathlib import Path
from typing import Any, Final

from deployment.assets.paths import model_dir
from tests.integration.local_fleet import PAGE, SERVED, LocalFleet, free_port

VERSION: Final = "1.6.1"
_FOLDER: Final = Path(__file__).resolve().parents[2] / ".venv-interop"
_NUM_TOKENS: Final = 100
_WAIT_S: Final = 60.0


def main() -> int:
    """Start a worker and the indexer, send two requests, compare."""
    python = _environment()
    fleet = LocalFleet(model_dir("tiny-llama"), num_workers=1, first_index=1)
    print("starting a worker ...", flush=True)
    fleet.start()
    port = free_port()
    log = Path(tempfile.mkdtemp()) / "indexer.log"
    with log.open("wb") as output:
        indexer = subprocess.Popen([python, "-m", "dynamo.indexer", "--port", str(port)], stdout=output, stderr=output)
    try:
        (source, rank), *_ = fleet.ranks().items()
        registration = {
            "instance_id": 1, "endpoint": rank.endpoint, "replay_endpoint": rank.replay_endpoint,
            "model_name": SERVED, "block_size": PAGE, "dp_rank": source.dp_rank,
        }  # fmt: skip
        _until(lambda: _post(port, "/register", registration), "the indexer registers the worker")
        tokens = list(range(5, 5 + _NUM_TOKENS))
        for model in (SERVED, "adapter-a"):
            _complete(fleet.url, model, tokens)
        held = _NUM_TOKENS // PAGE * PAGE
        found = _until(lambda: _scores(port, tokens, held, int(source.dp_rank)), "base and adapter-a are indexed")
    finally:
        indexer.terminate()
        indexer.wait()
        fleet.stop()
    print(json.dumps(found, indent=1))
    expected = {"base": held, "adapter-a": held, "adapter-b": 0}
    print(f"dynamo {VERSION}: {'as the engine holds it' if found == expected else f'expected {expected}'}")
    return 0 if found == expected else 1


def _scores(port: int, tokens: list[int], held: int, dp_rank: int) -> dict[str, int] | None:
    """Cached tokens by name, once base and adapter-a are there."""
    found = {}
    for name in ("base", "adapter-a", "adapter-b"):
        query = {"token_ids": tokens, "model_name": SERVED} | ({} if name == "base" else {"lora_name": name})
        scores = (_post(port, "/query", query) or {}).get("scores", {})
        found[name] = int(scores.get("1", {}).get(str(dp_rank), 0))
    return found if found["base"] == found["adapter-a"] == held else None


def _environment() -> str:
    """Python of the interop environment, made on the first run."""
    python = _FOLDER / "bin" / "python"
    if not (_FOLDER / ".installed").exists():
        print(f"installing ai-dynamo-runtime {VERSION} ...", flush=True)
        venv.create(_FOLDER, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", f"ai-dynamo-runtime=={VERSION}"], check=True)
        (_FOLDER / ".installed").touch()
    return str(python)


def _complete(url: str, model: str, tokens: list[int]) -> None:
    body = {"model": model, "prompt": tokens, "max_tokens": 1}
    assert _send(f"{url}/v1/completions", body)["usage"]["prompt_tokens"] == len(tokens)


def _post(port: int, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """The answer, or None while the indexer isn't up."""
    try:
        return _send(f"http://127.0.0.1:{port}{path}", body)
    except urllib.error.HTTPError as exc:
        raise RuntimeError(f"{path}: HTTP {exc.code}: {exc.read().decode()}") from exc
    except OSError:
        return None


def _send(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_WAIT_S) as answer:
        return dict(json.loads(answer.read() or b"{}") or {"ok": True})


def _until(ask: Any, what: str) -> Any:
    until_s = time.monotonic() + _WAIT_S
    while not (found := ask()):
        if time.monotonic() > until_s:
            raise TimeoutError(f"not within {_WAIT_S:.0f} s: {what}")
        time.sleep(0.2)
    return found


if __name__ == "__main__":
    sys.exit(main())
