"""What a model card says about pages."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from huggingface_hub import ModelCard
from ptm_accel.integrations.transformers import Trainer

from ptm_accel import __version__


def test_the_card_says_how_the_model_was_trained(tiny: ModuleType, tmp_path: Path) -> None:
    dials = tiny.budget("tight", tmp_path)
    run = tmp_path / "run"
    args = tiny.arguments(run, max_steps=1)
    trainer = Trainer(model=tiny.model(), args=args, train_dataset=tiny.data(), ptm_config=dials)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card(model_name="tiny")
    trainer.create_model_card(model_name="tiny")
    card = ModelCard.load(run / "README.md")
    assert card.text.count("## Memory") == 1
    assert f"Trained with ptm_accel {__version__}" in card.text
    assert "| host | 1.50 MiB |" in card.text
    assert "| disk | " in card.text
    assert card.data.library_name == "transformers", "the rest is the Trainer's"
