"""Ask pip-audit whether the pins of constraints.txt have known vulnerabilities: `make audit`.

Ends with 0 where none has, with 1 and a list where some have, and with 2 where the database could not be asked of all
of them: then nothing is known of the others.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

PINS = Path(__file__).resolve().parents[1] / "constraints.txt"
SECONDS = 900


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        words = ["--requirement", str(PINS), "--no-deps", "--disable-pip", "--format", "json", "--output", str(report)]
        command = [sys.executable, "-m", "pip_audit", "--progress-spinner", "off", *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
            found = json.loads(report.read_text())["dependencies"]
        except subprocess.TimeoutExpired:
            print(f"audit: no answer within {SECONDS} s: nothing is known", file=sys.stderr)
            return 2
        except (OSError, ValueError, KeyError):
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            print("audit: the database of vulnerabilities could not be asked: nothing is known", file=sys.stderr)
            print(f"audit: pip-audit says: {last[-300:]}", file=sys.stderr)
            return 2
    skipped = [one for one in found if "skip_reason" in one]
    known = [(one, fault) for one in found for fault in one.get("vulns", [])]
    for one, fault in known:
        mended = ", ".join(fault["fix_versions"]) or "no version"
        print(f"{one['name']} {one['version']}: {fault['id']}, mended in {mended}")
    print(f"audit: {len(found) - len(skipped)} of {len(found)} pins audited, {len(known)} known vulnerabilities")
    if skipped:
        names = ", ".join(one["name"] for one in skipped[:5])
        why = f"the database could not be asked, or does not know them: {skipped[0]['skip_reason']}"
        print(f"audit: nothing is known of {len(skipped)} pins ({names} ...): {why}", file=sys.stderr)
    return 1 if known else 2 if skipped else 0


if __name__ == "__main__":
    sys.exit(main())
