"""Text is encoded and decoded with bytes, and with the tokenizer and chat template of a checkpoint."""

import dataclasses
import datetime
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from experiments.rl import chat_templates
from experiments.rl.chat_templates import chat_renderer
from experiments.rl.checkpoint_tokenizer import load_tokenizer
from experiments.rl.configs import Train
from experiments.rl.policy import TINY
from experiments.rl.rewards import score_responses
from experiments.rl.tasks import TASKS, Example
from experiments.rl.tokens import BOS, BYTES, EOS, PAD, VOCABULARY
from experiments.rl.trainer import Trainer

START, END, TURN, TURN_END, FILL = SPECIAL = ("<s>", "</s>", "<|turn|>", "<|turn_end|>", "<fill>")
TEXT = "How many letters are in the word letters? Count the letters of the word."
# Similar to the template of Qwen3: whitespace control, a reversed loop, a namespace, and tools that are not given.
CHAT = """\
{%- if tools %}
    {{- '<|turn|>system\\nTools: ' ~ tools | tojson }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.last < 0 and message.role == "user" and message.content is string %}
        {%- set ns.last = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- if ns.last < 0 %}
    {{- raise_exception('no user') }}
{%- endif %}
{%- for message in messages %}
    {{- '<|turn|>' + message.role + '\\n' + message.content + '<|turn_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|turn|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


@pytest.fixture(scope="module")
def bpe():
    """Train a tiny byte-level BPE tokenizer with special tokens, similar to those of Qwen and Llama."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


