"""The style of pages: light and dark, wide and as narrow as a phone, on screen and on paper; nothing is loaded."""

STYLE = """
:root { color-scheme: light dark; --bg: #f6f6f3; --card: #fff; --line: #dedfd9; --text: #1c2128; --dim: #5d6570;
  --link: #005a8f; --good: #0b6e4f; --good-bg: #dff3ea; --part: #7a5200; --part-bg: #fbeecb; --bad: #9c3411;
  --bad-bg: #fbe3d9; --calm: #4a525c; --calm-bg: #e9ebed }
@media (prefers-color-scheme: dark) { :root { --bg: #0d1014; --card: #151a20; --line: #272e37; --text: #e3e7eb;
  --dim: #98a2ae; --link: #7cc4f5; --good: #7fe0b8; --good-bg: #12352a; --part: #f0cd7a; --part-bg: #3a2d0c;
  --bad: #f8ac8b; --bad-bg: #43200f; --calm: #b9c1ca; --calm-bg: #242a31 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 62rem; padding: 2rem 1.25rem 3rem; background: var(--bg); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif }
h1 { margin: 0; font-size: 1.5rem; letter-spacing: -.01em } h2 { margin: 2.4rem 0 .6rem; font-size: 1.2rem }
h3 { margin: 0; font-size: 1.02rem; line-height: 1.35 } h2, h3 { scroll-margin-top: 1rem }
a { color: var(--link) }
.subtitle { margin: .2rem 0 1.2rem; color: var(--dim) } p { margin: .5rem 0 1rem; max-width: 46rem }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: 1px; margin: 0 0 1.2rem;
  border: 1px solid var(--line); border-radius: 10px; background: var(--line); overflow: hidden }
dl div { padding: .55rem .8rem; background: var(--card) } dt { font-size: 12px; color: var(--dim) }
dd { margin: 0; font-size: 1.15rem; font-weight: 600; font-variant-numeric: tabular-nums }
dl.texts { grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); margin: .7rem 0 .8rem }
dl.texts dd { font-size: .97rem; font-weight: 500; overflow-wrap: anywhere }
figure { margin: 0 0 1.2rem; padding: .7rem .6rem; border: 1px solid var(--line); border-radius: 10px;
  background: var(--card) }
figcaption { padding: .2rem .6rem 0; font-size: 13px; color: var(--dim) }
.narrow { display: none }
.table { margin: 0 0 1.2rem; overflow-x: auto; border: 1px solid var(--line); border-radius: 10px;
  background: var(--card) }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .35rem .8rem; text-align: left; border-top: 1px solid var(--line) } thead th { border-top: 0 }
th { font-size: 12.5px; font-weight: 600; color: var(--dim) } .numeric :is(th, td):not(:first-child) {
  text-align: right } .numeric td { white-space: nowrap } .numeric td:first-child { white-space: normal }
pre { margin: 0 0 1.2rem; padding: .7rem .9rem; overflow-x: auto; border: 1px solid var(--line); border-radius: 10px;
  background: var(--card); font-size: 13px }
.badge { display: inline-block; padding: .05rem .55rem; border-radius: 99px; font-size: 12.5px; font-weight: 600;
  white-space: nowrap; color: var(--calm); background: var(--calm-bg) }
.badge.good { color: var(--good); background: var(--good-bg) } .badge.part { color: var(--part);
  background: var(--part-bg) } .badge.bad { color: var(--bad); background: var(--bad-bg) }
article { margin: 0 0 1.2rem; padding: 1rem 1.1rem; border: 1px solid var(--line); border-radius: 12px;
  background: var(--card) }
article > :last-child { margin-bottom: 0 } article figure, article .table { border-radius: 8px }
article p { margin: .4rem 0 .8rem } p.dim { color: var(--dim); font-size: 13px }
.head { display: flex; flex-wrap: wrap; gap: .3rem .7rem; align-items: baseline; justify-content: space-between }
nav { columns: 2 22rem; column-gap: 2rem; margin: 0 0 1.4rem } nav section { break-inside: avoid; margin: 0 0 1rem }
nav h3 { font-size: .95rem } nav ol { margin: .3rem 0 0; padding: 0; list-style: none; font-size: 14px }
nav li { display: flex; gap: .6rem; justify-content: space-between; align-items: baseline; padding: .18rem 0;
  border-bottom: 1px dotted var(--line) }
details { margin: 0 0 .8rem } summary { cursor: pointer; color: var(--link); font-size: 14px; margin: 0 0 .5rem }
footer { margin: 2.5rem 0 0; padding: .9rem 0 0; border-top: 1px solid var(--line); color: var(--dim); font-size: 13px;
  overflow-wrap: anywhere }
footer p { max-width: none; margin: .15rem 0 }
@media (max-width: 40rem) { body { padding: 1.2rem .75rem 2rem } article { padding: .8rem .7rem }
  figure { padding: .5rem .2rem } .wide { display: none } .narrow { display: block } }
@media print { :root { color-scheme: light; --bg: #fff; --card: #fff; --line: #c8cac4; --text: #000; --dim: #444;
  --link: #000; --good: #0b6e4f; --good-bg: #fff; --part: #7a5200; --part-bg: #fff; --bad: #9c3411; --bad-bg: #fff;
  --calm: #333; --calm-bg: #fff }
  body { max-width: none; padding: 0; font-size: 10.5pt } .badge { border: 1px solid currentColor }
  article, figure, .table, nav section { break-inside: avoid } h2, h3 { break-after: avoid }
  details:not([open]) { display: none } a { text-decoration: none } }
"""
