"""SGLang's HTTP control API, as a worker uses it on its own engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from router.reports import RankLoad

_TIMEOUT_S: Final = 10.0
_LOAD_TIMEOUT_S: Final = 600.0
_PREFILL_TIMEOUT_S: Final = 120.0
"""The first prefill of an engine may compile."""


class EngineError(Exception):
    """The engine refused, or didn't answer as it should; the message is the engine's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What a running engine says of itself."""

    page_size: int
    context_length: int
    max_total_tokens: int
    bigram: bool
    version: str


class EngineClient:
    """Talks to one engine life. `close` it with the life."""

    def __init__(self, url: str, api_key: str) -> None:
        self._url = url
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {api_key}"}, timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)
        )

    async def close(self) -> None:
        """Close connections."""
        await self._session.close()

    async def is_ready(self) -> bool:
        """Whether the server takes requests."""
        try:
            async with self._session.get(f"{self._url}/ready") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def facts(self) -> EngineFacts:
        """Raises EngineError."""
        info = await self._json("GET", "/server_info")
        models = await self._json("GET", "/v1/models")
        return EngineFacts(
            page_size=int(info["page_size"]),
            context_length=int(models["data"][0]["max_model_len"]),
            max_total_tokens=int(info["max_total_num_tokens"]),
            bigram=str(info.get("speculative_algorithm") or "").upper() in {"EAGLE", "EAGLE3"},
            version=str(info["version"]),
        )

    async def loads(self) -> dict[int, RankLoad]:
        """Load by the engine's own ranks. Raises EngineError."""
        answer = await self._json("GET", "/v1/loads?include=core")
        try:
            return {
                int(rank["dp_rank"]): RankLoad(
                    running=int(rank["num_running_reqs"]),
                    waiting=int(rank["num_waiting_reqs"]),
                    used_tokens=int(rank["num_used_tokens"]),
                    max_running=int(rank["max_running_requests"]),
                )
                for rank in answer["loads"]
            }
        except (KeyError, TypeError, ValueError) as exc:
            raise EngineError(f"/v1/loads: not as expected: {type(exc).__name__}: {exc}") from exc

    async def load_adapter(self, name: str, path: str, *, pinned: bool = False) -> None:
        """Load an adapter that isn't loaded. Raises EngineError with the engine's reason."""
        body = {"lora_name": name, "lora_path": path, "pinned": pinned}
        await self._json("POST", "/load_lora_adapter", body, timeout_s=_LOAD_TIMEOUT_S)

    async def unload_adapter(self, name: str, *, timeout_s: float = _LOAD_TIMEOUT_S) -> None:
        """Unload an adapter once its requests are done. Raises EngineError."""
        await self._json("POST", "/unload_lora_adapter", {"lora_name": name}, timeout_s=timeout_s)

    async def prefill(self, token_ids: list[int], *, local_rank: int | None) -> None:
        """Compute a prompt and one token more on a rank of the engine, None for its only one. Raises EngineError."""
        body: dict[str, Any] = {"input_ids": token_ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        if local_rank is not None:
            body["routed_dp_rank"] = local_rank
        await self._json("POST", "/generate", body, timeout_s=_PREFILL_TIMEOUT_S)

    async def flush_cache(self, *, timeout_s: float = 0.0) -> None:
        """Empty the prefix cache. Raises EngineError where requests still run after `timeout_s`."""
        params = {"timeout": str(timeout_s)}
        try:
            async with self._session.post(f"{self._url}/flush_cache", params=params) as answer:
                if answer.status != 200:
                    raise EngineError(f"/flush_cache: HTTP {answer.status}: {await answer.text()}")
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise EngineError(f"/flush_cache: {type(exc).__name__}: {exc}") from exc

    async def _json(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float = _TIMEOUT_S
    ) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(method, self._url + path, json=body, timeout=timeout) as answer:
                if answer.status != 200:
                    raise EngineError(f"{path}: HTTP {answer.status}: {(await answer.text())[:500]}")
                return dict(await answer.json())
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise EngineError(f"{path}: {type(exc).__name__}: {exc}") from exc
