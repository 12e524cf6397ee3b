"""What can never fit is refused with the sums: prompt, requested, limit and pages of the KV cache.

vLLM compares lengths in several places and by versions: some refuse a request for more tokens than
are left, others give fewer; messages have other numbers. One check, where every prompt passes after
it has been turned into tokens, replaces them.
"""

import math
from dataclasses import dataclass
from typing import Any

from magi_serve.server.middleware.admission import Refusal, current

GENERATING = ("/completions", "/responses", "/messages", "/generate", "/invocations")
"""How the paths end that need room for at least one token after the prompt."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one sequence may take: `max_model_len` tokens, and pages of `page_size` tokens.

    ``num_pages`` is None where a sequence does not keep all its tokens (a sliding window, a state
    space): the number of pages then says nothing about length.
    """

    max_model_len: int
    page_size: int
    num_pages: int | None

    def why_not(self, prompt: int, requested: int, *, or_more: bool = False) -> str | None:
        """Why a sequence can never fit; None if it can.

        Args:
            prompt: tokens of the prompt; with `or_more` it has at least that many.
            requested: tokens to generate at most; 0 if the request does not say.
        """
        total = prompt + requested
        pages = math.ceil(total / self.page_size)
        no_pages = self.num_pages is not None and pages > self.num_pages
        if total <= self.max_model_len and not no_pages:
            return None
        least = "at least " if or_more else ""
        room = self.max_model_len
        cache = ""
        if self.num_pages is not None:
            room = min(room, self.num_pages * self.page_size)
            cache = f" of {self.num_pages}"
        way_out = "shorten the prompt"
        if prompt < room:
            way_out += f", or request at most {room - prompt} tokens (max_tokens)"
        return (
            f"This model's maximum context length is {self.max_model_len} tokens, but the request "
            f"needs {least}{total}: {least}{prompt} in the prompt and {requested} requested, or "
            f"{least}{pages} KV pages{cache}, each of {self.page_size} tokens; {way_out}."
        )


def capacity_of(client: Any) -> Capacity:
    """What the engine behind `client` has."""
    model, cache = client.model_config, client.vllm_config.cache_config
    partial = model.get_sliding_window() is not None or getattr(model, "is_hybrid", False)
    if getattr(model, "is_attention_free", False) or getattr(model, "attention_chunk_size", None):
        partial = True
    pages = None if partial else cache.num_gpu_blocks
    return Capacity(model.max_model_len, cache.block_size or 1, pages)


def refuse(message: str, param: str) -> Exception:
    """The error to raise in a handler of vLLM, noted for the client to be told as it is."""
    from vllm.exceptions import VLLMValidationError

    if request := current.get():
        request.refusal = Refusal(400, message, param)
    error: Exception = VLLMValidationError(message)
    return error


def check_lengths(capacity: Capacity) -> None:
    """Have vLLM ask `capacity` about every prompt that it has turned into tokens."""
    from vllm.renderers.params import TokenizeParams

    theirs = getattr(
        TokenizeParams._token_len_check, "__wrapped__", TokenizeParams._token_len_check
    )
    kwargs_of = getattr(
        TokenizeParams.get_encode_kwargs, "__wrapped__", TokenizeParams.get_encode_kwargs
    )

    def _token_len_check(self: Any, tokenizer: Any, tokens: Any) -> Any:
        if self.max_total_tokens is None or self.truncate_prompt_tokens is not None:
            return theirs(self, tokenizer, tokens)
        request = current.get()
        needs_output = request is not None and request.path.endswith(GENERATING)
        requested = self.max_output_tokens or int(needs_output)
        or_more = len(tokens) > 2 * self.max_total_tokens
        if message := capacity.why_not(len(tokens), requested, or_more=or_more):
            raise refuse(
                message, "prompt" if len(tokens) >= capacity.max_model_len else "max_tokens"
            )
        return theirs(self, tokenizer, tokens)

    def get_encode_kwargs(self: Any) -> dict[str, Any]:
        """Enough tokens to say how long a prompt is that is up to twice too long."""
        kwargs: dict[str, Any] = kwargs_of(self)
        if self.max_total_tokens is not None and self.truncate_prompt_tokens is None:
            kwargs["max_length"] = 2 * self.max_total_tokens + 1
        return kwargs

    _token_len_check.__wrapped__ = theirs  # type: ignore[attr-defined]
    get_encode_kwargs.__wrapped__ = kwargs_of  # type: ignore[attr-defined]
    TokenizeParams._token_len_check = _token_len_check
    TokenizeParams.get_encode_kwargs = get_encode_kwargs
