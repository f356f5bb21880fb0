"""One HTML file that needs nothing else: no server, no network. Owns the templates' environment and what may run in it.

Everything in it may come from a model or from somebody's data set. Templates escape it; and the page's own policy lets
no script run but the two that we put in, named by their hashes, and loads nothing from anywhere.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from rlrecipes import __version__
from rlrecipes.tracking.log import write_atomically

_TEMPLATES = Path(__file__).parent / "templates"


def write_page(path: Path, template: str, **values: Any) -> None:
    """Render a template and write it whole or not at all.

    Args:
        path: the HTML file.
        template: its name in templates/.
        values: what it shows.

    Raises:
        OSError: the disk is full or refuses.
    """
    import jinja2
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    scripts = [get_plotlyjs(), (_TEMPLATES / "page.js").read_text(encoding="utf-8")]
    page = environment.get_template(template).render(
        values,
        scripts=scripts,
        script_hashes=[_hash(script) for script in scripts],
        style=(_TEMPLATES / "page.css").read_text(encoding="utf-8"),
        version=__version__,
    )
    write_atomically(path, page.encode("utf-8", errors="replace"))


def _hash(script: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"
