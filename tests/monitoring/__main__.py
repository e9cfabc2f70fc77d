"""Drills with a real Prometheus and a real server (Debian, Ubuntu: `apt install prometheus`).

python -m tests.monitoring alerts                     # cause what each alert is about, and see it fire
python -m tests.monitoring alerts overload            # one scenario
python -m tests.monitoring panels                     # every panel's expression, ours and vLLM's, has data
"""

from __future__ import annotations

import argparse
import sys

from tests.monitoring import alert_drill, panel_drill, prometheus_process


def main() -> int:
    """Exit status 1 if anything failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    alerts = commands.add_parser("alerts", help="see each alert fire")
    alerts.add_argument("scenarios", nargs="*", choices=[*alert_drill.SCENARIOS, []], help="default: all")
    alerts.add_argument("--factor", type=float, default=alert_drill.FACTOR, help="divide the rules' times by this")
    commands.add_parser("panels", help="evaluate every panel's expression")
    options = parser.parse_args()
    if not prometheus_process.is_installed():
        parser.error("Prometheus is not installed (Debian, Ubuntu: apt install prometheus)")
    failed = alert_drill.run(options.scenarios, options.factor) if options.command == "alerts" else panel_drill.run()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
