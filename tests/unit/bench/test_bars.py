"""The chart of a race."""

from xml.etree import ElementTree

from bench.bars import Bar, bars_svg

SVG = "{http://www.w3.org/2000/svg}"


def test_bars_are_as_long_as_their_seconds_on_one_scale() -> None:
    groups = {"128 tokens": [Bar("a", 2.0, True), Bar("b < c", 4.0, False)], "512 tokens": [Bar("a", 8.0, True)]}
    root = ElementTree.fromstring(bars_svg("Title", "Subtitle", groups))
    _ground, *bars = root.iter(f"{SVG}rect")
    lengths = [float(each.attrib["width"]) for each in bars]
    assert [each / lengths[0] for each in lengths] == [1, 2, 4]
    assert [each.attrib["class"] for each in bars] == ["ours", "bar", "ours"]


def test_a_picture_says_what_it_shows() -> None:
    root = ElementTree.fromstring(bars_svg("Title", "Subtitle", {"512 tokens": [Bar("b < c", 3.25, False)]}))
    assert {"Title", "Subtitle", "512 tokens", "b < c", "3.2 s"} <= {each.text for each in root.iter(f"{SVG}text")}


def test_a_picture_is_light_or_dark_as_the_screen_is() -> None:
    root = ElementTree.fromstring(bars_svg("Title", "Subtitle", {"512 tokens": [Bar("a", 1.0, True)]}))
    style = root.findtext(f"{SVG}style", "")
    light, _, dark = style.partition("@media (prefers-color-scheme: dark)")
    for kind in ("ground", "text", "quiet", "bar", "ours"):
        assert f"\n.{kind} {{" in light
        assert f"\n  .{kind} {{" in dark
