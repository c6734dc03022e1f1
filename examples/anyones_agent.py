"""Somebody's agent, which knows nothing of Workbench: a program that is given OPENAI_BASE_URL and a question.

    OPENAI_BASE_URL=http://… OPENAI_API_KEY=unused python examples/anyones_agent.py "Name a river."

It thinks in two turns and prints its last answer. `black_box.py` runs it in a campaign as it is.
"""

import os
import sys

from openai import APIConnectionError, OpenAI
from openai.types.chat import ChatCompletionMessageParam

if len(sys.argv) != 2 or not (os.environ.get("OPENAI_BASE_URL") and os.environ.get("OPENAI_API_KEY")):
    sys.exit('usage: OPENAI_BASE_URL=http://… OPENAI_API_KEY=unused python anyones_agent.py "QUESTION"')

client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": sys.argv[1]}]
for follow_up in ("Are you sure? Answer once more, in one line.", None):
    try:
        answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content or ""
    except APIConnectionError as error:
        sys.exit(f"no connection to {client.base_url}: {error.__cause__ or error}")
    messages.append({"role": "assistant", "content": answer})
    if follow_up:
        messages.append({"role": "user", "content": follow_up})
print(answer, end="")
