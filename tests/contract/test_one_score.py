"""One prompt with one completion has one score, bit for bit, wherever a reward model reads it; and what sft learns is
what sampling stops at.
"""

from __future__ import annotations

import json

import pytest
import torch
from tiny import byte_tokenizer, new_policy, new_reward_model
from transformers import GenerationConfig

from async_rlhf import OnlineDPOConfig
from async_rlhf.commands.evaluate import _conversations
from async_rlhf.commands.evaluation.answers import human_answers
from async_rlhf.commands.evaluation.generations import Generation
from async_rlhf.commands.evaluation.reward_judge import RewardJudge
from async_rlhf.commands.pairs import best_and_worst
from async_rlhf.commands.ratings import encode_ratings
from async_rlhf.commands.relabel import relabel
from async_rlhf.commands.reward import encode_pairs
from async_rlhf.commands.sft import encode_rows
from async_rlhf.data.formats import MESSAGES
from async_rlhf.data.stream import PromptStream
from async_rlhf.data.tokenizer import decode_samples
from async_rlhf.models.chats import ChatTemplate
from async_rlhf.models.forward import score_rows
from async_rlhf.models.loading import load_reward_model, load_tokenizer, stop_token_ids
from async_rlhf.rewards.reward_models import reward_models
from async_rlhf.rewards.scorer import Scorer
from async_rlhf.types import Batch, Group, Sample

CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}END\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
THOUGHTFUL = (
    "{% if m.role == 'assistant' and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<eos>"
)
KINDS = {
    "eos ends a turn": CHATML.replace("END", "<eos>"),
    "another token does": CHATML.replace("END", "<|end|>"),
    "two stand together": CHATML.replace("END", "<|end|><eos>"),
    "none does": CHATML.replace("END", ""),
    "no template": None,
}
COMPLETIONS = ["21", "2<eos>1", " odd\n", ""]


