"""Two texts to the token ids of one input, as a classifier of pairs wants them: [CLS] premise [SEP] hypothesis [SEP].

Where both together are too long, the premise loses its end and the hypothesis nothing: half a claim is another claim,
while most of a note still says most of what it said. How pairs are joined and which token belongs to which text is the
tokenizer's own rule (its post-processor), so BERT's, DistilBERT's and DeBERTa's files all work.

Deliberately absent: batches of single texts (`wordpiece`), and sentencepiece files, which `transformers` turns into a
tokenizer.json.
"""

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from thresher.common.errors import UserError
from thresher.policy.tokenizer import panics_refused
from thresher.retrieval.encoders.wordpiece import CHARACTERS_PER_TOKEN, TEXTS_AT_ONCE, read_tokenizer


class PairTokenizer:
    """Made by `load_pair_tokenizer`. max_tokens: of a whole input, with those that the tokenizer puts between texts."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._joints = tokenizer.num_special_tokens_to_add(True)
        self.max_tokens = max_tokens

    def encode(self, pairs: Sequence[tuple[str, str]]) -> tuple[list[tuple[list[int], list[int]]], int]:
        """(ids, types) of each (premise, hypothesis), at most `max_tokens` of each, and how many premises were cut.

        A type is 0 or 1, the text that a token belongs to. Half a UTF-16 pair is read as a question mark. UserError for
        a hypothesis that leaves no room for a premise.
        """
        limit = CHARACTERS_PER_TOKEN * self.max_tokens
        found: list[tuple[list[int], list[int]]] = []
        cut = 0
        for start in range(0, len(pairs), TEXTS_AT_ONCE):
            part = pairs[start : start + TEXTS_AT_ONCE]
            premises = self._encode([premise[:limit] for premise, _ in part])
            hypotheses = self._encode([hypothesis for _, hypothesis in part])
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

    def _encode(self, texts: list[str]) -> list[tokenizers.Encoding]:
        whole = [text.encode("utf-8", "replace").decode() for text in texts]
        with panics_refused(whole, "the classifier's tokenizer.json"):
            encodings: list[tokenizers.Encoding] = self._tokenizer.encode_batch_fast(whole, add_special_tokens=False)
        return encodings


def load_pair_tokenizer(folder: Path, vocab_size: int, max_tokens: int) -> PairTokenizer:
    """Reads the tokenizer of a model folder for a model with `vocab_size` rows of embeddings.

    UserError when there is none, it cannot be read, its vocabulary is not the model's, or it puts nothing between two
    texts.
    """
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt")) and any(folder.glob("sp*.model")):
        raise UserError(
            f"{folder}: its tokenizer is a sentencepiece file, which is not read; convert it once: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) of transformers writes tokenizer.json"
        )
    tokenizer, files = read_tokenizer(folder, vocab_size)
    if tokenizer.num_special_tokens_to_add(True) < 3:
        raise UserError(
            f"{files[0]}: puts no tokens of its own around two texts, as BERT's [CLS] and [SEP]; use the tokenizer "
            "that belongs to the model"
        )
    return PairTokenizer(tokenizer, max_tokens)
