// One chart: curves of several runs on a pair of axes, with hover, zoom and keys. uPlot draws.
import { css, el, number, place, tick } from "./dom.js";
import { saveCsv, saveSvg } from "./save.js";
import { laneColor } from "./overview.js";
import { look, remember, state, teams } from "./state.js";
import { together } from "./together.js";
import { hideTip, showTip } from "./tip.js";

const HEIGHT = 190,
  TALL = 380,
  // The legend has the values of so many runs; the colors of more are in the list of runs.
  MOST_IN_LEGEND = 4;
const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
// The plot under the pointer; without one, that with the keyboard's focus says its values.
let pointed = null;

// The place of the point nearest to x in ascending xs.
function nearest(xs, x) {
  let low = 0,
    high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle;
    else high = middle;
  }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

// Where a value is between the lowest of some values, at 0, and the highest, at 1.
function between(values) {
  const low = Math.min(...values),
    size = Math.max(...values) - low || 1;
  return value => (value - low) / size;
}

export class Plot {
  // chart: see `charts` of answers.py; zoom(range) is called with a range of the axis, or null for all of it.
  constructor(chart, zoom) {
    this.chart = chart;
    this.zoom = zoom;
    this.u = null;
    this.key = "";
    this.lines = [];
    // Around a curve: its color, and the upper and the lower edge.
    this.bands = [];
    this.area = el("div", { class: "plot" });
    this.legend = el("div", { class: "legend" });
    this.meaning = el(
      "div",
      { class: "meaning", hidden: true },
      ...chart.curves.map(curve => el("p", {}, el("b", {}, curve.label), ` ${curve.meaning}`)),
      chart.band && el("p", {}, el("b", {}, "band"), ` ${chart.band.meaning}`),
    );
    this.larger = el(
      "button",
      {
        type: "button",
        "aria-pressed": "false",
        "aria-label": `${chart.title} larger`,
        onclick: () => this.enlarge(!this.card.classList.contains("wide")),
      },
      "⤢",
    );
    this.log = el("input", { type: "checkbox", onchange: () => this.makeLog(this.log.checked) });
    this.tools = el(
      "div",
      { class: "tools chart-tools", hidden: true },
      !chart.compared && el("label", {}, this.log, "logarithmic"),
      el("button", { type: "button", onclick: () => saveSvg(this) }, "Save SVG"),
      el("button", { type: "button", onclick: () => saveCsv(this) }, "Save CSV"),
    );
    const what = opening("?", `What ${chart.title} means`, this.meaning),
      more = opening("⋯", `Scale and files of ${chart.title}`, this.tools);
    this.card = el(
      "article",
      {
        class: "chart card",
        tabindex: 0,
        role: "group",
        "aria-label": chart.title,
        onkeydown: event => this.press(event),
        onblur: () => this.hide(),
      },
      el("header", {}, el("h3", {}, chart.title, " ", chart.unit && el("em", {}, chart.unit)), what, more, this.larger),
      this.tools,
      this.area,
      this.legend,
      this.meaning,
    );
  }

  enlarge(wide) {
    this.keep(state.wide, wide);
    // It may have moved to a row of its own.
    this.card.scrollIntoView({ block: "nearest" });
  }

  makeLog(isLog) {
    this.keep(state.logs, isLog);
  }

  // Keeps in the address whether this chart is one of `titles`.
  keep(titles, isOne) {
    if (isOne) titles.add(this.chart.title);
    else titles.delete(this.chart.title);
    remember();
    this.take();
    this.remake();
  }

  // What the address says of this chart.
  take() {
    const wide = state.wide.has(this.chart.title);
    this.card.classList.toggle("wide", wide);
    this.larger.setAttribute("aria-pressed", String(wide));
    this.log.checked = state.logs.has(this.chart.title) && !this.chart.compared;
  }

  names() {
    return [...this.chart.curves, this.chart.band].filter(Boolean).map(curve => curve.name);
  }

