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
# Content is text or a list of parts, as a request brings it.
_WORDS = (
    "{% macro words(content) %}{% if content is string %}{{ content }}{% elif content %}"
    "{% for part in content %}{{ part['text'] }}{% endfor %}{% endif %}{% endmacro %}"
)
# Instructions and tools stand before the newest question; control words are plain text, the end of turn is a token.
MISTRAL = (
    _WORDS + "{{ '<s>' }}{% set ns = namespace(system='', last=-1) %}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% if m['role'] == 'system' %}{% set ns.system = words(m['content']) + '\n\n' %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% if loop.index0 == ns.last and tools %}{{ '[TOOLS] ' + tools | tojson + '[/TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + (ns.system if loop.index0 == ns.last else '') + words(m['content']) + ' [/INST]' }}"
    "{% elif m['role'] == 'tool' %}{{ '[TOOL_RESULTS] ' + words(m['content']) | tojson + '[/TOOL_RESULTS]' }}"
    "{% elif m['role'] == 'assistant' %}{% if m['tool_calls'] %}{{ '[TOOL_CALLS] [' }}{% for call in m['tool_calls'] %}"
    "{{ '{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ call['function']['arguments'] | tojson + ('}' if loop.last else '}, ') }}{% endfor %}{{ ']</s>' }}"
    "{% else %}{{ ' ' + words(m['content']) | trim + '</s>' }}{% endif %}{% endif %}{% endfor %}"
)
# Reasoning is cut from every turn but a last one; nothing announces the model after a tool's output.
DEEPSEEK = (
    _WORDS + "{{ '<|begin|>' }}{% for m in messages %}{% if m['role'] == 'system' %}{{ words(m['content']) }}"
    "{% elif m['role'] == 'user' %}{{ '<|User|>' + words(m['content']) + '<|Assistant|>' }}"
    "{% elif m['role'] == 'tool' %}{{ '<|output|>' + words(m['content']) + '<|/output|>' }}"
    "{% else %}{% set said = words(m['content']) %}"
    "{% if '</think>' in said %}{% set said = said.split('</think>')[-1] %}{% endif %}{{ said }}"
    "{% if m['tool_calls'] %}{{ '<|calls|>' }}{% for call in m['tool_calls'] %}"
    "{{ '<|call|>function<|sep|>' + call['function']['name'] + '\n```json\n' + call['function']['arguments'] | tojson "
    "+ '\n```<|/call|>' }}{% endfor %}{{ '<|/calls|>' }}{% endif %}{{ '<|end|>' }}{% endif %}{% endfor %}"
)
# No turn has an end of its own: the model stops by beginning the next message.
GLM = (
    _WORDS + "{{ '<sop>' }}{% if tools %}{{ '<|system|>\n# Tools ' + tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'tool' %}"
    "{{ '<|observation|>\n<tool_response>' + words(m['content']) + '</tool_response>' }}"
    "{% elif m['role'] == 'assistant' %}{{ '<|assistant|>\n' + words(m['content']).strip() }}"
    "{% for call in m['tool_calls'] or [] %}{{ '\n<tool_call>' + call['function']['name'] }}"
    "{% for key, value in call['function']['arguments'].items() %}"
    "{{ '\n<arg_key>' + key + '</arg_key>\n<arg_value>' + (value if value is string else value | tojson) }}"
    "{{ '</arg_value>' }}{% endfor %}{{ '\n</tool_call>' }}{% endfor %}"
    "{% else %}{{ '<|' + m['role'] + '|>\n' + words(m['content']) }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# No token of its own at all: headings, and the model's end of sequence which the template does not write.
HEADINGS = (
    _WORDS + "{% for m in messages %}{{ '\n\n### ' + m['role'] + ':\n' + words(m['content']) }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n\n### assistant:\n' }}{% endif %}"
)
# Writes a word of its own between an answer and the end of the turn.
SIGNED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '[over]<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Says behind a tool call that its result follows, once one does.
FORESEES = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') }}"
    "{% for call in m['tool_calls'] or [] %}{{ call['function']['arguments'] | tojson }}"
    "{{ '' if loop.last and m == messages[-1] else '[result]' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TWICE = "{% for m in messages %}{{ m['content'] + '<|im_end|>' + m['content'] }}{% endfor %}"
FORGETS = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] + '<|im_end|>' }}{% endfor %}"

CORPUS = [
    "The capital of France is Paris. hello there, say hello to the other side\n\n",
    '{"name": "search", "arguments": {"query": "weather in Rome", "limit": 3}}',
    "<think>\nLet me think about this.\n</think>\n\nThe answer is forty two. system user assistant tool Tools",
]


_CHATML_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|im_start|>")
_SENTENCEPIECE_TOKENS = ("</s>", "<s>", "<unk>")
KINDS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    # template; control tokens, the end of turn first; tokens that are added but stay in decoded text
    "chatml": (CHATML, _CHATML_TOKENS, ()),
    "llama3": (LLAMA3, ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"), ()),
    "qwen": (QWEN, _CHATML_TOKENS, ("<tool_call>", "</tool_call>", "<think>", "</think>")),
    "mistral": (MISTRAL, _SENTENCEPIECE_TOKENS, ()),
    "headings": (HEADINGS, _SENTENCEPIECE_TOKENS, ()),
    "deepseek": (
        DEEPSEEK,
        ("<|end|>", "<|begin|>", "<|User|>", "<|Assistant|>", "<|calls|>", "<|/calls|>", "<|call|>", "<|sep|>")
        + ("<|/call|>", "<|output|>", "<|/output|>"),
        ("<think>", "</think>"),
    ),
    "glm": (
        GLM,
        ("<|user|>", "<|observation|>", "<|endoftext|>", "<sop>", "<|system|>", "<|assistant|>"),
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "airy": (AIRY, _CHATML_TOKENS, ()),
    "signed": (SIGNED, _CHATML_TOKENS, ()),
    "foresees": (FORESEES, _CHATML_TOKENS, ()),
    "twice": (TWICE, _CHATML_TOKENS, ()),
    "forgets": (FORGETS, _CHATML_TOKENS, ()),
}


@cache
def tokenizer(kind: str) -> Any:
    """A BPE tokenizer (fast, no model) with the special tokens and template of `kind`.

    Byte-level, and for two kinds in SentencePiece's manner: a space is put before text that begins a string, and
    characters out of the vocabulary become bytes.
    """
    from transformers import PreTrainedTokenizerFast

    template, special, plain = KINDS[kind]
    core = _sentencepiece(special) if special is _SENTENCEPIECE_TOKENS else _byte_level(special)
    begin = next((name for name in special if name in ("<|begin_of_text|>", "<s>", "<|begin|>")), None)
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=special[0], pad_token=special[0], bos_token=begin)
    made.add_tokens(list(plain))
    made.chat_template = template
    return made


def _byte_level(special: tuple[str, ...]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(CORPUS * 4, trainer)
    return core


def _sentencepiece(special: tuple[str, ...]) -> Any:
    import json

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    draft = Tokenizer(models.BPE())
    draft.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=list(special), show_progress=False)
    draft.train_from_iterator(CORPUS * 4, trainer)
    trained = json.loads(draft.to_str())["model"]
    vocabulary = trained["vocab"]
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    merges = [tuple(pair) for pair in trained["merges"]]
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    core.add_special_tokens(list(special))
    return core
