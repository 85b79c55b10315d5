"""Pages from templates, and folders that are written beside and renamed.

Every value is escaped; a page refuses scripts and everything that lies elsewhere by its own policy.
Knows nothing of runs.
"""

import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from t1jax.evaluation.drawing import Drawn
from t1jax.evaluation.figures.shared import duration, label, percent

TEMPLATES = Path(__file__).parent / "templates"
INDEX = "index.html"


def render(template: str, **values: Any) -> str:
    """A page. SVG of our own drawing is the only markup that a value may be."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Callable[[Any], str]] = {
        "percent": percent,
        "points": lambda share: f"{100 * share:+.1f}",
        "duration": duration,
        "label": label,
        "code": _code,
    }
    environment.filters |= filters
    environment.globals |= {"style": Markup((TEMPLATES / "style.css").read_text()), "svg": _svg}
    return environment.get_template(template).render(**values)


def _code(text: str) -> Markup:
    """Text whose `quoted` parts are commands or keys."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _svg(figure: Drawn) -> Markup:
    return Markup(figure.svg)  # drawn here; matplotlib escapes its texts


def write_folder(
    folder: Path, page: str, figures: Sequence[Drawn], more: dict[str, str] | None = None
) -> Path:
    """Writes a page, its figures and further files; the folder is replaced as a whole.

    Returns: the page.
    """
    work = folder.with_name(folder.name + ".incomplete")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    (work / INDEX).write_text(page, encoding="utf-8")
    for figure in figures:
        (work / f"{figure.name}.png").write_bytes(figure.png)
    for name, text in (more or {}).items():
        (work / name).write_text(text, encoding="utf-8")
    before = folder.with_name(folder.name + ".before")
    shutil.rmtree(before, ignore_errors=True)
    if folder.exists():
        os.replace(folder, before)
    os.replace(work, folder)
    shutil.rmtree(before, ignore_errors=True)
    return folder / INDEX
