"""The folder the scripts run in: small seeded models and data under the names that the scripts ask the Hub for.

A name such as `bert-base-cased`, `nyu-mll/glue` or the metric `accuracy` is looked for in the current directory before
it is looked for anywhere else, so the scripts need neither a network nor a change. The text is Python's own standard
library.
"""

from __future__ import annotations

import ast
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.utils import logging

_LIBRARY = Path(os.__file__).parent
_VOCABULARY = 2048
_PAD, _BEGIN, _END, _UNKNOWN = "[PAD]", "[CLS]", "[SEP]", "[UNK]"
_IMAGE = 32


def build(folder: Path) -> None:
    """Fills an empty folder."""
    logging.disable_progress_bar()
    _write_files(folder / "data")
    _write_lines(folder / "Salesforce" / "wikitext")
    _write_pairs(folder / "nyu-mll" / "glue")
    _write_images(folder / "images")
    _write_sentence_splitter(folder / "nltk_data")
    for metric in ("accuracy", "glue", "rouge"):
        (folder / metric).mkdir()
        shutil.copy(Path(__file__).with_name("metric.py"), folder / metric / f"{metric}.py")
    tokenizer = _train_tokenizer()
    for name, model in _models().items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "vit" / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "ViTImageProcessor", "size": {"height": _IMAGE, "width": _IMAGE}})
    )


def _models() -> dict[str, PreTrainedModel]:
    """Each of about 5 million parameters, so that its states take about 80 MiB."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": _VOCABULARY,
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
    }
    ends: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    gpt2 = GPT2Config(vocab_size=_VOCABULARY, n_embd=256, n_layer=6, n_head=4, n_positions=128, **ends)
    t5 = T5Config(
        vocab_size=_VOCABULARY,
        d_model=256,
        d_ff=1024,
        num_layers=3,
        num_heads=4,
        **ends,
        decoder_start_token_id=0,
    )
    bert = BertForSequenceClassification(BertConfig(intermediate_size=1024, initializer_range=0.2, **shape))
    # From here on its answers are what training has made of it: the scripts' own metrics notice any difference.
    torch.nn.init.zeros_(bert.classifier.weight)
    return {
        "bert-base-cased": bert,
        "HuggingFaceTB/SmolLM-360M": LlamaForCausalLM(LlamaConfig(intermediate_size=704, **ends, **shape)),
        "gpt2": GPT2LMHeadModel(gpt2),
        "t5": T5ForConditionalGeneration(t5),
        "vit": ViTForImageClassification(ViTConfig(intermediate_size=1024, image_size=_IMAGE, patch_size=8, **shape)),
    }


def _train_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[_PAD, _BEGIN, _END, _UNKNOWN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_source("argparse"), _source("typing"), _source("inspect")], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_BEGIN} $A {_END}",
        pair=f"{_BEGIN} $A {_END} $B:1 {_END}:1",
        special_tokens=[(_BEGIN, 1), (_END, 2)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=128,
        pad_token=_PAD,
        cls_token=_BEGIN,
        sep_token=_END,
        eos_token=_END,
        unk_token=_UNKNOWN,
    )


def _source(module: str) -> str:
    return (_LIBRARY / f"{module}.py").read_text(encoding="utf-8")


def _write_files(folder: Path) -> None:
    """Plain text, and functions with their first line of documentation."""
    folder.mkdir()
    for name, module in (("train", "argparse"), ("validation", "textwrap")):
        (folder / f"{name}.txt").write_text(_source(module), encoding="utf-8")
    functions = (node for node in ast.walk(ast.parse(_source("inspect"))) if isinstance(node, ast.FunctionDef))
    rows = [
        {"text": "\n".join(map(ast.unparse, node.body[1:])), "summary": summary.splitlines()[0]}
        for node in functions
        if (summary := ast.get_docstring(node)) and len(node.body) > 1
    ]
    _write_rows(folder / "summaries.json", rows)


def _write_lines(folder: Path) -> None:
    """A line of code each; the script takes the first 500."""
    lines = {"train": _source("argparse").splitlines()[1000:1500], "validation": _source("bisect").splitlines()}
    features = [{"name": "text", "dtype": "string"}]
    _write_dataset(folder, "wikitext-2-v1", features, {n: [{"text": line} for line in lines[n]] for n in lines})


def _write_pairs(folder: Path) -> None:
    """Two lines of code each, and whether the second follows the first."""
    chance = random.Random(0)
    lines = [line.strip() for line in _source("typing").splitlines() if len(line.strip()) > 20]
    splits: dict[str, list[dict[str, Any]]] = {}
    for split, count in (("train", 128), ("validation", 48), ("test", 32)):
        splits[split] = []
        for index in range(count):
            first, label = chance.randrange(len(lines) - 1), index % 2
            second = first + 1 if label else chance.randrange(len(lines))
            row = {"sentence1": lines[first], "sentence2": lines[second], "label": label, "idx": index}
            splits[split].append(row)
    label_type = {"class_label": {"names": {"0": "not_equivalent", "1": "equivalent"}}}
    types = {"sentence1": "string", "sentence2": "string", "label": label_type, "idx": "int32"}
    _write_dataset(folder, "mrpc", [{"name": name, "dtype": kind} for name, kind in types.items()], splits)


def _write_dataset(
    folder: Path, name: str, features: list[dict[str, Any]], splits: dict[str, list[dict[str, Any]]]
) -> None:
    """A folder as it would be on the Hub: rows, and a card that says what they are."""
    (folder / name).mkdir(parents=True)
    files = [{"split": split, "path": f"{name}/{split}.json"} for split in splits]
    card = {
        "configs": [{"config_name": name, "data_files": files}],
        "dataset_info": [{"config_name": name, "features": features}],
    }
    (folder / "README.md").write_text(f"---\n{json.dumps(card)}\n---\n")
    for split, rows in splits.items():
        _write_rows(folder / name / f"{split}.json", rows)


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_images(folder: Path) -> None:
    """Noise, in one class brighter than in the other."""
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 16), ("validation", 8)):
        for label, brightest in (("bright", 256), ("dark", 160)):
            (folder / split / label).mkdir(parents=True)
            for index in range(count):
                pixels = torch.randint(brightest, (_IMAGE, _IMAGE, 3), generator=generator, dtype=torch.uint8)
                Image.fromarray(pixels.numpy()).save(folder / split / label / f"{index}.png")


def _write_sentence_splitter(folder: Path) -> None:
    """What `nltk.sent_tokenize` reads: no abbreviations, no collocations."""
    (folder / "tokenizers" / "punkt").mkdir(parents=True)
    english = folder / "tokenizers" / "punkt_tab" / "english"
    english.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (english / name).touch()
