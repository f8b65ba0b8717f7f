"""Shows what a prefetch router is worth on a terminal."""

from __future__ import annotations

from rich.table import Table

from estream_packer.prefetch.report import Asked, PrefetchReport


def report_tables(report: PrefetchReport) -> list[Table]:
    """The report, for a terminal: by layer, then by what was asked for."""
    layers = Table("layer", box=None)
    titles = ("experts", "KL, nats", "from", "target", "overlap", "all covered", "precision", "extra", "fixed needs")
    for title in (*titles, "calibration error", "router untrained", "previous token", "shuffled"):
        layers.add_column(title, justify="right")
    for each in report.layers:
        found = each.found
        layers.add_row(
            str(each.layer),
            f"{each.top_k} of {each.experts}",
            f"{each.loss:.4f}",
            f"{each.start_loss:.4f}, {each.start}",
            f"{each.target:.4f}",
            f"{found.overlap:.2%}",
            f"{found.covered:.2%}",
            f"{found.precision:.1%}",
            f"{found.extra:.2f}",
            f"{each.fixed_extra:.2f}",
            f"{each.calibration_error:.4f}",
            f"{each.untrained:.1%}",
            f"{each.previous_token:.1%}",
            f"{each.shuffled:.1%}",
        )
    asked = Table("asked for", box=None)
    for title in ("overlap", "all covered", "precision", "extra", "fixed needs", "share of that"):
        asked.add_column(title, justify="right")
    own = Asked(overlap=report.asked, found=report.found, fixed_extra=report.fixed_extra)
    for row in sorted((own, *report.others), key=lambda row: row.overlap):
        found = row.found
        share = f"{found.extra / row.fixed_extra:.2f}" if row.fixed_extra else ""
        asked.add_row(
            f"{row.overlap:.1%}",
            f"{found.overlap:.2%}",
            f"{found.covered:.2%}",
            f"{found.precision:.1%}",
            f"{found.extra:.2f}",
            f"{row.fixed_extra:.2f}",
            share,
        )
    fixed = Table("fixed extra", box=None)
    for title in ("overlap", "all covered", "precision"):
        fixed.add_column(title, justify="right")
    for d, each_fixed in enumerate(report.fixed):
        fixed.add_row(str(d), f"{each_fixed.overlap:.2%}", f"{each_fixed.covered:.2%}", f"{each_fixed.precision:.1%}")
    return [layers, asked, fixed]


def explained(report: PrefetchReport) -> list[str]:
    """What was measured, in words, a line each."""
    counts = ", ".join(f"{count:,} to {purpose}" for purpose, count in report.tokens.items())
    apart = (
        "none in two of them"
        if report.test is None
        else f"{report.test} is another text than the others, no more was checked"
    )
    return [
        f"tokens: {counts}; {apart}",
        f"trained to {report.distribution}",
        "overlap: share of needed experts that were predicted; extra: predicted beyond top_k; fixed needs: extra of a "
        "fixed number for the same overlap, between whole numbers in a straight line",
        f"calibration error {report.calibration_error:.4f}; overlap without training {report.untrained:.1%}, with the "
        f"token before {report.previous_token:.1%}, with shuffled tokens {report.shuffled:.1%}",
    ]
