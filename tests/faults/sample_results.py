"""Results as commands write them, without the hours that they take."""

from dataclasses import dataclass, replace

from measured_blocks import block as measured_block


def block(name):
    """A block of ``bench serve``."""
    return measured_block("stock", 0, 0.1) | {"id": name}


def requests(count):
    """What was measured of the requests of a block."""
    from irminsul.bench.client import Measured

    one = Measured("log:1", 0, 0.0, 0.5, 0.1, (0.01, 0.02), 1000, 3, None, 200, None, "", 0.0)
    # All different, so that packing them leaves something that can be cut.
    return [replace(one, place=f"log:{number}", started_s=number * 0.37) for number in range(count)]


@dataclass(frozen=True)
class _Sizes:
    blocks: int = 3


def experiment(folder):
    """Write what ``reproduce`` writes of one experiment."""
    from irminsul.machine import Machine
    from irminsul.reproduce.figures import Line, Panel
    from irminsul.reproduce.record import Origin, Report, write_report

    panel = Panel("title", "tokens", "share", (Line("a", (1, 10), (0.1, 0.2)),))
    report = Report("sink", "A title", "A method.", _Sizes(), {"a": 1.0}, (), (), (panel,))
    origin = Origin("irminsul reproduce sink", "tiny", True, 7, Machine("a computer", 2, 1, "2", "float32"), 1.5)
    write_report(report, origin, folder)


def case_results(folder):
    """Write what ``fidelity --json`` writes."""
    from irminsul.fidelity.report import write_json

    write_json(
        {"model": "tiny", "cases": [{"task": "needle", "number": number} for number in range(5)]}, folder / "out.json"
    )


def demo_report(folder):
    """Write what ``demo --json`` writes."""
    from irminsul.demo.results import DemoReport, RequestResult, write_json
    from irminsul.engine.types import Usage
    from irminsul.machine import Machine

    usage = Usage(100, 0, 0, 0, 100, 1, 0, 0.0, 0.0, 0.0)
    result = RequestResult("roles", 1, usage, usage, 0, 1.0, 1.0, True, 0.0)
    write_json(DemoReport((result,), 0, Machine("a computer", 2, 1, "2", "float32")), folder / "out.json")
