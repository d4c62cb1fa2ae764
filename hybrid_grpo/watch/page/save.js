// A chart as a file: its curves as a picture, or its values as a table.
import { ask, css, el, number, place, tick } from "./dom.js";
import { state } from "./state.js";

const SIZE = [760, 380],
  EDGE = { left: 64, right: 24, top: 40, bottom: 56 },
  POINTS = 4000;

function give(plot, end, type, text) {
  const link = el("a", {
    href: URL.createObjectURL(new Blob([text], { type })),
    download: `${plot.chart.title.replaceAll(/[^\p{L}\p{N}]+/gu, "-").toLowerCase()}.${end}`,
  });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// The values as they were measured, where there are no more than some thousands; otherwise thinned.
export async function saveCsv(plot) {
  const [low, high] = state.range ?? [null, null];
  const answer = await ask("curves", {
    run: state.open, name: plot.names(), axis: state.axis, low, high, window: "1", points: POINTS,
  }); // prettier-ignore
  const columns = state.open.flatMap(run =>
    plot.names().map(name => [run, name, new Map(pairs(answer[run]?.curves[name]?.raw ?? [[], []]))]),
  );
  const xs = [...new Set(columns.flatMap(([, , values]) => [...values.keys()]))].sort((a, b) => a - b);
  const head = [state.axis, ...columns.map(([run, name]) => (state.open.length > 1 ? `${run} ${name}` : name))];
  const lines = [head.map(quoted), ...xs.map(x => [x, ...columns.map(([, , values]) => values.get(x) ?? "")])];
  give(plot, "csv", "text/csv", lines.map(line => `${line.join(",")}\n`).join(""));
}

const pairs = ([xs, values]) => xs.map((x, at) => [x, values[at]]);
// A cell that begins like a formula must not become one in a spreadsheet.
const quoted = text => `"${text.replace(/^[=+\-@\t\r]/, "'$&").replaceAll('"', '""')}"`;
const escaped = text => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll('"', "&quot;");

export function saveSvg(plot) {
  give(plot, "svg", "image/svg+xml", svgOf(plot));
}

// The chart as it is on the page, with its title, its axes and its legend.
export function svgOf(plot) {
  const [wide, tall] = SIZE,
    { title, unit } = plot.chart,
    isLog = plot.log.checked,
    scale = value => (isLog ? Math.log10(value) : value);
  const { min: left, max: right } = plot.u.scales.x,
    { min: bottom, max: top } = plot.u.scales.y;
  const x = value => EDGE.left + ((value - left) / (right - left)) * (wide - EDGE.left - EDGE.right),
    y = value =>
      tall -
      EDGE.bottom -
      ((scale(value) - scale(bottom)) / (scale(top) - scale(bottom))) * (tall - EDGE.bottom - EDGE.top);
  const text = (at, from, words, more = "") =>
    `<text x="${at.toFixed(1)}" y="${from.toFixed(1)}" ${more}>${escaped(words)}</text>`;
  const line = (x1, y1, x2, y2) =>
    `<path d="M${x1.toFixed(1)} ${y1.toFixed(1)}L${x2.toFixed(1)} ${y2.toFixed(1)}" stroke="#ddd"/>`;
  const ticks = axis => (plot.u.axes[axis]._splits ?? []).filter(value => value !== null);
  const path = ([xs, values]) =>
    pairs([xs, values])
      .filter(([at, value]) => at >= left && at <= right && value !== null && (!isLog || value > 0))
      .map(([at, value]) => `${x(at).toFixed(1)} ${y(Math.min(top, Math.max(bottom, value))).toFixed(1)}`)
      .join("L");
  const drawn = plot.lines.map(each => {
    const share = plot.scaling(each),
      color = css(each.color),
      style = `fill="none" stroke="${color}" stroke-linejoin="round"`;
    const raw = `<path d="M${path(share(each.raw))}" ${style} stroke-width="${each.smooth ? 1 : 1.75}" opacity="${each.smooth ? 0.3 : 1}" stroke-dasharray="${each.smooth ? "" : each.dash}"/>`;
    return (
      raw +
      (each.smooth
        ? `<path d="M${path(share(each.smooth))}" ${style} stroke-width="1.75" stroke-dasharray="${each.dash}"/>`
        : "")
    );
  });
  let at = EDGE.left;
  const legend = plot.lines.map(each => {
    const words = `${plot.title(each)} ${number(each.raw[1].at(-1))}`,
      start = at;
    at += 34 + 6.4 * words.length;
    return `<path d="M${start} ${tall - 12}h18" stroke="${css(each.color)}" stroke-width="2" stroke-dasharray="${each.dash}"/>${text(start + 24, tall - 8, words)}`;
  });
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${Math.max(wide, Math.ceil(at))} ${tall}" font-family="sans-serif" font-size="11" fill="#333">`,
    `<rect width="100%" height="100%" fill="#fff"/>`,
    text(EDGE.left, 20, [title, unit].filter(Boolean).join(", "), 'font-size="14" font-weight="600"'),
    ...ticks(1).map(
      value =>
        line(EDGE.left, y(value), wide - EDGE.right, y(value)) +
        text(EDGE.left - 8, y(value) + 4, tick(value), 'text-anchor="end"'),
    ),
    ...ticks(0).map(value => text(x(value), tall - EDGE.bottom + 16, tick(value), 'text-anchor="middle"')),
    text(wide - EDGE.right, tall - EDGE.bottom + 30, state.axis, 'text-anchor="end" fill="#777"'),
    ...drawn,
    ...legend,
    `<desc>${escaped(`${state.open.join(", ")}: ${place(state.axis, left)} to ${place(state.axis, right)}`)}</desc>`,
    "</svg>",
    "",
  ].join("\n");
}
