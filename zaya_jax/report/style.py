"""The report's looks: one style sheet, in a light and a dark scheme, for the screen, a phone and paper.

Colours of heat maps are interpolated here once per scheme, and each gets a text colour that stands out on it.
"""

from zaya_jax.report.heat import LEVELS

LINES = {
    "light": ("#2a6fd0", "#d2501a", "#15885e", "#8057cc", "#a97f00", "#c4437f", "#1f8aa0", "#666a72"),
    "dark": ("#6aa5f2", "#f28a58", "#46c492", "#b296f2", "#dfbb45", "#ee82b4", "#5fc6d8", "#a6aab2"),
}
RAMPS = {
    ("light", "s"): ("#efebf6", "#c3b2e4", "#9173cc", "#6242a3", "#37205f"),
    ("dark", "s"): ("#2a2733", "#4d3d73", "#7d62b8", "#b39be6", "#e9deff"),
    ("light", "d"): ("#174f9e", "#7aade6", "#f0efec", "#f0a076", "#b83c08"),
    ("dark", "d"): ("#74b0fa", "#35669f", "#35383e", "#a5562c", "#fb935e"),
}

_PAGE = """
:root {
  color-scheme: light dark;
  --page: #f7f7f5; --card: #fff; --ink: #17181a; --soft: #5d6168; --line: #e3e3df; --bad: #c41e3a;
  --mark: #fff1c2; --focus: #1f66c9;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --page: #141517; --card: #1d1f22; --ink: #ececea; --soft: #a2a6ad; --line: #34373c; --bad: #ff6b81;
    --mark: #423814; --focus: #7db3ff;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink); -webkit-text-size-adjust: 100%;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif;
}
main { max-width: 1120px; margin: 0 auto; padding: 32px 20px 48px; }
h1 { font-size: 30px; line-height: 1.15; margin: 0; letter-spacing: -.015em; overflow-wrap: anywhere; }
h1 span { color: var(--soft); font-weight: 400; }
h2 { font-size: 19px; margin: 40px 0 4px; letter-spacing: -.005em; }
h2 + p { margin: 0 0 14px; color: var(--soft); max-width: 75ch; }
.sub { margin: 6px 0 0; color: var(--soft); }

.tiles {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 22px 0 0;
}
.tiles div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px; }
.tiles dt { color: var(--soft); font-size: 13px; }
.tiles dd { margin: 0; font-size: 23px; line-height: 1.25; font-weight: 600; white-space: nowrap; }
.tiles dd + dd { font-size: 13px; font-weight: 400; white-space: normal; color: var(--soft); }
.warn {
  border-left: 4px solid var(--bad); background: var(--card); padding: 8px 14px; margin: 16px 0 0;
  border-radius: 0 6px 6px 0;
}
.warn p { margin: 2px 0; overflow-wrap: anywhere; }

.grid2 {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); gap: 14px;
  margin-top: 12px;
}
figure, .card, details { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
figure, .card { margin: 0; padding: 12px 14px 8px; break-inside: avoid; min-width: 0; }
.card { margin-top: 14px; overflow-x: auto; }
figcaption, .card h3 { font-weight: 600; font-size: 15px; margin: 0; overflow-wrap: anywhere; }
.legend {
  list-style: none; display: flex; flex-wrap: wrap; gap: 0 14px; align-items: center; min-height: 20px;
  margin: 2px 0 4px; padding: 0; font-size: 13px; color: var(--soft);
}
.legend b { color: var(--ink); font-weight: 600; font-variant-numeric: tabular-nums; }
figcaption { display: flex; justify-content: space-between; align-items: baseline; gap: 12px; }
.at { font-size: 13px; font-weight: 400; white-space: nowrap; font-variant-numeric: tabular-nums; }
.key {
  display: inline-block; width: 14px; height: 0; border-top: 2.5px solid; vertical-align: 4px;
  margin-right: 5px;
}
.key.raw { opacity: .4; }
.key.dots {
  width: 8px; height: 8px; border: 0; border-radius: 50%; vertical-align: 0; background: currentColor;
}
.key.bad { border: 0; height: auto; width: auto; vertical-align: 0; font-style: normal; color: var(--bad); }
.ramp { display: inline-flex; margin: 0 7px; vertical-align: -1px; }
.ramp i { width: 11px; height: 11px; }
.note { margin: 2px 0 4px; font-size: 13px; color: var(--soft); }

svg { display: block; width: 100%; height: auto; overflow: visible; touch-action: pan-y pinch-zoom; }
svg text { font-size: 11.5px; fill: var(--soft); font-variant-numeric: tabular-nums; }
svg .value {
  fill: var(--ink); font-weight: 600; paint-order: stroke; stroke: var(--card); stroke-width: 4px;
  stroke-linejoin: round;
}
.grid { stroke: var(--line); fill: none; }
.axis { stroke: var(--soft); fill: none; stroke-width: .8; }
polyline { fill: none; stroke: currentColor; stroke-linejoin: round; stroke-linecap: round; }
polyline.line { stroke-width: 2; }
polyline.raw { stroke-width: 1; opacity: .35; }
polyline.dots { stroke-width: 1.5; opacity: .7; }
.band { fill: currentColor; opacity: .2; }
.alone, .bar { fill: currentColor; }
.area { fill: none; pointer-events: all; }
.dot { fill: currentColor; stroke: var(--card); stroke-width: 1.5; }
.dash1 { stroke-dasharray: 7 4; }
.key.dash1 { border-top-style: dashed; }
.dash2 { stroke-dasharray: 2 4; }
.key.dash2 { border-top-style: dotted; }
svg[tabindex] { cursor: crosshair; }
svg:focus-visible, summary:focus-visible { outline: 2px solid var(--focus); outline-offset: 2px; border-radius: 4px; }
.select { fill: var(--focus); opacity: .18; visibility: hidden; }
.told { position: absolute; width: 1px; height: 1px; margin: -1px; overflow: hidden; clip-path: inset(50%); }
.cursor { stroke: var(--soft); stroke-width: 1; visibility: hidden; }
.bad path { stroke: var(--bad); stroke-width: 1.8; fill: none; }
.bad .rule { stroke-width: .8; stroke-dasharray: 2 3; }
.cells { shape-rendering: crispEdges; }

pre, code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre { font-size: 13px; white-space: pre-wrap; overflow-wrap: anywhere; margin: 4px 0; tab-size: 4; }
code { font-size: 12.5px; }
mark { background: var(--mark); color: inherit; border-radius: 3px; padding: 1px 0; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td {
  text-align: left; padding: 3px 12px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: anywhere;
}
thead th { color: var(--soft); font-weight: 500; }
tbody th { font-weight: 400; }
.wide { width: 100%; }
.scroll { overflow-x: auto; position: relative; }
.num tbody th { white-space: nowrap; }
.num td, .num thead th + th { text-align: right; white-space: nowrap; }
.names tbody th { white-space: normal; min-width: 104px; }
.runs th, .runs td { min-width: 104px; }
.runs thead th { color: var(--ink); font-weight: 600; }
.runs tbody th {
  position: sticky; left: 0; background: var(--card); color: var(--soft); max-width: 34vw; min-width: 96px;
}
input[name="by"] { margin: 0 5px 0 0; accent-color: var(--focus); }
input[name="by"] + label { margin-right: 18px; }
#by-tokens:checked ~ .over-step, #by-step:checked ~ .over-tokens { display: none; }
.live {
  position: sticky; bottom: 0; margin: 0; padding: 5px 20px; font-size: 13px; color: var(--soft);
  background: var(--card); border-top: 1px solid var(--line);
}
.shares { width: 100%; min-width: max-content; }
.shares td, .shares th {
  border: 1px solid var(--card); padding: 4px 7px; text-align: center; white-space: nowrap;
}
.shares tbody th { color: var(--soft); text-align: right; }
.shares .apart { border-left: 8px solid var(--card); }
details { padding: 10px 14px; margin-top: 14px; }
summary { cursor: pointer; font-weight: 600; }
summary span { font-weight: 400; color: var(--soft); }
.values { border: 0; padding: 0; margin: 2px 0 4px; background: none; font-size: 13px; }
.values summary { font-weight: 400; color: var(--soft); }
.group th { padding-top: 14px; font-weight: 600; }
.changed td { background: var(--mark); }
footer { margin-top: 28px; color: var(--soft); font-size: 13px; }

@media (max-width: 520px) {
  main { padding: 20px 12px 32px; }
  h1 { font-size: 25px; }
  svg text { font-size: 16px; }
  svg .value { font-size: 14px; }
  figure, .card { padding: 10px; }
  .tiles { grid-template-columns: 1fr 1fr; gap: 8px; }
  .tiles div { padding: 9px 11px; }
  .tiles dd { font-size: 21px; }
}
@media print {
  :root { --page: #fff; }
  body { font-size: 11pt; }
  main { max-width: none; padding: 0; }
  h2 { break-after: avoid; }
  .grid2 { grid-template-columns: 1fr 1fr; }
  * { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
}
"""


