"""Text to token ids for an encoder, and two texts to the ids of one input: [CLS] premise [SEP] hypothesis [SEP].

A tokenizer is a tokenizer.json, whose truncation and padding are switched off, or a vocab.txt with BERT's rules. A text
that is too long keeps its first tokens and the last one, as in `transformers`. In a pair that is too long, only the
premise is truncated, because a truncated hypothesis is a different claim.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from thresher.common.errors import UserError
from thresher.common.files import MOST_TOKENIZER, check_file, read_bytes, read_json_object
from thresher.policy.tokenizer import panics_refused

# Characters that are read per token of the limit, so that a text of any size takes bounded time and memory. A token of
# real text is 4 or 5 characters, and WordPiece maps a word of more than 100 to the unknown token.
CHARACTERS_PER_TOKEN = 100
# Texts passed to the library at once; its memory for one is about thirty times the text.
TEXTS_AT_ONCE = 128
# A model's vocabulary may be padded to a round number for speed. A larger difference means another model's tokenizer.
PADDING_ROWS = 128
_SPECIAL = ("[UNK]", "[SEP]", "[CLS]", "[PAD]", "[MASK]")


class WordPiece:
    """A tokenizer that puts one token before and one after a text, read from `files`. See `load_wordpiece`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, max_length: int, files: tuple[Path, ...]) -> None:
        self._tokenizer = tokenizer
        self.max_length = max_length
        self.files = files

    def encode(self, texts: list[str]) -> tuple[list[list[int]], int]:
        """Return the ids of each text, at most `max_length`, and the number of truncated texts. A lone surrogate is
        read as a question mark."""
        limit = CHARACTERS_PER_TOKEN * self.max_length
        kept: list[list[int]] = []
        cut = 0
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            part = texts[start : start + TEXTS_AT_ONCE]
            heads = [_head(text, limit).encode("utf-8", "replace").decode() for text in part]
            with panics_refused(heads, str(self.files[0])):
                encodings = self._tokenizer.encode_batch_fast(heads)
            for text, encoding in zip(part, encodings, strict=True):
                ids = encoding.ids
                cut += len(ids) > self.max_length or len(text) > limit
                kept.append(ids if len(ids) <= self.max_length else [*ids[: self.max_length - 1], ids[-1]])
        return kept, cut

    @property
    def separates(self) -> bool:
        """Return whether [SEP] in a text is read as the token that BERT puts between two texts."""
        return len(self._tokenizer.encode("[SEP]", add_special_tokens=False).ids) == 1

    def count(self, texts: list[str]) -> list[int]:
        """Return the number of tokens of each text, not truncated, without special tokens."""
        return count_tokens(self._tokenizer, texts)


def _head(text: str, limit: int) -> str:
    """Return the text, or the whole words among the first `limit` characters of a longer one."""
    return text if len(text) <= limit else re.sub(r"\s\S*\Z", "", text[:limit])


def count_tokens(tokenizer: tokenizers.Tokenizer, texts: list[str]) -> list[int]:
    """Return the number of tokens of each text, without those that the tokenizer puts around it."""
    return [len(encoding.ids) for encoding in _encode_bare(tokenizer, texts, "the encoder's tokenizer.json")]


def _encode_bare(tokenizer: tokenizers.Tokenizer, texts: list[str], where: str) -> list[tokenizers.Encoding]:
    whole = [text.encode("utf-8", "replace").decode() for text in texts]
    with panics_refused(whole, where):
        encodings: list[tokenizers.Encoding] = tokenizer.encode_batch_fast(whole, add_special_tokens=False)
    return encodings


def load_wordpiece(folder: Path, vocab_size: int, max_length: int) -> WordPiece:
    """Read the tokenizer of a model folder for a model with `vocab_size` rows of embeddings."""
    tokenizer, files = read_tokenizer(folder, vocab_size)
    return WordPiece(tokenizer, max_length, files)


def read_tokenizer(folder: Path, vocab_size: int, pairs: bool = False) -> tuple[tokenizers.Tokenizer, tuple[Path, ...]]:
    """Return the tokenizer of a model folder, without truncation and padding, and its files. UserError if its
    vocabulary is not that of a model with `vocab_size` rows, or it puts no tokens around a text (or a pair)."""
    tokenizer, files = _read(folder)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    rows = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
    if not vocab_size - PADDING_ROWS < rows <= vocab_size:
        raise UserError(
            f"{files[0]}: has {rows} tokens, but the model {vocab_size}; use the tokenizer that belongs to the model"
        )
    if tokenizer.num_special_tokens_to_add(True) < 3 if pairs else len(tokenizer.encode("").ids) != 2:
        where = "tokens of its own around two texts" if pairs else "token of its own before and after a text"
        raise UserError(
            f"{files[0]}: adds no {where}, like BERT's [CLS] and [SEP]; use the tokenizer that belongs to the model"
        )
    return tokenizer, files