@pytest.fixture(params=KINDS)
def folder(request, tmp_path):
    """A reward model as ``reward`` leaves it."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<|end|>", "<|start|>"], special_tokens=True)
    tokenizer.chat_template = KINDS[request.param]
    new_reward_model(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "rm")
    tokenizer.save_pretrained(tmp_path / "rm")
    (tmp_path / "rm" / "reward.json").write_text(json.dumps({"stage": "reward"}))
    return str(tmp_path / "rm")


def answers(tokenizer, prompt, stops) -> list[tuple[str, Sample]]:
    """Each completion, ended by each token that ends one."""
    found = []
    for text in COMPLETIONS:
        for stop in stops:
            tokens = [*tokenizer.encode(text), stop]
            zeros = [0] * len(tokens)
            found.append((text, Sample.answer(prompt.tokens, tokens, zeros, zeros, "stop")))
    return found


@pytest.mark.quick
@pytest.mark.parametrize("form", ["text", "chat"])
def test_one_score_everywhere(folder, form):
    tokenizer = load_tokenizer(folder)
    chat, model = ChatTemplate(tokenizer), load_reward_model(folder)
    if form == "chat" and not chat.exists:
        return
    asked = "17+4?" if form == "text" else [{"role": "user", "content": "17+4?"}]
    (prompt,) = PromptStream([{"query": asked}], tokenizer, shuffle=False).batch(1, 1)
    policy = new_policy(vocab_size=len(tokenizer))
    policy.generation_config = GenerationConfig(eos_token_id=[256, 258])  # <eos> and <|end|>
    stops = stop_token_ids(policy, tokenizer)
    assert set(stops) == {256, 258}
    texts, samples = zip(*answers(tokenizer, prompt, stops), strict=True)
    args = OnlineDPOConfig(annotate_batch_size=1, non_eos_penalty=False)
    scored = Scorer(tokenizer, args, model)(Batch(1, 0, (Group(prompt, samples),), 0.0))
    trained = scored.scores_PK[0]
    judge = RewardJudge(folder, [], 1, "cpu")
    query = prompt.columns["query"]
    assert torch.equal(
        torch.tensor(judge([query] * len(texts), [{}] * len(texts), texts, [True] * len(texts))), trained
    )
    known = {} if prompt.messages is None else {MESSAGES: prompt.messages}
    rows = [{"prompt": str(query), **known, "chosen": text, "rejected": text + "x"} for text in texts]
    written, _ = relabel(rows, judge, "data")
    relabelled = [row["rejected_score" if row["swapped"] else "chosen_score"] for row in written]
    assert torch.equal(torch.tensor(relabelled), trained)
    pairs, _ = encode_pairs(rows, chat, 96, "train")
    assert torch.equal(score_rows(model, [pair.chosen for pair in pairs], 1), trained)
    rated = [{"prompt": row["prompt"], **known, "completion": row["chosen"], "score": n} for n, row in enumerate(rows)]
    ratings, _ = encode_ratings(rated, chat, "score", 96, "train")
    assert torch.equal(score_rows(model, [row.tokens for row in ratings], 1), trained)
    said = [[{"role": "assistant", "content": text}] for text in texts]
    whole = [[*(prompt.messages or ()), *each] for each in said]
    columns = {} if prompt.messages is None else {"messages": whole, "completion_messages": said}
    built_in = reward_models(models=[folder], batch_size=1)([query] * len(texts), list(texts), **columns)
    assert torch.equal(torch.tensor(built_in).float(), trained)
    assert len(set(trained.tolist())) == len(COMPLETIONS)


@pytest.mark.quick
def test_an_answer_that_is_no_whole_text_has_its_score_everywhere(folder):
    """Half a character: read as text it would be other tokens. `pairs` keeps them beside such a text, and no other."""
    tokenizer = load_tokenizer(folder)
    chat, model = ChatTemplate(tokenizer), load_reward_model(folder)
    (prompt,) = PromptStream([{"query": "17+4?"}], tokenizer, shuffle=False).batch(1, 1)
    drawn = [[65, 0xE2, 0x82, chat.end], [66, 67, chat.end], [0xF0, 68, 69]]
    reasons = ["stop", "stop", "length"]
    samples = tuple(
        Sample.answer(prompt.tokens, one, [0] * len(one), [0] * len(one), reason)
        for one, reason in zip(drawn, reasons, strict=True)
    )
    args = OnlineDPOConfig(annotate_batch_size=1, non_eos_penalty=False)
    trained = Scorer(tokenizer, args, model)(Batch(1, 0, (Group(prompt, samples),), 0.0)).scores_PK[0].tolist()
    texts = decode_samples(tokenizer, samples)
    judge, prompts = RewardJudge(folder, [], 1, "cpu"), ["17+4?"] * 3
    assert judge(prompts, [{}] * 3, texts, [reason == "stop" for reason in reasons]) == trained
    assert reward_models(models=[folder], batch_size=1)(prompts[:2], texts[:2]) == trained[:2]  # it takes all as ended
    tokens = [None if text.isascii() else text.tokens for text in texts]
    pairs = best_and_worst([prompt], samples, texts, trained, tokens=tokens)
    best, worst = (trained.index(edge(trained)) for edge in (max, min))
    (written,) = json.loads(json.dumps(pairs))
    assert written.get("chosen_tokens") == (None if tokens[best] is None else list(tokens[best]))
    (relabelled,), _ = relabel([written], judge, "data")
    assert (relabelled["chosen_score"], relabelled["rejected_score"]) == (trained[best], trained[worst])
    (pair,), _ = encode_pairs([written], chat, 96, "train")
    assert score_rows(model, [pair.chosen, pair.rejected], 1).tolist() == [trained[best], trained[worst]]
    (row,), _ = encode_rows([written], chat, True, 96, "train")
    assert list(row.tokens[row.start :]) == drawn[best]
    edited = {**written, "chosen": "AB", "rejected": "BA"}  # whoever changes a text means the text
    (pair,), _ = encode_pairs([edited], chat, 96, "train")
    assert tokenizer.decode(pair.chosen).startswith("17+4?AB")


@pytest.mark.quick
@pytest.mark.parametrize("form", ["text", "chat"])
def test_sft_learns_what_sampling_stops_at(folder, form):
    tokenizer = load_tokenizer(folder)
    chat = ChatTemplate(tokenizer)
    if form == "chat" and not chat.exists:
        return
    asked = "17+4?" if form == "text" else [{"role": "user", "content": "17+4?"}]
    (prompt,) = PromptStream([{"query": asked}], tokenizer, shuffle=False).batch(1, 1)
    (row,), _ = encode_rows([{"prompt": asked, "completion": "21"}], chat, True, 96, "train")
    assert row.tokens[: row.start] == prompt.tokens
    *said, end = row.tokens[row.start :]
    assert end in stop_token_ids(new_policy(vocab_size=len(tokenizer)), tokenizer)
    inner = "<|end|>" if "<|end|><eos>" in str(tokenizer.chat_template) and form == "chat" else ""
    assert tokenizer.decode(said) == "21" + inner


@pytest.mark.quick
def test_functions_get_the_same_messages_everywhere(tmp_path):
    """Of one chat with one answer, which has thought first: in training, of pairs in each form, and of a human."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML.replace("{{ m.content }}END", THOUGHTFUL)
    asked, text = [{"role": "user", "content": "17+4?"}], "<think>it is odd</think>21"
    answer = [{"role": "assistant", "content": "21", "reasoning_content": "it is odd"}]
    (prompt,) = PromptStream([{"query": asked}], tokenizer, shuffle=False).batch(1, 1)
    seen = []

    def judged(prompts, completions, messages, completion_messages, **columns):
        seen.append((prompts[0], completions[0], messages[0], completion_messages[0]))
        return [0.0] * len(prompts)

    tokens = [*tokenizer.encode(text), tokenizer.eos_token_id]
    sample = Sample.answer(prompt.tokens, tokens, [0] * len(tokens), [0] * len(tokens), "stop")
    Scorer(tokenizer, OnlineDPOConfig(), reward_funcs=[judged])(Batch(1, 0, (Group(prompt, (sample,)),), 0.0))
    judge = RewardJudge(None, [], 1, "cpu")
    judge.functions, judge.tokenizer, judge.chat = [judged], tokenizer, ChatTemplate(tokenizer)
    sides = {"chosen": answer, "rejected": text}
    for row in (
        {"prompt": asked} | sides,
        {"prompt": str(prompt.columns["query"]), MESSAGES: asked, "chosen": text, "rejected": text},
        {"chosen": asked + answer, "rejected": asked + answer},
    ):
        relabel([row], judge, "data")
    line = Generation(str(prompt.columns["query"]), "", "stop", (), (), prompt.tokens, 0, {}, None, [])
    line.columns.update({MESSAGES: asked, "reference_response": text})
    human = human_answers([line], judge.chat)
    more = _conversations([line], human)
    judge([line.query], [line.columns], human.texts, [True], more)
    assert len(seen) == 8
    assert seen[0] == (str(prompt.columns["query"]), text, asked + answer, answer)
    assert all(one == seen[0] for one in seen)
