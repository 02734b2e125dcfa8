"""`make audit`: bandit over the code, pip-audit over the pinned packages; fails on what docs/operations.md does not explain."""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FOLDERS = ("wire", "router", "gpu_worker", "hostcache", "sim", "parkade", "tools", "benchmarks")
# (test, file) of bandit: findings above low that stay, with the reasons on the page
EXPLAINED = {
    ("B103", "parkade/systemd.py"),
    ("B104", "parkade/serve.py"),
    ("B108", "parkade/run_dir.py"),
    ("B113", "router/gate.py"),
}
# ids of advisories that do not concern us, with the reasons on the page
HARMLESS: set[str] = set()


def main() -> int:
    """Status 0 only if both have looked and nothing is unexplained."""
    bandit = json.loads(_output("bandit", "-q", "-r", *FOLDERS, "-f", "json"))
    packages = json.loads(_output("pip_audit", "-r", "constraints.txt", "--no-deps", "--disable-pip", "-f", "json") or "{}")
    problems = [*of_code(bandit), *of_packages(packages.get("dependencies", []))]
    print("\n".join(problems) or "nothing that is not explained")
    return 1 if problems else 0


def of_code(report: Mapping[str, Any]) -> Iterable[str]:
    """What is above low and not explained, what could not be read, and explanations of what is no longer there."""
    found = {}
    for issue in report["results"]:
        if issue["issue_severity"] != "LOW":
            found[issue["test_id"], str(Path(issue["filename"]))] = issue
    for key, issue in found.items():
        if key not in EXPLAINED:
            place = f"{issue['filename']}:{issue['line_number']}"
            yield f"{place}: {issue['test_id']} {issue['issue_severity']} {issue['issue_text']}"
    for test, file in sorted(EXPLAINED - found.keys()):
        yield f"{file}: {test} is explained and no longer there"
    for error in report["errors"]:
        yield f"{error['filename']}: {error['reason']}"


def of_packages(dependencies: list[Mapping[str, Any]]) -> Iterable[str]:
    """Advisories, and packages about which nobody could be asked. An empty report is no good news."""
    if not dependencies:
        yield "pip-audit gave no report"
    for package in dependencies:
        if "skip_reason" in package:
            yield f"{package['name']}: not audited: {package['skip_reason']}"
        for advisory in package.get("vulns", []):
            if advisory["id"] not in HARMLESS:
                fixed = ", ".join(advisory["fix_versions"]) or "no version"
                yield f"{package['name']} {package['version']}: {advisory['id']}, fixed in {fixed}"


def _output(module: str, *arguments: str) -> str:
    """Both end with 1 when they have found something."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1):
        sys.exit(f"{module} ended with status {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
