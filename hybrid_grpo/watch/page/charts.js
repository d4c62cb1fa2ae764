// All charts, section by section. Only those on the screen are asked for and drawn.
import { ask, byId, el } from "./dom.js";
import { Plot } from "./plot.js";
import { state } from "./state.js";

const plots = new Map();
const visible = new Set();
let shape = "",
  zoom = () => {},
  onSpan = () => {},
  asked = 0;

const watcher = new IntersectionObserver(
  entries => {
    for (const entry of entries) {
      const plot = [...plots.values()].find(candidate => candidate.card === entry.target);
      if (!plot) continue;
      if (entry.isIntersecting) visible.add(plot);
      else visible.delete(plot);
    }
    drawCharts();
  },
  { rootMargin: "250px" },
);

let width = 0;
new ResizeObserver(() => {
  if (byId("charts").clientWidth === width) return;
  width = byId("charts").clientWidth;
  for (const plot of plots.values()) plot.resize();
}).observe(byId("charts"));

// zoom: see Plot; span: called with the ends of the axis whenever curves came.
export function useCharts(zoomTo, spanIs) {
  zoom = zoomTo;
  onSpan = spanIs;
}

export async function layOut() {
  const charts = state.open.length ? await ask("charts", { run: state.open }) : [];
  const now = JSON.stringify(charts);
  if (now === shape) return;
  shape = now;
  watcher.disconnect();
  visible.clear();
  const before = new Map(plots),
    closed = new Map([...document.querySelectorAll(".section")].map(section => [section.dataset.name, !section.open])),
    heard = new Set([...document.querySelectorAll(".folded[open]")].map(folded => folded.dataset.name));
  plots.clear();
  const sections = new Map();
  for (const chart of charts) sections.set(chart.section, [...(sections.get(chart.section) ?? []), chart]);
  const scrolled = scrollY;
  byId("charts").replaceChildren(
    ...[...sections].map(([section, members]) => {
      const drawn = [],
        folded = new Map();
      for (const chart of members) {
        // A chart that stays as it was keeps what the reader has opened.
        const key = JSON.stringify(chart),
          plot = before.get(key) ?? new Plot(chart, zoom);
        plots.set(key, plot);
        if (chart.folded) folded.set(chart.folded, [...(folded.get(chart.folded) ?? []), plot]);
        else drawn.push(plot);
      }
      return el(
        "details",
        { class: "section", "data-name": section, open: !(closed.get(section) ?? section === "More") },
        el("summary", {}, el("h2", {}, section), el("span", { class: "soft" }, String(members.length))),
        el("div", { class: "charts" }, ...drawn.map(plot => plot.card)),
        ...[...folded].map(([why, quiet]) =>
          el(
            "details",
            { class: "folded", "data-name": section + why, open: heard.has(section + why) },
            el("summary", {}, `${why}: ${quiet.map(plot => plot.chart.title).join(", ")}`),
            el("div", { class: "charts" }, ...quiet.map(plot => plot.card)),
          ),
        ),
      );
    }),
  );
  scrollTo(0, scrolled);
  findCharts();
  for (const plot of plots.values()) watcher.observe(plot.card);
}

export async function drawCharts(all = false) {
  const shown = all ? [...plots.values()] : [...visible].filter(plot => plot.card.offsetParent);
  if (!shown.length || !state.open.length) return;
  const turn = ++asked,
    open = [...state.open],
    [low, high] = state.range ?? [null, null];
  const answer = await ask("curves", {
    run: open,
    name: [...new Set(shown.flatMap(plot => plot.names()))],
    axis: state.axis,
    low,
    high,
    window: state.window,
    points: 2 * Math.max(300, Math.max(...shown.map(plot => plot.area.clientWidth))),
  });
  // Other runs may have been chosen meanwhile; their curves are asked for next.
  if (turn !== asked || open.join() !== state.open.join()) return;
  const ends = open.map(run => answer[run]);
  const span = [Math.min(...ends.map(end => end.from)), Math.max(...ends.map(end => end.to))];
  for (const plot of shown) plot.show(answer, span);
  onSpan(span);
}

// Charts that nobody has scrolled to are drawn only now.
export async function printCharts() {
  const closed = [...document.querySelectorAll(".section:not([open])")];
  for (const section of closed) section.open = true;
  await drawCharts(true);
  print();
  for (const section of closed) section.open = false;
}

export function redrawCharts() {
  for (const plot of plots.values()) if (plot.u) plot.remake();
}

export function findCharts() {
  const wanted = state.chart.trim().toLowerCase();
  for (const plot of plots.values()) {
    const words = [
      plot.chart.section,
      plot.chart.title,
      ...plot.chart.curves.flatMap(curve => [curve.name, curve.label]),
    ];
    plot.card.hidden = !words.some(word => word.toLowerCase().includes(wanted));
  }
  for (const part of document.querySelectorAll(".section, .folded")) {
    part.hidden = !part.querySelector(".chart:not([hidden])");
    if (wanted) part.open = true;
  }
  byId("no-chart").hidden = !plots.size || [...plots.values()].some(plot => !plot.card.hidden);
  byId("no-chart").textContent = `No chart matches “${state.chart.trim()}”.`;
}