@pytest.fixture
def checkpoint(bpe, tmp_path):
    """Return a function that writes the tokenizer files of a checkpoint."""

    def write(template=None, *, backend=bpe, model=None, generation=None, **settings):
        backend.save(str(tmp_path / "tokenizer.json"))
        settings = {"bos_token": START, "eos_token": {"content": END, "__type": "AddedToken"}} | settings
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        for name, values in (("config", model), ("generation_config", generation)):
            if values is not None:
                (tmp_path / f"{name}.json").write_text(json.dumps(values))
        if template is not None:
            (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
        return tmp_path

    return write


def copied(bpe):
    return tokenizers.Tokenizer.from_str(bpe.to_str())


@given(st.text())
def test_bytes_round_trip(text):
    assert BYTES.encode_prompt(text) == [BOS, *text.encode()]
    tokens = BYTES.encode_answer(text)
    assert tokens == [*text.encode(), EOS]
    assert BYTES.decode([BOS, *tokens, *tokens, PAD]) == text


def test_bytes_decode_invalid_text_and_special_tokens():
    assert BYTES.decode([0xC3, PAD, BOS, 65]) == "\ufffdA"
    assert {PAD, BOS, EOS} == set(range(256, VOCABULARY))
    assert (BYTES.ends, BYTES.pad, BYTES.size) == ((EOS,), PAD, VOCABULARY)
    assert np.flatnonzero(~BYTES.allowed(VOCABULARY + 1)).tolist() == [PAD, BOS, VOCABULARY]


def test_pad_sequences_pads_or_rejects():
    padded = BYTES.pad_sequences([[BOS, 1], []], 2)
    assert (padded.tolist(), padded.dtype) == ([[BOS, 1], [PAD, PAD]], np.int32)
    with pytest.raises(ValueError, match="sequence 1 has 3 tokens and must have at most 2"):
        BYTES.pad_sequences([[1], [1, 2, 3]], 2)


@pytest.mark.parametrize("text", [TEXT, " é🙂\n\n  2+2=", "", "<s> and </s"])
def test_checkpoint_tokenizer_round_trip(checkpoint, bpe, text):
    tokenizer = load_tokenizer(checkpoint())
    answer = tokenizer.encode_answer(text)
    assert answer[-1] == bpe.token_to_id(END)
    assert tokenizer.decode([*answer, 70, 71]) == text.replace(START, "")
    assert tokenizer.encode_prompt(TEXT) == bpe.encode(TEXT, add_special_tokens=False).ids
    assert len(tokenizer.encode_prompt(TEXT)) < len(TEXT) / 3
    assert tokenizer.size == bpe.get_vocab_size()
    # Models have more ids than the tokenizer; decoding leaves these out.
    assert tokenizer.decode([70, tokenizer.size + 5, 70]) == tokenizer.decode([70, 70])


def test_load_tokenizer_reads_special_tokens_from_the_files_beside_it(checkpoint, bpe):
    start, end, turn, turn_end, fill = map(bpe.token_to_id, SPECIAL)
    plain = load_tokenizer(checkpoint())
    assert (plain.ends, plain.pad) == ((end,), end)
    assert load_tokenizer(checkpoint(pad_token="<none>")).pad == end
    assert load_tokenizer(checkpoint(pad_token=FILL)).pad == fill
    assert load_tokenizer(checkpoint(model={"eos_token_id": turn})).ends == (end, turn)
    # Responses never contain the padding or start token, unless it is an end token.
    assert (plain.never, load_tokenizer(checkpoint(pad_token=FILL)).never) == ((start,), (fill, start))
    assert load_tokenizer(checkpoint(bos_token=END)).never == ()
    several = load_tokenizer(checkpoint(generation={"eos_token_id": [turn_end, end]}))
    assert several.ends == (end, turn_end), "generation_config.json replaces config.json"
    assert several.encode_answer("")[-1] == end
    assert load_tokenizer(checkpoint(eos_token=None)).ends == (turn_end, end)
    assert load_tokenizer(checkpoint(generation={"eos_token_id": 5000})).size == 5001
    word = several.encode_text("word")
    for stop in several.ends:
        assert several.decode([start, turn, *word, fill, stop, *word]) == "word"


def test_load_tokenizer_starts_prompts_like_the_checkpoint(checkpoint, bpe):
    start, end = bpe.token_to_id(START), bpe.token_to_id(END)
    words = bpe.encode(TEXT, add_special_tokens=False).ids
    both = copied(bpe)
    ids = [(START, start), (END, end)]
    both.post_processor = processors.TemplateProcessing(single=f"{START} $A {END}", special_tokens=ids)
    assert load_tokenizer(checkpoint(backend=both)).encode_prompt(TEXT) == [start, *words]
    assert load_tokenizer(checkpoint(backend=both)).encode_answer(TEXT) == [*words, end]
    assert load_tokenizer(checkpoint()).encode_prompt(TEXT) == words
    chat = load_tokenizer(checkpoint("{{ bos_token }}{{ messages[0].content }}", backend=both))
    assert chat.encode_prompt(TEXT) == [start, *words], "the template writes BOS, nothing adds it again"


def test_load_tokenizer_neither_truncates_nor_pads(checkpoint, bpe):
    cutting = copied(bpe)
    cutting.enable_truncation(4)
    cutting.enable_padding(length=64, pad_token=FILL)
    tokenizer = load_tokenizer(checkpoint(backend=cutting))
    assert tokenizer.encode_prompt(TEXT) == bpe.encode(TEXT).ids
    assert tokenizer.decode(tokenizer.encode_answer(TEXT)) == TEXT


def test_load_tokenizer_applies_the_chat_template(checkpoint, bpe):
    tokenizer = load_tokenizer(
        checkpoint(CHAT, chat_template="{{ raise_exception('the file comes first') }}")
    )
    tokens = tokenizer.encode_prompt("2 < 3 & é?")
    expected = f"{TURN}user\n2 < 3 & é?{TURN_END}\n{TURN}assistant\n"
    assert bpe.decode(tokens, skip_special_tokens=False) == expected
    turn, turn_end = bpe.token_to_id(TURN), bpe.token_to_id(TURN_END)
    assert (tokens.count(turn), tokens.count(turn_end)) == (2, 1)
    # Answers are not put into the chat template.
    assert tokenizer.encode_answer("3") == [*bpe.encode("3").ids, bpe.token_to_id(END)]


SPACED = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }} {{ eos_token }}{% endfor %}[assistant]"
"""A template with a blank before the ends of messages, like that of Llama 2."""


@pytest.mark.parametrize(("template", "end"), [(CHAT, TURN_END), (SPACED, END)], ids=["chat", "spaced"])
def test_replies_continue_the_chat_of_the_template(checkpoint, bpe, template, end):
    """Prompt, turn and reply are the template's chat of three messages. The end of the turn is there once."""
    tokenizer = load_tokenizer(checkpoint(template, eos_token=end))
    answer, reply = tokenizer.encode_answer("2 + 2 ="), tokenizer.encode_reply("4 is\nit")
    text = bpe.decode([*tokenizer.encode_prompt("?"), *answer, *reply], skip_special_tokens=False)
    whole = chat_renderer(template, {"bos_token": START, "eos_token": end}, place="a template")
    assert text == whole("?", "2 + 2 =", "4 is\nit").replace(f"= {end}", f"={end}")
    assert tokenizer.decode_turns([*answer, *tokenizer.encode_answer("4")]) == ["2 + 2 =", "4"]


