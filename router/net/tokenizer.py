"""Prompt text and chat messages to token ids, exactly as SGLang's server would; or None, to let SGLang do it.

Only plain text chats are rendered here: system, user and assistant messages whose content is a string or text
parts. Tools, images, template arguments and the like take other paths in SGLang, which this module doesn't repeat;
such requests are left to the engine. engine_tokenizer.py asks a live engine whether the two agree.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

_INLINE_CHARS: Final = 8_000
"""Texts up to this length are tokenized on the loop (a few ms at most); a thread costs more than it saves."""
_PLAIN_ROLES: Final = frozenset({"system", "user", "assistant"})
_PLAIN_KEYS: Final = frozenset({"role", "content"})
_RENDERING_FIELDS: Final = (
    "tools", "tool_choice", "functions", "reasoning_effort", "chat_template_kwargs", "continue_final_message",
    "add_generation_prompt", "add_special_tokens", "chat_template", "documents", "thinking", "session_params",
    "mm_processor_kwargs", "modalities",
)  # fmt: skip
"""Request fields that change how SGLang renders messages."""
PROBE: Final = (
    {"role": "system", "content": "You are terse. 12 x 34 = 408."},
    {"role": "user", "content": "Hi!\n\n  <b>two</b> lines\tand a tab; caf\u00e9, \u4f60\u597d."},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "And then?"},
)
"""A chat that any difference in rendering or tokenizing would show in."""
PROBE_TEXT: Final = "  1234567 caf\u00e9\n\tdef f(x): return x  # \u4f60\u597d"
"""The same for completions."""


class PromptTokenizer:
    """The model's tokenizer and chat template. Thread-safe for what is used here."""

    def __init__(self, model_path: str, *, trust_remote_code: bool = False) -> None:
        """`model_path`: folder or hub id. Raises OSError where there is no tokenizer."""
        from transformers import AutoTokenizer  # seconds to import, and only routers tokenize

        path = Path(model_path).expanduser()
        if path.is_absolute() and not (path / "config.json").is_file():
            raise FileNotFoundError(f"model folder {path} has no config.json on this node; correct model.path")
        self._tokenizer: Any = AutoTokenizer.from_pretrained(
            str(path) if path.exists() else model_path, trust_remote_code=trust_remote_code
        )
        self._content_format = _content_format(self._tokenizer.chat_template)
        self._encode_args = {"add_special_tokens": False} if self._tokenizer.encode("") else {}
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenizer")

    async def completion(self, prompt: str) -> list[int]:
        """Token ids of a completion's prompt, special tokens as the tokenizer adds them."""
        return await self._run(len(prompt), self._encode_completion, prompt)

    async def chat(self, body: Mapping[str, Any]) -> list[int] | None:
        """Token ids of a chat completion's messages, or None where SGLang should render them itself."""
        from jinja2 import TemplateError  # transformers brings it

        messages = self._plain(body)
        if messages is None:
            return None
        try:
            return await self._run(sum(len(m["content"]) for m in messages), self._encode_chat, messages)
        except TemplateError:  # it refuses these messages: SGLang shall say so
            return None

    def _plain(self, body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        if self._content_format is None or any(body.get(field) is not None for field in _RENDERING_FIELDS):
            return None
        plain = []
        for message in body["messages"]:
            if message.keys() - _PLAIN_KEYS or message["role"] not in _PLAIN_ROLES:
                return None
            content = message.get("content")
            if isinstance(content, list):
                content = self._text_of(content)
            if not isinstance(content, str):
                return None
            plain.append({"role": message["role"], "content": content})
        if plain[-1]["role"] == "assistant":  # as SGLang has it, unless continue_final_message says otherwise
            plain[-1]["role"] = "user"
        return plain

    def _text_of(self, parts: Sequence[Any]) -> str | None:
        """Text parts as the 'string' templates get them; other templates render parts on their own."""
        if self._content_format != "string":
            return None
        texts = [p["text"] for p in parts if isinstance(p, dict) and p.get("type") == "text" and "text" in p]
        if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
            return None
        return " ".join(texts)

    async def _run(self, num_chars: int, work: Any, argument: Any) -> list[int]:
        if num_chars <= _INLINE_CHARS:
            return work(argument)  # type: ignore[no-any-return]  # one of the two below
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, argument)

    def _encode_completion(self, prompt: str) -> list[int]:
        return list(self._tokenizer.encode(prompt))

    def _encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer.encode(text, **self._encode_args))


def _content_format(chat_template: Any) -> str | None:
    """'string' or 'openai' as SGLang tells them apart; None without a single template."""
    if not isinstance(chat_template, str):
        return None
    from sglang.srt.parser.jinja_template_utils import detect_jinja_template_content_format

    return str(detect_jinja_template_content_format(chat_template))
