"""MkDocs hook for links out of docs/: checks that their file exists, and shows its path instead of a link.

Links of README.md, ARCHITECTURE.md and CONTRIBUTING.md are checked too.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parents[2]
ROOT_PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
LINK = re.compile(r"\[(?P<text>[^]\[]*)\]\((?P<target>[^)#\s]+)(?:#[^)\s]*)?\)")


def on_pre_build(config: Any) -> None:
    """Check the links of pages that are not part of the site.

    Raises PluginError.
    """
    for name in ROOT_PAGES:
        for link in LINK.finditer((ROOT / name).read_text()):
            if "://" not in link["target"] and not (ROOT / link["target"]).exists():
                raise PluginError(f"{name}: no file {link['target']}")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace links to files of the repository by their paths.

    Raises PluginError for a file that does not exist.
    """
    folder = Path(page.file.abs_src_path).parent
    docs = Path(config.docs_dir)

    def shown(link: re.Match[str]) -> str:
        if "://" in link["target"]:
            return link[0]
        target = (folder / link["target"]).resolve()
        if target.is_relative_to(docs):
            return link[0]
        if not target.exists():
            raise PluginError(f"{page.file.src_uri}: no file {link['target']}")
        path = target.relative_to(ROOT)
        return f"`{path}`" if link["text"].strip("`") in (str(path), path.name) else f"{link['text']} (`{path}`)"

    return LINK.sub(shown, markdown)
