//! The page's style sheet. Colours are variables: light, dark, and light again on paper.

/// The whole sheet. It names nothing outside of the page.
pub(super) const CSS: &str = "
:root { color-scheme: light dark;
  --paper: #ffffff; --ink: #1c2128; --soft: #5b6673; --grid: #e3e7eb; --axis: #9aa4af; --card: #f6f8fa;
  --memory: #3b78c3; --disk: #e09a3e; --other: #9aa3ad; --dirty: #b7478f; --remaining: #2b8a84; --bar: #5c7fa8;
  --echo: #3b78c3; --bad: #c0392b; --good: #23803f; --gap: #c0392b33; --stopped: #c0392b22;
  --p0: #7c8794; --p1: #8a63b8; --p2: #2b8a84; --p3: #5f8f3a; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14181d; --ink: #e4e8ec; --soft: #9aa5b1; --grid: #2a313a; --axis: #5d6873; --card: #1c222a;
  --memory: #5b9be6; --disk: #e0a355; --other: #7f8994; --dirty: #d977b5; --remaining: #55b8b0; --bar: #7da2cd;
  --echo: #6aa8f0; --bad: #f0766a; --good: #63c283; --gap: #f0766a40; --stopped: #f0766a26;
  --p0: #8793a0; --p1: #ab8bd6; --p2: #55b8b0; --p3: #8cba63; } }
@media print { :root { color-scheme: light;
  --paper: #ffffff; --ink: #000000; --soft: #444c55; --grid: #dde1e6; --axis: #8a949f; --card: #ffffff;
  --memory: #3b78c3; --disk: #e09a3e; --other: #9aa3ad; --dirty: #b7478f; --remaining: #2b8a84; --bar: #5c7fa8;
  --echo: #3b78c3; --bad: #c0392b; --good: #23803f; --gap: #c0392b33; --stopped: #c0392b22;
  --p0: #7c8794; --p1: #8a63b8; --p2: #2b8a84; --p3: #5f8f3a; }
  body { max-width: none; padding: 0; } section.entry { break-before: page; } .scroll { overflow: visible; }
  table { font-size: 8pt; } * { print-color-adjust: exact; } }
@page { margin: 14mm; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1080px; padding: 1.5rem 1.5rem 4rem; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .2rem; overflow-wrap: anywhere; } h2 { font-size: 1.25rem; margin: 2.2rem 0 .5rem; overflow-wrap: anywhere; }
h2 small { font-weight: normal; color: var(--soft); }
p { margin: .3rem 0; } .soft, .chart-note { color: var(--soft); }
ul { margin: .4rem 0; padding-left: 1.2rem; }
.warnings { border-left: 4px solid var(--disk); background: var(--card); padding: .5rem .9rem; margin: 1rem 0; }
.why { border-left: 4px solid var(--bad); background: var(--card); padding: .5rem .9rem; margin: .8rem 0; overflow-wrap: anywhere; }
section.entry { border-top: 2px solid var(--grid); margin-top: 2.5rem; }
.scroll { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-size: 13px; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 600; vertical-align: bottom; border-bottom: 2px solid var(--grid); }
th, td { padding: .28rem .6rem .28rem 0; } td { border-bottom: 1px solid var(--grid); vertical-align: top; }
th.n, td.n { text-align: right; } td.n { white-space: nowrap; } td a { color: inherit; white-space: nowrap; }
.ok { color: var(--good); } .no { color: var(--bad); font-weight: 600; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(130px, 1fr)); gap: .5rem; margin: .8rem 0; }
dl div { background: var(--card); border: 1px solid var(--grid); border-radius: 5px; padding: .4rem .6rem; break-inside: avoid; }
dt { color: var(--soft); font-size: 12px; } dd { margin: 0; font-size: 1.05rem; font-variant-numeric: tabular-nums; }
dd small { display: block; color: var(--soft); font-size: 11.5px; }
figure { margin: 1.1rem 0 0; break-inside: avoid; }
figcaption { font-size: 13.5px; } figcaption b { margin-right: .8em; }
.key { margin-right: .9em; white-space: nowrap; font-size: 12.5px; color: var(--soft); }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; border-radius: 2px; vertical-align: -1px; }
.chart-note { font-size: 12.5px; }
svg { display: block; width: 100%; height: auto; font-size: 11.5px; }
svg text { fill: var(--ink); } svg .tick, svg .unit, svg .note { fill: var(--soft); } svg .unit { font-style: italic; }
svg .value { font-size: 10.5px; } svg .bad { fill: var(--bad); font-size: 10.5px; } svg .label { font-size: 12.5px; }
svg .halo { paint-order: stroke; stroke: var(--paper); stroke-width: 3px; stroke-linejoin: round; }
svg .grid { stroke: var(--grid); stroke-width: 1; } svg .axis { stroke: var(--axis); stroke-width: 1; }
svg .reference { stroke: var(--bad); stroke-width: 1.3; stroke-dasharray: 5 4; }
svg path[class^='l-'] { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
svg .l-dirty { stroke: var(--dirty); } svg .l-remaining { stroke: var(--remaining); }
svg path.l-echo { stroke: var(--echo); stroke-width: 2.6; stroke-linecap: round; stroke-opacity: .75; }
.c-memory { fill: var(--memory); background: var(--memory); } .c-disk { fill: var(--disk); background: var(--disk); }
.c-other { fill: var(--other); background: var(--other); } .c-dirty { fill: var(--dirty); background: var(--dirty); }
.c-read { fill: var(--memory); background: var(--memory); } .c-write { fill: var(--disk); background: var(--disk); }
svg .l-read, svg .l-median { stroke: var(--memory); } svg .l-write { stroke: var(--disk); } svg .l-work { stroke: var(--p2); }
svg .l-longest { stroke: var(--dirty); } svg path.dot { stroke-width: 2.6; stroke-linecap: round; }
.gap { fill: var(--gap); background: var(--gap); } .stopped { fill: var(--stopped); } .bar { fill: var(--bar); }
.dim { opacity: .4; } .phase { rx: 2px; } .p-stop { fill: var(--bad); }
.p0 { fill: var(--p0); } .p1 { fill: var(--p1); } .p2 { fill: var(--p2); } .p3 { fill: var(--p3); }
";

/// What of it a drawing needs that stands by itself, with the light colours put in: programs that draw SVG know no variables as a rule.
pub(super) fn of_a_drawing() -> String {
    let root = CSS.split_once(":root {").and_then(|(_, rest)| rest.split_once('}')).map_or("", |(root, _)| root);
    let colours = root.split(';').filter_map(|line| line.trim().strip_prefix("--")?.split_once(": "));
    let drawn = CSS.split_once("\nsvg {").map_or("", |(_, rest)| rest);
    let sheet = format!("svg {{ background: var(--paper); font-family: system-ui, 'DejaVu Sans', sans-serif;{drawn}");
    colours.fold(sheet, |sheet, (name, value)| sheet.replace(&format!("var(--{name})"), value))
}
