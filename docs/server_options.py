"""Write the table of the server's options in docs/server.md from `ServerConfig`.

.venv/bin/python docs/server_options.py            # rewrite the page (`make docs` does it, too)
.venv/bin/python docs/server_options.py --check    # exit with 1 if the page is stale
"""

from __future__ import annotations

import sys
from pathlib import Path

from written_part import WrittenPart

from headway.cli.every_option import server_flags

PART = WrittenPart(
    Path(__file__).resolve().parent / "server.md",
    "<!-- options: written by docs/server_options.py from src/headway/server/server_config.py -->",
    "<!-- end of options -->",
)


def listing() -> str:
    """A row for each option."""
    rows = [f"| `{one.flag}` | {one.default_text} | {one.help} |" for one in server_flags()]
    return "\n".join(["| option | default | meaning |", "|---|---|---|", *rows])


if __name__ == "__main__":
    sys.exit(PART.main(listing()))
