"""How pages look: one style sheet, in a light and a dark scheme, for the screen, a phone and paper.

Colours of heat maps are interpolated here once per scheme.
"""

LEVELS = 13  # colours of a heat map; odd, so that a diverging scale has a neutral middle
LINES = {
    "light": (
        "#2a6fd0",
        "#d2501a",
        "#15885e",
        "#8057cc",
        "#a97f00",
        "#c4437f",
        "#1f8aa0",
        "#666a72",
    ),
    "dark": (
        "#6aa5f2",
        "#f28a58",
        "#46c492",
        "#b296f2",
        "#dfbb45",
        "#ee82b4",
        "#5fc6d8",
        "#a6aab2",
    ),
}
RAMPS = {
    ("light", "s"): ("#efebf6", "#c3b2e4", "#9173cc", "#6242a3", "#37205f"),
    ("dark", "s"): ("#2a2733", "#4d3d73", "#7d62b8", "#b39be6", "#e9deff"),
    ("light", "d"): ("#174f9e", "#7aade6", "#f0efec", "#f0a076", "#b83c08"),
    ("dark", "d"): ("#74b0fa", "#35669f", "#35383e", "#a5562c", "#fb935e"),
}

_PAGE = """
:root { color-scheme: light dark; --page: #f7f7f5; --card: #fff; --ink: #17181a; --soft: #5d6168; --line: #e3e3df;
  --bad: #c41e3a; --mark: #fff1c2; --focus: #1f66c9; --edge: #0002; }
@media screen and (prefers-color-scheme: dark) { :root { --page: #141517; --card: #1d1f22; --ink: #ececea;
  --soft: #a2a6ad; --line: #34373c; --bad: #ff6b81; --mark: #423814; --focus: #7db3ff; --edge: #000; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); -webkit-text-size-adjust: 100%;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 20px 48px; }
h1 { font-size: 30px; line-height: 1.15; margin: 0; letter-spacing: -.015em; overflow-wrap: anywhere; }
h1 span { color: var(--soft); font-weight: 400; }
h2 { font-size: 19px; margin: 40px 0 4px; overflow-wrap: anywhere; }
h2 + p { margin: 0 0 14px; color: var(--soft); max-width: 75ch; }
h3, figcaption { font-weight: 600; font-size: 15px; margin: 0; overflow-wrap: anywhere; }
section > ul { padding-left: 20px; color: var(--soft); }
.sub { margin: 6px 0 0; color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 18px 0 0; }
.tiles div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px; }
.tiles dt { color: var(--soft); font-size: 13px; }
.tiles dd { margin: 0; font-size: 23px; line-height: 1.25; font-weight: 600; overflow-wrap: anywhere; }
.tiles dd + dd { font-size: 13px; font-weight: 400; color: var(--soft); }
.warn { border-left: 4px solid var(--bad); background: var(--card); padding: 8px 14px; margin: 16px 0 0; }
.warn p { margin: 2px 0; overflow-wrap: anywhere; }
.grid2 { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); gap: 14px;
  margin-top: 12px; }
figure, .card, details { background: var(--card); border: 1px solid var(--line); border-radius: 8px; min-width: 0; }
figure, .card { margin: 0; padding: 12px 14px 8px; break-inside: avoid; }
.card, section > details { margin-top: 14px; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 0 14px; margin: 2px 0 4px; padding: 0;
  font-size: 13px; color: var(--soft); }
.legend b { color: var(--ink); font-weight: 600; font-variant-numeric: tabular-nums; }
.key { display: inline-block; width: 14px; border-top: 2.5px solid; vertical-align: 4px; margin-right: 5px; }
.key.raw { opacity: .4; }
.key.dots { width: 8px; height: 8px; border: 0; border-radius: 50%; vertical-align: 0; background: currentColor; }
.key.bad { border: 0; width: auto; vertical-align: 0; font-style: normal; color: var(--bad); }
.ramp { display: inline-flex; margin: 0 7px; vertical-align: -1px; }
.ramp i { width: 11px; height: 11px; }
.note { margin: 2px 0 4px; font-size: 13px; color: var(--soft); }
svg { overflow: hidden; }
figure > svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font-size: 11.5px; fill: var(--soft); font-variant-numeric: tabular-nums; }
svg .value { fill: var(--ink); font-weight: 600; paint-order: stroke; stroke: var(--card); stroke-width: 4px; }
.grid { stroke: var(--line); fill: none; }
.axis { stroke: var(--soft); fill: none; stroke-width: .8; }
polyline { fill: none; stroke: currentColor; stroke-linejoin: round; stroke-linecap: round; }
polyline.line { stroke-width: 2; }
polyline.raw { stroke-width: 1; opacity: .35; }
polyline.dots { stroke-width: 1.5; opacity: .7; }
.band { fill: currentColor; opacity: .2; }
.alone, .bar, .dot { fill: currentColor; }
.dot { stroke: var(--card); stroke-width: 1.5; }
.hollow { fill: var(--card); stroke: currentColor; stroke-width: 1.5; }
polyline.band { fill: none; stroke-width: 12; opacity: .3; }
.dash1 { stroke-dasharray: 7 4; }
.key.dash1 { border-top-style: dashed; }
.bad path { fill: none; stroke: var(--bad); stroke-width: 1.8; }
.bad .rule { stroke-width: .8; stroke-dasharray: 2 3; }
.cells { shape-rendering: crispEdges; }
pre, .code td, .code tbody th { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre { font-size: 13px; white-space: pre-wrap; overflow-wrap: anywhere; margin: 4px 0; tab-size: 4; }
mark { background: var(--mark); color: inherit; border-radius: 3px; }
.scroll { overflow-x: auto; background: linear-gradient(to left, var(--card) 24px, transparent) right / 48px 100% local,
  linear-gradient(to left, var(--edge), transparent) right / 18px 100% scroll; background-repeat: no-repeat; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 3px 12px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
thead th { color: var(--soft); font-weight: 500; }
tbody th { font-weight: 400; position: sticky; left: 0; background: var(--card); }
.num:not(.narrow) tbody th { min-width: 104px; max-width: 46vw; overflow-wrap: break-word; }
.num td, .num thead th + th { text-align: right; white-space: nowrap; }
.code td, .code th { font-size: 12.5px; overflow-wrap: anywhere; min-width: 80px; }
details { padding: 10px 14px; }
summary { cursor: pointer; font-weight: 600; overflow-wrap: anywhere; }
summary:focus-visible { outline: 2px solid var(--focus); outline-offset: 2px; border-radius: 4px; }
footer { margin-top: 28px; color: var(--soft); font-size: 13px; }
@media (max-width: 520px) {
  main { padding: 20px 12px 32px; }
  h1 { font-size: 25px; }
  svg text { font-size: 16px; }
  svg .value { font-size: 14px; }
  .tiles { grid-template-columns: 1fr 1fr; gap: 8px; }
  .tiles div, figure, .card { padding: 10px; }
  .tiles dd { font-size: 21px; }
  .num:not(.narrow) tbody th { min-width: 80px; }
  .num th, .num td { padding-right: 7px; font-size: 12px; }
  .narrow th, .narrow td { padding-right: 5px; font-size: 11px; }
  .code td, .code th { min-width: 108px; }
  .num thead th + th { white-space: normal; }
}
@media print {
  :root { --page: #fff; }
  main { max-width: none; padding: 0; }
  .grid2 { grid-template-columns: 1fr 1fr; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""


def _mixed(stops: tuple[str, ...], part: float) -> str:
    """The colour at a part of the way from the first stop to the last."""
    place = part * (len(stops) - 1)
    index = min(int(place), len(stops) - 2)
    before, after = (bytes.fromhex(stop[1:]) for stop in stops[index : index + 2])
    mixed = "#"
    for low, high in zip(before, after, strict=True):
        mixed += f"{round(low + (high - low) * (place - index)):02x}"
    return mixed


def _scheme(scheme: str) -> str:
    rules = [f".c{i}{{color:{color}}}" for i, color in enumerate(LINES[scheme])]
    for ramp in "sd":
        for level in range(LEVELS):
            color = _mixed(RAMPS[scheme, ramp], level / (LEVELS - 1))
            names = f".{ramp}{level}"
            if ramp == "s":  # reversed, it is a ramp too
                names += f",.r{LEVELS - 1 - level}"
            rules.append(f"{names}{{fill:{color};background:{color}}}")
    return "".join(rules)


def style_sheet() -> str:
    """The page's CSS; print always takes the light scheme."""
    dark = f"@media screen and (prefers-color-scheme:dark){{{_scheme('dark')}}}"
    return _PAGE + _scheme("light") + dark