def test_replies_without_a_chat_template_are_plain_text(checkpoint, bpe):
    assert load_tokenizer(checkpoint()).encode_reply(TEXT) == bpe.encode(TEXT, add_special_tokens=False).ids
    assert BYTES.encode_reply("é") == [195, 169]


@pytest.mark.parametrize(
    ("template", "refusal"),
    [
        ("{{ messages[0].content }}", "leaves out the assistant's message before the last of the user$"),
        (
            "{% if messages|length > 1 %}{{ raise_exception('once') }}{% endif %}",
            r"chat_template\.jinja: once$",
        ),
    ],
)
def test_templates_that_take_no_reply_are_rejected_when_replies_are_encoded(checkpoint, template, refusal):
    tokenizer = load_tokenizer(checkpoint(template))
    with pytest.raises(ValueError, match=refusal):
        tokenizer.encode_reply("?")


TODAY = datetime.datetime.now().strftime("%Y")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages | tojson }}", '[{"role": "user", "content": "a <b> & é\'"}]'),
        ("{{ {'b': 1, 'a': 'é'} | tojson(indent=1) }}", '{\n "b": 1,\n "a": "é"\n}'),
        ("{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ pad_token is defined }}", "<s>|</s>||False"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}.", "a <b> & é'."),
        ("{% for i in range(9) %}{% if i is odd %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02468"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ strftime_now('%Y') }}", TODAY),
        ("{{ tools is none }} {{ tools is defined }} {{ documents is none }}", "True True True"),
    ],
)
def test_chat_renderer_has_the_documented_functions(checkpoint, bpe, template, expected):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": template}]
    for settings in ({"chat_template": template}, {"chat_template": named}):
        tokens = load_tokenizer(checkpoint(**settings)).encode_prompt("a <b> & é'")
        assert bpe.decode(tokens, skip_special_tokens=False) == expected


def test_chat_renderer_renders_the_same_as_transformers():
    golden = json.loads(
        (Path(__file__).parent / "golden" / "chat_templates.json").read_text(encoding="utf-8")
    )
    assert len(golden["cases"]) == 3
    for case in golden["cases"]:
        render = chat_renderer(case["template"], golden["special_tokens"], place="golden")
        assert [render(prompt) for prompt in golden["prompts"]] == case["texts"]


@pytest.mark.parametrize(
    ("template", "refusal"),
    [
        ("{{ raise_exception('Only systems\\nspeak') }}", r"chat_template\.jinja: Only systems speak$"),
        ("a\n{% if %}", r"chat_template\.jinja, line 2: Expected an expression"),
        ("{{ messages[0].name.first }}", r"chat_template\.jinja: .* has no attribute 'name'$"),
        ("{{ messages[0]['content'] + 1 }}", r"chat_template\.jinja: can only concatenate str"),
        ("{{ messages.__class__.__mro__ }}", r"chat_template\.jinja: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", r"chat_template\.jinja: access to attribute 'append'"),
        ("{{ 'x' * 10**10 }}", r"chat_template\.jinja: MemoryError$"),
        ("{{ 'x' * 2**21 }}", r"chat_template\.jinja: it gives more than 1048576 characters$"),
        ("x" * 2**21, r"chat_template\.jinja: a template of 2097152 characters; at most 1048576$"),
    ],
)
def test_load_tokenizer_rejects_templates_that_fail(checkpoint, template, refusal):
    with pytest.raises(ValueError, match=refusal):
        load_tokenizer(checkpoint(template))


def test_load_tokenizer_rejects_templates_that_take_too_long(checkpoint, monkeypatch):
    monkeypatch.setattr(chat_templates, "MOST_SECONDS", 1.0)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ValueError, match=r"chat_template\.jinja: it takes more than 1 s$"):
        load_tokenizer(checkpoint(loop))


def test_load_tokenizer_rejects_named_templates_without_a_default(checkpoint):
    with pytest.raises(
        ValueError, match=r"chat_template: none of the templates \['tools'\] is named default$"
    ):
        load_tokenizer(checkpoint(chat_template=[{"name": "tools", "template": ""}]))
    with pytest.raises(ValueError, match="chat_template: expected a text or named texts, found int"):
        load_tokenizer(checkpoint(chat_template=3))


