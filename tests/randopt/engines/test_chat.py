"""Prompts: template or plain text, special tokens once, bytes of tokens that add up."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitsperbyte.randopt.engines.chat import Prompter

TEMPLATE = ("{{ bos_token }}{% for m in messages %}{% if m.role == 'system' and refuses %}{{ raise_exception('no system role') }}{% endif %}"
            "<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}")
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "12 + 34?"}


@pytest.fixture
def prompter(tokenizer_of: Callable) -> Callable[..., Prompter]:
    def made(bos: bool = True, template: str | None = None, prompt_format: str = "auto", said: list[str] | None = None) -> Prompter:
        tokenizer = tokenizer_of(bos)
        if template:
            tokenizer.chat_template = template
        return Prompter(tokenizer, prompt_format, (said if said is not None else []).append)

    return made


def test_a_template_is_used_where_there_is_one(prompter: Callable) -> None:
    said: list[str] = []
    chat = prompter(template=TEMPLATE, said=said)
    ids = chat.encode([SYSTEM, USER])
    assert chat.format == "chat" and not said
    assert chat._tokenizer.decode(ids) == "<s><system>Be brief.\n<user>12 + 34?\n<assistant>"
    assert ids.count(1) == 1 and ids[0] == 1, "the BOS that the template writes, and no other"


def test_plain_text_joins_contents_behind_one_bos(prompter: Callable) -> None:
    said: list[str] = []
    plain = prompter(said=said)
    ids = plain.encode([SYSTEM, USER])
    assert plain.format == "plain" and len(said) == 1 and "no chat template" in said[0]
    assert ids[0] == 1 and ids.count(1) == 1 and plain.text_of(ids) == "Be brief.\n12 + 34?"
    without = prompter(bos=False)
    assert without.prefix == [] and without.text_of(without.encode([USER])) == "12 + 34?" and 1 not in without.encode([USER])
    asked_for = prompter(template=TEMPLATE, prompt_format="plain", said=said)
    assert asked_for.format == "plain" and len(said) == 1 and asked_for.encode([SYSTEM, USER]) == ids


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_an_empty_system_message_is_left_out(prompter: Callable, template: str | None) -> None:
    made = prompter(template=template)
    assert made.encode([{"role": "system", "content": " \n"}, USER]) == made.encode([USER]) != made.encode([SYSTEM, USER])


def test_chat_without_a_template_is_refused(prompter: Callable) -> None:
    with pytest.raises(ValueError, match="set it to plain"):
        prompter(prompt_format="chat")


def test_a_template_that_refuses_a_role_gets_a_sentence(prompter: Callable) -> None:
    made = prompter(template="{% set refuses = true %}" + TEMPLATE)
    assert made.encode([USER])
    with pytest.raises(ValueError, match="refuses messages of the roles system, user .*no system role.* leave out task.system"):
        made.encode([SYSTEM, USER])


@pytest.mark.parametrize("template", ["{{ 1 // 0 }}", "{{ messages + 1 }}", "{% if %}", "{{ messages[99].content }}", "{{ [].__class__.__base__ }}",
                                      "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"])
def test_a_template_that_fails_in_any_way_gets_a_sentence(prompter: Callable, template: str) -> None:
    with pytest.raises(ValueError, match="the model's chat template refuses messages of the roles user"):
        prompter(template=template).encode([USER])


def test_an_end_token_that_the_tokenizer_appends_does_not_end_the_prompt(tokenizer_of: Callable) -> None:
    from tokenizers import processors

    tokenizer = tokenizer_of(True)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    assert tokenizer("a")["input_ids"][-1] == 2
    made = Prompter(tokenizer, "plain", print)
    assert made.prefix == [1] and 2 not in made.encode([USER])


def test_end_tokens_of_the_generation_config_and_the_tokenizer(prompter: Callable) -> None:
    made = prompter()
    assert made.eos_ids(SimpleNamespace(eos_token_id=[7, 5])) == [2, 5, 7]
    assert made.eos_ids(SimpleNamespace(eos_token_id=7)) == [2, 7]
    assert made.eos_ids(SimpleNamespace(eos_token_id=None)) == made.eos_ids(None) == [2]


def test_text_of_keeps_blanks_and_drops_special_tokens(prompter: Callable) -> None:
    made = prompter()
    text = "  two , blanks .\n\n"
    assert made.text_of([1, *made.document(text)[0], 2]) == text


@settings(max_examples=60, deadline=None)
@given(text=st.one_of(st.text(max_size=60), st.text("aé東🙂 \n", max_size=60)))
def test_bytes_of_tokens_add_up_to_the_text(byte_level: Prompter, text: str) -> None:
    ids, num_bytes = byte_level.document(text)
    assert len(ids) == len(num_bytes) and num_bytes.sum() == len(text.encode())
    assert (num_bytes >= 0).all()
    total = 0
    for i, count in enumerate(num_bytes, 1):  # whenever the tokens so far are whole characters, their bytes are theirs
        total += count
        decoded = byte_level._tokenizer.decode(ids[:i])
        if "\ufffd" not in decoded:
            assert total == len(decoded.encode())


@pytest.fixture(scope="module")
def byte_level(tokenizer_of: Callable) -> Prompter:
    return Prompter(tokenizer_of(False), "plain", print)


def test_what_a_normaliser_takes_away_is_counted(tokenizer_of: Callable) -> None:
    """A tokenizer that trims and lowers the text: offsets leave blanks out, and the bytes are still those of the text."""
    from tokenizers import normalizers

    tokenizer = tokenizer_of(False)
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.Lowercase()])
    made = Prompter(tokenizer, "plain", print)
    ids, num_bytes = made.document("  ÄB c \n ")
    assert made.text_of(ids) == "äb c" and num_bytes.sum() == len("  ÄB c \n ".encode()) and num_bytes[-1] >= 4


def test_a_tokenizer_without_offsets_is_refused() -> None:
    class Slow:
        chat_template, is_fast = None, False

        def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
            return {"input_ids": list(text.encode())}

    made = Prompter(Slow(), "plain", print)
    with pytest.raises(ValueError, match="fast tokenizer"):
        made.document("text")
