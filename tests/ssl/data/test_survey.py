from nestling.ssl.data.survey import say_if_not_compiled
from nestling.ssl.views import render


def test_an_installation_without_the_compiled_kernel_is_told_of_it(monkeypatch, caplog):
    caplog.set_level("INFO", logger="nestling")
    monkeypatch.setattr(render, "kernel", object())
    say_if_not_compiled()
    assert not caplog.text
    monkeypatch.setattr(render, "kernel", None)
    say_if_not_compiled()
    assert "with a C compiler on the machine, install nestling again" in caplog.text
