"""Which scripts are run, and with which arguments."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

_TRAINER = (
    "--output_dir {output} --do_train --do_eval --max_steps 6 --eval_strategy steps --eval_steps 3 --save_steps 3 "
    "--logging_steps 1 --per_device_train_batch_size 2 --per_device_eval_batch_size 2 --gradient_accumulation_steps 2 "
    "--learning_rate 1e-3 --weight_decay 0.1 --seed 7 --report_to none --disable_tqdm true --use_cpu"
)
_EXAMPLES = "transformers/examples/pytorch"
_FEATURES = "accelerate/examples/by_feature"


@dataclass(frozen=True)
class Case:
    """One script with its arguments.

    Attributes:
        script: its path below the folder that holds the checkouts of `transformers` and `accelerate`.
        arguments: as on a command line; `{output}` stands for the run's own folder, other paths are the workplace's.
        resume: from where it is started a second time, below its output; nothing for once only.
        last_words: what it prints last, if it may then not end by itself without pages: torch ends a DDP model that
            still holds its process group without letting go of Python's lock, for which gloo's thread may be waiting.
        host_memory: the budget of the run on pages, below what the model's states take.
    """

    script: str
    arguments: str = ""
    resume: str = ""
    last_words: str = ""
    host_memory: str = "64MiB"

    @property
    def name(self) -> str:
        """The script's file name."""
        return Path(self.script).name

    def commands(self, scripts: Path, output: Path) -> list[list[str]]:
        """The script and its arguments, for each time that it is started."""
        first = [str(scripts / self.script), *shlex.split(self.arguments.format(output=output))]
        return [first, [*first, "--resume_from_checkpoint", str(output / self.resume)]] if self.resume else [first]


# `run_clm_no_trainer.py` is not here: it asks for `DistributedType.TPU`, which Accelerate no longer has, so it does not
# run without pages either. Causal language models without a Trainer are the last case.
CASES = (
    Case(
        f"{_EXAMPLES}/language-modeling/run_clm.py",
        f"{_TRAINER} --model_name_or_path gpt2 --train_file data/train.txt --validation_file data/validation.txt "
        "--block_size 64 --max_eval_samples 8",
        resume="checkpoint-3",
    ),
    Case(
        f"{_EXAMPLES}/text-classification/run_glue.py",
        f"{_TRAINER} --do_predict --model_name_or_path bert-base-cased --task_name mrpc --max_seq_length 64 "
        "--max_eval_samples 16 --max_predict_samples 16",
    ),
    Case(
        f"{_EXAMPLES}/text-classification/run_glue_no_trainer.py",
        "--output_dir {output} --model_name_or_path bert-base-cased --task_name mrpc --max_length 64 "
        "--max_train_steps 6 --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --checkpointing_steps 3 "
        "--learning_rate 1e-3 --weight_decay 0.1 --seed 7",
        resume="step_3",
    ),
    Case(
        f"{_EXAMPLES}/summarization/run_summarization.py",
        f"{_TRAINER} --do_predict --predict_with_generate --model_name_or_path t5 --train_file data/summaries.json "
        "--validation_file data/summaries.json --test_file data/summaries.json --max_source_length 64 "
        "--max_target_length 16 --num_beams 2 --max_eval_samples 8 --max_predict_samples 8",
    ),
    Case(
        f"{_EXAMPLES}/image-classification/run_image_classification.py",
        f"{_TRAINER} --model_name_or_path vit --train_dir images/train --validation_dir images/validation "
        "--remove_unused_columns false",
    ),
    Case("accelerate/examples/nlp_example.py"),
    Case(f"{_FEATURES}/gradient_accumulation.py", "--gradient_accumulation_steps 2"),
    Case(f"{_FEATURES}/checkpointing.py", "--output_dir {output} --checkpointing_steps epoch", resume="epoch_0"),
    Case(
        f"{_FEATURES}/gradient_accumulation_for_autoregressive_models.py",
        "--gradient_accumulation_steps 2 --per_device_batch_size 16",
        last_words="epoch 2:: eval perplexity",
    ),
)
