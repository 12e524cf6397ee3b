"""Ask about a file with the official client, and see how far the server is with reading it.

    pip install openai
    python examples/openai_client.py book.txt "Who tells the story?"

No GPU is needed here. Prints, for a service started with ``make serve``:

    read 256 of 2002 tokens, 0 of them cached, after 1.1 s
    ...
    read 2002 of 2002 tokens, 0 of them cached, after 7.9 s
    Ishmael tells the story.
    2002 prompt tokens, 0 of them cached; 6 tokens
"""

import os
import sys
from pathlib import Path

from openai import OpenAI

file, question = sys.argv[1:]
client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
stream = client.chat.completions.create(
    model=client.models.list().data[0].id,
    # The file first: the next question about it finds the file's tokens in the cache.
    messages=[{"role": "user", "content": f"{Path(file).read_text('utf-8')}\n\n{question}"}],
    max_tokens=64,
    stream=True,
    stream_options={"include_usage": True},
    extra_body={"return_progress": True},  # what is not OpenAI's own goes here
)
for chunk in stream:
    if progress := (chunk.model_extra or {}).get("prompt_progress"):
        print(
            f"read {progress['processed']} of {progress['total']} tokens, "
            f"{progress['cache']} of them cached, after {progress['time_ms'] / 1e3:.1f} s"
        )
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if usage := chunk.usage:
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
        print(
            f"\n{usage.prompt_tokens} prompt tokens, {cached} of them cached; "
            f"{usage.completion_tokens} tokens"
        )