  // answer: of each run its curves; span: ends of the whole axis.
  show(answer, span) {
    this.span = span;
    this.take();
    this.lines = state.open
      .flatMap(run =>
        this.chart.curves.map((curve, number) => {
          const found = answer[run]?.curves[curve.name];
          return found && found.raw[0].length ? { run, curve, ...look(run, number), ...found } : null;
        }),
      )
      .filter(Boolean);
    // Bands of several runs would hide each other.
    const spread = state.open.length === 1 && this.chart.band && answer[state.open[0]]?.curves[this.chart.band.name];
    this.bands = spread && spread.raw[0].length && this.lines.length ? [this.around(this.lines[0], spread)] : [];
    if (state.grouped) {
      this.lines = [...teams()].flatMap(([team, runs]) =>
        this.chart.curves.flatMap(curve =>
          together(team, this.lines.filter(line => line.curve === curve && runs.includes(line.run))),
        ),
      );
      const spread = this.lines.filter(line => line.spread && !this.chart.compared);
      this.bands = spread.map(line => ({ color: line.color, edges: line.spread }));
    }
    const key = JSON.stringify([
      this.lines.map(line => [line.run, line.curve.name, Boolean(line.smooth), line.color, line.raw[0].length <= 40]),
      state.axis,
      this.bands.length,
      this.log.checked,
      this.card.classList.contains("wide"),
    ]);
    if (!this.u || key !== this.key) {
      this.key = key;
      this.remake();
    } else this.u.setData(this.data());
    this.showLegend();
  }

  // Both edges of the band: a line, averaged where it is, and so far above and below it as the spread says.
  around(line, spread) {
    const part = line.smooth && spread.smooth ? "smooth" : "raw",
      [xs, values] = line[part],
      [places, widths] = spread[part];
    const edge = side => [xs, values.map((value, at) => value + side * widths[nearest(places, xs[at])])];
    return { color: line.color, edges: [edge(1), edge(-1)] };
  }

  data() {
    const tables = this.lines.flatMap(line => [line.raw, line.smooth].filter(Boolean).map(this.scaling(line)));
    const edges = this.bands.flatMap(band => band.edges),
      all = [...edges, ...tables].map(this.log.checked ? positive : table => table);
    return tables.length ? uPlot.join(all) : [[], []];
  }

  // Puts values onto the chart's axis: where curves are compared, between the ends of what is shown of the curve.
  scaling(line) {
    if (!this.chart.compared) return table => table;
    const [xs, values] = line.raw,
      [low, high] = this.range(),
      shown = values.filter((_, at) => xs[at] >= low && xs[at] <= high),
      share = between(shown.length ? shown : values);
    return ([places, numbers]) => [places, numbers.map(share)];
  }

  remake() {
    this.u?.destroy();
    this.u = null;
    if (!this.lines.length) return;
    const edge = { width: 0, points: { show: false }, spanGaps: true, faint: true };
    const series = [
      {},
      ...this.bands.flatMap(() => [edge, edge]),
      ...this.lines.flatMap(line => {
        const strong = {
          stroke: css(line.color),
          width: line.color === "--text" ? 2.5 : 1.75,
          dash: line.dash,
          spanGaps: true,
          points: { show: line.raw[0].length <= 40, size: 5, fill: css(line.color) },
        };
        return line.smooth
          ? [
              { ...strong, width: 1, dash: [], alpha: 0.3, points: { show: false }, faint: true },
              { ...strong, points: { show: false } },
            ]
          : [strong];
      }),
    ];
    const axis = {
      stroke: css("--soft"),
      font: FONT,
      ticks: { show: false },
      grid: { stroke: css("--grid"), width: 1 },
    };
    this.u = new uPlot(
      {
        width: this.area.clientWidth,
        height: this.card.classList.contains("wide") ? TALL : HEIGHT,
        series,
        bands: this.bands.map(({ color }, at) => ({ series: [2 * at + 1, 2 * at + 2], fill: `${css(color)}24` })),
        legend: { show: false },
        padding: [8, 22, 0, 0],
        scales: {
          x: { time: false, range: () => this.range() },
          y: this.log.checked
            ? { distr: 3, range: (u, low, high) => (low > 0 && low < high ? [low / 1.1, 1.1 * high] : around(low)) }
            : { range: (u, low, high) => this.heights(low, high) },
        },
        axes: [
          {
            ...axis,
            grid: { show: false },
            size: 26,
            space: 70,
            splits: withEnds,
            values: (u, splits) => splits.map(at => tick(state.axis === "hours" ? at : Math.round(at))),
            incrs: state.axis === "hours" ? undefined : WHOLE,
          },
          {
            ...axis,
            size: roomFor,
            space: 34,
            ...(this.log.checked ? {} : { splits: (u, axis, low, high) => withEnds(u, axis, low, high, this.unit) }),
            values: (u, splits) => splits.map(at => (at === null ? "" : tick(at))),
          },
        ],
        cursor: {
          y: false,
          sync: { key: "charts", scales: ["x", null] },
          drag: { x: true, y: false, setScale: false },
          bind: { dblclick: () => () => this.zoom(null) },
          dataIdx: present,
          points: { size: (u, number) => (u.series[number].faint ? 0 : 7) },
        },
        hooks: {
          setSelect: [u => this.select(u)],
          setCursor: [u => this.hover(u)],
          drawClear: [u => this.drawAlarms(u)],
        },
      },
      this.data(),
      this.area,
    );
    this.u.over.addEventListener("mouseenter", () => {
      pointed = this;
    });
    this.u.over.addEventListener("mouseleave", () => this.hide());
  }

