"""The tokenizer of a new model, and how prompts and responses become tokens."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from async_rlhf.config import ConfigError, NewModelConfig
from async_rlhf.data.tokenizer import decode_samples, encode_responses, encode_texts, split_text, train_tokenizer
from async_rlhf.models.chats import ChatTemplate
from async_rlhf.models.loading import load_tokenizer
from async_rlhf.models.new import new_language_model
from async_rlhf.models.saving import write_model

TEXTS = ["def read_file(path): Return the content.", "def write_file(path, text): Write the text."] * 20
HARD = ["", " two  spaces ", "tab\tand\nline\r\n", "naïve Ünïcode — 漢字 🙂", "don't , stop .", "<|endoftext|x"]


@pytest.fixture(scope="module")
def bpe():
    return train_tokenizer(TEXTS, vocab_size=320, max_length=64)


def test_every_text_survives(bpe):
    for text, ids in zip(HARD, encode_texts(bpe, HARD), strict=True):
        assert bpe.decode(ids) == text


def test_special_tokens_and_sizes(bpe):
    assert (bpe.eos_token, bpe.eos_token_id) == ("<|endoftext|>", 0)
    assert (bpe.pad_token, bpe.pad_token_id) == ("<|padding|>", 1)
    assert bpe.encode("a<|endoftext|>b") == [*bpe.encode("a"), 0, *bpe.encode("b")]
    assert 258 < len(bpe) <= 320
    assert bpe.model_max_length == 64
    assert len(encode_texts(bpe, [" path"])[0]) < len(" path")  # merges were learned


def test_the_same_texts_give_the_same_tokenizer(bpe):
    assert train_tokenizer(iter(TEXTS), 320, 64).backend_tokenizer.to_str() == bpe.backend_tokenizer.to_str()
    ended = train_tokenizer([text + "<|endoftext|>" for text in TEXTS], 320, 64)
    assert ended.get_vocab() == bpe.get_vocab()  # the end is a token of its own, not text to learn


def test_saved_beside_a_model_it_is_read_back_alike(bpe, tmp_path):
    model = new_language_model(NewModelConfig(hidden_size=16, num_layers=1, num_heads=2), bpe, seed=0)
    write_model(model, bpe, tmp_path / "model")
    for loaded in (load_tokenizer(str(tmp_path / "model")), AutoTokenizer.from_pretrained(tmp_path / "model")):
        assert loaded.get_vocab() == bpe.get_vocab()
        assert (loaded.eos_token_id, loaded.pad_token_id) == (0, 1)
        assert list(encode_texts(loaded, HARD + TEXTS)) == list(encode_texts(bpe, HARD + TEXTS))


def test_a_response_ends_once_or_not_at_all(bpe):
    plain, spelled, cut = encode_responses(
        ChatTemplate(bpe), ["Return.", "Return.<|endoftext|>", "Return."], [True, True, False]
    )
    assert plain == spelled == (*cut, 0)
    assert cut == encode_texts(bpe, ["Return."])[0]
    assert encode_responses(ChatTemplate(bpe), [""]) == [(0,)]
    assert encode_responses(ChatTemplate(bpe), []) == []


def test_the_query_must_be_the_start_of_the_text():
    assert split_text({"query": "ab", "query_reference_response": "abc"}, "x") == ("ab", "c")
    assert split_text({"query_reference_response": "abc"}, "x") == ("", "abc")
    with pytest.raises(ConfigError, match=r"train: row 7: .* must begin with `query`, 'b'; it begins with 'a'"):
        split_text({"query": "b", "query_reference_response": "abc"}, "train: row 7")


def test_a_model_without_tokenizer_files_is_refused(tmp_path, make_policy, tokenizer):
    make_policy().save_pretrained(tmp_path / "bare")
    with pytest.raises(ConfigError, match=r"reward_model: no tokenizer could be loaded from '.*bare'; it has none"):
        load_tokenizer(str(tmp_path / "bare"), "reward_model")
    tokenizer.save_pretrained(tmp_path / "bare")
    assert load_tokenizer(str(tmp_path / "bare")).encode("a") == tokenizer.encode("a")


def test_of_no_samples_there_are_no_texts(tokenizer):
    """As with num_samples_logged 0."""
    assert decode_samples(tokenizer, []) == []
