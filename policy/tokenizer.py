"""Text to token ids and token ids to bytes, for byte-level BPE tokenizers stored in a tokenizer.json.

`encode` is for external text (questions, passages, feedback): it encodes an added token, such as `<|im_end|>`, like any
other text. The library's switch for this covers only tokens marked special, so a second encoder is built from the JSON
without added tokens. `encode_template` is for our own templates; only it can put control ids into a prompt. Decoding
uses the exact bytes of each token, because a tag or a character may end inside a token. Some bytes may have no token
(in SmolLM2's, eight control characters); a text with such a byte is refused. Chat templates do not get `strftime_now`,
because a prompt would then depend on the day (Llama 3.2's falls back to a fixed date).
"""

import atexit
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thresher.common.errors import UserError
from thresher.common.files import (
    MOST_TEXT,
    MOST_TOKENIZER,
    atomic_write_bytes,
    decode_text,
    parse_json_object,
    read_bytes,
    refuse_other_folder,
)
from thresher.common.hashes import check_hashes

if TYPE_CHECKING:
    import tokenizers

TEMPLATE_SECONDS = 10.0  # CPU time limit of a chat template
_COMPANIONS = ("chat_template.jinja", "tokenizer_config.json")

# Qwen2's rules for splitting text into words before BPE: contractions, letters with one leading mark, single digits,
# runs of marks, line ends, spaces.
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_letters() -> dict[str, int]:
    """Return the alphabet of byte-level BPE: printable Latin-1 stands for itself, other bytes follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_letters()


class UnencodableText(UserError):
    """Error for a text with a byte that the tokenizer has no token for."""


class Tokenizer:
    """One tokenizer.json and the chat template next to it, created by `load_tokenizer` or `train_bpe`. where: names the
    file in errors. companions: raw content of the files that are saved with it, by name."""

    def __init__(self, tokenizer_json: bytes, where: str, companions: Mapping[str, bytes] | None = None) -> None:
        data = parse_json_object(tokenizer_json, where)
        self._json = tokenizer_json
        self._companions = dict(companions or {})
        self._where = where
        try:
            self.added_tokens: dict[str, int] = {
                token["content"]: token["id"] for token in data.get("added_tokens") or []
            }
            _refuse_unsupported(data, where)
            self._table = _token_table(data["model"]["vocab"], self.added_tokens, where)
            plain = _without_added_tokens(data, self.added_tokens, where)
        except UserError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UserError(
                f"{where}: not a tokenizers file ({type(error).__name__}: {error}); fetch or write it again"
            ) from None
        self._missing = _missing_bytes(data["model"]["vocab"])
        self._template_encoder = _build(tokenizer_json.decode("utf-8-sig"), where)
        self._plain_encoder = _build(json.dumps(plain, ensure_ascii=False), where)
        for content, token_id in self.added_tokens.items():
            if (found := self._template_encoder.token_to_id(content)) != token_id:
                raise UserError(
                    f"{where}: added token {content!r} says id {token_id} but encodes as {found}; "
                    "fetch or write the file again"
                )

    @property
    def vocab_size(self) -> int:
        """Return the number of ids: 0 to vocab_size - 1, each with a token. The model's head may be wider."""
        return len(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def encode(self, text: str) -> list[int]:
        """Encode plain text; the result never contains the id of an added token."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text as `encode` does, in one call to the library, which is much faster for many short texts."""
        with panics_refused(texts, self._where):
            encodings = self._plain_encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        self._refuse_missing_bytes(texts)
        return [encoding.ids for encoding in encodings]

    def encode_template(self, text: str) -> list[int]:
        """Encode text with added tokens recognised. For templates only, never for external text."""
        with panics_refused([text], self._where):
            ids = list(self._template_encoder.encode(text, add_special_tokens=False).ids)
        self._refuse_missing_bytes([text])
        return ids

    @property
    def lacks_bytes(self) -> bool:
        """Return whether some texts cannot be encoded; `encode` raises UnencodableText for them."""
        return self._missing is not None

    def _refuse_missing_bytes(self, texts: Sequence[str]) -> None:
        """Raise UnencodableText for a text with a byte that has no token, which the library would drop silently."""
        if self._missing is None:
            return
        normalizer = self._plain_encoder.normalizer
        for text in texts:
            spelled = (text if normalizer is None else normalizer.normalize_str(text)).encode()
            if found := self._missing.search(spelled):
                at = len(spelled[: found.start()].decode(errors="ignore"))
                raise UnencodableText(
                    f"text starting {text[:40]!r} has U+{ord(spelled.decode()[at]):04X} at character {at}, and the "
                    f"tokenizer {self._where} has no token for its byte {found[0][0]:#04x}; remove the character, or "
                    "use another tokenizer"
                )

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes of one token (UTF-8 of the content of an added one). ValueError for an unknown id."""
        if not 0 <= token_id < len(self._table):
            raise ValueError(f"token id {token_id} is outside the tokenizer's {len(self._table)} ids")
        return self._table[token_id]

    def decode_bytes(self, token_ids: Iterable[int]) -> bytes:
        """Return the bytes of the tokens, joined."""
        return b"".join(map(self.token_bytes, token_ids))

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of the tokens, control tokens included, with U+FFFD where the bytes are not UTF-8."""
        return self.decode_bytes(token_ids).decode("utf-8", errors="replace")

    def byte_ids(self, data: bytes) -> list[int]:
        """Return one token id per byte."""
        return [self._id_of_bytes[bytes([byte])] for byte in data]

    def token_id(self, content: str) -> int | None:
        """Return the id of the added token `content`, else of the token with exactly its bytes, else None."""
        if content in self.added_tokens:
            return self.added_tokens[content]
        return self._id_of_bytes.get(content.encode("utf-8", errors="surrogatepass"))

    @cached_property
    def begin_ids(self) -> tuple[int, ...]:
        """Return the ids that Hugging Face's tokenizer puts before a raw text: Llama 3's begin of text; none for Qwen.

        `add_bos_token` of tokenizer_config.json decides if it is set (Qwen, R1-Distill), else the post-processor of
        tokenizer.json (Llama 3), which is the only one that transformers 5 reads.
        """
        asked = self._settings.get("add_bos_token")
        if isinstance(asked, bool):
            begin = _content(self._settings.get("bos_token"))
            token = self.token_id(begin) if asked and isinstance(begin, str) else None
            return () if token is None else (token,)
        with panics_refused(["a"], self._where):
            encoding = self._template_encoder.encode("a", add_special_tokens=True)
        marked = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        return tuple(token for token, _ in takewhile(lambda pair: pair[1], marked))

    @cached_property
    def _id_of_bytes(self) -> dict[bytes, int]:
        return {token: token_id for token_id, token in enumerate(self._table)}

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and its companions into `folder`, byte for byte as they were read."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in {"tokenizer.json": self._json, **self._companions}.items():
            atomic_write_bytes(folder / name, content)

    @cached_property
    def chat_template(self) -> str | None:
        """Return the Jinja source: chat_template.jinja, else tokenizer_config.json's (the one named "default")."""
        if (source := self._companions.get("chat_template.jinja")) is not None:
            return decode_text(source, str(Path(self._where).with_name("chat_template.jinja")))
        template = self._settings.get("chat_template")
        if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
            template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
        if not isinstance(template, str | None):
            raise UserError(
                f"{self._settings_file}: chat_template is {json.dumps(template)[:60]}, expected a string, or a list of "
                'objects with "name" and "template"; correct the file or fetch it again'
            )
        return template

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Fill the chat template with `messages` ({"role", "content"}) and schemas of `tools`, as Hugging Face does.
        UserError if there is no template or it fails.

        The result contains control tokens as text, for `encode_template`. A control token spelled in a message becomes
        one as well, so external text must not be passed here.
        """
        where = str(Path(self._where).parent)
        if self.chat_template is None:
            raise UserError(f"{where}: no chat template; add chat_template.jinja or set prompt to 'raw'")
        names = {key: _content(value) for key, value in self._settings.items() if key.endswith("_token")}
        names = {key: value for key, value in names.items() if isinstance(value, str)}
        request = {"template": self.chat_template, "messages": messages, "names": names, "tools": list(tools) or None}
        try:
            found = _worker(os.getpid()).ask({**request, "add_generation_prompt": add_generation_prompt})
        except TypeError as error:  # a message that JSON cannot hold
            found = {"error": str(error)}
        if "text" not in found:
            raise UserError(
                f"{where}: the chat template cannot render these messages ({found['error']}); correct one of them"
            )
        return found["text"]

    def chat_prompt(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Fill the chat template with `text` as the user's only message, up to the beginning of the model's turn.
        UserError as in `render_chat`, and for a template that omits the message."""
        prompt = self.render_chat([{"role": "user", "content": text}], tools=tools)
        if text.strip() not in prompt:
            where = str(Path(self._where).parent)
            raise UserError(f"{where}: the chat template leaves out the user's message; use another, or prompt 'raw'")
        return prompt

    @cached_property
    def _settings(self) -> dict[str, Any]:
        return parse_json_object(self._companions.get("tokenizer_config.json", b"{}"), self._settings_file)

    @property
    def _settings_file(self) -> str:
        return str(Path(self._where).with_name("tokenizer_config.json"))


def load_tokenizer(path: str | Path, verify: bool = True) -> Tokenizer:
    """Read a tokenizer.json, given by its path or its folder, and the chat template next to it. UserError, naming the
    file, if it is absent, malformed or not byte-level BPE, and with `verify` if it does not match the hashes next to
    it."""
    refuse_other_folder(path)
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if path.is_dir() and not os.path.lexists(file) and (path / "vocab.json").exists():
        raise UserError(f"{file}: no such file, and vocab.json alone is not read; convert it to tokenizer.json")
    if verify:
        check_hashes(file.parent, [file.name, *_COMPANIONS])
    content = read_bytes(file, MOST_TOKENIZER)
    beside = {name: file.with_name(name) for name in _COMPANIONS}
    companions = {
        name: read_bytes(companion, MOST_TEXT) for name, companion in beside.items() if os.path.lexists(companion)
    }
    return Tokenizer(content, str(file), companions)


def train_bpe(texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()) -> Tokenizer:
    """Train a byte-level BPE with Qwen2's rules for splitting words; the same texts give the same tokenizer.

    vocab_size: the 256 bytes, the merges (of pairs seen at least twice, so there may be fewer tokens), and
    `special_tokens`, which get the last ids. Any text decodes to its NFC form. ValueError for sizes or special tokens
    that do not fit.
    """
    import tokenizers

    specials = list(special_tokens)
    if len(set(specials)) < len(specials) or "" in specials:
        raise ValueError(f"special tokens must be different and not empty, got {specials}")
    if vocab_size < 256 + len(specials):
        raise ValueError(f"vocab_size {vocab_size} has no room for 256 bytes and {len(specials)} special tokens")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.normalizer = tokenizers.normalizers.NFC()
    words = tokenizers.pre_tokenizers.Split(tokenizers.Regex(QWEN_WORDS), behavior="isolated")
    letters = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([words, letters])
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size - len(specials),
        min_frequency=2,
        initial_alphabet=sorted(_BYTE_OF_LETTER),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    data = json.loads(model.to_str())
    first = len(data["model"]["vocab"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    data["added_tokens"] = [{"id": first + i, "content": content, **flags} for i, content in enumerate(specials)]
    try:
        return Tokenizer(json.dumps(data, ensure_ascii=False, indent=1).encode(), "trained tokenizer")
    except UserError as error:
        raise ValueError(str(error)) from None


def _refuse_unsupported(data: dict[str, Any], where: str) -> None:
    """Raise UserError unless the tokenizer is byte-level BPE that is deterministic and keeps every text unchanged."""
    model = data["model"]
    step = data.get("pre_tokenizer") or {}
    steps = step["pretokenizers"] if step.get("type") == "Sequence" else [step]
    byte_level = [step for step in steps if step.get("type") == "ByteLevel"]
    if model.get("type", "BPE") != "BPE" or not byte_level or model.get("byte_fallback"):
        raise UserError(f"{where}: only byte-level BPE tokenizers are supported; use a tokenizer like Qwen2's")
    reasons = {
        "add_prefix_space puts a space before every piece": any(s.get("add_prefix_space") for s in byte_level),
        "dropout makes the encoding random": model.get("dropout"),
        "continuing_subword_prefix changes a token's bytes": model.get("continuing_subword_prefix"),
        "end_of_word_suffix changes a token's bytes": model.get("end_of_word_suffix"),
    }
    for reason, present in reasons.items():
        if present:
            raise UserError(f"{where}: {reason}, which is not supported; use a tokenizer like Qwen2's")


def _missing_bytes(vocab: Mapping[str, int]) -> re.Pattern[bytes] | None:
    """Return a pattern for the bytes of UTF-8 that have no token; None if all have one."""
    never = {0xC0, 0xC1, *range(0xF5, 0x100)}  # in UTF-8
    missing = [byte for letter, byte in _BYTE_OF_LETTER.items() if letter not in vocab and byte not in never]
    return re.compile(b"[" + b"".join(re.escape(bytes([byte])) for byte in missing) + b"]") if missing else None


def _token_table(vocab: dict[str, int], added: dict[str, int], where: str) -> list[bytes]:
    """Return the bytes of each token, by id. UserError for an id with no token or with two."""
    of_id: dict[int, bytes] = {}
    for token, token_id in vocab.items():
        if token in added:
            continue
        try:
            spelled = bytes([_BYTE_OF_LETTER[letter] for letter in token])
        except KeyError as error:
            raise UserError(
                f"{where}: token {token!r} holds {error.args[0]!r}, which stands for no byte; only "
                "byte-level BPE tokenizers are supported"
            ) from None
        if token_id in of_id:
            raise UserError(f"{where}: two tokens have the id {token_id}; fetch or write the file again")
        of_id[token_id] = spelled
    for content, token_id in added.items():
        if vocab.get(content, token_id) != token_id:
            raise UserError(
                f"{where}: added token {content!r} has id {token_id} in added_tokens and {vocab[content]} in the "
                "vocabulary; rename it or make the ids equal"
            )
        if token_id in of_id:
            raise UserError(f"{where}: two tokens have the id {token_id}; fetch or write the file again")
        of_id[token_id] = content.encode("utf-8")
    hole = next((token_id for token_id in range(len(of_id)) if token_id not in of_id), None)
    if hole is not None:
        raise UserError(
            f"{where}: id {hole} has no token though ids go up to {max(of_id)}; use a tokenizer without gaps"
        )
    return [of_id[token_id] for token_id in range(len(of_id))]


def _without_added_tokens(data: dict[str, Any], added: dict[str, int], where: str) -> dict[str, Any]:
    """Return the tokenizer's JSON without its added tokens, including those in the base vocabulary.

    Merges could produce these, or the lookup of whole words (`ignore_merges`). They are therefore removed from the
    vocabulary together with the merges that make or use them.
    """
    model = dict(data["model"])
    if inside := model["vocab"].keys() & added.keys():
        if letters := sorted(inside & _BYTE_OF_LETTER.keys()):
            raise UserError(
                f"{where}: added token {letters[0]!r} is also the letter of a byte, so it cannot be "
                "told from plain text; use a tokenizer with other added tokens"
            )
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [[left, right] for left, right in pairs if not inside & {left, right, left + right}]
        model["vocab"] = {token: token_id for token, token_id in model["vocab"].items() if token not in inside}
    return {**data, "model": model, "added_tokens": [], "post_processor": None}


def _build(tokenizer_json: str, where: str) -> "tokenizers.Tokenizer":
    import tokenizers

    try:
        with panics_refused([], where):
            built = tokenizers.Tokenizer.from_str(tokenizer_json)
    except UserError:
        raise
    except Exception as error:  # the library raises Exception itself for any fault in the file
        raise UserError(f"{where}: not a readable tokenizer ({error}); fetch or write it again") from None
    built.no_truncation()
    built.no_padding()
    return built


@contextmanager
def panics_refused(texts: Sequence[str], where: str) -> Iterator[None]:
    """Raise UserError if the tokenizers library panics on `texts`, and for a lone surrogate. It panics on millions of
    spaces, or if the tokenizer's pattern tries all ways to split a text. A panic is a BaseException."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, TypeError) and texts:
            raise _unencodable(texts) from None
        if type(error).__name__ != "PanicException":
            raise
        longest = max(texts, key=len, default="")
        what = f"texts of up to {len(longest):,} characters, such as {longest[:40]!r}" if texts else "its own file"
        raise UserError(
            f"{where}: the tokenizer failed on {what} ({str(error)[:80]}); shorten the text, or use another tokenizer"
        ) from None


def _unencodable(texts: Sequence[str]) -> Exception:
    """Return the error for texts that the library refused."""
    for text in texts:
        if not isinstance(text, str):
            return TypeError(f"expected a string to encode, got {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return UserError(
                f"text starting {text[:40]!r} has a lone surrogate at character {error.start}, which is "
                "not Unicode; repair the input"
            )
    return TypeError("the texts to encode are not a sequence of strings")


def _content(value: Any) -> Any:
    """Return a special token's text, which tokenizer_config.json gives as a string or an object."""
    return value.get("content") if isinstance(value, dict) else value


class _Worker:
    """A process of chat_worker.py, which answers each request with a line; it is replaced if it does not."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def ask(self, request: dict[str, Any]) -> dict[str, str]:
        line = json.dumps({**request, "seconds": TEMPLATE_SECONDS}) + "\n"
        with self._lock:
            for _ in range(2):  # the first may have been killed for another reason, such as a lack of memory
                process = self._process = self._process or self._start()
                assert process.stdin is not None and process.stdout is not None
                answer = ""
                try:
                    process.stdin.write(line)
                    process.stdin.flush()
                    answer = process.stdout.readline()
                except BrokenPipeError:
                    pass
                finally:  # also after an interrupt, so that no later request gets this answer
                    if not answer.endswith("\n"):
                        self.end()
                if answer.endswith("\n"):
                    found: dict[str, str] = json.loads(answer)
                    return found
                if process.returncode == -signal.SIGPROF:
                    return {"error": f"it takes longer than {TEMPLATE_SECONDS:g} s"}
        return {"error": "it ended the process that renders it"}

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    @staticmethod
    def _start() -> subprocess.Popen[str]:
        # -P: nothing is imported from the folder of the script, whose files have common names.
        command = [sys.executable, "-P", str(Path(__file__).with_name("chat_worker.py"))]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")


@cache
def _worker(process: int) -> _Worker:
    """Return the worker of this process; sharing it with a forked process would mix up the answers."""
    worker = _Worker()
    atexit.register(worker.end)
    return worker
