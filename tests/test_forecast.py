from __future__ import annotations

from sparseautomodel.forecast import Forecast


def test_speed_is_that_of_what_is_streamed() -> None:
    found = Forecast(1000, 400, 300, 200, 100, 5000, 1e6)
    assert found.fits and found.seconds == 0.005 and found.to_dict()["seconds"] == 0.005
    assert "at least 5.0 ms" in str(found)
    assert "at least 400 bytes are needed" in str(Forecast(100, 400, 0, 0, 0, 0, 1.0))
