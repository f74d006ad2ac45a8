"""Messages to token ids and back: the chat template where the tokenizer has one, plain text otherwise, special tokens exactly once."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np


class Prompter:
    """The tokenizer as an engine uses it. `prompt_format` as in the config; `format` is what it came to: chat or plain. ValueError for
    chat where the tokenizer has no template."""

    def __init__(self, tokenizer: Any, prompt_format: Literal["auto", "chat", "plain"], say: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if prompt_format == "chat" and not has_template:
            raise ValueError("model.prompt_format is chat, and this model's tokenizer has no chat template: set it to plain, or take the "
                             "instruction-tuned version of the model")
        if prompt_format == "auto" and not has_template:
            say("the tokenizer has no chat template: prompts are plain text, the messages' contents joined by newlines")
        self.format: Literal["chat", "plain"] = "plain" if prompt_format == "plain" or not has_template else "chat"
        self.prefix = self._special_prefix()

    def encode(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Ids of one prompt, ready for the answer to follow. A system message without text is left out. A template writes the special
        tokens it wants itself; plain text gets those that the tokenizer puts first (a BOS, mostly)."""
        messages = [m for m in messages if m["role"] != "system" or m["content"].strip()]
        if self.format == "plain":
            return self.prefix + self._ids("\n".join(m["content"] for m in messages))
        try:
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # the template is a program of its own: beside TemplateError it may fail as any expression does
            roles = ", ".join(m["role"] for m in messages)
            raise ValueError(f"the model's chat template refuses messages of the roles {roles} ({error}): leave out task.system where it is "
                             "set, or set model.prompt_format to plain") from error
        return self._ids(text)

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of generated ids, without special tokens and with every blank as it is."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def document(self, text: str) -> tuple[list[int], np.ndarray]:
        """(ids without special tokens, int64 bytes of each). A token's bytes are the UTF-8 bytes of the text from the end of the token
        before it to its own end, so that they add up to the text's: characters split over several tokens, blanks that offsets leave
        out and added prefixes count once. ValueError for a tokenizer without offsets."""
        if not getattr(self._tokenizer, "is_fast", False):
            raise ValueError("this model's tokenizer cannot say which token stands for which bytes (it has no tokenizer.json): take a model "
                             "with a fast tokenizer to score text")
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = list(encoded["input_ids"])
        if not ids:
            return [], np.zeros(0, np.int64)
        ends = np.maximum.accumulate(np.array([end for _, end in encoded["offset_mapping"]], np.int64))
        ends[-1] = len(text)  # what a normaliser trims from the end of a text belongs to its last token
        code_points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        widths = 1 + (code_points >= 0x80).astype(np.int64) + (code_points >= 0x800) + (code_points >= 0x10000)
        before = np.concatenate([[0], np.cumsum(widths)])
        return ids, np.diff(before[ends], prepend=0)

    def eos_ids(self, generation_config: Any) -> list[int]:
        """Ids that end an answer: those of the generation config, and the tokenizer's end token."""
        found = getattr(generation_config, "eos_token_id", None)
        ids = {found} if isinstance(found, int) else set(found or [])
        return sorted(ids | {i for i in [self._tokenizer.eos_token_id] if i is not None})

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _special_prefix(self) -> list[int]:
        """Special tokens that the tokenizer puts before a text. Those that it puts after one would end the prompt, and are left out."""
        plain = self._ids("a")
        whole = list(self._tokenizer("a", add_special_tokens=True, verbose=False)["input_ids"])
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return whole[:start]
        return []
