from __future__ import annotations

from sparseautomodel.residency_report import ResidencyReport, UnitReport


def test_sums_and_text() -> None:
    units = (UnitReport("a", "block", 10, "resident", 0, 0, 0.0), UnitReport("b", "block", 20, "streamed", 3, 60, 0.5))
    report = ResidencyReport("cuda:0", "pinned", 1000, 10, 20, 5, units)
    assert report.live_nbytes == 30 and report.streamed_nbytes == 20
    assert report.to_dict()["live_nbytes"] == 30 and report.to_dict()["units"][1]["copies"] == 3
    assert "on cuda:0, home in pinned" in str(report) and "waited 0.500 s" in str(report)
