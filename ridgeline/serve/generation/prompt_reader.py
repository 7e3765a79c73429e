"""From text to token ids, without holding up other requests.

Every long text is bounded and charged before it is tokenised: a text of n characters has at least
n / `max_token_chars` tokens. The tokenizer releases the GIL, so long texts run in a thread; the
longest take turns, so that the memory of tokenising is that of one of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from ridgeline.serve.engine_protocol import ServedTokenizer
from ridgeline.serve.errors import ApiError
from ridgeline.serve.generation.request import TokenPrompt

_INLINE = 4_000  # characters of one request; tokenised within a millisecond or two
_LONG_CHARS = 256 << 10
_LONG_TEXTS = ThreadPoolExecutor(1, thread_name_prefix="ridgeline-tokenizer")

T = TypeVar("T")


class PromptReader:
    """Tokenises the texts of one request.

    `charge` is called with the least number of tokens that a text can have, before it is tokenised;
    it may raise ApiError. `max_model_len`: tokens that a text may have at most.
    """

    def __init__(
        self, tokenizer: ServedTokenizer, max_model_len: int, charge: Callable[[int], object]
    ) -> None:
        self._tokenizer, self._max_model_len, self._charge = tokenizer, max_model_len, charge
        self._num_chars = 0

    def without_charge(self) -> PromptReader:
        """A reader of texts that were charged before."""
        return PromptReader(self._tokenizer, self._max_model_len, lambda _: None)

    @property
    def template_uses_documents(self) -> bool:
        """Whether the chat template mentions the documents of a request."""
        return self._tokenizer.template_uses_documents

    async def read(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        is_cut: bool = False,
    ) -> TokenPrompt:
        """A text as a prompt, which may be empty. `is_cut`: it may be longer than the context.

        ApiError 400 if the text is too long, 429 if its key is over budget.
        """
        num_charged = self._admit(len(text), "prompt", is_cut)
        tokens = await self._run(
            len(text),
            lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens),
        )
        return TokenPrompt(tuple(tokens), text, num_charged)

    async def render(self, num_chars: int, *, is_cut: bool = False, **chat: Any) -> TokenPrompt:
        """A conversation of `num_chars` as a prompt; `chat`: arguments of `apply_chat_template`."""
        num_charged = self._admit(num_chars, "messages", is_cut)
        # Always in a thread: it may wait for the process that renders the template.
        executor = _LONG_TEXTS if num_chars >= _LONG_CHARS else None
        render = partial(self._tokenizer.apply_chat_template, **chat)
        tokens = await asyncio.get_running_loop().run_in_executor(executor, render)
        return TokenPrompt(tuple(tokens), None, num_charged)

    async def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, with special tokens. It is charged as a text of as many characters,
        which is as much work. ApiError 429 if its key is over budget."""
        if len(tokens) >= _INLINE:
            self._charge(len(tokens) // self._tokenizer.max_token_chars)
        return await self._run(
            len(tokens), lambda: self._tokenizer.decode(tokens, skip_special_tokens=False)
        )

    async def decode_each(self, tokens: Sequence[int]) -> list[str]:
        """The text of every token. Many take turns: a loop in Python holds the GIL."""
        decode = self._tokenizer.decode

        def texts() -> list[str]:
            return [decode([token], skip_special_tokens=False) for token in tokens]

        if len(tokens) < _INLINE:
            return texts()
        return await asyncio.get_running_loop().run_in_executor(_LONG_TEXTS, texts)

    def _admit(self, num_chars: int, field: str, is_cut: bool) -> int:
        """Tokens that were charged for a text of `num_chars`."""
        max_token_chars = self._tokenizer.max_token_chars
        max_chars = self._max_model_len * max_token_chars
        if num_chars > max_chars and not is_cut:
            limit = f"limit: {self._max_model_len} tokens of at most {max_token_chars} characters"
            raise ApiError(
                400, f"{field} is too long: {num_chars} characters; {limit}", param=field
            )
        if self._num_chars + num_chars < _INLINE:
            return 0  # cheap, and a refusal can then tell how long to wait for the exact number
        num_tokens = num_chars // max_token_chars
        self._charge(num_tokens)
        return num_tokens

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        self._num_chars += size
        if size < _LONG_CHARS:
            return await in_thread_if_long(self._num_chars, work)
        return await asyncio.get_running_loop().run_in_executor(_LONG_TEXTS, work)


async def in_thread_if_long(size: int, work: Callable[[], T]) -> T:
    """The result of `work`, which runs in a thread if `size` characters or tokens take long."""
    return work() if size < _INLINE else await asyncio.to_thread(work)
