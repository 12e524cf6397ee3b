"""What docs/errors.md says beside the code's own words: when an error comes, and what to do."""

from typing import NamedTuple


class Note(NamedTuple):
    """When a client is told so, and what it can do; `shown` where the message reads badly raw."""

    when: str
    way_out: str
    shown: str = ""


HTTP = {
    "no key that this service knows": Note(
        "keys are configured, and the request has none or another, or its path is spelled oddly",
        "send one of the keys; ask who runs the service",
    ),
    "the body has more than LIMIT bytes": Note(
        "Content-Length says so, or so much has come",
        "send less, or raise `--max-body-bytes`",
    ),
    "arrays and objects": Note("the JSON has more than 100000 of them", "send fewer"),
    "levels deep": Note("the JSON is nested deeper", "flatten it, or raise `--max-json-depth`"),
    "not JSON in UTF-8": Note("the body cannot be parsed", "correct it"),
    "asks for PROMPTS": Note(
        "prompts times `n` (or `best_of`) are more than may be asked for at once",
        "send several requests, or raise `--max-sequences`",
        "NAME asks for PROMPTS x n=N = TOTAL sequences, the limit is LIMIT (--max-sequences); send "
        "several requests",
    ),
    "n=N asks for more": Note(
        "`n` alone is more than may be asked for",
        "send several requests, or raise `--max-sequences`",
    ),
    "(--max-stop)": Note(
        "`stop`, `stop_sequences`, `stop_token_ids` or `bad_words` is too long a list",
        "give fewer, or raise `--max-stop`",
    ),
    "an entry of LONGEST characters": Note(
        "one stop string or bad word has more than 1024 characters", "shorten it"
    ),
    "(--max-logit-bias)": Note(
        "`logit_bias`, `allowed_token_ids` or `logprob_token_ids` names too many tokens",
        "name fewer, or raise `--max-logit-bias`",
    ),
    "(--max-prompt-logprobs)": Note(
        "`prompt_logprobs` of a prompt of this length is too much",
        "ask for fewer, shorten the prompt, or raise `--max-prompt-logprobs`",
        "TOKENS tokens of the prompt with EACH logprobs and their own are TOTAL logprobs, the "
        "limit is LIMIT (--max-prompt-logprobs); ask for fewer, or about a shorter prompt",
    ),
    "return_progress is of type": Note("`return_progress` is neither true nor false", "correct it"),
    "maximum context length": Note(
        "prompt and `max_tokens` together can never fit, in the model or in the KV cache",
        "shorten the prompt, ask for fewer tokens; a larger `--max-model-len` or cache",
        "This model's maximum context length is N tokens, but the request needs TOTAL: PROMPT in "
        "the prompt and REQUESTED requested, or PAGES KV pages of NUM_PAGES, each of PAGE_SIZE "
        "tokens; WAY_OUT.",
    ),
    "which is what the queue holds": Note(
        "one request has more long prompts than may be read and wait together",
        "send several requests, or raise `--max-queue`",
    ),
    "long prompts are waiting already": Note(
        "a long prompt comes while the queue of them is full",
        "come again after `Retry-After`; another replica; `--max-queue`, `--max-long-prefills`",
    ),
    "requests are open already": Note(
        "as many requests are open, in all or with this key, as may be",
        "come again after `Retry-After` (2 s); `--max-requests`, `--max-requests-per-key`",
    ),
    "the engine is starting": Note(
        "the model is being loaded, and only probes are answered",
        "come again after `Retry-After` (10 s); send requests when `/ready` is 200",
    ),
    "no new requests: REFUSING": Note(
        "the service is draining, or its engine has died",
        "come again after `Retry-After` (1 s), on a new connection: another replica, or the next "
        "process",
    ),
    "the service is stopping": Note(
        "the grace time ended before this request had an answer", "send it to another replica"
    ),
    "the engine has died": Note(
        "the engine ended while this request was open", "send it again; the log says why it died"
    ),
}
"""By a part of the message, as `reference_pages.py` reads it from the source."""

FIELDS = (
    "400",
    "`BadRequestError`",
    "`FIELD: WHAT IS EXPECTED; ...`",
    "the body does not fit the route: a field is missing, or of another type",
    "correct the fields named, at most five of them",
)
"""The one message that is made of others' words."""

OF_VLLM = [
    ["400", "`BadRequestError`", "a value that a route, the model or its chat template refuses"],
    ["404", "`NotFoundError`", "`model` is not a name that `/v1/models` lists"],
    ["404", "(a body with `detail` or `error`)", "no such path"],
    ["422", "`UnprocessableEntityError`", "well formed, and not to be processed"],
    ["500", "`InternalServerError`", "a bug, in vLLM or here; the log has it, by request id"],
    ["501", "`NotImplementedError`", "the model or this vLLM does not do what is asked"],
]

WEBSOCKETS = [
    (
        1008,
        "no key that this service knows; before the socket is accepted, so clients see HTTP 403",
    ),
    (1012, "the service is starting, draining or stopping"),
    (1013, "as many requests are open as may be; before it is accepted"),
]

EXIT_CODES = [
    ("magi-serve", "0", "`--help`, `--version`"),
    ("magi-serve", "1", "a package that the command needs is not installed"),
    (
        "magi-serve",
        "2",
        "an option or command is not known, or a value not accepted; so of each below",
    ),
    ("magi-serve serve", "0", "SIGTERM or SIGINT ended it, whether or not requests were cut"),
    ("magi-serve serve", "1", "it could not start, or its engine died"),
    ("magi-serve complete", "0", "the answer is complete, or as long as it may be"),
    ("magi-serve complete", "1", "refused, broken off, no such server or file"),
    ("magi-serve complete", "130", "Ctrl-C"),
    ("magi-serve doctor", "0", "some kernel can run here; with `--check` all that can are right"),
    ("magi-serve doctor", "1", "none can, or one is wrong"),
    ("magi-serve bench", "0", "everything was measured"),
    ("magi-serve bench", "1", "a result was wrong, something failed, there is no GPU"),
    ("magi-serve tune", "0", "everything was tried, or the time was up"),
    ("magi-serve tune", "1", "something failed: a row in use, the GPU, an argument"),
]
