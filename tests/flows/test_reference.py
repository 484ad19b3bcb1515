"""The reference of settings is the code's."""

from __future__ import annotations

from pathlib import Path

from flows.config import RunConfig
from flows.reference import reference


def test_the_page_is_what_the_code_says() -> None:
    page = Path(__file__).parents[2] / "docs" / "settings.md"
    assert page.read_text() == reference(), "run `python -m flows.reference > docs/settings.md`"


def test_every_setting_of_the_form_is_described() -> None:
    for name, section in RunConfig.model_fields.items():
        for field, info in getattr(section.annotation, "model_fields", {}).items():
            assert info.description, f"{name}.{field}"
