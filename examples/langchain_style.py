"""A chain of a prompt template, a model behind an OpenAI-compatible address, and a parser.

    pip install langchain-openai
    python examples/langchain_style.py book.txt "Who tells the story?"

No GPU is needed here. Prints the answer in pieces, as it comes:

    Ishmael tells the story.

The model is an ordinary ``ChatOpenAI``: any code that takes one works with the service.
"""

import os
import sys
from pathlib import Path

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from openai import OpenAI

file, question = sys.argv[1:]
url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
key = os.environ.get("OPENAI_API_KEY", "none")

model = ChatOpenAI(
    base_url=url,
    api_key=key,
    model=OpenAI(base_url=url, api_key=key).models.list().data[0].id,
    max_tokens=64,
    # Seconds without a byte; the service sends one at least every 15 s, however long the file is.
    timeout=60,
)
# The file first: the next question about it finds the file's tokens in the cache.
prompt = ChatPromptTemplate.from_messages([("user", "{text}\n\n{question}")])
chain = prompt | model | StrOutputParser()
for piece in chain.stream({"text": Path(file).read_text("utf-8"), "question": question}):
    print(piece, end="", flush=True)
print()
