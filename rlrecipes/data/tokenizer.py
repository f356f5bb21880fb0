"""Tokenizers: loading a model's, and building a small one that needs no training. Owns no model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlrecipes.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def build_char_tokenizer(
    *,
    alphabet: str | None = None,
    eos_token: str = "<eos>",
    pad_token: str = "<pad>",
    extra_special_tokens: Sequence[str] = (),
    chat_template: str | None = None,
) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character (or byte) and no merges.

    ``save_pretrained`` writes it into a model directory, from where transformers and SGLang load it. Decoding what was
    encoded gives the same text back, without limit by bytes, and for texts of the alphabet by characters.

    Args:
        alphabet: the characters known; anything else becomes ``<unk>``. None: the 256 bytes, so everything is known.
        eos_token: ends a response.
        pad_token: fills up batches.
        extra_special_tokens: further tokens that text names whole, such as role marks of a chat template.
        chat_template: Jinja source; None for prompts that are plain text.

    Returns:
        Ids are: the characters in order of first appearance (bytes in order), ``<unk>`` where there is an alphabet,
        then eos, pad and the extra tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if alphabet is None:
        bytes_in_order = sorted(pre_tokenizers.ByteLevel.alphabet())
        core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(bytes_in_order)}, merges=[]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
    else:
        vocab = {char: i for i, char in enumerate(dict.fromkeys(alphabet))}
        vocab["<unk>"] = len(vocab)
        core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
        core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=eos_token,
        pad_token=pad_token,
        unk_token=None if alphabet is None else "<unk>",
        extra_special_tokens=list(extra_special_tokens),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def load_tokenizer(path: Path | str) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a model.

    Args:
        path: an HF model directory; a name is never looked for on a hub.

    Raises:
        DataError: there is none.
    """
    from transformers import AutoTokenizer

    name = str(path)
    if not Path(name).expanduser().is_dir():
        raise DataError(name, "is not a directory, so it holds no tokenizer", "give the directory of an HF model")
    try:
        tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(str(Path(name).expanduser()))
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        fix = "give an HF model directory with tokenizer.json and tokenizer_config.json"
        raise DataError(name, f"no tokenizer can be loaded: {first_line}", fix) from error
    return tokenizer