def ignores_case(folder: Path) -> bool:
    """Return whether the tokenizer of a model folder reads capitals as small letters."""
    normalizer = _read(folder)[0].normalizer
    return normalizer is not None and bool(normalizer.normalize_str("A") == "a")


def _read(folder: Path) -> tuple[tokenizers.Tokenizer, tuple[Path, ...]]:
    path = folder / "tokenizer.json"
    if os.path.lexists(path):
        data = read_bytes(path, MOST_TOKENIZER)
        try:
            with panics_refused([], str(path)):
                return tokenizers.Tokenizer.from_buffer(data), (path,)
        except UserError:
            raise
        except Exception as error:  # the library raises nothing more specific
            raise UserError(f"{path}: not a tokenizers file ({_first_line(error)}); fetch it again") from None
    vocabulary, config = folder / "vocab.txt", folder / "tokenizer_config.json"
    if not os.path.lexists(vocabulary):
        raise UserError(f"{folder}: holds neither tokenizer.json nor vocab.txt; fetch the model's tokenizer")
    return _from_vocabulary(vocabulary, config), (vocabulary, config)


def _from_vocabulary(vocabulary: Path, config: Path) -> tokenizers.Tokenizer:
    settings = read_json_object(config)
    if not isinstance(lowercase := settings.get("do_lower_case"), bool):
        raise UserError(
            f"{config}: do_lower_case is {lowercase!r}, expected true or false; add it or fetch tokenizer.json"
        )
    check_file(vocabulary, MOST_TOKENIZER)
    try:
        vocab = models.WordPiece.read_file(os.fspath(vocabulary))
    except Exception as error:  # as above
        raise UserError(f"{vocabulary}: not a vocabulary ({_first_line(error)}); fetch it again") from None
    if missing := [token for token in _SPECIAL if token not in vocab]:
        raise UserError(f"{vocabulary}: lacks the token {missing[0]}; fetch the vocabulary again")
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase,
        strip_accents=settings.get("strip_accents"),
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"]))
    return tokenizer


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class PairTokenizer:
    """A tokenizer of pairs, created by `load_pair_tokenizer`. max_tokens: of a whole input, with special tokens."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._joints = tokenizer.num_special_tokens_to_add(True)
        self.max_tokens = max_tokens

    def encode(self, pairs: Sequence[tuple[str, str]]) -> tuple[list[tuple[list[int], list[int]]], int]:
        """Return (ids, types) of each (premise, hypothesis), at most `max_tokens`, and the number of cut premises. A
        type is 0 for the premise, 1 for the hypothesis. UserError for a hypothesis that leaves no room for a
        premise."""
        limit = CHARACTERS_PER_TOKEN * self.max_tokens
        found: list[tuple[list[int], list[int]]] = []
        cut = 0
        for start in range(0, len(pairs), TEXTS_AT_ONCE):
            part = pairs[start : start + TEXTS_AT_ONCE]
            premises, hypotheses = (
                _encode_bare(self._tokenizer, texts, "the classifier's tokenizer.json")
                for texts in ([premise[:limit] for premise, _ in part], [hypothesis for _, hypothesis in part])
            )
            for (text, claim), premise, hypothesis in zip(part, premises, hypotheses, strict=True):
                room = self.max_tokens - self._joints - len(hypothesis)
                if room < 1:
                    raise UserError(
                        f"the hypothesis {claim[:80]!r} takes {len(hypothesis)} tokens, which leaves no room for a "
                        f"premise within max_tokens = {self.max_tokens}; raise max_tokens or drop the question"
                    )
                cut += len(premise) > room or len(text) > limit
                premise.truncate(room)
                joined = self._tokenizer.post_process(premise, hypothesis)
                found.append((joined.ids, joined.type_ids))
        return found, cut


def load_pair_tokenizer(folder: Path, vocab_size: int, max_tokens: int) -> PairTokenizer:
    """Read the tokenizer of pairs of a model folder; see `load_wordpiece`."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt")) and any(folder.glob("sp*.model")):
        raise UserError(
            f"{folder}: its tokenizer is a sentencepiece file, which is not read; convert it once: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) of transformers writes tokenizer.json"
        )
    tokenizer, _ = read_tokenizer(folder, vocab_size, pairs=True)
    return PairTokenizer(tokenizer, max_tokens)
