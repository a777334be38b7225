"""The tokenizer of the family: byte-level BPE with exactly `VOCAB_SIZE` tokens, digits one by one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from specbench.tiny import english
from specbench.tiny.world import training_examples

VOCAB_SIZE = 16384
BOS, USER, ASSISTANT, END, PAD = SPECIALS = ("<|bos|>", "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>")
CONTEXT = 4096
TOKENIZER_SEED = 77

# <|bos|>, then per exchange <|user|>question<|assistant|>answer<|end|>.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' + message['content'] + '<|end|>' }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] + '\\n' }}"
    "{% else %}{{ raise_exception('unknown role: ' + message['role']) }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def training_text(examples: int) -> Iterator[str]:
    """World text, and English word lists with every ending so that prompts from outside encode compactly."""
    for example in islice(training_examples(TOKENIZER_SEED), examples):
        yield from example.turns
        yield from example.answers
    for word in english.FREQUENT:
        forms = [word, word + "s", word + "ed", word + "ing", word.capitalize()]
        yield " ".join([""] + forms + [word] * 40)
    for ending in english.ENDINGS:
        yield f"x{ending} " * 200
    for mark in (
        "->",
        "==",
        "!=",
        "<=",
        ">=",
        "():",
        "):",
        "()",
        "[]",
        "...",
        "--",
        "://",
        "  ",
        "    ",
        "\n\n",
        '"',
        "'s",
        "'t",
    ):
        yield f"a{mark} b" * 100


def train_tokenizer(examples: int, vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Train on `examples` world examples; ValueError when the text does not fill the vocabulary."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])  # fmt: skip
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIALS), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), min_frequency=1,
    )  # fmt: skip
    core.train_from_iterator(training_text(examples), trainer)
    if core.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the text gives {core.get_vocab_size()} tokens, not {vocab_size}: use more examples"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=BOS, eos_token=END, pad_token=PAD, chat_template=CHAT_TEMPLATE,
        additional_special_tokens=[USER, ASSISTANT], clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT, padding_side="left",
    )  # fmt: skip


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a folder."""
    return PreTrainedTokenizerFast.from_pretrained(folder)