  resize() {
    this.u?.setSize({ width: this.area.clientWidth, height: this.u.height });
  }

  range() {
    const [low, high] = state.range ?? this.span;
    return low < high ? [low, high] : [low - 1, high + 1];
  }

  heights(low, high) {
    if (low === null || low === undefined) return [0, 1];
    if (low >= 0 && low < 0.5 * high) low = 0;
    if (this.chart.top) {
      low = Math.min(0, low);
      high = high < 1.05 * this.chart.top ? this.chart.top : high;
    }
    if (low === high) [low, high] = low > 0 ? [0, 2 * high] : low < 0 ? [low - 1, high + 1] : [0, 1];
    // Both ends are whole multiples of a round number, and are labeled.
    const unit = (this.unit = WHOLE_OR_LESS.find(each => each >= (high - low) / 5) ?? high - low),
      upper = high === this.chart.top ? high : unit * Math.ceil(high / unit - 1e-9);
    return [unit * Math.floor(low / unit + 1e-9), upper];
  }

  select(u) {
    if (u.select.width < 4) return;
    const ends = [u.select.left, u.select.left + u.select.width].map(at => u.posToVal(at, "x"));
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.zoom(ends);
  }

  hover(u) {
    if (pointed ? pointed !== this : document.activeElement !== this.card) return;
    if (u.cursor.left < 0) return hideTip();
    const x = u.data[0][u.cursor.idx] ?? u.posToVal(u.cursor.left, "x"),
      here = place(state.axis, x);
    const averaged = this.lines.some(line => line.smooth);
    // A curve with few values shows the nearest one, and where that is.
    const rows = this.lines.map(line => {
      const at = nearest(line.raw[0], x),
        value = line.raw[1][at],
        average = line.smooth?.[1][nearest(line.smooth[0], x)],
        there = place(state.axis, line.raw[0][at]),
        [highest, lowest] = (line.spread ?? []).map(([, values]) => number(values[at]));
      return el(
        "tr",
        {},
        el("th", { scope: "row" }, swatch(line), this.title(line)),
        el("td", {}, number(average ?? value)),
        averaged && el("td", { class: "soft" }, line.smooth ? number(value) : ""),
        el("td", { class: "soft" }, line.spread ? `${lowest} to ${highest}` : there === here ? "" : `at ${there}`),
      );
    });
    const head = el(
      "tr",
      {},
      el("th", {}, here),
      el("td", { class: "soft" }, averaged ? "average" : ""),
      averaged && el("td", { class: "soft" }, "value"),
      el("td", {}),
    );
    const box = u.over.getBoundingClientRect();
    showTip(box.left + u.cursor.left, box.top + 10, el("table", {}, head, ...rows));
  }

  hide() {
    if (pointed === this) pointed = null;
    hideTip();
  }

  title(line) {
    const many = state.open.length > 1,
      lone = this.chart.curves.length === 1;
    return many ? (lone ? line.run : `${line.run}, ${line.curve.label}`) : line.curve.label;
  }

  press(event) {
    if (event.key === "Escape" && this.card.classList.contains("wide")) {
      this.enlarge(false);
      return;
    }
    if (event.target !== this.card || !this.u || event.ctrlKey || event.metaKey) return;
    const u = this.u,
      [low, high] = this.range(),
      width = high - low;
    const at = u.cursor.left >= 0 ? u.posToVal(u.cursor.left, "x") : high;
    const move = by => {
      const xs = u.data[0].filter(x => x >= low && x <= high);
      const x = xs[Math.max(0, Math.min(xs.length - 1, nearest(xs, at) + by))];
      u.setCursor({ left: u.valToPos(x, "x"), top: 20 });
    };
    const keys = {
      ArrowLeft: () => move(event.shiftKey ? -10 : -1),
      ArrowRight: () => move(event.shiftKey ? 10 : 1),
      "+": () => this.zoom([Math.max(low, at - width / 4), Math.min(high, at + width / 4)]),
      "-": () => this.zoom([Math.max(this.span[0], low - width / 2), Math.min(this.span[1], high + width / 2)]),
      0: () => this.zoom(null),
      l: () => this.chart.compared || this.makeLog(!this.log.checked),
      Escape: () => this.hide(),
    };
    if (keys[event.key]) {
      event.preventDefault();
      keys[event.key]();
    }
  }