def test_load_tokenizer_rejects_folders_without_a_tokenizer(checkpoint, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"no tokenizer\.json, which the model of this checkpoint needs"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer \(.+\)$"):
        load_tokenizer(tmp_path)
    for broken, refusal in (("{", "not JSON"), ("[]", "expected a JSON object, found list")):
        (checkpoint() / "tokenizer_config.json").write_text(broken)
        with pytest.raises(ValueError, match=rf"tokenizer_config\.json: {refusal}"):
            load_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match="reading a tokenizer needs the extra rl"):
        load_tokenizer(tmp_path)


def test_load_tokenizer_needs_a_token_that_ends_responses(checkpoint):
    with pytest.raises(ValueError, match="no token ends a response: set eos_token in tokenizer_config"):
        load_tokenizer(checkpoint(eos_token=None, model={"eos_token_id": None}))
    with pytest.raises(ValueError, match=r"eos_token '<end>' is not in tokenizer\.json"):
        load_tokenizer(checkpoint(eos_token="<end>"))
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id=\['x'\] must be token ids"):
        load_tokenizer(checkpoint(generation={"eos_token_id": "x"}))


def test_trainer_uses_the_given_tokenizer(checkpoint, bpe):
    tokenizer = load_tokenizer(checkpoint(generation={"eos_token_id": [bpe.token_to_id(TURN_END)]}))
    with pytest.raises(
        ValueError, match=f"tokenizer has {tokenizer.size} tokens, .* vocabulary has only {VOCABULARY}"
    ):
        Trainer(Train(), 0, tokenizer=tokenizer)
    end, turn_end = tokenizer.ends
    [four] = tokenizer.encode_text("4")
    tokens = np.array([[9, four, end, four], [9, four, turn_end, four], [9, four, four, end]])
    rewards = score_responses(
        TASKS["add"], [Example("2+2=", "4")] * 3, tokens, np.array([[0, 1, 1, 1]] * 3, bool), tokenizer
    )
    assert rewards.reward.tolist() == [1, 1, 0]


@pytest.mark.long
def test_trainer_generates_and_learns_with_the_tokenizer_of_a_checkpoint(checkpoint, monkeypatch):
    smallest = dataclasses.replace(
        TINY, width=16, layers=1, heads=2, kv_heads=1, head_width=8, expert_width=8, vocabulary=320
    )
    monkeypatch.setattr("experiments.rl.configs.POLICIES", {"tiny": smallest})
    tokenizer = load_tokenizer(checkpoint(CHAT, pad_token=FILL))
    # With so many end tokens, responses of an untrained model end.
    tokenizer = dataclasses.replace(tokenizer, ends=(*tokenizer.ends, *range(100, tokenizer.size)))
    config = Train(
        task="add",
        prompts=8,
        responses_per_prompt=4,
        prompt_tokens=40,
        response_tokens=6,
        evaluation_batches=1,
    )
    trainer = Trainer(config, 0, tokenizer=tokenizer)
    examples = trainer.sampler.examples(0)
    actual = trainer.sampler.respond(examples, jax.random.key(0)).responses
    assert tokenizer.size < 320
    assert tokenizer.allowed(320)[actual.tokens[actual.response_mask]].all()
    assert (actual.tokens[~actual.mask] == tokenizer.pad).all()
    assert 0.9 < actual.ended.mean() <= 1
    for example, tokens, mask, response in zip(
        examples, actual.tokens, actual.mask, actual.response_mask, strict=True
    ):
        assert tokens[mask & ~response].tolist() == tokenizer.encode_prompt(example.prompt)
        assert not np.isin(tokens[response][:-1], tokenizer.ends).any()
    assert trainer.evaluate()["evaluation/failed"] == 0
    assert trainer.warm_up()["warmup/loss"] == pytest.approx(np.log(320), rel=0.05)
    monkeypatch.setattr(trainer.prompts, "config", dataclasses.replace(config, prompt_tokens=9))
    with pytest.raises(
        ValueError,
        match=r"only 0 of 64 examples fit prompt_tokens=9 .* the longest prompt has \d\d tokens and",
    ):
        trainer.sampler.examples(0)
