import os

from nestling.ssl.names import printable


def test_any_bytes_are_shown_on_one_line_in_any_encoding():
    name = os.fsdecode(b"\xff\xfe a\nb\x1b[31m.png")
    assert printable(name) == r"\xff\xfe a\nb\x1b[31m.png"
    printable(name).encode("ascii")


def test_text_of_any_script_stays_as_it_is():
    assert printable("кот/猫 é.JPG") == "кот/猫 é.JPG"