  drawAlarms(u) {
    const { ctx, bbox } = u;
    ctx.save();
    const dot = devicePixelRatio;
    for (const alarm of state.alarms) {
      const inside = at => Math.min(bbox.left + bbox.width, Math.max(bbox.left, u.valToPos(at, "x", true)));
      const [from, to] = alarm.at[state.axis].map(inside);
      if (from === to && (from === bbox.left || from === bbox.left + bbox.width)) continue;
      const width = Math.max(2 * dot, to - from),
        top = bbox.top - ((state.open.indexOf(alarm.run) % 3) + 1.5) * 2 * dot;
      ctx.fillStyle = css(laneColor(alarm.run).slice(4, -1));
      ctx.globalAlpha = 0.8;
      ctx.fillRect(from, top, width, 2 * dot);
      // Of several runs, the washes would hide each other.
      ctx.globalAlpha = state.open.length > 1 ? 0 : 0.08;
      ctx.fillRect(from, bbox.top, width, bbox.height);
    }
    ctx.restore();
  }

  showLegend() {
    const several = state.open.length > 1,
      many = new Set(this.lines.map(line => line.run)).size > MOST_IN_LEGEND;
    // Of several runs, a chart with one curve names the runs, and one with more its curves.
    const byCurve = several && this.chart.curves.length > 1;
    const entries = Map.groupBy(this.lines, line => (byCurve ? line.curve : line));
    this.legend.replaceChildren(
      ...[...entries.values()]
        .filter(() => byCurve || !many)
        .map(lines =>
          el(
            "span",
            { title: `${lines[0].curve.name}: ${lines[0].curve.meaning}` },
            swatch(byCurve ? { ...lines[0], color: "--soft" } : lines[0]),
            byCurve ? lines[0].curve.label : this.title(lines[0]),
            ...(many ? [] : lines).map(({ color, run, raw }) =>
              el("b", byCurve ? { style: { color: `var(${color})` }, title: run } : {}, number(raw[1].at(-1))),
            ),
          ),
        ),
      this.bands.length
        ? state.grouped
          ? el("span", {}, "band: from the lowest to the highest run")
          : el("span", { title: this.chart.band.meaning }, `band: ± ${this.chart.band.name.split("/").at(-1)}`)
        : "",
    );
    const newest = this.lines.map(line => `${this.title(line)} ${number(line.raw[1].at(-1))}`).join(", ");
    this.card.setAttribute("aria-label", `${this.chart.title}. Newest: ${newest}`);
  }
}

// A button that shows and hides a panel.
function opening(sign, label, panel) {
  const button = el("button", { type: "button", "aria-expanded": "false", "aria-label": label }, sign);
  button.addEventListener("click", () => {
    panel.hidden = !panel.hidden;
    button.setAttribute("aria-expanded", String(!panel.hidden));
  });
  return button;
}

const rounds = (from, to) =>
  Array.from({ length: to - from }, (_, at) => [1, 2, 5].map(base => Number(`${base}e${from + at}`))).flat();
const WHOLE = rounds(0, 13),
  WHOLE_OR_LESS = rounds(-12, 13);

// The labeled places of an axis: both ends, and what is not too close to them.
function withEnds(u, axis, low, high, unit) {
  const first = Math.ceil(low / unit),
    count = Math.floor(high / unit) - first + 1,
    inner = Array.from({ length: count }, (_, at) => Number(((first + at) * unit).toPrecision(12)));
  return [low, ...inner.filter(at => at - low > 0.6 * unit && high - at > 0.6 * unit), high];
}

// A logarithmic axis has no place for 0 and less.
const positive = ([xs, values]) => [xs, values.map(value => (value > 0 ? value : null))];
const around = value => (value > 0 ? [value / 2, 2 * value] : [0.1, 10]);

// The width of an axis whose labels are not cut.
const roomFor = (u, labels, at, cycle) =>
  cycle > 1 ? u.axes[at]._size : Math.max(42, 14 + 6.5 * Math.max(0, ...(labels ?? []).map(label => label.length)));

// The row of a curve's value nearest to the cursor: curves have values at different places.
function present(u, series, row) {
  const values = u.data[series];
  if (values[row] !== null && values[row] !== undefined) return row;
  for (let away = 1; row - away >= 0 || row + away < values.length; away++)
    for (const at of [row - away, row + away]) if (values[at] !== null && values[at] !== undefined) return at;
  return row;
}

function swatch(line) {
  const style = line.dash.length === 0 ? "solid" : line.dash[0] < 4 ? "dotted" : "dashed";
  return el("i", { class: "swatch", style: { "border-top": `2px ${style} var(${line.color})` } });
}
