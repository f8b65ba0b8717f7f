"""The page's tables: what the package says of itself, and where every byte and every weight of it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from estream_packer.inspection import Inspection
from estream_packer.markup import Markup, element, foreign, join, swatch
from estream_packer.page.layout_picture import PADDING, kind_of, share_text
from estream_packer.summary import Summary
from estream_spec.manifest import DeviceConfiguration


def table(
    title: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Sequence[str] = (),
    ids: Iterable[str] = (),
) -> Markup:
    """A table that scrolls by itself where the page is narrow; nothing where it has no rows.

    Args:
        title: its caption.
        headings: one for each column.
        rows: their cells.
        numbers: headings of the columns that are set to the right.
        ids: names of the first rows, for links to them.
    """
    kinds = ["number" if heading in numbers else None for heading in headings]
    heads = (element("th", each, scope="col", class_=kind) for each, kind in zip(headings, kinds, strict=True))
    names = iter(ids)
    body = [
        element(
            "tr",
            *(element("td", each, class_=kind) for each, kind in zip(row, kinds, strict=True)),
            id=next(names, None),
        )
        for row in rows
    ]
    if not body:
        return Markup("")
    caption = element("caption", title)
    whole = element("table", caption, element("thead", element("tr", *heads)), element("tbody", *body))
    return element("div", whole, class_="scroll", tabindex=0, role="region", aria_label=title)


def pairs(found: Mapping[str, str]) -> Markup:
    """Names and what they stand for."""
    items = [join(element("dt", foreign(name)), element("dd", foreign(text))) for name, text in found.items()]
    return element("dl", *items, class_="pairs")


def figures(found: Mapping[str, str]) -> Markup:
    """What a reader asks first, in large type."""
    items = [element("div", element("dt", name), element("dd", text)) for name, text in found.items()]
    return element("dl", *items, class_="figures")


def bar(share: float) -> Markup:
    """A share, 0 to 1, as a bar."""
    full = element("rect", class_="bar-all", width="100%", height=10)
    return element(
        "svg",
        full,
        element("rect", class_="bar", width=f"{100 * share:.2f}%", height=10),
        class_="share",
        width=120,
        height=10,
        aria_hidden="true",
    )


def weights_table(summary: Summary) -> Markup:
    """Weights by role."""
    stored = sum(role.stored_bytes for role in summary.roles)
    rows = [(each.role, each.bits_per_weight, each.weights, each.stored_bytes) for each in summary.roles]
    rows.append(("all weights", summary.bits_per_weight, summary.weights, stored))
    headings = "role", "bits per weight", "weights", "bytes"
    texts = [(role, f"{bits:.3f}", f"{weights:,}", f"{length:,}") for role, bits, weights, length in rows]
    return table("Bits per weight by role", headings, texts, headings[1:])


def space_table(summary: Summary) -> Markup:
    """Bytes by what they are for."""
    rows: list[tuple[str, ...]] = [
        (label, f"{length:,}", join(bar(length / summary.file_length), " ", share_text(length / summary.file_length)))
        for label, length in summary.space.items()
    ]
    rows.append(("package", f"{summary.file_length:,}", ""))
    return table("What the bytes are for", ("purpose", "bytes", "share"), rows, ("bytes",))


def sections_table(found: Inspection) -> Markup:
    """Every stretch of the package; those between sections are added up."""
    padding = sum(each.stored_length for each in found.extents if each.name == "padding")
    named = [(number, each) for number, each in enumerate(found.extents) if each.name != "padding"]
    rows: list[tuple[str, ...]] = [
        (
            join(swatch(kind_of(each.name)), each.name),
            f"{each.offset:,}",
            f"{each.stored_length:,}",
            f"{each.length:,}",
            each.codec,
            share_text(each.share),
        )
        for _, each in named
    ]
    share = share_text(padding / found.summary.file_length)
    rows.append((join(swatch("padding"), "padding between them"), "", f"{padding:,}", "", "", share))
    headings = "section", "offset", "stored bytes", "bytes", "codec", "share"
    ids = [*(f"section-{number}" for number, _ in named), PADDING]
    return table("Sections", headings, rows, ("offset", "stored bytes", "bytes", "share"), ids)


def records_table(found: Inspection) -> Markup:
    """Records by section and layout."""
    rows = [
        (
            each.section,
            f"{each.count:,}",
            f"{each.record_length:,}",
            f"{each.padding_share:.1%}",
            ", ".join(each.matrices) or "norms only",
        )
        for each in found.records
    ]
    headings = "records", "count", "bytes each", "padding", "matrices"
    first: dict[str, int] = {}
    for number, each in enumerate(found.records):
        first.setdefault(each.section, number)
    ids = (
        f"records-{each.section}" if first[each.section] == number else f"records-{each.section}-{number}"
        for number, each in enumerate(found.records)
    )
    return table("Records", headings, rows, headings[1:4], ids)


def configurations_table(title: str, choices: Sequence[DeviceConfiguration]) -> Markup:
    """Device configurations with all their fields; nothing where there are none."""
    if not choices:
        return Markup("")
    names = DeviceConfiguration.__struct_fields__
    values = [[getattr(choice, name) for name in names] for choice in choices]
    headings = [name.replace("_", " ") for name in names]
    numbers = [heading for heading, *column in zip(headings, *values, strict=True) if isinstance(column[0], int)]
    rows = [[_field(name, value) for name, value in zip(names, row, strict=True)] for row in values]
    return table(title, headings, rows, numbers)


def _field(name: str, value: str | int) -> str:
    """What a field of a device configuration says."""
    if name == "prompt_tokens" and value == 0:
        return "any"
    return f"{value:,}" if isinstance(value, int) else foreign(value)


def schedules_table(found: Inspection) -> Markup:
    """Programs, each with what is proven of it."""
    rows = [
        (
            str(each.section),
            each.phase,
            each.policy,
            foreign(", ".join(each.configurations)),
            f"{each.instructions:,}",
            f"{each.banks:,}",
            f"{each.peak_bytes:,}",
            f"{each.groups_read:,}",
            f"{each.bytes_read:,}",
        )
        for each in found.schedules
    ]
    headings = "schedule", "phase", "policy", "for", "instructions", "banks", "peak bytes", "reads", "bytes read"
    return table("Programs, as proven", headings, rows, headings[4:])


def prefetch_table(found: Inspection) -> Markup:
    """The prefetch router with what its maker measured; nothing where there is none."""
    if (router := found.prefetch_router) is None:
        return Markup("")
    row = (
        foreign(router.writer),
        str(router.layers),
        f"{router.tokens:,}",
        f"{router.overlap:.2%}",
        f"{router.extra:.2f}",
        f"{router.length:,}",
    )
    headings = "trained by", "layers", "tokens", "overlap", "extra experts", "bytes"
    return table("Prefetch router", headings, [row], headings[1:])


def graphs_table(found: Inspection) -> Markup:
    """Compiled graphs."""
    sizes = {extent.name: extent.length for extent in found.extents}
    rows = [
        (
            str(each.section),
            each.role,
            str(each.shape_class),
            each.weights,
            each.activations,
            each.target,
            f"{sizes[f'graph {each.section}']:,}",
        )
        for each in found.graphs
    ]
    headings = "graph", "role", "shape class", "weights", "activations", "target", "bytes"
    return table("Graphs", headings, rows, ("shape class", "bytes"))


def binaries_table(found: Inspection) -> Markup:
    """Graphs compiled for accelerators."""
    rows = [
        (
            str(each.section),
            f"{each.chip}, {each.title}",
            f"{each.target} v{each.architecture}",
            each.sdk,
            foreign(each.compiler),
            f"{len(each.graphs):,}",
            f"{each.length:,}",
        )
        for each in found.binaries
    ]
    headings = "binary", "chip", "architecture", "SDK", "compiler", "graphs", "bytes"
    return table("Binaries", headings, rows, ("graphs", "bytes"))
