"""A run's record, and its two files: JSON, and JUnit XML as CI systems read it (Jenkins' junit-10.xsd).

Both are written anew before and after every case, so that they are complete up to the moment in which a process dies;
the case that runs then stands in them as failed.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nki_parallel_attn.validation.case import Case
from validate_outcome import FAILED, NOT_RUN, PASSED, Outcome, describe

# What XML 1.0 cannot hold, not even escaped.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_PACKAGES = ("nki-parallel-attn", "torch", "nki", "torch-neuronx", "torch-xla", "neuronx-cc", "neuronx-distributed")


def environment() -> dict[str, str]:
    """What a reader of the report needs to know of the machine: versions, and the variables of Neuron and of ours."""
    found = {"python": platform.python_version(), "platform": platform.platform(), "command": " ".join(sys.argv)}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    for name, value in sorted(os.environ.items()):
        if name.startswith(("NEURON_", "NKI_")):
            found[name] = value
    return found


@dataclass
class Record:
    """The cases of a run and what has become of them.

    Attributes:
        settings: of the run: backend, target, seed, timeout, world size.
        outcomes: by case name, of the cases that ended.
        running: the case that runs now.
        ended: why the run ended before all cases did; "" while it has not.
    """

    cases: Sequence[Case]
    settings: dict[str, Any]
    junit: Path | None = None
    json: Path | None = None
    environment: dict[str, str] = field(default_factory=environment)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    running: Case | None = None
    ended: str = ""
    started: datetime = field(default_factory=lambda: datetime.now(timezone.utc))

    def outcome(self, case: Case) -> Outcome:
        """The verdict; a case that runs has failed unless it ends."""
        if case.name in self.outcomes:
            return self.outcomes[case.name]
        if case is self.running:
            return Outcome(FAILED, title="it ran when the script ended", message="it ran when the script ended")
        return Outcome(NOT_RUN, title=self.ended or "the script ended before its turn")

    def counts(self) -> Counter[str]:
        """Cases by status."""
        return Counter(self.outcome(case).status for case in self.cases)

    @property
    def passed(self) -> bool:
        """At least one case passed, none failed, and all had their turn."""
        counts = self.counts()
        return counts[PASSED] > 0 and not counts[FAILED] and not counts[NOT_RUN]

    def start(self, case: Case) -> None:
        """The case runs now."""
        self.running = case
        self.write()

    def end(self, case: Case, outcome: Outcome) -> None:
        """The case has a verdict."""
        self.outcomes[case.name] = outcome
        self.running = None
        self.write()

    def write(self) -> None:
        """Write the files that were asked for.

        Raises:
            OSError: a file cannot be written.
        """
        for path, text in ((self.json, self.to_json), (self.junit, self.to_junit)):
            if path is not None:
                _replace(path, text())

    def to_json(self) -> str:
        """Settings, environment, counts, and one object per case; errors that are no numbers are null."""
        content = {
            "passed": self.passed,
            "counts": dict(self.counts()),
            "ended": self.ended,
            "started": self.started.isoformat(timespec="seconds"),
            "settings": self.settings,
            "environment": self.environment,
            "cases": [_case_as_json(case, self.outcome(case)) for case in self.cases],
        }
        return json.dumps(content, indent=2, allow_nan=False) + "\n"

    def to_junit(self) -> str:
        """One testsuite per kernel; not available, skipped and not run are <skipped>."""
        root = ET.Element("testsuites", name="nki-parallel-attn validate")
        for kernel in dict.fromkeys(case.kernel for case in self.cases):
            suite = ET.SubElement(root, "testsuite", name=kernel)
            properties = ET.SubElement(suite, "properties")
            for name, value in {**self.settings, **self.environment}.items():
                ET.SubElement(properties, "property", name=name, value=_xml_text(str(value)))
            outcomes = [(case, self.outcome(case)) for case in self.cases if case.kernel == kernel]
            for case, outcome in outcomes:
                _add_testcase(suite, case, outcome)
            _set_totals(suite, [outcome for _, outcome in outcomes])
            suite.set("skipped", str(sum(outcome.status not in (PASSED, FAILED) for _, outcome in outcomes)))
            suite.set("timestamp", self.started.strftime("%Y-%m-%dT%H:%M:%S"))
        _set_totals(root, [self.outcome(case) for case in self.cases])
        ET.indent(root)
        return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _case_as_json(case: Case, outcome: Outcome) -> dict[str, Any]:
    found = outcome.deviation
    return {
        "name": case.name,
        "kernel": case.kernel,
        "layout": case.layout,
        "scenario": case.scenario,
        "dtype": case.dtype,
        "ranks": case.ranks,
        "lnc": case.lnc,
        "status": outcome.status,
        "error": found.error if found and math.isfinite(found.error) else None,
        "tolerance": found.tolerance if found else None,
        "rank": outcome.rank,
        "seconds": round(outcome.seconds, 3),
        "message": outcome.message or outcome.title,
    }


def _add_testcase(suite: ET.Element, case: Case, outcome: Outcome) -> None:
    name = case.name.removeprefix(f"{case.kernel}/")
    attributes = {"classname": f"validate.{case.kernel}", "name": name, "time": f"{outcome.seconds:.3f}"}
    testcase = ET.SubElement(suite, "testcase", attributes)
    if outcome.status == FAILED:
        failure = ET.SubElement(testcase, "failure", type="failed", message=_xml_text(outcome.title))
        failure.text = _xml_text(outcome.message)
    elif outcome.status != PASSED:
        ET.SubElement(testcase, "skipped", message=_xml_text(f"{outcome.status}: {outcome.title}"))
    if outcome.deviation:
        ET.SubElement(testcase, "system-out").text = _xml_text(describe(outcome.deviation))


def _set_totals(element: ET.Element, outcomes: Sequence[Outcome]) -> None:
    failures = sum(outcome.status == FAILED for outcome in outcomes)
    element.set("tests", str(len(outcomes)))
    element.set("failures", str(failures))
    element.set("errors", "0")
    element.set("time", f"{sum(outcome.seconds for outcome in outcomes):.3f}")


def _xml_text(text: str) -> str:
    return _NOT_XML.sub("?", text)


def _replace(path: Path, text: str) -> None:
    """Write at once: who reads the file never sees a part of it."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
