"""Small tokenizers with chat templates that splicing must get right: ChatML, Llama-3-like, Qwen-like, and bad ones."""

from __future__ import annotations

from functools import cache
from typing import Any

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{% if message['tool_calls'] %}{% set call = message['tool_calls'][0]['function'] %}"
    "{{ '{\"name\": \"' + call['name'] + '\", \"parameters\": ' + call['arguments'] | tojson + '}' }}"
    "{% else %}{{ message['content'] | trim }}{% endif %}{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Strips the reasoning of earlier turns, keeps that of the last one; tool results are grouped into user turns.
QWEN = (
    "{% if tools %}{{ '<|im_start|>system\nTools: ' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + message['content'] + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% elif message['role'] == 'assistant' %}{% set content = message['content'] or '' %}"
    "{% if '</think>' in content and not loop.last %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\n' + content }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '\n<tool_call>\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' "
    "+ call['function']['arguments'] | tojson + '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Puts a line break before its end of turn, which a model that ends the turn by itself has not sampled.
AIRY = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '\n<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TWICE = "{% for m in messages %}{{ m['content'] + '<|im_end|>' + m['content'] }}{% endfor %}"
FORGETS = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] + '<|im_end|>' }}{% endfor %}"

CORPUS = [
    "The capital of France is Paris. hello there, say hello to the other side\n\n",
    '{"name": "search", "arguments": {"query": "weather in Rome", "limit": 3}}',
    "<think>\nLet me think about this.\n</think>\n\nThe answer is forty two. system user assistant tool Tools",
]


@cache
def tokenizer(kind: str) -> Any:
    """A byte-level BPE tokenizer (fast, no model) with the special tokens and template of `kind`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    llama = kind == "llama3"
    special = (
        ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
        if llama
        else ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]
    )
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(CORPUS * 4, trainer)
    end = "<|eot_id|>" if llama else "<|im_end|>"
    begin = "<|begin_of_text|>" if llama else None
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end, pad_token=end, bos_token=begin)
    if kind == "qwen":
        # Added, but not special: they stay in decoded text.
        made.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    made.chat_template = {
        "chatml": CHATML, "llama3": LLAMA3, "qwen": QWEN, "airy": AIRY, "twice": TWICE, "forgets": FORGETS
    }[kind]  # fmt: skip
    return made