def _rgb(color: str) -> tuple[float, float, float]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


def _between(stops: tuple[str, ...], part: float) -> str:
    place = part * (len(stops) - 1)
    index = min(int(place), len(stops) - 2)
    mixed = [
        a + (b - a) * (place - index) for a, b in zip(_rgb(stops[index]), _rgb(stops[index + 1]), strict=True)
    ]
    return "#" + "".join(f"{round(v):02x}" for v in mixed)


def _luminance(color: str) -> float:
    r, g, b = (((c / 255 + 0.055) / 1.055) ** 2.4 if c > 10 else c / 255 / 12.92 for c in _rgb(color))
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def _scheme(scheme: str) -> str:
    rules = [f".c{i}{{color:{color}}}" for i, color in enumerate(LINES[scheme])]
    for (name, ramp), stops in RAMPS.items():
        if name == scheme:
            for level in range(LEVELS):
                color = _between(stops, level / (LEVELS - 1))
                text = "#000" if _luminance(color) > 0.18 else "#fff"
                also = f",.r{LEVELS - 1 - level}" if ramp == "s" else ""
                rules.append(f".{ramp}{level}{also}{{fill:{color};background:{color};color:{text}}}")
    return "".join(rules)


def style_sheet() -> str:
    """The page's CSS; print always takes the light scheme."""
    dark = f"@media screen and (prefers-color-scheme:dark){{{_scheme('dark')}}}"
    return _PAGE + _scheme("light") + dark
