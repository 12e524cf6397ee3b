#!/usr/bin/env bash
# Ask about a file with curl alone:   examples/curl.sh book.txt "Who tells the story?"
#
# Prints the stream as it comes: while the file is read, chunks with "prompt_progress" (and, when
# nothing else is sent for a while, a comment, ": keep-alive"), then the answer in pieces:
#
#   data: {..., "prompt_progress": {"total": 2002, "cache": 0, "processed": 256, "time_ms": 1108}}
#   data: {..., "choices": [{"index": 0, "delta": {"content": "Ishmael"}, ...}]}
#   data: [DONE]
set -euo pipefail
file=${1:?usage: curl.sh FILE QUESTION}
question=${2:?usage: curl.sh FILE QUESTION}
url=${OPENAI_BASE_URL:-http://127.0.0.1:8000/v1}
key=(-H "Authorization: Bearer ${OPENAI_API_KEY:-none}")

model=$(curl -sS --fail-with-body "${key[@]}" "$url/models" |
	python3 -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])')

# A file does not fit on a command line: the body is made, and sent, through a pipe.
python3 - "$model" "$file" "$question" <<'EOF' |
import json, sys
model, file, question = sys.argv[1:]
text = open(file, encoding="utf-8").read()
message = {"role": "user", "content": f"{text}\n\n{question}"}
body = {"model": model, "messages": [message], "stream": True, "return_progress": True}
print(json.dumps(body | {"max_tokens": 64}))
EOF
	curl -sS --fail-with-body -N "${key[@]}" -H "Content-Type: application/json" \
		--data-binary @- "$url/chat/completions"
